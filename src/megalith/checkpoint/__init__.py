"""Checkpoints: chunks of global tensors, and the stores that keep them.

A checkpoint that is missing, damaged, unfitting or cannot be written is a `CheckpointError`, whose message names the
file and the remedy. All functions of this package may raise it; a docstring says so only where there is more to tell,
and names every other error type.
"""

from typing import TYPE_CHECKING, Any

from megalith.checkpoint.content import CheckpointContent, Chunk, LoadedContent
from megalith.checkpoint.store.staging import Staging
from megalith.checkpoint.store.store import DirectoryStore, Retention, split_path

if TYPE_CHECKING:
    from megalith.checkpoint.store.saving import PendingSave, SaveReport

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


def __getattr__(name: str) -> Any:
    """Import what belongs to a save when it is first used: torch.distributed.checkpoint takes long to import."""
    if name not in ("PendingSave", "SaveReport"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megalith.checkpoint.store import saving

    return getattr(saving, name)
