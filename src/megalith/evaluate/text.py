"""Tasks that measure how a model continues text: cloze (LAMBADA), WIKITEXT103, and perplexity of any text.

Cloze (LAMBADA: Paperno et al. 2016, arXiv:1606.06031): a file has one JSON object a line, whose "text" ends with the
word to be found. As in Megatron the target is the last token of the text, or, strictly, all tokens of its last word; a
text counts as right if every target token is the most likely one given the text before it.

Perplexity of text longer than the context is taken by overlapping windows, as in Megatron's WIKITEXT103. With windows
of L tokens that begin every s tokens, the first window scores all its L predictions and each later one only its last
s, which have at least L - s tokens of context, so that every token but the first is scored once:

    tokens    0 1 2 3 4 5 6 7 8          L = 4, s = 2
    window 0  . x x x x                  x scored, . context
    window 1      . . . x x
    window 2          . . . x x

WikiText, the Penn Treebank and LAMBADA are distributed as words between single spaces. A model that reads subwords is
measured on the detokenised text (with Megatron's replacements, in its order); its loss is then divided by the number of
the benchmark's words.

Sources: docs/reference/evaluation.md#lambada, docs/reference/evaluation.md#wikitext-103.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megalith.data.sources import JSONL, format_of
from megalith.data.sources.formats import (
    ARRAY,
    ARROW,
    BZIP2,
    CSV,
    GZIP,
    PARQUET,
    XZ,
    ZSTD,
    archive_of,
    compression_of,
    format_by_content,
    name_without_compression,
)
from megalith.errors import DataError
from megalith.evaluate.score import Ids, Sample, Score, Scorer
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.protocol import end_ids, require_text

Detokenizer = Callable[[str], str]

_DEGREE = "\u00b0"

# (old, new), each applied to the whole text before the next.
_WIKITEXT_BEFORE_PAIRS = (
    *(("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" : ", ": ")),
    *((" ; ", "; "), (" . ", ". "), (" ! ", "! "), (" ? ", "? "), (" , ", ", ")),
)
_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
_WIKITEXT_AFTER_PAIRS = (
    *(("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (f" {_DEGREE} ", _DEGREE)),
    *((" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")),
)
_PTB = (
    (" '", "'"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" n't", "n't"),
    (" N ", "1 "),  # without the space before it, as Megatron has it
    ("$ 1", "$1"),
    ("# 1", "#1"),
)

BUNDLED = "cloze.jsonl"
"""Sixty sentences, to try a model without a download; far fewer and easier than LAMBADA's."""
_NOT_PLAIN = {ARRAY: "a JSON array", CSV: "a csv", PARQUET: "a parquet file", ARROW: "an arrow file"}
_DECOMPRESS = {GZIP: "gzip -dc", XZ: "xz -dc", ZSTD: "zstd -dc", BZIP2: "bzip2 -dc"}  # to standard output
_LARGEST_EXPONENT = 20.0  # Megatron's: a perplexity is at most e^20


def wikitext(text: str) -> str:
    """Undo the tokenisation of WikiText-2 and WikiText-103.

    >>> wikitext("a 3 @.@ 5 ( very ) old = = Top = = town 's")
    "a 3.5 (very) old == Top == town's"
    """
    text = _replaced(text, _WIKITEXT_BEFORE_PAIRS)
    for opening, closing in _PAIRS:
        text = re.sub(rf"{re.escape(opening)}\s*([^{re.escape(closing)}]*?)\s*{re.escape(closing)}", _tight, text)
    return _replaced(text, _WIKITEXT_AFTER_PAIRS)


def ptb(text: str) -> str:
    """Undo the tokenisation of the Penn Treebank.

    >>> ptb("it did n't cost $ N million")
    "it didn't cost $1 million"
    """
    return _replaced(text, _PTB)


def unchanged(text: str) -> str:
    """Return the text unchanged: LAMBADA's jsonl is plain text already."""
    return text


