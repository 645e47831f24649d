"""What the rest of Megalith knows of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to ids and back. Ids are 0 to `vocab_size` - 1; the padded vocabulary is no business of the tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included, padding excluded."""

    @property
    def eod(self) -> int:
        """Id that ends a document."""

    @property
    def pad(self) -> int | None:
        """Id that fills up short samples, None where the tokenizer has none."""

    @property
    def special(self) -> Mapping[str, int]:
        """Ids with a role, by its name: eod, bos, eos, pad, unk, cls, sep, mask, as far as the tokenizer has them."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens, with a role or without, except `extra_ids`, which are part of answers."""

    @property
    def extra_ids(self) -> tuple[int, ...]:
        """Ids of `<extra_id_0>`, `<extra_id_1>` and so on, which stand for the spans that T5 leaves out."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Whether special tokens written out in it are plain text is said by each class.

        Raises:  DataError if the text cannot be encoded (lone surrogates; non-numbers for NullTokenizer).
        """

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, in order."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD.

        Raises:  DataError naming the first id outside the vocabulary.
        """

    def card(self) -> dict[str, Any]:
        """Who this tokenizer is, wherever its files lie: class, sizes, special ids, sha256 of each file (`card`)."""

    def identity(self) -> dict[str, Any]:
        """What Megatron hashes into the names of index caches; holds the paths as they were typed."""

    def files(self) -> dict[str, Path]:
        """The files that make this tokenizer, under the names that they have beside a checkpoint."""
