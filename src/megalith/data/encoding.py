"""Encoding of text chunks into token ids: the work of one preprocessing worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megalith.config import TokenizerConfig
from megalith.data.indexed import smallest_dtype
from megalith.data.sentences import PunctuationSplitter, SentenceSplitter, find_parameters
from megalith.data.sources import BadDocument, ChunkDocuments, Dialogue, Payload
from megalith.data.sources.documents import MESSAGES, Document
from megalith.errors import DataError
from megalith.tokenizers import Tokenizer, build_tokenizer
from megalith.tokenizers.fast_bpe import SURE_IDS, ArrayEncoder, array_encoder
from megalith.tokenizers.protocol import require_eod

if TYPE_CHECKING:
    from megalith.data.dialogues import DialogueEncoder

LOSS_MASKS = ("assistant", "last", "all")
"""What is learnt of a dialogue: all that an assistant says, its last message only, or every token."""
_BYTES_PER_TOKEN = 2  # initial estimate; a text with more tokens makes the buffer grow


@dataclass(frozen=True)
class SentenceSettings:
    """Settings of the splitting of texts into sentences.

    Attributes:
        keep_newlines: include line breaks after a sentence in it.
        parameters_file: what the algorithm knows of the language; None looks where nltk looks.
        by_marks: by punctuation alone, without data of a language; the others are of no use then.
    """

    language: str = "english"
    keep_newlines: bool = False
    parameters_file: str | None = None
    nltk_folders: tuple[str, ...] = ()
    by_marks: bool = False

    def splitter(self) -> SentenceSplitter | PunctuationSplitter:
        """Build the splitter. Raises DataError if there are no Punkt parameters for the language."""
        if self.by_marks:
            return PunctuationSplitter()
        parameters = find_parameters(self.language, self.parameters_file, self.nltk_folders)
        return SentenceSplitter(parameters, keep_newlines=self.keep_newlines)


@dataclass(frozen=True)
class EncodeSettings:
    """Settings that decide the tokens of a chunk; small and the same for all chunks.

    Attributes:
        keys: keys of the JSON objects, or columns; for a txt there is one.
        append_eod: end each document that has tokens with the end-of-document id.
        sentences: how texts are split, None to leave them whole.
        skip_bad: pass over documents that cannot be read; otherwise nothing after the first is encoded.
        chat_template: file of a Jinja template that makes text of messages, or TOKENIZERS for the tokenizer's.
        loss_mask: what of a dialogue is learnt, one of `LOSS_MASKS`; its mask is one more column. None for no mask.
        seq_length: tokens that a dialogue with a loss mask may take, None for any number.
        as_in_megatron: a system message begins another dialogue.
        expected_bytes: of text for each process, as far as it shows; decides what is worth being loaded at once.
    """

    tokenizer: TokenizerConfig
    keys: tuple[str, ...]
    append_eod: bool
    sentences: SentenceSettings | None = None
    skip_bad: bool = False
    expected_bytes: int = 0
    chat_template: str | None = None
    loss_mask: str | None = None
    seq_length: int | None = None
    as_in_megatron: bool = False


@dataclass(frozen=True)
class DocumentLengths:
    """Division of a chunk's tokens under one key: sequence lengths [S], sequences of each document [D]."""

    lengths: NDArray[np.int32]
    sequences_per_document: NDArray[np.int64]

    def token_mask(self, documents: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the mask [tokens] of the tokens that belong to the selected documents; `documents` is a mask [D]."""
        return np.repeat(self._sequences_of(documents), self.lengths)

    def select(self, documents: NDArray[np.bool_]) -> DocumentLengths:
        """Return the lengths of the selected documents only; `documents` is a mask [D]."""
        return DocumentLengths(self.lengths[self._sequences_of(documents)], self.sequences_per_document[documents])

    def _sequences_of(self, documents: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.repeat(documents, self.sequences_per_document)


@dataclass(frozen=True)
class ChunkReport:
    """Result of encoding a chunk, without its tokens.

    Attributes:
        num_documents: documents, empty ones included.
        num_units: lines of a jsonl, rows of a table; what positions in the file are counted in.
        problems: the bad documents, as number among the units and reason.
    """

    by_key: tuple[DocumentLengths, ...]
    num_documents: int
    num_units: int
    num_bytes: int
    problems: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class EncodedChunk:
    """Tokens of a chunk, one array for each key in the stored dtype, documents back to back."""

    tokens: tuple[NDArray[Any], ...]
    report: ChunkReport


class ChunkEncoder:
    """Encoder of chunks. Raises DataError if a file of the tokenizer or the language is missing or damaged."""

    def __init__(self, settings: EncodeSettings, tokenizer: Tokenizer | None = None) -> None:
        self._settings = settings
        tokenizer = tokenizer or build_tokenizer(settings.tokenizer)
        self._encode = array_encoder(tokenizer, settings.expected_bytes)
        self._template = None
        self._dialogues: DialogueEncoder | None = None
        if settings.chat_template is not None:
            from megalith.tokenizers.chat_template import added_around, find_template  # which imports jinja2

            self._template, encode = find_template(settings.chat_template, tokenizer), self._encode
            if settings.loss_mask is not None:
                from megalith.data.dialogues import DialogueEncoder  # which imports jinja2

                eod = require_eod(tokenizer, "--append-eod") if settings.append_eod else None
                self._dialogues = DialogueEncoder(
                    self._template, tokenizer, settings.loss_mask, settings.seq_length, eod, settings.expected_bytes
                )
            before, behind = added_around(tokenizer)
            self._encode = lambda texts: [ids[before : len(ids) - behind] for ids in encode(texts)]
        self._vocab_size, self._dtype = tokenizer.vocab_size, smallest_dtype(tokenizer.vocab_size)
        self._eod = require_eod(tokenizer, "--append-eod") if settings.append_eod else None
        self._splitter = settings.sentences.splitter() if settings.sentences else None

    def encode(self, payload: Payload) -> EncodedChunk:
        """Read and encode a chunk. Raises DataError if its file can no longer be read."""
        part = payload.read(self._settings.keys)
        if self._dialogues is not None:
            return self._encode_dialogues(part, self._dialogues)
        return self._encode_together(part) or self._encode_one_by_one(part)

    def _encode_together(self, part: ChunkDocuments) -> EncodedChunk | None:
        """Encode all documents at once; return None if one of them needs the path document by document."""
        if part.texts is None or self._splitter is not None or self._settings.keys == (MESSAGES,):
            return None  # the text of messages may be the JSON of a dialogue
        texts = part.texts()
        if texts is None:
            return None
        columns = self._new_buffers(part)
        try:
            for column, of_key in zip(columns, texts, strict=True):
                column.add_all(of_key)
        except DataError:
            return None
        return _encoded(columns, part, len(texts[0]), [])

    def _encode_dialogues(self, part: ChunkDocuments, encoder: DialogueEncoder) -> EncodedChunk:
        """Encode dialogues to a column of tokens and one of loss masks."""
        columns = [
            _TokenBuffer(self._encode, None, dtype, part.num_bytes, size)
            for dtype, size in ((self._dtype, self._vocab_size), (np.dtype(np.uint8), 2))
        ]
        numbered = list(part.documents)
        if self._settings.as_in_megatron:
            numbered = [(number, one) for number, whole in numbered for one in _split_at_systems(whole)]
        problems: list[tuple[int, str]] = []
        learnt = []
        for (number, _), found in zip(numbered, encoder.encode([one for _, one in numbered]), strict=True):
            if not isinstance(found, BadDocument):
                learnt.append(found)
                continue
            problems.append((number, found.reason))
            if not self._settings.skip_bad:
                break
        for column, arrays in zip(columns, zip(*learnt, strict=True), strict=False):
            column.add_arrays(arrays)
        return _encoded(columns, part, len(learnt), problems)

    def _encode_one_by_one(self, part: ChunkDocuments) -> EncodedChunk:
        columns, num_documents = self._new_buffers(part), 0
        problems: list[tuple[int, str]] = []
        for number, document in part.documents:
            if self._template is not None and isinstance(document, Dialogue):
                document = self._render(document)
            reason = document.reason if isinstance(document, BadDocument) else self._add(columns, document)
            if reason is None:
                num_documents += 1
                continue
            problems.append((number, reason))
            if not self._settings.skip_bad:
                break
        return _encoded(columns, part, num_documents, problems)

    def _new_buffers(self, part: ChunkDocuments) -> list[_TokenBuffer]:
        return [
            _TokenBuffer(self._encode, self._eod, self._dtype, part.num_bytes, self._vocab_size)
            for _ in self._settings.keys
        ]

    def _render(self, dialogue: Dialogue) -> list[str | list[str]] | BadDocument:
        assert self._template is not None
        if dialogue.tools and not self._template.takes_tools:
            return BadDocument("the dialogue has tools, and the template of --chat-template takes none")
        try:
            return [self._template.render(dialogue.messages, tools=dialogue.tools, add_generation_prompt=False)]
        except ValueError as error:  # BadDialogue
            return BadDocument(f"--chat-template does not take the messages: {error}")

    def _add(self, columns: list[_TokenBuffer], document: list[str | list[str]]) -> str | None:
        """Append a document to its buffers; if one buffer cannot hold it, undo all and return the reason."""
        ends = [column.end() for column in columns]
        try:
            for column, texts in zip(columns, document, strict=True):
                if self._splitter is not None and isinstance(texts, str):
                    texts = self._splitter.split(texts)
                column.add(texts)
        except DataError as error:
            for column, end in zip(columns, ends, strict=True):
                column.cut(end)
            return str(error)
        return None


def _split_at_systems(document: Document | BadDocument) -> list[Document | BadDocument]:
    """Return the dialogues of a line: each begins with a system message, the first with any, as in Megatron."""
    if not isinstance(document, Dialogue):
        return [document]
    begins = [at for at, message in enumerate(document.messages) if not at or message["role"] == "system"]
    return [
        replace(document, messages=document.messages[begin:end], prompt=max(0, document.prompt - begin))
        for begin, end in zip(begins, [*begins[1:], None], strict=True)
    ]


def _encoded(
    columns: list[_TokenBuffer], part: ChunkDocuments, num_documents: int, problems: list[tuple[int, str]]
) -> EncodedChunk:
    report = ChunkReport(
        by_key=tuple(column.structure() for column in columns),
        num_documents=num_documents,
        num_units=part.num_units,
        num_bytes=part.num_bytes,
        problems=tuple(problems),
    )
    return EncodedChunk(tuple(column.tokens() for column in columns), report)


class _TokenBuffer:
    """Growing array of the tokens of one key.

    Ids are cast to the stored dtype text by text or a chunk at a time, while they are still in the CPU cache.
    """

    def __init__(
        self, encode: ArrayEncoder, eod: int | None, dtype: np.dtype[Any], num_bytes: int, vocab_size: int
    ) -> None:
        self._encode, self._eod = encode, eod
        self._num_ids = min(vocab_size, np.iinfo(dtype).max + 1)
        self._end = np.array([eod or 0], dtype)
        self._tokens = np.empty(num_bytes // _BYTES_PER_TOKEN + 1, dtype)
        self._used = 0
        self._lengths: list[int] = []
        self._sequences: list[int] = []

    def add(self, texts: str | list[str]) -> None:
        """Append a document; a text without tokens makes no sequence, and an empty document gets no end.

        Raises:  DataError if a text cannot be encoded, or to ids outside the vocabulary; to be `cut` then.
        """
        count = 0
        for text in (texts,) if isinstance(texts, str) else texts:
            (ids,) = self._encode((text,))
            if not len(ids):
                continue
            if ids.dtype != SURE_IDS:
                _require_fit(ids, self._num_ids)
            end = self._grow(len(ids) + 1)
            self._tokens[self._used : end] = ids
            self._used = end
            self._lengths.append(len(ids))
            count += 1
        if count and self._eod is not None:
            self._tokens[self._used] = self._eod
            self._used += 1
            self._lengths[-1] += 1
        self._sequences.append(count)

    def add_all(self, texts: list[str]) -> None:
        """Append documents of one text each. Raises DataError as `add` does; the column is of no use then."""
        self.add_arrays(self._encode(texts))

    def add_arrays(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Append documents of one sequence each. Raises DataError as `add_all` does."""
        for ids in arrays:
            if ids.dtype not in (SURE_IDS, self._tokens.dtype):
                _require_fit(ids, self._num_ids)
        lengths = list(map(len, arrays))
        self._sequences += [1 if length else 0 for length in lengths]
        if self._eod is not None:
            arrays = [piece for ids in arrays if len(ids) for piece in (ids, self._end)]
            lengths = [length and length + 1 for length in lengths]
        self._lengths += filter(None, lengths)
        if arrays:
            stop = self._grow(sum(lengths) + 1)
            np.concatenate(arrays, out=self._tokens[self._used : stop], casting="unsafe")
            self._used = stop

    def end(self) -> tuple[int, int, int]:
        """Return the numbers of tokens, sequences and documents held."""
        return self._used, len(self._lengths), len(self._sequences)

    def cut(self, end: tuple[int, int, int]) -> None:
        """Truncate to an earlier `end`."""
        self._used = end[0]
        del self._lengths[end[1] :], self._sequences[end[2] :]

    def tokens(self) -> NDArray[Any]:
        return self._tokens[: self._used]

    def structure(self) -> DocumentLengths:
        return DocumentLengths(np.array(self._lengths, np.int32), np.array(self._sequences, np.int64))

    def _grow(self, count: int) -> int:
        """Make room for `count` more tokens and return the position after all but the last of them."""
        if self._used + count > len(self._tokens):
            more = np.empty(2 * (self._used + count), self._tokens.dtype)
            more[: self._used] = self._tokens[: self._used]
            self._tokens = more
        return self._used + count - 1


def _require_fit(ids: NDArray[Any], num_ids: int) -> None:
    if not len(ids):
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= num_ids:
        raise DataError(
            f"token {low if low < 0 else high} is outside the vocabulary of {num_ids} ids (0 to {num_ids - 1}); give "
            "the tokenizer that made the ids (NullTokenizer: a larger --vocab-size)"
        )