DETOKENIZERS: dict[str, Detokenizer] = {"ptb": ptb, "wiki": wikitext, "lambada": unchanged}
"""Part of a path -> function that undoes the tokenisation of that benchmark; the first match counts."""


def detokenizer_for(path: str) -> tuple[str, Detokenizer] | None:
    """Return name and function for a path by what it contains, as Megatron does; None if nothing fits."""
    return next(((name, function) for name, function in DETOKENIZERS.items() if name in path), None)


def _replaced(text: str, rules: tuple[tuple[str, str], ...]) -> str:
    for old, new in rules:
        text = text.replace(old, new)
    return text


def _tight(match: re.Match[str]) -> str:
    """Return a pair of brackets or quotes without the blanks inside it."""
    whole = match[0]
    return whole[0] + match[1] + whole[-1]


def bundled_path() -> Path:
    return Path(str(files("megalith.evaluate") / BUNDLED))


def read_texts(path: Path) -> list[str]:
    """Read the texts of a jsonl file, in order. Raises DataError naming file and line of a bad one."""
    lines = read_text(path).split("\n")
    texts = [_text_of(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not texts:
        raise DataError(f'{path} is empty; it needs one JSON object per line with a text under the key "text"')
    return texts


def _text_of(line: str, path: Path, number: int) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{number} is not valid JSON: {error}") from error
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
        keys = f"the keys {', '.join(found) or 'none'}" if isinstance(found, dict) else f"a {type(found).__name__}"
        raise DataError(f'{path}:{number} has no text under the key "text"; it has {keys}')
    try:
        return require_text(text)
    except DataError as error:
        raise DataError(f"{path}:{number}: {error}; correct its \\u escape, or leave the line out") from error


def context_and_target(text: str, tokenizer: Tokenizer, *, strict: bool) -> tuple[list[int], list[int]]:
    """Return context and target ids of a text; either may be empty."""
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
    """Cloze task as samples."""

    samples: tuple[Sample, ...]
    skipped: int  # texts without context or target, or with a target longer than the context
    shortened: int  # texts whose context is longer than the model's and was truncated on the left


def make_cloze(texts: Sequence[str], tokenizer: Tokenizer, *, strict: bool, context_length: int) -> Cloze:
    """Cut texts into contexts and targets: the last word if strict, else the last token."""
    samples, skipped, shortened = [], 0, 0
    for text in texts:
        context, target = context_and_target(text, tokenizer, strict=strict)
        if not context or not target or len(target) > context_length:
            skipped += 1
            continue
        ids = context + target
        shortened += len(ids) > context_length + 1
        samples.append(Sample(ids[-(context_length + 1) :], len(target)))
    return Cloze(tuple(samples), skipped, shortened)


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a cloze task."""

    correct: int
    total: int
    loss: float  # mean over all target tokens, in nats
    skipped: int  # of `Cloze`
    shortened: int  # of `Cloze`
    by_chance: float  # expected number of correct uniform guesses

    @property
    def share(self) -> float:
        return self.correct / self.total if self.total else math.nan


def accuracy(cloze: Cloze, scores: Sequence[Score], vocab_size: int) -> Accuracy:
    targets = sum(len(score.logprobs) for score in scores)
    return Accuracy(
        correct=sum(bool(score.greedy.all()) for score in scores),
        total=len(scores),
        loss=-sum(score.total for score in scores) / targets if targets else math.nan,
        skipped=cloze.skipped,
        shortened=cloze.shortened,
        by_chance=sum(float(vocab_size) ** -sample.num_targets for sample in cloze.samples),
    )


@dataclass(frozen=True)
class Windows:
    """Windows over a long text."""

    length: int  # predictions of one window, which reads as many tokens
    stride: int  # tokens between the beginnings of two windows; at most `length`, which means no overlap

    def __post_init__(self) -> None:
        assert 1 <= self.stride <= self.length, f"stride {self.stride} of windows of {self.length}"

    def samples(self, ids: Ids) -> Iterator[Sample]:
        """Yield the windows that score anything; together they score every id but the first, once."""
        num_targets = len(ids) - 1
        scored, start = 0, 0
        while scored < num_targets:
            stop = min(start + self.length, num_targets)
            yield Sample(ids[start : stop + 1], stop - scored)
            scored = stop
            start += self.stride

    def count(self, num_ids: int) -> int:
        """Return Megatron's number of windows, which includes fully masked ones at the end."""
        targets = max(num_ids - 1 - self.stride, 0)
        return math.ceil(targets / self.stride) + 1


@dataclass(frozen=True)
class TextLoss:
    """Loss of text under a model, with the counts that perplexities are taken over."""

    total: float  # summed over the predicted tokens, in nats
    num_tokens: int
    num_words: int | None = None  # words of the benchmark, less the first; None if it counts none
    num_bytes: int | None = None  # of the whole text as UTF-8; None if the first token is not predicted
    num_documents: int = 1
    skipped: int = 0  # empty texts

    @property
    def mean(self) -> float:
        """Return the loss per token, in nats; NaN if there are no tokens."""
        return self.total / self.num_tokens if self.num_tokens else math.nan

    @property
    def perplexity(self) -> float:
        return bounded_exp(self.mean)

    @property
    def token_ratio(self) -> float:
        """Return the tokens per word; NaN without words."""
        return self.num_tokens / self.num_words if self.num_words else math.nan

    @property
    def adjusted_perplexity(self) -> float:
        """Return the perplexity per word of the benchmark, which is independent of the tokenizer."""
        return bounded_exp(self.mean * self.token_ratio)

    @property
    def bits_per_byte(self) -> float:
        return self.total / math.log(2) / self.num_bytes if self.num_bytes else math.nan


def bounded_exp(value: float) -> float:
    """Return e^x, with x capped at 20 as Megatron prints it."""
    return math.exp(value) if math.isnan(value) else math.exp(min(_LARGEST_EXPONENT, value))


def score_texts(
    scorer: Scorer, texts: Sequence[Ids], windows: Windows, on_batch: Callable[[int], None] = lambda number: None
) -> list[NDArray[np.float64]]:
    """Return the log-probability of every token of each text but its first, in order."""
    per_text = [list(windows.samples(ids)) for ids in texts]
    scores = iter(scorer([sample for samples in per_text for sample in samples], on_batch))
    empty = np.zeros(0)
    return [np.concatenate([empty, *(next(scores).logprobs for _ in samples)]) for samples in per_text]


class Listener(Protocol):
    """Callbacks for the progress of an evaluation."""

    def building(self, path: Path) -> None: ...  # the samples are read from `path`

    def found(self, samples: int) -> None: ...  # number of samples

    def counted(self, original: int, tokens: int) -> None: ...  # words and tokens of a text

    def batch(self, number: int) -> None: ...  # batch `number` is about to run

    def note(self, text: str) -> None: ...  # for the user


def measure_cloze(path: Path, scorer: Scorer, tokenizer: Tokenizer, listener: Listener, *, strict: bool) -> Accuracy:
    """Measure LAMBADA, or another jsonl with texts: the last word if strict, else the last token."""
    listener.building(path)
    texts = read_texts(path)
    listener.found(len(texts))
    with _naming(path):
        cloze = make_cloze(texts, tokenizer, strict=strict, context_length=scorer.context_length)
    if cloze.shortened:
        listener.note(
            f"{cloze.shortened} of {len(texts)} samples are longer than the {scorer.context_length} tokens that the "
            "model reads: their beginnings are left out"
        )
    if cloze.skipped:
        listener.note(f"{cloze.skipped} of {len(texts)} samples have no context or no word to ask for: skipped")
    return accuracy(cloze, scorer(cloze.samples, listener.batch), tokenizer.vocab_size)


def measure_wikitext(
    path: Path, scorer: Scorer, tokenizer: Tokenizer, windows: Windows, listener: Listener, *, detokenizer: str = "auto"
) -> TextLoss:
    """Measure perplexity per token and per word of a text that was cut into words, as Megatron's WIKITEXT103."""
    text = read_text(path)
    num_words = len(text.strip().split(" "))
    with _naming(path):
        ids = tokenizer.encode(_detokenizer(path, detokenizer, listener)(text))
    listener.counted(num_words, len(ids))
    (logprobs,) = score_texts(scorer, [ids], windows, listener.batch)
    return TextLoss(
        total=-float(logprobs.sum()),
        num_tokens=len(logprobs),
        num_words=num_words - 1,
        skipped=int(len(ids) < 2),
    )


def _detokenizer(path: Path, name: str, listener: Listener) -> Detokenizer:
    if name != "auto":
        return DETOKENIZERS.get(name, unchanged)
    fitting = detokenizer_for(str(path))
    if fitting is None:
        listener.note(
            f"{path} names none of {', '.join(DETOKENIZERS)}: the text is taken as it is (Megatron would fail here)"
        )
        return unchanged
    return fitting[1]


def measure_text(path: Path, scorer: Scorer, tokenizer: Tokenizer, windows: Windows, listener: Listener) -> TextLoss:
    """Measure perplexity and bits per byte of a jsonl or a text.

    Each document follows an end-of-document token; without one its first token is context alone.
    """
    texts = read_documents(path)
    whole = [text for text in texts if text]
    with _naming(path):
        encoded = tokenizer.encode_batch(whole)
    documents = [[*end_ids(tokenizer), *ids] for ids in encoded]
    unpredicted = [] if end_ids(tokenizer) else [tokenizer.decode(ids[:1]) for ids in encoded]
    words = sum(len(text.split()) for text in whole)
    listener.counted(words, sum(len(ids) - 1 for ids in documents))
    logprobs = score_texts(scorer, documents, windows, listener.batch)
    return TextLoss(
        total=-sum(float(part.sum()) for part in logprobs),
        num_tokens=sum(len(part) for part in logprobs),
        num_words=words,
        num_bytes=sum(len(text.encode()) for text in whole) - sum(len(text.encode()) for text in unpredicted),
        num_documents=len(whole),
        skipped=len(texts) - len(whole),
    )


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise the error of a tokenizer with the file whose text it cannot encode."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def read_documents(path: Path) -> Sequence[str]:
    """Read the texts of a jsonl file, or the single text of any other file but those that hold texts in another form.

    Raises DataError for a JSON array or a table, whose markup would be taken for text.
    """
    form = format_of(path)
    _require_plain(path, form)
    return read_texts(path) if form == JSONL else [read_text(path)]


def _require_plain(path: Path, form: str | None) -> None:
    if form in _NOT_PLAIN:
        raise DataError(
            f"{path} is {_NOT_PLAIN[form]}, not plain text; write its texts to a jsonl file, a line for each: "
            '{"text": ...}'
        )


def read_text(path: Path) -> str:
    """Read a whole file, line ends included, without a byte order mark.

    Raises DataError if it cannot be read, is compressed or is not UTF-8.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if archive := archive_of(content[:512]):
        raise DataError(f"{path} is a {archive} archive; unpack it, and give a file of it")
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        _require_plain(path, format_by_content(content[:8]))
        if compression := compression_of(content[:8]):
            name = name_without_compression(path)
            plain = path.with_name(name if name != path.name else f"decompressed-{name}")
            command = f"{_DECOMPRESS[compression]} {shlex.quote(str(path))} > {shlex.quote(str(plain))}"
            raise DataError(f"{path} is compressed ({compression}); decompress it: {command}") from error
        raise DataError(f"{path} is not UTF-8: {error.reason} at byte {error.start}; convert it with iconv") from error
