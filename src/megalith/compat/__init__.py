"""Compatibility with other programs: what they print and which command lines they accept."""
