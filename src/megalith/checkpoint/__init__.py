"""Checkpoints: chunks of global tensors, and the stores that keep them."""

from megalith.checkpoint.content import CheckpointContent, Chunk, LoadedContent
from megalith.checkpoint.saving import PendingSave, SaveReport
from megalith.checkpoint.staging import Staging
from megalith.checkpoint.store import DirectoryStore, Retention, split_path

__all__ = [
    "CheckpointContent",
    "Chunk",
    "DirectoryStore",
    "LoadedContent",
    "PendingSave",
    "Retention",
    "SaveReport",
    "Staging",
    "split_path",
]
