"""The command lines that the quickstart runs, as a user would type them, with Megatron's flags."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalith.cli.quickstart.sizing import ModelSize

COMMAND = (sys.executable, "-m", "megalith")
SPLIT = "94,4,2"
EVALUATIONS = 6
EVALUATION_TOKENS = 32_768
SAVES = 4


@dataclass(frozen=True)
class Folder:
    """What lies where in the quickstart's output folder."""

    root: Path

    @property
    def corpus(self) -> Path:
        return self.root / "corpus.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def data_prefix(self) -> Path:
        return self.root / "data" / "corpus"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.checkpoints / "run" / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def curve(self) -> Path:
        return self.root / "loss.png"

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def commands(self) -> Path:
        return self.root / "commands.sh"


def tokenizer_flags(folder: Folder) -> list[str]:
    return [
        *("--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", str(folder.tokenizer / "vocab.json")),
        *("--merge-file", str(folder.tokenizer / "merges.txt")),
    ]


def preprocess_arguments(folder: Folder) -> list[str]:
    return [
        "preprocess",
        *("--input", str(folder.corpus), "--output-prefix", str(folder.data_prefix)),
        *tokenizer_flags(folder),
        *("--append-eod", "--workers", str(os.cpu_count() or 1)),
    ]


def model_flags(size: ModelSize) -> list[str]:
    return [
        *("--num-layers", str(size.num_layers), "--hidden-size", str(size.hidden_size)),
        *("--num-attention-heads", str(size.num_attention_heads), "--ffn-hidden-size", str(size.ffn_hidden_size)),
        *("--seq-length", str(size.seq_length), "--max-position-embeddings", str(size.seq_length)),
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        *("--untie-embeddings-and-output-weights", "--attention-dropout", "0", "--hidden-dropout", "0"),
    ]


def schedule_flags(size: ModelSize, precision: str, iterations: int) -> list[str]:
    return [
        *("--micro-batch-size", str(size.batch_size), "--global-batch-size", str(size.batch_size)),
        *(
            "--train-iters",
            str(iterations),
            "--lr",
            f"{size.learning_rate:g}",
            "--min-lr",
            f"{size.learning_rate / 20:g}",
        ),
        *("--lr-decay-style", "cosine", "--lr-warmup-iters", str(max(1, iterations // 25))),
        *("--weight-decay", "0.1", "--adam-beta1", "0.9", "--adam-beta2", "0.95", "--clip-grad", "1.0"),
        *([f"--{precision}"] if precision != "fp32" else []),
    ]


def train_arguments(folder: Folder, size: ModelSize, precision: str, iterations: int) -> list[str]:
    return [
        "train",
        *model_flags(size),
        *schedule_flags(size, precision, iterations),
        *("--data-path", f"{folder.data_prefix}_text_document", "--split", SPLIT),
        *tokenizer_flags(folder),
        *("--eval-interval", str(max(1, iterations // EVALUATIONS))),
        *("--eval-iters", str(evaluation_iterations(size, iterations))),
        *("--save", str(folder.checkpoints), "--load", str(folder.checkpoints)),
        *("--save-interval", str(save_interval(iterations)), "--log-interval", "10"),
    ]


def evaluation_iterations(size: ModelSize, iterations: int) -> int:
    """Enough for a steady number, and not long against the training."""
    return max(2, min(EVALUATION_TOKENS // size.tokens_per_step, iterations // 40))


def save_interval(iterations: int) -> int:
    return max(1, iterations // SAVES)


def kill_iteration(iterations: int) -> int:
    """Half-way, and far enough behind a checkpoint that some steps are lost."""
    return iterations // SAVES * (SAVES // 2) + max(3, iterations // 40)


def generate_arguments(folder: Folder, prompt: str, num_tokens: int) -> list[str]:
    return [
        *("generate", str(folder.checkpoints), "--prompt", prompt, "--max-new-tokens", str(num_tokens)),
        *("--temperature", "0.6", "--top-k", "40", "--seed", "1"),
    ]


def program() -> str:
    """Give `megalith` as the user's shell finds it: the bare name, or its path in an environment not activated."""
    beside = Path(sys.executable).with_name("megalith")
    on_path = str(beside.parent) in os.environ.get("PATH", "").split(os.pathsep)
    if on_path or not beside.exists():
        return "megalith"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def as_typed(arguments: Sequence[str]) -> str:
    """Give the line that a user would type."""
    return f"{program()} {shlex.join(arguments)}"


def script(command_lines: Sequence[Sequence[str]]) -> str:
    """Give a shell script of the commands, one flag a line, to read, change and run."""
    parts = ["#!/usr/bin/env bash", "# What `megalith quickstart` ran, in this order.", "set -e"]
    parts.append(f"cd {shlex.quote(str(Path.cwd()))}")
    for arguments in command_lines:
        words = [" \\\n    " + word if word.startswith("--") else " " + shlex.quote(word) for word in arguments]
        parts.append("\n" + program() + "".join(words))
    return "\n".join(parts) + "\n"
