"""Tokens that are single characters: Unicode code points, with their ids in a vocab.json made from the text.

The vocabulary is a JSON object of character: id with the ids 0 to its length - 1, in the order of the code points where
`character_vocabulary` made it. It may have one longer entry, `<|endoftext|>`, whose id ends a document and is plain
text inside a text. Texts are not normalised: a letter with a combining accent is two characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.errors import DataError
from megalith.tokenizers.protocol import Tokenizer, json_object, require_ids

VOCABULARY_FILE = "vocab.json"
"""The name of the vocabulary beside a checkpoint."""

_END_OF_TEXT = "<|endoftext|>"
_AGAIN = "`megalith preprocess --tokenizer-type CharacterTokenizer` without --vocab-file makes one from its input"


def character_vocabulary(characters: Iterable[str], *, with_eod: bool) -> str:
    """Return the content of the vocab.json of these characters, with an end-of-document token if asked for."""
    tokens = [*sorted({one for one in characters if _is_character(one)}), *((_END_OF_TEXT,) if with_eod else ())]
    return json.dumps({token: number for number, token in enumerate(tokens)}, ensure_ascii=False, indent=0) + "\n"


class CharacterTokenizer(Tokenizer):
    """Tokenizer of the characters of a vocabulary. Raises DataError if the file is none of single characters."""

    def __init__(self, vocab_file: str) -> None:
        self._path = Path(vocab_file)
        self._ids = _read_vocabulary(self._path)
        self._token_of = {number: token for token, number in self._ids.items()}
        self.vocab_size, self.eod = len(self._ids), self._ids.get(_END_OF_TEXT)
        self.special = {} if self.eod is None else {"eod": self.eod}

    @cached_property
    def token_sizes(self) -> NDArray[np.int64]:
        return np.array([len(self._token_of[number].encode()) for number in range(self.vocab_size)])

    def encode(self, text: str) -> list[int]:
        try:
            return list(map(self._ids.__getitem__, text))
        except KeyError:
            at = next(place for place, character in enumerate(text) if character not in self._ids)
        line, character = text.count("\n", 0, at) + 1, text[at]
        raise DataError(
            f"line {line} of the text: the character {character!r} (U+{ord(character):04X}) is not in --vocab-file "
            f"{self._path}, which has {self.vocab_size} tokens; leave it out of the text, or train with a vocabulary "
            "made from all texts"
        )

    def decode(self, ids: Sequence[int]) -> str:
        require_ids(ids, self.vocab_size)
        return "".join(map(self._token_of.__getitem__, ids))

    def identity(self) -> dict[str, Any]:
        return {"class": type(self).__name__, "tokenizer_path": [str(self._path)]}

    def files(self) -> dict[str, Path]:
        return {VOCABULARY_FILE: self._path}

    def _tokens(self) -> Iterable[tuple[str, int]]:
        return self._ids.items()


def _read_vocabulary(path: Path) -> dict[str, int]:
    if not path.is_file():
        raise DataError(f"--vocab-file {path}: no such file; {_AGAIN}")
    ids = json_object(path)
    wrong = next((token for token in ids if not _is_character(token) and token != _END_OF_TEXT), None)
    if wrong is not None or not ids:
        found = "it is empty" if wrong is None else f"{wrong!r} is not a single character"
        raise DataError(f"--vocab-file {path}: {found}; {_AGAIN}")
    if any(type(number) is not int for number in ids.values()) or {*ids.values()} != {*range(len(ids))}:
        raise DataError(f"--vocab-file {path}: the ids are not 0 to {len(ids) - 1}, each once; {_AGAIN}")
    return ids


def _is_character(token: str) -> bool:
    """Return whether a token is one code point that UTF-8 can encode."""
    return len(token) == 1 and not "\ud800" <= token <= "\udfff"
