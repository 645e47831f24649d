"""What two runs must agree on to be called the same: every byte of the state in their checkpoints."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from megalith.checkpoint import CheckpointContent, Chunk, DirectoryStore
from megalith.checkpoint.formats.torch_dist import is_rng_object
from megalith.train.metrics import read_metrics


def state_of(save: Path, iteration: int) -> dict[str, Any]:
    """All tensors, random states and counters of a checkpoint; tensors and arrays as bytes."""
    store = DirectoryStore(save)
    contents = store.contents(iteration)
    tensors = {key: torch.empty(held.shape, dtype=held.dtype) for key, held in contents.tensors.items()}
    chunks = [Chunk(key, tensor, (0,) * tensor.dim(), tuple(tensor.shape)) for key, tensor in tensors.items()]
    loaded = store.load(iteration, CheckpointContent(chunks, dict.fromkeys(contents.objects)))
    optimizer = {key: value for key, value in loaded.common["optimizer"].items()}
    return {
        **{key: tensor.contiguous().view(torch.uint8).numpy().tobytes() for key, tensor in tensors.items()},
        **{key: _bytes(value) for key, value in loaded.objects.items() if is_rng_object(key)},
        "schedule": loaded.common["opt_param_scheduler"],
        "optimizer": _bytes(optimizer),
        "iteration": loaded.common["iteration"],
        "samples": loaded.common["args"].consumed_train_samples,
        "validation samples": loaded.common["args"].consumed_valid_samples,
        "flops": loaded.common["num_floating_point_operations_so_far"],
    }


def _bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def curve_of(save: Path) -> list[tuple[Any, ...]]:
    """Loss, gradient norm, rate, loss scale and samples of every step that counts."""
    names = ("iteration", "loss", "grad_norm", "learning_rate", "loss_scale", "applied", "consumed_samples")
    records = read_metrics(save / "run" / "metrics.jsonl")
    return [tuple(record[name] for name in names) for record in records if record["event"] == "step"]


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Name what differs, rather than print megabytes."""
    assert a.keys() == b.keys()
    assert [key for key in a if a[key] != b[key]] == []
