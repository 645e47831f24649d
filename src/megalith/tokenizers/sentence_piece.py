"""Megatron's three tokenizers over a SentencePiece model: Llama 2's, GPT's plain one, and T5's.

They share the model file and differ in the special tokens:

    Llama2Tokenizer             beginning of text, then the pieces; special pieces in a text are plain text
    GPTSentencePieceTokenizer   the pieces alone; special pieces in a text are plain text
    SentencePieceTokenizer      more special tokens after the model's ids (<CLS>, <SEP>, <EOD>, <MASK>, those of <PAD>,
                                <BOS>, <EOS> that the model lacks, and <extra_id_0> and on); in a text they become
                                their ids, and the parts between them are encoded separately

Source:  Megatron-LM megatron/training/tokenizer/tokenizer.py; docs/reference/tokenizers.md#sentencepiece.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalith.errors import DataError
from megalith.tokenizers.protocol import Tokenizer, import_for, require_ids, require_text

MODEL_FILE = "tokenizer.model"
"""The name of the model beside a checkpoint."""

_LEAST_BYTES = 16  # shorter files are left by failed downloads


class _SentencePiece(Tokenizer):
    """Base of the three. Raises DataError if the model is missing, damaged, or lacks a needed piece."""

    def __init__(self, model_file: str | Path) -> None:
        self._model_file = str(model_file)
        self._model = load_model(type(self).__name__, Path(model_file))
        self._model_size: int = self._model.get_piece_size()

    def _set_special_from_model(self) -> None:
        """Set vocabulary size, eod and special ids from the model, which must have an end of text."""
        self.vocab_size, self.eod = self._model_size, self._required("eos")
        self.special = {role: number for role in ("bos", "eos") if (number := self._role(role)) is not None}

    def encode(self, text: str) -> list[int]:
        return self._pieces(require_text(text))

    def decode(self, ids: Sequence[int]) -> str:
        require_ids(ids, self.vocab_size)
        return decode_with_special(ids, {}, self._model, "")

    def identity(self) -> dict[str, Any]:
        return {"class": f"_{type(self).__name__}", "tokenizer_path": [self._model_file], "vocab_extra_ids": "0"}

    def files(self) -> dict[str, Path]:
        return {MODEL_FILE: Path(self._model_file)}

    def _tokens(self) -> Iterable[tuple[str, int]]:
        return ((self._model.id_to_piece(number), number) for number in range(self._model_size))

    def _pieces(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def _role(self, role: str) -> int | None:
        """Return the id of bos, eos or pad; None if the model has no such piece."""
        number: int = getattr(self._model, f"{role}_id")()
        return None if number < 0 else number

    def _required(self, role: str) -> int:
        number = self._role(role)
        if number is None:
            what = {"bos": "begins a text (bos)", "eos": "ends a text (eos)"}[role]
            raise DataError(f"{self._model_file} has no piece that {what}, which {type(self).__name__} needs")
        return number


class GPTSentencePieceTokenizer(_SentencePiece):
    """Megatron's `GPTSentencePieceTokenizer`: the pieces of the text, nothing around them."""

    def __init__(self, model_file: str | Path) -> None:
        super().__init__(model_file)
        self._set_special_from_model()
        self.pad = self._role("pad")


class Llama2Tokenizer(_SentencePiece):
    """Megatron's `Llama2Tokenizer`: every text starts with the beginning of text."""

    def __init__(self, model_file: str | Path) -> None:
        super().__init__(model_file)
        self._set_special_from_model()
        self._bos = self._required("bos")

    def encode(self, text: str) -> list[int]:
        return [self._bos, *self._pieces(require_text(text))]


