"""A run that is small enough to be started again and again on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megalith.data.indexed import IndexedWriter

MODEL = [
    *("--num-layers", 2, "--hidden-size", 16, "--num-attention-heads", 4, "--seq-length", 8),
    *("--max-position-embeddings", 8, "--micro-batch-size", 1, "--global-batch-size", 4, "--lr", 1e-2),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", 99, "--log-interval", 1, "--eval-iters", 0),
    *("--num-workers", 0, "--hidden-dropout", 0, "--attention-dropout", 0, "--split", "100,0,0"),
]


def on_text(folder: Path, words: Sequence[object]) -> list[object]:
    """A command line with a small dataset instead of `--mock-data`, whose index takes seconds at a short length."""
    place = words.index("--mock-data")
    return [*words[:place], "--data-path", write_text(folder), "--split", "90,5,5", *words[place + 1 :]]


def write_text(folder: Path, scale: int = 1) -> Path:
    """A small dataset, another one for another scale; returns its prefix."""
    prefix = folder / "text"
    with IndexedWriter(str(prefix), "uint16") as writer:
        for document in range(50):
            writer.add_document(np.arange(40) * (document + 3) * scale % 99, [40])
        writer.finalize()
    return prefix
