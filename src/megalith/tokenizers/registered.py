"""Registered tokenizers: the interface that a user's object must have, and its adapter to `Tokenizer`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megalith.errors import ConfigError, DataError
from megalith.tokenizers.protocol import Tokenizer


class TextCodec(Protocol):
    """Interface of the object that a `register_tokenizer` function makes from a TokenizerConfig.

    Optional attributes: `special` (name of a role -> id, such as "pad" or "bos"), `pad` (an id), `encode_batch` (texts
    -> lists of ids), and `files` (name -> path of a file to keep beside checkpoints).

    Attributes:
        vocab_size: Number of ids, special ones included.
        eod: Id that ends a document.
    """

    vocab_size: int
    eod: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class RegisteredTokenizer(Tokenizer):
    """Adapter of a registered tokenizer.

    Raises:
        ConfigError: The object lacks an attribute of `TextCodec`.
    """

    def __init__(self, name: str, codec: TextCodec) -> None:
        lacking = [part for part in ("vocab_size", "eod", "encode", "decode") if not hasattr(codec, part)]
        if lacking:
            raise ConfigError(f"--tokenizer-type {name}: {type(codec).__name__} lacks {', '.join(lacking)}")
        self._name, self._codec = name, codec
        self.vocab_size, self.eod = int(codec.vocab_size), int(codec.eod)
        special: Mapping[str, int] = getattr(codec, "special", {})
        self.special = {"eod": self.eod, **special}
        self.pad = getattr(codec, "pad", None)
        if outside := {role: number for role, number in self.special.items() if not 0 <= number < self.vocab_size}:
            raise ConfigError(
                f"--tokenizer-type {name}: the special ids {outside} are not below its vocab_size {self.vocab_size}"
            )

    def encode(self, text: str) -> list[int]:
        return list(self._codec.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        batch = getattr(self._codec, "encode_batch", None)
        return [self.encode(text) for text in texts] if batch is None else [list(ids) for ids in batch(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        if outside := next((number for number in ids if not 0 <= number < self.vocab_size), None):
            raise DataError(f"id {outside} is outside the vocabulary of {self.vocab_size} of {self._name}")
        return self._codec.decode(list(ids))

    def identity(self) -> dict[str, Any]:
        return {"class": self._name, "vocab_size": self.vocab_size}

    def files(self) -> dict[str, Path]:
        own: Mapping[str, str | Path] = getattr(self._codec, "files", {})
        return {name: Path(path) for name, path in own.items()}

    @property
    def _megatron_class(self) -> str:
        return self._name

    def _tokens(self) -> Iterable[tuple[str, int]]:
        return ((self._codec.decode([number]), number) for number in range(self.vocab_size))
