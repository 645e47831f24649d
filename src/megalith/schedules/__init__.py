"""Schedules as pure functions of consumed samples, without torch, clock or state."""
