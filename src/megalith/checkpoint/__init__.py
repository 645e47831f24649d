"""Checkpoints: chunks of global tensors, and the stores that keep them.

A checkpoint that is missing, damaged, unfitting or cannot be written is a `CheckpointError`, whose message names the
file and the remedy. All functions of this package may raise it; a docstring says so only where there is more to tell,
and names every other error type.
"""

from megalith.checkpoint.content import CheckpointContent, Chunk, LoadedContent
from megalith.checkpoint.store.saving import PendingSave, SaveReport
from megalith.checkpoint.store.staging import Staging
from megalith.checkpoint.store.store import DirectoryStore, Retention, split_path

Store = DirectoryStore
"""What keeps checkpoints, for annotations: there is one kind."""

__all__ = [
    "CheckpointContent",
    "Chunk",
    "DirectoryStore",
    "LoadedContent",
    "PendingSave",
    "Retention",
    "SaveReport",
    "Staging",
    "Store",
    "split_path",
]
