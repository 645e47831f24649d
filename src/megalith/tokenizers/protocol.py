"""The base of all tokenizers, and what they have in common."""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megalith.errors import DataError, install_command
from megalith.tokenizers.card import file_hashes, vocabulary_hash


class Tokenizer(ABC):
    """Text to ids and back. Ids are 0 to `vocab_size` - 1; the padded vocabulary is no business of the tokenizer.

    Attributes:
        vocab_size: number of ids, special ones included, padding excluded.
        eod: id that ends a document.
        special: ids with a role, by its name: eod, bos, eos, pad, unk, cls, sep, mask, as far as there are any.
        pad: id that fills up short samples, None where the tokenizer has none.
        extra_ids: ids of `<extra_id_0>`, `<extra_id_1>` and so on, which stand for the spans that T5 leaves out.
    """

    vocab_size: int
    eod: int
    special: Mapping[str, int]
    pad: int | None = None
    extra_ids: tuple[int, ...] = ()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens, with a role or without, except `extra_ids`, which are part of answers."""
        return frozenset((self.eod, *self.special.values()))

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text. Whether special tokens written out in it are plain text is said by each class.

        Raises:  DataError if the text cannot be encoded (lone surrogates; non-numbers for NullTokenizer).
        """

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, in order."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; what is no UTF-8 becomes U+FFFD. Raises DataError naming the first id outside the vocabulary."""

    def card(self) -> dict[str, Any]:
        """Who this tokenizer is, wherever its files lie: class, sizes, special ids, sha256 of each file (`card`)."""
        card: dict[str, Any] = {
            "class": self._card_class,
            "vocabulary": self._vocabulary_hash,
            "vocab_size": self.vocab_size,
            "special": {"eod": self.eod, **self.special},
            "files": self._hashes,
        }
        settings = self._settings()
        return card if settings is None else {**card, "settings": settings}

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What Megatron hashes into the names of index caches; holds the paths as they were typed."""

    @abstractmethod
    def files(self) -> dict[str, Path]:
        """The files that make this tokenizer, under the names that they have beside a checkpoint."""

    @property
    def _card_class(self) -> str:
        """Megatron's name of this kind of tokenizer, for the card."""
        return type(self).__name__

    def _settings(self) -> dict[str, Any] | None:
        """The settings that change ids, for the card; None for a kind without any."""
        return None

    @abstractmethod
    def _tokens(self) -> Iterable[tuple[str, int]]:
        """Tokens and their ids, for the card: without those of `--vocab-extra-ids`."""

    @cached_property
    def _vocabulary_hash(self) -> str:
        return vocabulary_hash(self._tokens())

    @cached_property
    def _hashes(self) -> dict[str, str]:
        """Of the files, for the card."""
        return file_hashes(self.files())


def require_text(text: str) -> str:
    """The text. Raises DataError for a lone surrogate, which libraries replace in silence, each in its own way."""
    try:
        if not text.isascii():  # which a string knows without looking
            text.encode()
    except UnicodeEncodeError as error:
        raise surrogate_error(error) from error
    return text


def surrogate_error(error: UnicodeEncodeError) -> DataError:
    """What to say of a text that has no UTF-8."""
    character = ord(error.object[error.start])
    return DataError(f"character {error.start} is a lone surrogate (U+{character:04X}), which is no text")


def require_ids(ids: Iterable[int], vocab_size: int) -> None:
    """Refuse to decode what is no id. Raises DataError naming the first id outside the vocabulary."""
    outside = next((number for number in ids if not 0 <= number < vocab_size), None)
    if outside is not None:
        raise DataError(f"id {outside} is outside the vocabulary of {vocab_size}")


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int = 1) -> int:
    """Smallest multiple of both factors that holds the vocabulary: Megatron-LM's `_vocab_size_with_padding`."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def padding_message(vocab_size: int, padded_size: int) -> str:
    """Megatron's line about the padding."""
    dummies = padded_size - vocab_size
    return f" > padded vocab (size: {vocab_size}) with {dummies} dummy tokens (new size: {padded_size})"


def tensor_parallel_note(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> str:
    """Return a line saying that another tensor-parallel size would pad the vocabulary differently; empty if not.

    Every row takes part in the softmax, so that a run with another padded vocabulary computes other losses.
    """
    alone = padded_vocab_size(vocab_size, divisible_by)
    here = padded_vocab_size(vocab_size, divisible_by, tensor_parallel_size)
    if here == alone:
        return ""
    return (
        f" > the padded vocabulary depends on --tensor-model-parallel-size: {here} with {tensor_parallel_size}, "
        f"{alone} with 1, and losses with it; --padded-vocab-size {here} gives every layout the same"
    )


def read_text_file(path: str | Path, role: str, again: str, *, flag: str = "", encoding: str = "utf-8") -> str:
    """Read a text file of a tokenizer.

    Args:
        role: what it is to be, for the messages.
        again: the remedy for a damaged file.
        encoding: utf-8, or utf-8-sig where a byte order mark is passed over.

    Raises:  DataError if it is missing, a web page or not text.
    """
    shown = f"{flag} {path}" if flag else str(path)
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {shown} ({role}): {error.strerror}") from error
    if content[:1024].lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise DataError(f"{shown} is a web page, not the {role}: the download saved the page about the file; {again}")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(f"{shown} is not text: byte {error.start} is no UTF-8; {again}") from error


def json_object(path: Path) -> dict[str, Any]:
    """What a JSON file holds. Raises DataError if it is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is damaged: it holds no JSON object")
    return found


def import_for(user: str, module: str, extra: str) -> Any:
    """Import a module of an extra of this package, for its first user. Raises DataError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{user} needs the package {module.split('.')[0]}, which is not installed here: {install_command(extra)}"
        ) from error
