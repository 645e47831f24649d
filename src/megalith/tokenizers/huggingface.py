"""The tokenizer of a Hugging Face model folder: its tokenizer.json by the `tokenizers` library, and who ends a text.

Nothing is downloaded and no code of the folder is run. As in Megatron, special tokens that are written out in a text
become their ids, and what the tokenizer puts around every text (Llama's beginning of text) is there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megalith.errors import DataError

TOKENIZER_FILE = "tokenizer.json"
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_MODEL_CONFIGS = ("generation_config.json", "config.json")
_FILES = (
    TOKENIZER_FILE,
    *_CONFIGS,
    "generation_config.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
)
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
_SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """The files of a folder that its tokenizer is made of, and those of the hub's tools beside them, by name."""
    return {name: folder / name for name in _FILES if (folder / name).is_file()}


class HuggingFaceTokenizer:
    """`HuggingFaceTokenizer` of Megatron, for folders that have a tokenizer.json.

    Args:
        folder: with tokenizer.json and, to say who ends a text, tokenizer_config.json or the like.

    Raises:
        DataError: a file is missing or damaged, or nothing says which token ends a text.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder, self._named = Path(folder), str(folder)
        self._tokenizer = _load(self._folder)
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self._size = max(len(ids), 1 + max(ids.values(), default=-1))
        self._eod = self._end(ids)
        pad = next((ids[token] for token in self._named_tokens("pad_token") if token in ids), None)
        self._pad = None if pad == self._eod else pad  # one id for both would hide the ends of texts

    @property
    def vocab_size(self) -> int:
        return self._size

    @property
    def eod(self) -> int:
        return self._eod

    @property
    def pad(self) -> int | None:
        return self._pad

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(_sound(text)).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch([_sound(text) for text in texts])]

    def decode(self, ids: Sequence[int]) -> str:
        outside = next((number for number in ids if not 0 <= number < self.vocab_size), None)
        if outside is not None:
            raise DataError(f"id {outside} is outside the vocabulary of {self.vocab_size}")
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def card(self) -> dict[str, Any]:
        return {
            "class": "HuggingFaceTokenizer",
            "vocab_size": self.vocab_size,
            "special": {"eod": self.eod},
            "files": {TOKENIZER_FILE: self._hash},
        }

    @cached_property
    def _hash(self) -> str:
        return hashlib.sha256((self._folder / TOKENIZER_FILE).read_bytes()).hexdigest()

    def identity(self) -> dict[str, Any]:
        return {"class": "_HuggingFaceTokenizer", "tokenizer_path": [self._named]}

    def files(self) -> dict[str, Path]:
        return tokenizer_files(self._folder)

    def _end(self, ids: Mapping[str, int]) -> int:
        """The id that ends a text: the eos_token, else the model's eos_token_id, else a token of a usual name."""
        for token in self._named_tokens("eos_token"):
            if token in ids:
                return ids[token]
        for name in _MODEL_CONFIGS:
            number = _object(self._folder / name).get("eos_token_id")
            number = number[0] if isinstance(number, list) and number else number
            if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < self._size:
                return number
        for token in _USUAL_ENDS:
            if token in ids:
                return ids[token]
        raise DataError(
            f"nothing in {self._folder} says which token ends a text; add tokenizer_config.json with an eos_token that "
            f"is in {TOKENIZER_FILE}"
        )

    def _named_tokens(self, role: str) -> Iterator[str]:
        """The token that has a role, as the files name it: a text, or an object with its content."""
        for name in _CONFIGS:
            token = _object(self._folder / name).get(role)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                yield token


def _load(folder: Path) -> Any:
    from tokenizers import Tokenizer

    path = folder / TOKENIZER_FILE
    if not folder.is_dir():
        raise DataError(
            f"--tokenizer-model {folder} is no folder; give one with a {TOKENIZER_FILE}. Nothing is downloaded; to "
            "get the tokenizer of a model of the hub, `hf download NAME --local-dir DIR`"
        )
    if not path.is_file():
        slow = [name for name in _SLOW_FILES if (folder / name).is_file()]
        but = f" ({', '.join(slow)} alone is not enough)" if slow else ""
        raise DataError(
            f"{folder} has no {TOKENIZER_FILE}{but}; make it once with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no class of its own for its errors
        raise DataError(f"{path} is damaged, or made by a later version of tokenizers: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _object(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where there is none.

    Raises:
        DataError: it is damaged.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is damaged: it holds no JSON object")
    return found


def _sound(text: str) -> str:
    """The text, if it is one.

    Raises:
        DataError: a character is a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = ord(text[error.start])
        raise DataError(f"character {error.start} is a lone surrogate (U+{character:04X}), which is no text") from error
    return text
