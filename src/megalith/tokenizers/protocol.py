"""Base class of tokenizers and functions that they share."""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.errors import DataError, install_command
from megalith.tokenizers.fingerprint import file_hashes, vocabulary_hash


class Tokenizer(ABC):
    """Tokenizer with ids 0 to `vocab_size` - 1, without the padding of the vocabulary.

    Attributes:
        vocab_size: number of ids, special ones included, padding excluded.
        eod: id that ends a document, None if the tokenizer has none.
        special: id of each role that exists: eod, bos, eos, pad, unk, cls, sep, mask.
        pad: id that pads short samples, None if the tokenizer has none.
        extra_ids: ids of `<extra_id_0>`, `<extra_id_1>` and so on, T5's sentinels.
    """

    vocab_size: int
    eod: int | None
    special: Mapping[str, int]
    pad: int | None = None
    extra_ids: tuple[int, ...] = ()

    @property
    def token_sizes(self) -> NDArray[np.int64] | None:
        """Return the bytes of each id, [vocab_size], if the bytes of its ids make up every text; None otherwise."""
        return None

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of all special tokens except `extra_ids`, which answers may contain."""
        return frozenset((*end_ids(self), *self.special.values()))

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Each class defines whether special tokens in the text are plain text.

        Raises:  DataError if the text cannot be encoded (lone surrogates; non-numbers for NullTokenizer).
        """

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, in order."""
        return [self.encode(text) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return ids [N] and their ranges of characters [N, 2], without what a tokenizer adds around every text.

        Raises:  DataError as `encode`, and if the tokenizer does not tell where in the text a token is.
        """
        if self.token_sizes is None:
            raise DataError(
                f"this {type(self).__name__} does not tell where in a text its tokens are; give a HuggingFaceTokenizer "
                "with a tokenizer.json"
            )
        ids = np.array(self.encode(text), np.int64)
        ranges = character_ranges(text, self.token_sizes[ids])
        assert ranges is not None
        return ids, ranges

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with U+FFFD for invalid UTF-8. Raises DataError for an id outside the vocabulary."""

    def fingerprint(self) -> dict[str, Any]:
        """Return class, sizes, special ids, hashes of vocabulary and files, and settings; see `fingerprint`."""
        fingerprint: dict[str, Any] = {
            "class": self._megatron_class,
            "vocabulary": self._vocabulary_hash,
            "vocab_size": self.vocab_size,
            "special": {"eod": self.eod, **self.special},
            "files": self._hashes,
        }
        settings = self._settings()
        return fingerprint if settings is None else {**fingerprint, "settings": settings}

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what Megatron hashes into the names of index caches; it holds the paths as typed."""

    @abstractmethod
    def files(self) -> dict[str, Path]:
        """Return the files of this tokenizer, under their names beside a checkpoint."""

    @property
    def _megatron_class(self) -> str:
        """Return Megatron's name of this class of tokenizer, for the fingerprint."""
        return type(self).__name__

    def _settings(self) -> dict[str, Any] | None:
        """Return the settings that change ids, for the fingerprint; None for a class without settings."""
        return None

    @abstractmethod
    def _tokens(self) -> Iterable[tuple[str, int]]:
        """Return the tokens and their ids, for the fingerprint, without those of `--vocab-extra-ids`."""

    @cached_property
    def _vocabulary_hash(self) -> str:
        return vocabulary_hash(self._tokens())

    @cached_property
    def _hashes(self) -> dict[str, str]:
        """Hash the files, for the fingerprint."""
        return file_hashes(self.files())


def end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a document: one, or none."""
    return () if tokenizer.eod is None else (tokenizer.eod,)


def character_ranges(text: str, sizes: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the range of characters, [N, 2], of each token of a text; None if the `sizes` [N] do not make it up.

    Args:
        sizes: bytes of UTF-8.
    """
    content = text.encode()
    ends = np.cumsum(sizes)
    if len(content) != (ends[-1] if len(ends) else 0):
        return None
    starts = ends - sizes
    if len(content) > len(text):
        number = np.cumsum((np.frombuffer(content, np.uint8) & 0xC0) != 0x80) - 1  # of the character of each byte
        starts, ends = number[starts], number[ends - 1] + 1
    return np.stack([starts, ends], axis=1)


def require_eod(tokenizer: Tokenizer, purpose: str) -> int:
    """Return the id that ends a document. Raises DataError naming the purpose if there is none."""
    if tokenizer.eod is None:
        raise DataError(
            f"{purpose} needs an end-of-document token, which this {type(tokenizer).__name__} lacks; preprocess made "
            "without --vocab-file but with --append-eod has one"
        )
    return tokenizer.eod


def require_text(text: str) -> str:
    """Return the text. Raises DataError for a lone surrogate, which libraries replace silently and differently."""
    try:
        if not text.isascii():  # O(1): CPython stores it
            text.encode()
    except UnicodeEncodeError as error:
        raise surrogate_error(error) from error
    return text


def surrogate_error(error: UnicodeEncodeError) -> DataError:
    """Return the error for a text that cannot be encoded as UTF-8."""
    character = ord(error.object[error.start])
    return DataError(f"character {error.start} is a lone surrogate (U+{character:04X}), which UTF-8 cannot encode")


def require_ids(ids: Iterable[int], vocab_size: int) -> None:
    """Raise DataError for the first id outside the vocabulary."""
    outside = next((number for number in ids if not 0 <= number < vocab_size), None)
    if outside is not None:
        raise DataError(f"id {outside} is outside the vocabulary of {vocab_size}")


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int = 1) -> int:
    """Round the vocabulary up to a multiple of both factors, as Megatron-LM's `_vocab_size_with_padding`."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def padding_message(vocab_size: int, padded_size: int) -> str:
    """Return Megatron's console line about the padding."""
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
        raise DataError(
            f"{shown} is a web page, not the {role}: the download saved a page instead of the file; {again}"
        )
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(f"{shown} is not text: byte {error.start} is not valid UTF-8; {again}") from error


def json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises DataError if it is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is damaged: it is not a JSON object")
    return found


def import_for(user: str, module: str, extra: str) -> Any:
    """Import a module of an optional dependency. Raises DataError naming its `user` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{user} needs the package {module.split('.')[0]}, which is not installed here: {install_command(extra)}"
        ) from error
