"""Faster implementations of operations in nn/; each has a reference twin there and a test that both agree."""