class SentencePieceTokenizer(_SentencePiece):
    """Megatron's `SentencePieceTokenizer`: T5's special tokens in addition to the model's pieces."""

    def __init__(self, model_file: str | Path, vocab_extra_ids: int = 0) -> None:
        super().__init__(model_file)
        self._vocab_extra_ids = vocab_extra_ids
        tokens = {self._model.id_to_piece(number): number for number in range(self._model_size)}
        extra = [f"<extra_id_{number}>" for number in range(vocab_extra_ids)]
        roles = {"cls": "<CLS>", "sep": "<SEP>", "eod": "<EOD>", "mask": "<MASK>"}
        for role, absent in (("pad", "<PAD>"), ("bos", "<BOS>"), ("eos", "<EOS>")):
            number = self._role(role)
            roles[role] = absent if number is None else self._model.id_to_piece(number)
        self._ids: dict[str, int] = {}
        for token in (*roles.values(), *extra):
            self._ids[token] = tokens.setdefault(token, len(tokens))
        self.special = {role: self._ids[token] for role, token in roles.items()}
        self.vocab_size, self.eod, self.pad = len(tokens), self.special["eod"], self.special["pad"]
        self.extra_ids = tuple(self._ids[token] for token in extra)
        self._token_of = {number: token for token, number in self._ids.items()}
        self._special_pattern = re.compile("|".join(map(re.escape, self._ids)))

    def encode(self, text: str) -> list[int]:
        return encode_with_special(require_text(text), self._special_pattern, self._ids, self._model)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with a space on both sides of special tokens, as Megatron does."""
        require_ids(ids, self.vocab_size)
        return decode_with_special(ids, self._token_of, self._model, " ")

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "vocab_extra_ids": str(self._vocab_extra_ids)}

    def _settings(self) -> dict[str, Any]:
        return {"vocab_extra_ids": self._vocab_extra_ids}

    def _tokens(self) -> Iterable[tuple[str, int]]:
        added = ((token, number) for token, number in self._ids.items() if number >= self._model_size)
        return itertools.chain(super()._tokens(), (entry for entry in added if entry[1] not in self.extra_ids))


def encode_with_special(text: str, pattern: re.Pattern[str], ids_of: Mapping[str, int], model: Any) -> list[int]:
    """Encode a text: special tokens that `pattern` finds become their ids, each part between them is encoded alone."""
    ids, begin = list[int](), 0
    for found in pattern.finditer(text):
        ids += model.encode(text[begin : found.start()])
        ids.append(ids_of[found.group()])
        begin = found.end()
    ids += model.encode(text[begin:])
    return ids


def decode_with_special(ids: Sequence[int], token_of: Mapping[int, str], model: Any, space: str) -> str:
    """Decode ids: special tokens are written with `space` on both sides, each part between them is decoded alone."""
    parts, begin = list[str](), 0
    for place, number in enumerate(ids):
        if number in token_of:
            parts += [model.decode(list(map(int, ids[begin:place]))), f"{space}{token_of[number]}{space}"]
            begin = place + 1
    return "".join([*parts, model.decode(list(map(int, ids[begin:])))])


def load_model(tokenizer: str, path: Path) -> Any:
    """Load a SentencePiece model. Raises DataError if it is missing or damaged, or the library is not installed."""
    if path.is_dir():
        raise DataError(
            f"--tokenizer-model {path} is a folder; {tokenizer} takes the file, such as {path / MODEL_FILE}"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read --tokenizer-model {path} ({tokenizer}): {error.strerror}") from error
    library = import_for(tokenizer, "sentencepiece", "data")
    model = library.SentencePieceProcessor()
    try:
        if len(content) < _LEAST_BYTES:
            raise RuntimeError("cut short")
        model.load_from_serialized_proto(content)
    except (RuntimeError, TypeError) as error:  # raised for a file that is not a model
        beginning = content[:256].lstrip().lower()
        what = "truncated or not a SentencePiece model"
        if beginning.startswith((b"<!doctype", b"<html")):
            what = "a web page"
        elif beginning.startswith(b"version https://git"):
            what = "a Git LFS pointer"
        raise DataError(f"--tokenizer-model {path} is {what}; download the file itself again") from error
    return model
