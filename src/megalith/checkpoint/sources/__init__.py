"""Readers: checkpoint folders of every format, as tensors of a whole model."""
