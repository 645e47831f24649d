"""Tuning for CPUs, all of it in one room: attention, products with frozen weights, memory and threads of the process.

What needs to know the layers stands beside them: `models/frozen.py`, the layers of a model in fewer calls, and the
choice of an attention kernel, `models/attention_kernels.py`. The measurements are in benchmarks/results/README.md.
"""
