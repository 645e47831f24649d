"""Chunks of text into tokens: what a worker process of the preprocessing does."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.config import TokenizerConfig
from megalith.data import sources
from megalith.data.indexed import smallest_dtype
from megalith.data.sources import BadDocumentError, Chunk
from megalith.errors import DataError
from megalith.tokenizers import Tokenizer


@dataclass(frozen=True)
class EncodeSettings:
    """What decides the tokens of a chunk; small, hashable, and the same for all chunks of a file.

    Attributes:
        tokenizer: the tokenizer.
        input_format: jsonl or txt.
        keys: keys of the JSON objects; for txt there is one.
        separator: what separates the documents of a text.
        append_eod: end each document that has tokens with the end-of-document id.
    """

    tokenizer: TokenizerConfig
    input_format: str
    keys: tuple[str, ...]
    separator: str | None
    append_eod: bool

    @property
    def separator_bytes(self) -> bytes | None:
        """What ends a document in the file."""
        if self.input_format == sources.JSONL:
            return b"\n"
        return None if self.separator is None else self.separator.encode()


@dataclass(frozen=True)
class Encoded:
    """Tokens of the documents of a chunk under one key, ready for `IndexedWriter.add_documents`."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    sequences_per_document: NDArray[np.int64]


@dataclass(frozen=True)
class EncodedChunk:
    """Tokens of a chunk.

    Attributes:
        by_key: one entry for each key.
        num_documents: documents, empty ones included.
        num_units: lines of a jsonl, separated parts of a txt; what positions in the file are counted in.
        num_bytes: bytes of the chunk.
        problem: the first bad document, as its number among the units and the reason; what follows is not encoded.
    """

    by_key: tuple[Encoded, ...]
    num_documents: int
    num_units: int
    num_bytes: int
    problem: tuple[int, str] | None


def encode_chunk(settings: EncodeSettings, tokenizer: Tokenizer, chunk: Chunk) -> EncodedChunk:
    """Tokens of a chunk."""
    columns = [_Column(tokenizer, settings.append_eod) for _ in settings.keys]
    num_documents, problem = 0, None
    try:
        for number, texts_by_key in _documents(settings, chunk):
            for column, texts in zip(columns, texts_by_key, strict=True):
                try:
                    column.add(texts)
                except DataError as error:
                    raise BadDocumentError(number, str(error)) from error
            num_documents += 1
    except BadDocumentError as error:
        problem = (error.number, error.reason)
    return EncodedChunk(
        by_key=tuple(column.encoded() for column in columns),
        num_documents=num_documents,
        num_units=sources.count_documents(chunk, settings.separator_bytes),
        num_bytes=len(chunk.data),
        problem=problem,
    )


def _documents(settings: EncodeSettings, chunk: Chunk) -> Iterator[tuple[int, list[list[str]]]]:
    if settings.input_format == sources.JSONL:
        return sources.json_documents(chunk, settings.keys)
    return sources.text_documents(chunk, settings.separator)


class _Column:
    """Tokens of one key, growing document by document."""

    def __init__(self, tokenizer: Tokenizer, append_eod: bool) -> None:
        self._tokenizer, self._append_eod = tokenizer, append_eod
        self._dtype = smallest_dtype(tokenizer.vocab_size)
        self._tokens = array("H" if self._dtype.itemsize == 2 else "i")
        self._lengths: list[int] = []
        self._sequences: list[int] = []

    def add(self, texts: list[str]) -> None:
        """Append a document; a text without tokens makes no sequence, and an empty document gets no end.

        Raises:  DataError if a text cannot be encoded, or to ids that do not fit the stored type.
        """
        before = len(self._lengths)
        for text in texts:
            ids = self._tokenizer.encode(text)
            if ids:
                self._extend(ids)
                self._lengths.append(len(ids))
        num_sequences = len(self._lengths) - before
        if num_sequences and self._append_eod:
            self._extend([self._tokenizer.eod])
            self._lengths[-1] += 1
        self._sequences.append(num_sequences)

    def _extend(self, ids: list[int]) -> None:
        try:
            self._tokens.extend(ids)
        except OverflowError as error:
            outside = min(ids) if min(ids) < 0 else max(ids)
            raise DataError(f"token {outside} does not fit {self._dtype.name}, the type of this vocabulary") from error

    def encoded(self) -> Encoded:
        return Encoded(
            tokens=np.array(self._tokens).astype(self._dtype, copy=False),
            lengths=np.array(self._lengths, np.int32),
            sequences_per_document=np.array(self._sequences, np.int64),
        )
