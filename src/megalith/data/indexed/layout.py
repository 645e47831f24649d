"""Where what stands in the two files of a dataset.

Layout of the .idx, little-endian, nothing aligned: 9 bytes magic, u64 version, u8 dtype code, u64 S (number of
sequences), u64 D (length of the document index), i32[S] lengths, i64[S] byte offsets, i64[D] document index and,
for multimodal files only, i8[S] modes. A document is a run of sequences; a document index entry is the number of
its first sequence.

Source:  Megatron-LM `megatron/core/datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
HEADER_SIZE = HEADER.size

DTYPE_OF_CODE: dict[int, np.dtype[Any]] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in enumerate(("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"), start=1)
}
CODE_OF_DTYPE: dict[np.dtype[Any], int] = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}

ENTRIES_AT_ONCE = 1 << 20
"""Entries of the index that are worked on at once; keeps the memory small next to the index itself."""


def smallest_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """The dtype that Megatron stores a vocabulary in: uint16 below 65500 ids, else int32."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str) -> Path:
    return Path(prefix + ".bin")


def idx_path(prefix: str) -> Path:
    return Path(prefix + ".idx")
