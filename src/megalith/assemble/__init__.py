"""Composition root: functions that build the parts of a run from its configuration."""
