"""Megatron's TikTokenizer: tiktoken ranks from one JSON file, special tokens before them.

The file is a list of {"rank": 0, "token_bytes": base64, "token_str": ...} in order of rank; the first 256 are the
bytes. Of a vocabulary of N ids the first S are special and the others are the first N - S ranks.

Source:  Megatron-LM CustomTikTokenizer; docs/reference/tokenizers.md#tiktokenizer.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.errors import DataError
from megalith.tokenizers.byte_level import BYTE_OF_CHARACTER
from megalith.tokenizers.protocol import Tokenizer, require_ids, require_text

VOCABULARY_FILE = "tiktoken.vocab.json"
"""The name of the vocabulary beside a checkpoint."""

DEFAULT_SIZE = 1 << 17  # ids, where --vocab-size is not given
DEFAULT_PATTERN = "v2"
NEEDED_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
_NUM_BYTES = 256
_AGAIN = "take the vocabulary file of the model again"

# Megatron's pretokenization patterns, unchanged because identity() hashes them.
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


class TikTokenizer(Tokenizer):
    """Megatron's `TikTokenizer`. Special tokens in a text are plain text.

    Args:
        vocab_size: ids, special ones included; 131072 by default.
        num_special_tokens: ids before the ranks.
        special_tokens: names of the first of them, including `<unk>`, `<s>` and `</s>`; the others get generated names.

    Raises:  DataError if the file is missing or damaged, or has fewer tokens than needed.
    """

    def __init__(
        self,
        vocab_file: str | Path,
        *,
        pattern: str = DEFAULT_PATTERN,
        vocab_size: int | None = None,
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] = (),
    ) -> None:
        self._vocab_file, self._pattern, self._asked_size = str(vocab_file), pattern, vocab_size
        self._num_special, self._special_tokens = num_special_tokens, tuple(special_tokens)
        size = DEFAULT_SIZE if vocab_size is None else vocab_size
        names = self._special_tokens or NEEDED_SPECIAL_TOKENS
        tokens = _read_ranks(Path(vocab_file), size, num_special_tokens)
        filler = [f"<SPECIAL_{number}>" for number in range(len(names), num_special_tokens)]
        self._bytes = [*(name.encode() for name in (*names, *filler)), *tokens]
        roles = {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}
        roles |= {
            name: token for name in ("pad", "mask", "cls", "sep") if (token := f"<{name}>") in self._special_tokens
        }
        self.special = {role: names.index(token) for role, token in roles.items()}
        self.vocab_size, self.eod, self.pad = size, self.special["eos"], self.special.get("pad")

        import tiktoken

        ranks = {token: rank for rank, token in enumerate(tokens, start=num_special_tokens)}
        self._encoding = tiktoken.Encoding(
            "megalith", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={}
        )

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(range(self._num_special))

    @cached_property
    def token_sizes(self) -> NDArray[np.int64]:
        return np.array(list(map(len, self._bytes)))

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(require_text(text))

    def decode(self, ids: Sequence[int]) -> str:
        require_ids(ids, self.vocab_size)
        return b"".join([self._bytes[number] for number in ids]).decode(errors="replace")

    def identity(self) -> dict[str, Any]:
        return {
            "class": "CustomTikTokenizer",
            "tokenizer_path": [self._vocab_file],
            "pattern": PATTERNS[self._pattern],
            "vocab_size": str(self._asked_size),
            "num_special_tokens": str(self._num_special),
            "special_tokens": str(list(self._special_tokens) or None),
        }

    def files(self) -> dict[str, Path]:
        return {VOCABULARY_FILE: Path(self._vocab_file)}

    def _settings(self) -> dict[str, Any]:
        return {"pattern": self._pattern, "num_special_tokens": self._num_special}

    def _tokens(self) -> Iterable[tuple[str, int]]:
        # Spelt as in the files of byte-level vocabularies, which are one character a byte.
        names = (token.decode() for token in self._bytes[: self._num_special])
        character_of = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
        ranked = ("".join(map(character_of.__getitem__, token)) for token in self._bytes[self._num_special :])
        return ((token, number) for number, token in enumerate(itertools.chain(names, ranked)))


def _read_ranks(path: Path, vocab_size: int, num_special: int) -> list[bytes]:
    """Read the tokens in order of rank, as many as the vocabulary has room for."""
    try:
        entries = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read --tokenizer-model {path} (TikTokenizer): {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"--tokenizer-model {path} is cut short or damaged: {error}; {_AGAIN}") from error
    needed = vocab_size - num_special
    if not isinstance(entries, list):
        raise DataError(f"--tokenizer-model {path} is not a TikTokenizer vocabulary: expected a JSON list; {_AGAIN}")
    if len(entries) < needed:
        raise DataError(
            f"--tokenizer-model {path} has {len(entries)} tokens, and --vocab-size {vocab_size} with {num_special} "
            f"special tokens needs {needed}; give --vocab-size {len(entries) + num_special} or less"
        )
    tokens = [_token(path, rank, entry) for rank, entry in enumerate(entries[:needed])]
    if needed < _NUM_BYTES:
        raise DataError(f"--vocab-size {vocab_size} leaves {needed} ranks, but the bytes alone need {_NUM_BYTES}")
    if len(set(tokens)) < len(tokens):
        raise DataError(f"--tokenizer-model {path} has duplicate tokens; {_AGAIN}")
    return tokens


def _token(path: Path, rank: int, entry: Any) -> bytes:
    try:
        token = base64.b64decode(entry["token_bytes"], validate=True)
        if entry["rank"] != rank or (rank < _NUM_BYTES and token != bytes([rank])) or not token:
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"--tokenizer-model {path} is damaged: entry {rank} is {str(entry)[:80]}; {_AGAIN}") from error
    return token
