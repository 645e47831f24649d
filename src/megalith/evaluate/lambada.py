"""Cloze tasks: whether the model says the last word of a text. LAMBADA (Paperno et al. 2016, arXiv:1606.06031).

A file has one JSON object a line, whose "text" ends with the word to be found. As in Megatron the target is the last
token of the text, or, strictly, all tokens of its last word; a text counts as right if every target token is the most
likely one given the text before it. Source: docs/reference/evaluation.md#lambada.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from megalith.errors import DataError
from megalith.evaluate.score import Sample, Score
from megalith.tokenizers import Tokenizer

BUNDLED = "cloze.jsonl"
"""Sixty sentences of our own, to try a model without a download; far fewer and easier than LAMBADA's."""


def bundled_path() -> Path:
    """Where the bundled task is."""
    return Path(str(files("megalith.evaluate") / BUNDLED))


def read_texts(path: Path) -> list[str]:
    """The texts of a jsonl file, in order.

    Raises:
        DataError: it cannot be read, or a line is no JSON object with a "text".
    """
    texts = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    texts.append(_text_of(line, path, number))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    if not texts:
        raise DataError(f"{path} is empty; it needs one JSON object a line, with a text under the key text")
    return texts


def _text_of(line: str, path: Path, number: int) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{number} is no JSON: {error}") from error
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
        keys = f"the keys {', '.join(found) or 'none'}" if isinstance(found, dict) else f"a {type(found).__name__}"
        raise DataError(f'{path}:{number} has no text under the key "text"; it has {keys}')
    return text


def parts_of(text: str, tokenizer: Tokenizer, *, strict: bool) -> tuple[list[int], list[int]]:
    """Context and target of a text; either may be empty."""
    if not strict:
        ids = tokenizer.encode(text)
        return ids[:-1], ids[-1:]
    words = text.split()
    if not words:
        return [], []
    context = text[: text.rfind(words[-1])].strip()
    return tokenizer.encode(context) if context else [], tokenizer.encode(" " + words[-1])


@dataclass(frozen=True)
class Cloze:
    """A task made ready for a model.

    Attributes:
        samples: those that can be asked.
        skipped: how many texts cannot: they have no context, or no target, or a target longer than the context.
        shortened: how many have a longer context than the model reads; its beginning is left out.
    """

    samples: tuple[Sample, ...]
    skipped: int
    shortened: int


def make_cloze(texts: Sequence[str], tokenizer: Tokenizer, *, strict: bool, context_length: int) -> Cloze:
    """Cut texts into contexts and targets.

    Args:
        texts: each ends with what is asked for.
        tokenizer: of the model.
        strict: ask for the last word, else for the last token.
        context_length: tokens that the model reads.
    """
    samples, skipped, shortened = [], 0, 0
    for text in texts:
        context, target = parts_of(text, tokenizer, strict=strict)
        if not context or not target or len(target) > context_length:
            skipped += 1
            continue
        ids = context + target
        shortened += len(ids) > context_length + 1
        samples.append(Sample(ids[-(context_length + 1) :], len(target)))
    return Cloze(tuple(samples), skipped, shortened)


@dataclass(frozen=True)
class Accuracy:
    """What came out.

    Attributes:
        correct: texts whose target was found.
        total: texts that were asked.
        loss: mean over all target tokens, in nats.
        skipped, shortened: of `Cloze`.
        by_chance: how many a guess of equal probabilities would be expected to find.
    """

    correct: int
    total: int
    loss: float
    skipped: int
    shortened: int
    by_chance: float

    @property
    def share(self) -> float:
        return self.correct / self.total if self.total else math.nan


def accuracy(cloze: Cloze, scores: Sequence[Score], vocab_size: int) -> Accuracy:
    """Count what is right.

    Args:
        cloze: the task.
        scores: of its samples.
        vocab_size: tokens of the tokenizer.
    """
    targets = sum(len(score.logprobs) for score in scores)
    return Accuracy(
        correct=sum(bool(score.greedy.all()) for score in scores),
        total=len(scores),
        loss=-sum(score.total for score in scores) / targets if targets else math.nan,
        skipped=cloze.skipped,
        shortened=cloze.shortened,
        by_chance=sum(float(vocab_size) ** -sample.num_targets for sample in cloze.samples),
    )
