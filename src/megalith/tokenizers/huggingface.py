"""The tokenizer of a Hugging Face model folder: its files, who begins and ends a text, and who knows its ids.

Nothing is downloaded and no code of the folder is run. As in Megatron, special tokens that are written out in a text
become their ids, and what the tokenizer puts around every text (Llama's beginning of text) is there. What turns text
into ids is in `huggingface_engines`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megalith.errors import DataError
from megalith.tokenizers.card import file_hashes, vocabulary_hash
from megalith.tokenizers.huggingface_engines import (
    BYTE_LEVEL_FILES,
    SLOW_FILES,
    TOKENIZER_FILE,
    Engine,
    byte_level_engine,
    fast_engine,
    sentence_piece_engine,
    transformers_engine,
)
from megalith.tokenizers.sentence_piece import MODEL_FILE
from megalith.tokenizers.text import require_ids, require_text

_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_MODEL_CONFIGS = ("generation_config.json", "config.json")
_FILES = (
    TOKENIZER_FILE,
    *_CONFIGS,
    "generation_config.json",
    "added_tokens.json",
    MODEL_FILE,
    "chat_template.jinja",
)
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]")
_ROLES = ("bos", "eos", "pad", "unk", "cls", "sep", "mask")


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """The files of a folder that its tokenizer is made of, and those of the hub's tools beside them, by name."""
    return {name: folder / name for name in _FILES if (folder / name).is_file()}


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer that is told by its files."""
    alone = ((TOKENIZER_FILE,), (MODEL_FILE, _CONFIGS[0]), (*BYTE_LEVEL_FILES, _CONFIGS[0]))
    return any(all((folder / name).is_file() for name in names) for names in alone)


def find_folder(named: str) -> Path:
    """The folder that `--tokenizer-model` means: itself, that of the file it names, or a model in the hub's cache.

    The cache is where `hf download` and transformers put a model: see `hub_cache`.

    Raises:
        DataError: there is none.
    """
    path = Path(named)
    if path.is_file() and path.name in (TOKENIZER_FILE, *SLOW_FILES):
        return path.parent
    if path.is_dir():
        return path
    if path.exists():
        raise DataError(f"--tokenizer-model {named} is no folder and no {TOKENIZER_FILE}; give the model's folder")
    found = _cached(named)
    if found is None:
        raise DataError(
            f"--tokenizer-model {named} is no folder; give one with a {TOKENIZER_FILE}, or the name of a model in "
            f"{hub_cache(os.environ)}. Nothing is downloaded; to get the tokenizer of a model of the hub, `hf download "
            "NAME --local-dir DIR`"
        )
    return found


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The folder of the models of the hub: HF_HUB_CACHE, else HF_HOME/hub, else huggingface/hub in the cache folder.

    An empty variable counts as none; `~` and variables in a path are resolved.
    Source:  huggingface_hub 1.x, `constants.py`.
    """
    caches = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{caches}/huggingface"
    folder = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(folder)).expanduser()


def _cached(name: str) -> Path | None:
    """The snapshot of a model in the cache of the hub that its main branch points at; None if it is not there."""
    parts = name.split("/")
    if len(parts) > 2 or not all(parts) or any(part.startswith(".") for part in parts):
        return None
    model = hub_cache(os.environ) / f"models--{'--'.join(parts)}"
    try:
        snapshot = model / "snapshots" / (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return snapshot if snapshot.is_dir() else None


class HuggingFaceTokenizer:
    """`HuggingFaceTokenizer` of Megatron, for local folders.

    Args:
        named: a folder with tokenizer.json and, to say who ends a text, tokenizer_config.json or the like; or that
            file; or the name of a model in the cache of the hub. A folder without tokenizer.json needs the library
            that its files are for.
        special_tokens: more special tokens, which get the next ids if the tokenizer has them not.
        around: whether what the tokenizer puts around every text is there.

    Raises:
        DataError: a file is missing or damaged, or nothing says which token ends a text.
    """

    def __init__(self, named: str | Path, *, special_tokens: Sequence[str] = (), around: bool = True) -> None:
        self._named, self._special_tokens, self._around = str(named), tuple(special_tokens), around
        self._folder = find_folder(str(named))
        self._engine = self._load()
        ids = self._engine.ids
        self._size = max(len(ids), 1 + max(ids.values(), default=-1))
        self._eod = self._end(ids)
        self._special = {
            role: ids[token]
            for role in _ROLES
            if (token := next((name for name in self._named_tokens(f"{role}_token") if name in ids), None)) is not None
        }
        pad = self._special.get("pad")
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

    @property
    def special(self) -> Mapping[str, int]:
        return {"eod": self._eod, **self._special}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return (self._engine.special_ids | set(self.special.values())) - set(self.extra_ids)

    @property
    def extra_ids(self) -> tuple[int, ...]:
        ids, found = self._engine.ids, list[int]()
        while (number := ids.get(f"<extra_id_{len(found)}>")) is not None:
            found.append(number)
        return tuple(found)

    def encode(self, text: str) -> list[int]:
        return self._engine.encode(require_text(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._engine.encode_batch([require_text(text) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        require_ids(ids, self.vocab_size)
        return self._engine.decode(ids)

    def card(self) -> dict[str, Any]:
        card: dict[str, Any] = {
            "class": "HuggingFaceTokenizer",
            "vocabulary": self._vocabulary_hash,
            "vocab_size": self.vocab_size,
            "special": dict(self.special),
            "files": self._hashes,
        }
        settings: dict[str, Any] = {}
        if not self._around:
            settings["include_special_tokens"] = False
        if self._special_tokens:
            settings["special_tokens"] = list(self._special_tokens)
        return {**card, "settings": settings} if settings else card

    @cached_property
    def _vocabulary_hash(self) -> str:
        return vocabulary_hash(self._engine.ids.items())

    @cached_property
    def _hashes(self) -> dict[str, str]:
        """Of the files that decide the ids of a text."""
        return file_hashes({name: self._folder / name for name in self._engine.files})

    def identity(self) -> dict[str, Any]:
        return {"class": "_HuggingFaceTokenizer", "tokenizer_path": [self._named]}

    def files(self) -> dict[str, Path]:
        return {**tokenizer_files(self._folder), **{name: self._folder / name for name in self._engine.files}}

    def _load(self) -> Engine:
        folder = self._folder
        if (folder / TOKENIZER_FILE).is_file():
            return fast_engine(folder / TOKENIZER_FILE, self._special_tokens, around=self._around)
        settings = _object(folder / _CONFIGS[0])
        slow = [name for name in SLOW_FILES if (folder / name).is_file()]
        if not slow:
            raise DataError(
                f"{folder} has no {TOKENIZER_FILE}, nor another file of a tokenizer ({', '.join(SLOW_FILES)})"
            )
        is_llama = str(settings.get("tokenizer_class", "LlamaTokenizer")).startswith("LlamaTokenizer")
        if MODEL_FILE in slow and is_llama and not self._special_tokens:
            return sentence_piece_engine(folder, settings, self._named_tokens, around=self._around)
        settings = {**_object(folder / _CONFIGS[1]), **settings}
        own = byte_level_engine(folder, settings, self._named_tokens, self._special_tokens, around=self._around)
        return own or transformers_engine(folder, slow, self._special_tokens, around=self._around)

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
        for token in (*self._named_tokens("sep_token"), *_USUAL_ENDS):
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


def _object(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where there is none.

    Raises:
        DataError: it is damaged.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is damaged: it holds no JSON object")
    return found
