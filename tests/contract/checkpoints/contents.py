"""What a checkpoint holds, read with torch alone: a change of our own readers cannot hide a change of the files."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_OF_ARGS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "padded_vocab_size")


def contents(folder: Path) -> dict[str, Any]:
    """Return every tensor and value of a checkpoint folder (`iter_*`) by name.

    Of the saved arguments only the counters: the rest names folders and versions.
    """
    return dict(leaves(_read(folder)))


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return the weights and optimizer states of a torch_dist checkpoint, whose names are the same in every layout."""
    return {name: value for name, value in contents(folder).items() if isinstance(value, Tensor) and _is_state(name)}


def _is_state(name: str) -> bool:
    return "rng_state" not in name and not name.startswith("common.pt")


def _read(folder: Path) -> dict[str, Any]:
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*.pt"))}
    objects = {name: torch.load(path, weights_only=False) for name, path in files.items()}
    return {**objects, **_distributed(folder)} if (folder / ".metadata").exists() else objects


def _distributed(folder: Path) -> dict[str, Any]:
    reader = dcp.FileSystemReader(folder)
    state: dict[str, Any] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        state[key] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over what nested mappings and sequences hold, with names such as `optimizer/param_groups/0/lr`."""
    if isinstance(value, Namespace):
        yield from ((f"{name}/{key}", getattr(value, key)) for key in _OF_ARGS)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{name}/{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from leaves(item, f"{name}/{number}")
    else:
        yield name, torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the names of what one has and the other has not, or has with other bits."""
    return sorted(
        name
        for name in expected.keys() | found.keys()
        if name not in expected or name not in found or not _same(expected[name], found[name])
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)
    return type(a) is type(b) and (a == b or a is b)


def _bytes(value: Tensor) -> bytes:
    return value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def distance(expected: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """Return the largest difference between floating-point tensors of the same names."""
    return max(
        (value.float() - found[name].float()).abs().max().item()
        for name, value in expected.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel()
    )
