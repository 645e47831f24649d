"""Checkpoints: chunks of global tensors, and the stores that keep them."""

from megalith.checkpoint.background import PendingSave, SaveReport
from megalith.checkpoint.content import CheckpointContent, Chunk, LoadedContent
from megalith.checkpoint.retention import Retention
from megalith.checkpoint.staging import Staging
from megalith.checkpoint.store import DirectoryStore, split_path

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
