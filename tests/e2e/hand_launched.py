"""Ranks started one by one, as a launcher starts them, from warm processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megalith.data.indexed import IndexedWriter

from .warm import Finished, Running, WarmProcess, free_port

MODEL = [
    *("--num-layers", 2, "--hidden-size", 16, "--num-attention-heads", 4, "--seq-length", 8),
    *("--max-position-embeddings", 8, "--micro-batch-size", 1, "--global-batch-size", 4, "--lr", 1e-2),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", 99, "--log-interval", 1, "--eval-iters", 0),
    *("--num-workers", 0, "--hidden-dropout", 0, "--attention-dropout", 0, "--split", "100,0,0"),
]


def write_text(folder: Path) -> Path:
    """A small dataset; returns its prefix."""
    prefix = folder / "text"
    with IndexedWriter(str(prefix), "uint16") as writer:
        for document in range(50):
            writer.add_document(np.arange(40) * (document + 3) % 99, [40])
        writer.finalize()
    return prefix


@dataclass
class Ranks:
    """The ranks of one run."""

    running: Sequence[Running]
    started: float

    def finish(self) -> list[Finished]:
        """Wait for the end of all."""
        return [running.finish() for running in self.running]

    @property
    def text(self) -> str:
        """What all have printed."""
        return "".join(running.text for running in self.running)


def start_ranks(warm: WarmProcess, cwd: Path, words: Sequence[object], count: int = 2, **env: str) -> Ranks:
    """Start `pretrain_gpt.py words` as `count` ranks."""
    port = str(free_port())
    places = [{"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_PORT": port} for rank in range(count)]
    return Ranks([warm.start(words, cwd, **place, **env) for place in places], time.monotonic())
