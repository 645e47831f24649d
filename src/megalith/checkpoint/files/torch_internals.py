"""Private parts of torch that checkpoints use, under names of our own.

Each has a canary in `tests/unit/checkpoint/test_torch_internals.py`, which says in one line what a new version of torch
broke; pyproject.toml bounds the version. `torch_archive` takes the archives of `torch.save` apart; its canaries are in
the same file.
"""

from __future__ import annotations

from torch._utils import _rebuild_tensor_v2 as rebuild_tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormatEncoding
from torch.serialization import _get_layout as get_layout

__all__ = ["MemoryFormatEncoding", "StorageInfo", "get_layout", "rebuild_tensor"]
