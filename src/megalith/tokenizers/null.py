"""Megatron's NullTokenizer for synthetic data: a text is a list of ids, separated by single spaces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megalith.errors import DataError
from megalith.tokenizers.protocol import Tokenizer

_SHOWN_CHARACTERS = 40


class NullTokenizer(Tokenizer):
    """Tokenizer whose texts are ids written as numbers, in two generations of Megatron.

    Up to Megatron 0.16 `--vocab-size N` gives N + 1 ids, of which the last ends a document. Later it gives N ids, of
    which the last ends a document unless `--null-tokenizer-eod-id` sets another. The flags that only later versions
    have tell which of the two a command line means.

    Args:
        eod_id: id that ends a document, in the later generation; the last id by default.
        pad_id: id that pads short samples, in the later generation; -1 for none.
    """

    def __init__(self, num_ids: int, *, later: bool = False, eod_id: int | None = None, pad_id: int = -1) -> None:
        self._num_ids = num_ids
        self.vocab_size = num_ids if later else num_ids + 1
        self.eod = self.vocab_size - 1 if eod_id is None else eod_id
        self.pad = None if pad_id < 0 else pad_id
        self.special = {"eod": self.eod} if self.pad is None else {"eod": self.eod, "pad": self.pad}

    def encode(self, text: str) -> list[int]:
        """Parse the numbers of a text. Negative and too large ones pass, as in Megatron; writers check the range."""
        try:
            return [int(number) for number in text.split(" ")]
        except ValueError:
            shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
            raise DataError(f"NullTokenizer takes whole numbers separated by single spaces, not {shown!r}") from None

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(number) for number in ids)

    def fingerprint(self) -> dict[str, Any]:
        return {"class": "NullTokenizer", "vocab_size": self.vocab_size, "special": dict(self.special), "files": {}}

    def identity(self) -> dict[str, Any]:
        # Megatron serialises the constructor's arguments: a list with one null path, and the size as a string.
        return {"class": "_NullTokenizer", "tokenizer_path": [None], "vocab_size": str(self._num_ids)}

    def files(self) -> dict[str, Path]:
        return {}

    def _tokens(self) -> Iterable[tuple[str, int]]:
        return ()
