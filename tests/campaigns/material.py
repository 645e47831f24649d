"""What the campaigns share: a small run over tokenised text, commands with a time limit, and a table."""

from __future__ import annotations

import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megalith.tokenizers import train_byte_level_bpe

from ..e2e.warm import Finished, Running

REPOSITORY = Path(__file__).resolve().parents[2]
HUNG = "hung"
TRAIN = shlex.split(
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 256 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 0.01 --lr-decay-style cosine --min-lr 0.001 --lr-warmup-iters 2 "
    "--weight-decay 0.1 --hidden-dropout 0.1 --attention-dropout 0.1 --make-vocab-size-divisible-by 8 --device cpu "
    "--distributed-backend gloo --log-interval 1 --eval-iters 1 --num-workers 1 --split 90,5,5 "
    "--tokenizer-type GPT2BPETokenizer --vocab-file data/vocab.json --merge-file data/merges.txt "
    "--data-path data/text_text_document --data-cache-path cache"
)
"""The flags of a small run in a folder with `data`: relative paths, so that a copy of the folder is the same run."""


def prepare_data(folder: Path) -> None:
    """Write `data` in a folder: a tokenizer, and 300 documents tokenised with it."""
    words, chance = [f"{a}{b}" for a in "bdfghklm" for b in ("at", "en", "ill", "ow", "ust")], random.Random(0)
    documents = [" ".join(chance.choices(words, k=chance.randint(5, 40))) for _ in range(300)]
    data = folder / "data"
    data.mkdir(parents=True)
    (data / "text.txt").write_text("\n\n".join(documents))
    vocab, merges = train_byte_level_bpe(documents, 300, data)
    command = [sys.executable, REPOSITORY / "tools/preprocess_data.py", "--input", "data/text.txt", "--append-eod"]
    command += ["--output-prefix", "data/text", "--workers", 1, "--tokenizer-type", "GPT2BPETokenizer"]
    command += ["--vocab-file", vocab, "--merge-file", merges]
    subprocess.run([str(word) for word in command], cwd=folder, check=True, capture_output=True)
    (data / "text.txt").unlink()


def finish_within(running: Running, seconds: float) -> Finished | None:
    """Wait for the end of a command; None, and it is killed, where it takes longer."""
    deadline = time.monotonic() + seconds
    while not has_ended(running):
        if time.monotonic() > deadline:
            running.send(signal.SIGKILL)
            running.finish()
            return None
        time.sleep(0.01)
    return running.finish()


def has_ended(running: Running) -> bool:
    return Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def last_lines(text: str, count: int = 3) -> str:
    return " | ".join(text.strip().splitlines()[-count:])


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in columns; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
