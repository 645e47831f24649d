"""Which checkpoint folder a path on a command line means.

A path is a save folder, one checkpoint folder in it (`iter_0000100`, `release`), a Hugging Face model folder, or a
checkpoint folder that was copied under a name of its own.
"""

from __future__ import annotations

from pathlib import Path

from megalith.checkpoint.dcp_tensors import METADATA_FILE
from megalith.checkpoint.source import is_huggingface, no_save_folder
from megalith.checkpoint.store import RELEASE, DirectoryStore, split_path
from megalith.errors import CheckpointError


def locate(path: Path, iteration: int | None = None) -> Path:
    """The one checkpoint folder that is meant.

    Args:
        path: what the user gave.
        iteration: of a save folder, which; by default that of its tracker file, else the last.

    Raises:
        CheckpointError: there is none; says what is there instead.
    """
    if not path.is_dir():
        raise CheckpointError(nothing_in(path))
    if is_checkpoint(path):
        return path
    store = DirectoryStore(path)
    there = store.iterations()
    if not there:
        raise CheckpointError(nothing_in(path))
    if iteration is None:
        latest = store.latest()
        iteration = latest if latest in there else there[-1]
    if iteration not in there:
        held = ", ".join(map(str, there))
        raise CheckpointError(f"{path} holds no iteration {iteration}; it holds {held}")
    return store.folder(iteration)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one checkpoint rather than a folder of them."""
    named = split_path(path)[1] is not None or path.resolve().name == RELEASE
    return named or is_huggingface(path) or (path / METADATA_FILE).exists() or any(path.glob("mp_rank_*"))


def nothing_in(path: Path) -> str:
    """That a path leads to no checkpoint, and what is there instead."""
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        return (
            f"{path} holds no checkpoint: it {found}; give a save folder, one iter_* folder in it, or a Hugging Face "
            "folder"
        )
    if (what := no_save_folder(path)) is not None:
        return f"{path} {what}"
    entries = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir())
    found = ", ".join(entries[:6]) + (f" and {len(entries) - 6} more" if len(entries) > 6 else "")
    return (
        f"{path} holds no checkpoint: neither iter_0000000 or the like, nor mp_rank_* folders, nor .metadata, nor "
        f"config.json beside safetensors files; it holds {found or 'nothing'}"
    )
