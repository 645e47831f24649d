"""Megalith: pretraining of large transformer language models, Megatron-compatible at every border.

The package imports nothing heavy here, so that `megalith --help` and configuration errors stay fast.
"""

__version__ = "0.1.0"
