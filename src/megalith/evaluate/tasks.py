"""The tasks: from a file to a result, told step by step to a listener."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megalith.data.sources import JSONL, format_of
from megalith.errors import DataError
from megalith.evaluate.detokenizers import DETOKENIZERS, Detokenizer, detokenizer_for, unchanged
from megalith.evaluate.lambada import Accuracy, accuracy, make_cloze, read_texts
from megalith.evaluate.perplexity import TextLoss, Windows, score_texts
from megalith.evaluate.score import Scorer
from megalith.tokenizers import Tokenizer


class Listener(Protocol):
    """Hears how an evaluation goes."""

    def building(self, path: Path) -> None:
        """A cloze task is read from a file."""
        ...

    def found(self, samples: int) -> None:
        """So many samples are to be asked."""
        ...

    def counted(self, original: int, tokens: int) -> None:
        """A text has so many words, and so many tokens."""
        ...

    def batch(self, number: int) -> None:
        """A batch is about to be computed."""
        ...

    def note(self, text: str) -> None:
        """Something that the user must hear."""
        ...


def measure_cloze(path: Path, scorer: Scorer, tokenizer: Tokenizer, listener: Listener, *, strict: bool) -> Accuracy:
    """LAMBADA, or another file of its format.

    Args:
        path: jsonl with a text under the key text.
        scorer: with the model.
        tokenizer: of the model.
        listener: told of each step.
        strict: ask for the last word rather than the last token.

    Raises:
        DataError: the file cannot be read.
    """
    listener.building(path)
    texts = read_texts(path)
    listener.found(len(texts))
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
    """Perplexity per token and per word of a text that was cut into words, as Megatron's WIKITEXT103.

    Args:
        path: the text.
        scorer: with the model.
        tokenizer: of the model.
        windows: how the text is cut.
        listener: told of each step.
        detokenizer: "auto" chooses by the path, "none" changes nothing, else a key of `DETOKENIZERS`.

    Raises:
        DataError: the file cannot be read.
    """
    text = read_text(path)
    num_words = len(text.strip().split(" "))
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
    """Perplexity and bits per byte of the documents of a file, each predicted whole, from an end of document on.

    Args:
        path: jsonl with a text under the key text in each line, or one text.
        scorer: with the model.
        tokenizer: of the model.
        windows: how documents are cut.
        listener: told of each step.

    Raises:
        DataError: the file cannot be read.
    """
    texts = read_documents(path)
    whole = [text for text in texts if text]
    documents = [[tokenizer.eod, *ids] for ids in tokenizer.encode_batch(whole)]
    words = sum(len(text.split()) for text in whole)
    listener.counted(words, sum(len(ids) - 1 for ids in documents))
    logprobs = score_texts(scorer, documents, windows, listener.batch)
    return TextLoss(
        total=-sum(float(part.sum()) for part in logprobs),
        num_tokens=sum(len(part) for part in logprobs),
        num_words=words,
        num_bytes=sum(len(text.encode()) for text in whole),
        num_documents=len(whole),
        skipped=len(texts) - len(whole),
    )


def read_documents(path: Path) -> Sequence[str]:
    """The texts of a jsonl file, or the one text of another.

    Raises:
        DataError: the file cannot be read.
    """
    return read_texts(path) if format_of(path) == JSONL else [read_text(path)]


def read_text(path: Path) -> str:
    """A whole file as it is, line ends included.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
