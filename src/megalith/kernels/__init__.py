"""Faster forms of operations in nn/, each with a reference twin there and a test that the two agree."""
