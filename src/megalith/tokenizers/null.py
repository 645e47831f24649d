"""The tokenizer of made-up data: a text is ids written as numbers, separated by single spaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalith.errors import DataError

_SHOWN_CHARACTERS = 40


class NullTokenizer:
    """Numbers are ids, in two generations of Megatron.

    Up to 0.16 `--vocab-size N` gives N + 1 ids, the last of which ends a document. Later it gives N ids, the last of
    which ends a document unless `--null-tokenizer-eod-id` names another. A command line shows which is meant by the
    flags that only the later has.

    Args:
        num_ids: `--vocab-size`.
        later: whether it is the later generation.
        eod_id: the id that ends a document, in the later one; the last if absent.
        pad_id: the id that fills up short samples, in the later one; -1 for none.
    """

    def __init__(self, num_ids: int, *, later: bool = False, eod_id: int | None = None, pad_id: int = -1) -> None:
        self._num_ids, self._later = num_ids, later
        self._eod = (num_ids - 1 if later else num_ids) if eod_id is None else eod_id
        self._pad = None if pad_id < 0 else pad_id

    @property
    def vocab_size(self) -> int:
        return self._num_ids if self._later else self._num_ids + 1

    @property
    def eod(self) -> int:
        return self._eod

    @property
    def pad(self) -> int | None:
        return self._pad

    @property
    def special(self) -> Mapping[str, int]:
        return {"eod": self._eod} if self._pad is None else {"eod": self._eod, "pad": self._pad}

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.special.values())

    @property
    def extra_ids(self) -> tuple[int, ...]:
        return ()

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
        return {"class": "NullTokenizer", "vocab_size": self.vocab_size, "special": dict(self.special), "files": {}}

    def identity(self) -> dict[str, Any]:
        # Megatron serialises the constructor's arguments: a list with one null path, and the size as a string.
        return {"class": "_NullTokenizer", "tokenizer_path": [None], "vocab_size": str(self._num_ids)}

    def files(self) -> dict[str, Path]:
        return {}
