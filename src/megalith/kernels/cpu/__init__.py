"""Tuning for CPUs: attention, GELU, products with frozen weights, memory and threads of the process.

Code that depends on the layers is in `models/frozen.py` (layers of a model in fewer calls) and
`models/attention_kernels.py` (choice of the attention kernel). Measurements: benchmarks/results/README.md.
"""
