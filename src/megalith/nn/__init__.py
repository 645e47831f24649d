"""Transformer layers as math on local tensors. Nothing here names a rank, a group or a collective."""
