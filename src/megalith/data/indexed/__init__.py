"""Megatron's .bin/.idx pair: tokens of all documents back to back, and an index of where each begins."""

from megalith.data.indexed.reader import (
    CODE_OF_DTYPE,
    DTYPE_OF_CODE,
    HEADER_SIZE,
    LOSS_MASK,
    MASK_FILES,
    TEMPLATE,
    IndexedDataset,
    bin_path,
    idx_path,
    remove_side_files,
    smallest_dtype,
)
from megalith.data.indexed.writer import IndexedWriter, Written, open_partial, spool_path

__all__ = [
    "CODE_OF_DTYPE",
    "DTYPE_OF_CODE",
    "HEADER_SIZE",
    "LOSS_MASK",
    "MASK_FILES",
    "TEMPLATE",
    "IndexedDataset",
    "IndexedWriter",
    "Written",
    "bin_path",
    "idx_path",
    "open_partial",
    "remove_side_files",
    "smallest_dtype",
    "spool_path",
]
