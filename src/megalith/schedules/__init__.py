"""Schedules as data: pure functions of the samples that were trained on. No torch, no clock, no state."""
