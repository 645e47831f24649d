"""Checkpoints: chunks of global tensors, and the stores that keep them."""

from megalith.checkpoint.content import CheckpointContent, Chunk, LoadedContent
from megalith.checkpoint.saving import PendingSave, SaveReport
from megalith.checkpoint.staging import Staging
from megalith.checkpoint.store import DirectoryStore, Retention, split_path

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
