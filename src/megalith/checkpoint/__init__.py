"""Checkpoints: chunks of global tensors, and the stores that keep them."""

from megalith.checkpoint.content import CheckpointContent, Chunk, LoadedContent
from megalith.checkpoint.memory import MemoryStore
from megalith.checkpoint.store import DirectoryStore, SaveReport, Store, split_path

__all__ = [
    "CheckpointContent",
    "Chunk",
    "DirectoryStore",
    "LoadedContent",
    "MemoryStore",
    "SaveReport",
    "Store",
    "split_path",
]
