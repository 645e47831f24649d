"""Records of parts of models in the user's cache folder, so that a structure is measured once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megalith
from megalith.config import RunConfig
from megalith.plan import cache_folder
from megalith.plan.devices import Device
from megalith.plan.memory import Part
from megalith.plan.record import Record

_PART_OF_LAYOUT = {"num_layers", "decoder_num_layers"}  # a part names its layers
_NEEDLESS = {
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "microbatch_group_size_per_vp_stage",
    "pipeline_schedule",
    "use_distributed_optimizer",
}
"""Settings of parallelism that are counted in integers."""
_OTHERS = {
    "train": ("micro_batch_size", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    "data": ("seq_length", "decoder_seq_length"),
}


@cache
def versions() -> list[Any]:
    """Return what a result depends on besides settings: this source and torch."""
    newest = max(file.stat().st_mtime_ns for file in Path(megalith.__file__).parent.rglob("*.py"))
    return [megalith.__version__, newest, version("torch")]


def remember(path: Path, text: str) -> None:
    """Write a result, whole or not at all; without one if the folder cannot be written to."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)


def structure(run: RunConfig, part: Part, vocab_size: int, device: Device) -> dict[str, Any]:
    """Return everything that a record depends on, for JSON."""
    groups = run.to_dict()
    chosen = {name: groups[name] for name in ("precision", "optimizer")}
    chosen["model"] = {name: value for name, value in groups["model"].items() if name not in _PART_OF_LAYOUT}
    chosen["parallel"] = {name: value for name, value in groups["parallel"].items() if name not in _NEEDLESS}
    chosen |= {group: {name: groups[group][name] for name in names} for group, names in _OTHERS.items()}
    chosen["train"]["recompute"] = str(run.recompute)
    return {
        "settings": chosen,
        "part": [part.kinds, part.is_first, part.is_last, part.recomputed],
        "split": run.pipeline_schedule == "zb-h1",
        "sharded": [run.layout.cp * run.layout.dp, run.num_micro_batches > 1] if run.fully_sharded else [],
        "stages": run.layout.pp > 1,
        "vocab_size": vocab_size,
        "device": [device.compute, device.block],
        "versions": versions(),
    }


def remembering(
    run: RunConfig, vocab_size: int, device: Device, measure: Callable[[Part], Record]
) -> Callable[[Part], Record]:
    """Return `measure` with a cache; without one if the run has registered layers, whose code may change."""
    if run.registered:
        return measure

    def record_of(part: Part) -> Record:
        words = json.dumps(structure(run, part, vocab_size, device), sort_keys=True)
        path = cache_folder() / f"{hashlib.sha256(words.encode()).hexdigest()[:32]}.json"
        with suppress(OSError, ValueError, KeyError, TypeError):  # absent, or cut off by a full disk
            return Record.from_json(json.loads(path.read_text(encoding="utf-8")))
        record = measure(part)
        remember(path, json.dumps(asdict(record)))
        return record

    return record_of
