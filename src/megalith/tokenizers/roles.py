"""Which ids have a role, for the tokenizers that know it for good once they are made.

What is the same in all of them follows from that; how text becomes ids is theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megalith.tokenizers.card import file_hashes, vocabulary_hash


@dataclass(frozen=True)
class Roles:
    """The ids of a tokenizer that are more than text; as `Tokenizer` has them.

    Attributes:
        vocab_size: number of ids.
        eod: id that ends a document.
        special: ids by role.
        pad: id that fills up short samples, None for none.
        extra_ids: ids of the spans that T5 leaves out.
    """

    vocab_size: int
    eod: int
    special: Mapping[str, int]
    pad: int | None = None
    extra_ids: tuple[int, ...] = ()


class TokenizerWithRoles(ABC):
    """What follows from the roles and from one text at a time; a tokenizer sets `_roles` when it is made."""

    _roles: Roles

    @property
    def vocab_size(self) -> int:
        return self._roles.vocab_size

    @property
    def eod(self) -> int:
        return self._roles.eod

    @property
    def pad(self) -> int | None:
        return self._roles.pad

    @property
    def special(self) -> Mapping[str, int]:
        return self._roles.special

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset((self.eod, *self.special.values()))

    @property
    def extra_ids(self) -> tuple[int, ...]:
        return self._roles.extra_ids

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    @abstractmethod
    def files(self) -> dict[str, Path]:
        """The files that make this tokenizer."""

    @abstractmethod
    def _tokens(self) -> Iterable[tuple[str, int]]:
        """Tokens and their ids, for the card: without those of `--vocab-extra-ids`."""

    @cached_property
    def _vocabulary_hash(self) -> str:
        return vocabulary_hash(self._tokens())

    @cached_property
    def _hashes(self) -> dict[str, str]:
        """Of the files, for the card."""
        return file_hashes(self.files())
