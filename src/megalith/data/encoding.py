"""Chunks of text into tokens: what a worker process of the preprocessing does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.config import TokenizerConfig
from megalith.data.indexed import smallest_dtype
from megalith.data.punkt import SentenceSplitter
from megalith.data.punkt_parameters import find_parameters
from megalith.data.sources import BadDocument, Payload
from megalith.errors import DataError
from megalith.tokenizers import Tokenizer, build_tokenizer
from megalith.tokenizers.fast_bpe import ArrayEncoder, array_encoder


@dataclass(frozen=True)
class SentenceSettings:
    """How texts are split into sentences.

    Attributes:
        language: as nltk names it.
        keep_newlines: let line breaks behind a sentence be part of it.
        parameters_file: what the algorithm knows of the language; None looks where nltk looks.
    """

    language: str = "english"
    keep_newlines: bool = False
    parameters_file: str | None = None

    def splitter(self) -> SentenceSplitter:
        """Make the splitter. Raises DataError where there are no parameters of this language."""
        return SentenceSplitter(find_parameters(self.language, self.parameters_file), keep_newlines=self.keep_newlines)


@dataclass(frozen=True)
class EncodeSettings:
    """What decides the tokens of a chunk; small, and the same for all chunks.

    Attributes:
        tokenizer: the tokenizer.
        keys: keys of the JSON objects, or columns; for a txt there is one.
        append_eod: end each document that has tokens with the end-of-document id.
        sentences: how texts are split, None to leave them whole.
        skip_bad: pass over documents that cannot be read; otherwise nothing after the first is encoded.
    """

    tokenizer: TokenizerConfig
    keys: tuple[str, ...]
    append_eod: bool
    sentences: SentenceSettings | None = None
    skip_bad: bool = False


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
        num_units: lines of a jsonl, rows of a table; what positions in the file are counted in.
        num_bytes: bytes of the text.
        problems: the bad documents, as number among the units and reason.
    """

    by_key: tuple[Encoded, ...]
    num_documents: int
    num_units: int
    num_bytes: int
    problems: tuple[tuple[int, str], ...]


class ChunkEncoder:
    """Turns chunks into tokens.

    Args:
        settings: what decides the tokens.
        tokenizer: the tokenizer, where it is built already.

    Raises:
        DataError: the tokenizer or what is known of the language is missing or damaged.
    """

    def __init__(self, settings: EncodeSettings, tokenizer: Tokenizer | None = None) -> None:
        self._settings = settings
        tokenizer = tokenizer or build_tokenizer(settings.tokenizer)
        self._encode = array_encoder(tokenizer)
        self._dtype = smallest_dtype(tokenizer.vocab_size)
        self._eod = np.array([tokenizer.eod], np.uint32) if settings.append_eod else None
        self._splitter = settings.sentences.splitter() if settings.sentences else None

    def encode(self, payload: Payload) -> EncodedChunk:
        """Tokens of a chunk. Raises DataError if its file cannot be read any more."""
        try:
            return self._encoded(payload, each_checked=False)
        except _DoesNotFit:
            return self._encoded(payload, each_checked=True)  # now it shows which document it is

    def _encoded(self, payload: Payload, *, each_checked: bool) -> EncodedChunk:
        columns = [_Column(self._encode, self._eod, self._dtype, each_checked) for _ in self._settings.keys]
        problems: list[tuple[int, str]] = []
        num_documents = 0
        part = payload.read(self._settings.keys)
        for number, document in part.documents:
            reason = document.reason if isinstance(document, BadDocument) else self._add(columns, document)
            if reason is None:
                num_documents += 1
                continue
            problems.append((number, reason))
            if not self._settings.skip_bad:
                break
        return EncodedChunk(
            by_key=tuple(column.encoded() for column in columns),
            num_documents=num_documents,
            num_units=part.num_units,
            num_bytes=part.num_bytes,
            problems=tuple(problems),
        )

    def _add(self, columns: list[_Column], document: list[str | list[str]]) -> str | None:
        """Append a document to its columns; to none of them, with the reason, if one cannot hold it."""
        try:
            for column, texts in zip(columns, document, strict=True):
                if self._splitter is not None and isinstance(texts, str):
                    texts = self._splitter.split(texts)
                column.add(texts)
        except DataError as error:
            for column in columns:
                column.roll_back(len(columns[-1].sequences))
            return str(error)
        return None


class _DoesNotFit(Exception):
    """An id is outside the stored type."""


class _Column:
    """Tokens of one key, growing document by document.

    Args:
        encode: a text to its ids.
        eod: what ends a document, None for nothing.
        dtype: type that the ids are stored in.
        each_checked: whether every text is held against that type; otherwise all of them at once in the end.
    """

    def __init__(
        self, encode: ArrayEncoder, eod: NDArray[Any] | None, dtype: np.dtype[Any], each_checked: bool
    ) -> None:
        self._encode, self._eod, self._dtype, self._each_checked = encode, eod, dtype, each_checked
        self._arrays: list[NDArray[Any]] = []
        self._lengths: list[int] = []
        self.sequences: list[int] = []
        """Of each document."""

    def add(self, texts: str | list[str]) -> None:
        """Append a document; a text without tokens makes no sequence, and an empty document gets no end.

        Raises:  DataError if a text cannot be encoded, or to ids that do not fit the stored type.
        """
        if isinstance(texts, str):
            ids = self._encode(texts)
            arrays = [ids] if len(ids) else []
        else:
            arrays = [ids for text in texts if len(ids := self._encode(text))]
        if self._each_checked:
            for ids in arrays:
                self._check(ids)
        self.sequences.append(len(arrays))
        if not arrays:
            return
        self._arrays += arrays
        self._lengths += map(len, arrays)
        if self._eod is not None:
            self._arrays.append(self._eod)
            self._lengths[-1] += 1

    def roll_back(self, num_documents: int) -> None:
        """Forget what comes after so many documents."""
        for count in self.sequences[num_documents:]:
            del self._lengths[len(self._lengths) - count :]
            del self._arrays[len(self._arrays) - count - (count > 0 and self._eod is not None) :]
        del self.sequences[num_documents:]

    def encoded(self) -> Encoded:
        """All of it. Raises _DoesNotFit if an id is outside the stored type."""
        tokens = np.concatenate(self._arrays) if self._arrays else np.zeros(0, self._dtype)
        if len(tokens) and not self._fits(tokens):
            raise _DoesNotFit
        return Encoded(
            tokens=tokens.astype(self._dtype),
            lengths=np.array(self._lengths, np.int32),
            sequences_per_document=np.array(self.sequences, np.int64),
        )

    def _fits(self, ids: NDArray[Any]) -> bool:
        limits = np.iinfo(self._dtype)
        return bool(ids.min() >= limits.min and ids.max() <= limits.max)

    def _check(self, ids: NDArray[Any]) -> None:
        if not self._fits(ids):
            outside = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise DataError(f"token {outside} does not fit {self._dtype.name}, the type of this vocabulary")
