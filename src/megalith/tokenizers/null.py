"""The tokenizer of made-up data: a text is ids written as numbers, separated by single spaces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalith.errors import DataError

_SHOWN_CHARACTERS = 40


class NullTokenizer:
    """Numbers are ids. As in Megatron 0.8 to 0.16, `--vocab-size N` gives N + 1 ids, the last ends a document."""

    pad: int | None = None

    def __init__(self, num_ids: int) -> None:
        self._num_ids = num_ids

    @property
    def vocab_size(self) -> int:
        return self._num_ids + 1

    @property
    def eod(self) -> int:
        return self._num_ids

    def encode(self, text: str) -> list[int]:
        """Numbers of a text. Negative and too large numbers pass, as in Megatron; what stores them checks the range."""
        try:
            return [int(number) for number in text.split(" ")]
        except ValueError:
            shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
            raise DataError(f"NullTokenizer takes whole numbers separated by single spaces, not {shown!r}") from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(number) for number in ids)

    def card(self) -> dict[str, Any]:
        return {"class": "NullTokenizer", "vocab_size": self.vocab_size, "special": {"eod": self.eod}, "files": {}}

    def identity(self) -> dict[str, Any]:
        # Megatron serialises the constructor's arguments: a list with one null path, and the size as a string.
        return {"class": "_NullTokenizer", "tokenizer_path": [None], "vocab_size": str(self._num_ids)}

    def files(self) -> dict[str, Path]:
        return {}
