"""Evaluation requests and their validation, without torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megalith.config import TokenizerConfig
from megalith.config.environment import read_launch
from megalith.evaluate.local_data import BENCHMARKS
from megalith.registry import EMPTY, Registry

TASKS = {
    "lambada": "the last token of each text of a jsonl file, or its last word (--strict-lambada)",
    "cloze": "the last word of sixty bundled sentences, to try a model without a download",
    "wikitext103": "perplexity per token and per word of a text file, as Megatron's task of that name takes it",
    "text": "perplexity and bits per byte of any txt or jsonl file",
    "masked": "of BERT: hidden words that it finds, their loss, and the order of sentences",
    "spans": "of T5: tokens of hidden spans that it writes, their loss and perplexity",
    **{name: benchmark.about for name, benchmark in BENCHMARKS.items()},
}
"""Name -> what is measured."""

MASKED_TASKS = ("masked", "spans")
"""Tasks with hidden tokens, for models of that objective; the others are for models that continue text."""

DEFAULT_OVERLAP = 32
DEFAULT_BATCH = 8
DETOKENIZER_CHOICES = ("auto", "none", "wiki", "ptb")

_WINDOWED = ("wikitext103", "text")
_FLAGS_OF_TASKS: dict[str, tuple[str, Collection[str]]] = {
    "strict": ("--strict-lambada", ("lambada", "cloze")),
    "detokenizer": ("--detokenizer", ("wikitext103",)),
    "overlap": ("--overlapping-eval", _WINDOWED),
    "seq_length": ("--seq-length", (*_WINDOWED, *MASKED_TASKS)),
    "samples": ("--samples", (*MASKED_TASKS, *BENCHMARKS)),
    "decoder_seq_length": ("--decoder-seq-length", ("spans",)),
    "others": ("--others", BENCHMARKS),
    "shots": ("--num-fewshot", BENCHMARKS),
    "chat": ("--apply-chat-template", BENCHMARKS),
    "chat_template": ("--chat-template", BENCHMARKS),
    "subjects": ("--subjects", BENCHMARKS),
}
"""Field of a `Request` -> its flag, and the tasks that read it."""


class Unread(NamedTuple):
    """Field of a request that has a value, and that its task does not read."""

    field: str
    given: str  # the flag and its value
    tasks: Collection[str]  # that read it


@dataclass(frozen=True)
class Request:
    """Request for an evaluation."""

    checkpoint: Path
    task: str  # a key of `TASKS`
    data: Path | None = None  # the file; None for the bundled one
    result: Path | None = None  # the JSON file to write
    iteration: int | None = None  # which checkpoint; the newest sound one if None
    strict: bool = False  # of lambada: the last word rather than the last token; cloze is always so
    overlap: int | None = None  # tokens that later windows score; None: `DEFAULT_OVERLAP`, at most the window
    seq_length: int | None = None  # of windows or samples; None: the model's context, or that of the training
    batch_size: int = DEFAULT_BATCH
    log_interval: int = 100
    detokenizer: str | None = None  # of wikitext103, of `DETOKENIZER_CHOICES`; None: "auto", which goes by the path
    samples: int | None = None  # of masked, spans and benchmarks (of each subject), how many at most; all if None
    others: tuple[Path, ...] = ()  # further checkpoints or adapters that a benchmark is asked of
    shots: int | None = None  # of benchmarks: examples before each question; None: as lm-eval's task says
    chat: bool = False  # of benchmarks: whether questions are messages of a dialogue
    chat_template: Path | None = None  # None: the tokenizer's
    subjects: tuple[str, ...] = ()  # of benchmarks; all if empty
    decoder_seq_length: int | None = None  # of spans; that of the training if None
    dtype: str | None = None  # of the weights, by name; that of the checkpoint if None
    tokenizer: TokenizerConfig | None = None  # instead of the one in the checkpoint
    registry: Registry = EMPTY  # what users have registered, of which the model may be made
    settings: Mapping[str, Any] = field(default_factory=dict)  # of launch and layout, as of `megalith train`
    stated: Mapping[str, Any] = field(default_factory=dict)  # the architecture that the command line expects

    def violations(self, *, files: bool = True) -> list[str]:
        """Return what is wrong, naming the flags.

        With `files` the file of the task must exist, and it must be possible to write the result.
        """
        found = []
        if self.task not in TASKS:
            found.append(f"--task {self.task} is unknown; use one of {', '.join(TASKS)}")
        elif self.data is None and self.task != "cloze":
            found.append(f"--task {self.task} needs a file to measure on (--data FILE; of tasks/main.py: --valid-data)")
        asks = self.task in BENCHMARKS
        if files and asks and self.data is not None and not self.data.is_dir():
            get = f"{BENCHMARKS[self.task].download} {self.data}"
            found.append(f"no such folder: {self.data} (--data); get the files of {self.task}: {get}")
        if files and self.data is not None and not asks and not self.data.is_file() and not self._is_dataset:
            what = "this is a folder, not a file" if self.data.is_dir() else "no such file"
            found.append(f"{what}: {self.data} (--data; of tasks/main.py: --valid-data){_where_from(self.task)}")
        pair = (".bin", ".idx")
        if files and self.data is not None and self.data.suffix in pair and self.data.with_suffix(pair[1]).is_file():
            without = f"--data {self.data.with_suffix('')}" if self.task in MASKED_TASKS else "a text file"
            found.append(f"--data {self.data} is a file of a dataset of token ids; give {without}")
        if files and self.result is not None and read_launch(os.environ).get("RANK", "0") == "0":  # which writes it
            found += unwritable(self.result, "--json")
        found += [f"{one.given} is for --task {' and '.join(one.tasks)}; leave it out" for one in self.unread()]
        if self.shots is not None and self.shots < 0:
            found.append(f"--num-fewshot {self.shots} is negative; 0 asks without examples")
        if self.chat_template is not None and not self.chat:
            found.append("--chat-template is used with --apply-chat-template alone; give both")
        for flag, value in (
            ("--overlapping-eval", self.overlap),
            ("--seq-length", self.seq_length),
            ("--micro-batch-size", self.batch_size),
            ("--log-interval", self.log_interval),
            ("--samples", self.samples),
            ("--decoder-seq-length", self.decoder_seq_length),
        ):
            if value is not None and value < 1:
                found.append(f"{flag} {value} is below 1; give 1 or more")
        return found

    def unread(self) -> list[Unread]:
        """Return the fields that have a value and that the task does not read."""
        found = []
        for name, (flag, tasks) in _FLAGS_OF_TASKS.items():
            value = getattr(self, name)
            if value is None or value is False or value == () or self.task in tasks:
                continue
            words = () if value is True else value if isinstance(value, tuple) else (value,)
            found.append(Unread(name, " ".join([flag, *map(str, words)]), tasks))
        return found

    @property
    def _is_dataset(self) -> bool:
        """Return whether the data is the prefix of a .bin/.idx pair, for a task that takes one."""
        return self.task in MASKED_TASKS and Path(f"{self.data}.idx").is_file()

    def windows(self, context_length: int) -> tuple[int, int, list[str]]:
        """Return length and stride of the windows over a model's context, and what is wrong with them."""
        length = self.seq_length or context_length
        stride = min(DEFAULT_OVERLAP, length) if self.overlap is None else self.overlap
        wrong = []
        if length > context_length:
            wrong.append(
                f"--seq-length {length} is longer than the {context_length} positions of the model "
                f"(--max-position-embeddings); give {context_length} or less"
            )
        if stride > length:
            wrong.append(
                f"--overlapping-eval {stride} is more than the {length} tokens of a window (--seq-length), so that "
                f"tokens would be skipped; give {length} or less"
            )
        return length, stride, wrong


def unwritable(file: Path, flag: str) -> list[str]:
    """Return why the file of a flag cannot be written, if it cannot."""
    folder = file.absolute().parent
    if file.is_dir():
        return [f"{flag} {file} is a folder; name a file in it"]
    if not folder.is_dir():
        return [f"{flag} {file}: no such folder: {folder}; create it (mkdir -p), or choose another path"]
    target = file if file.exists() and not file.is_file() else folder  # a device is written where it is
    if not os.access(target, os.W_OK):
        return [f"{flag} {file}: no permission to write to {target}; choose another path"]
    return []


def _where_from(task: str) -> str:
    if task in MASKED_TASKS:
        return ", nor the prefix of a dataset (PREFIX.bin and PREFIX.idx)"
    if task != "lambada":
        return ""
    return "; docs/evaluation.md tells where to get LAMBADA's, and --task cloze needs no file"
