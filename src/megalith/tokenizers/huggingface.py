"""Hugging Face tokenizers: files of a model folder, special tokens, and the library that encodes.

Only `hf:ORG/NAME` is downloaded, and no code of the folder is run. As in Megatron, special tokens in a text become
their ids, and the tokens that the tokenizer adds around every text (Llama's beginning of text) are included.

tokenizer.json needs only the library `tokenizers`. The SentencePiece model of a Llama folder is read by sentencepiece,
as the slow tokenizer class of transformers did. Other files in folders without tokenizer.json are converted by
transformers, in memory, if it is installed.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.errors import DataError
from megalith.hub import TOKENIZER_FILES as HUB_FILES
from megalith.hub import fetched
from megalith.tokenizers.byte_level import END_OF_TEXT, byte_level_tokenizer, bytes_of, read_byte_pair_vocabulary
from megalith.tokenizers.fast_bpe import ArrayEncoder, BytePairArrays
from megalith.tokenizers.fingerprint import file_hashes
from megalith.tokenizers.pipeline import MATCHING_OPTIONS, gigatoken_model, is_byte_level, is_stable
from megalith.tokenizers.protocol import Tokenizer, import_for, json_object, require_ids, require_text
from megalith.tokenizers.sentence_piece import MODEL_FILE, decode_with_special, encode_with_special, load_model

TOKENIZER_FILE = "tokenizer.json"
SLOW_FILES = (MODEL_FILE, "vocab.json", "vocab.txt", "spiece.model", "merges.txt")
"""Files of tokenizers without tokenizer.json."""
BYTE_LEVEL_FILES = ("vocab.json", "merges.txt")
_UNSUPPORTED_BYTE_LEVEL_SETTINGS = (
    *("add_prefix_space", "add_bos_token", "added_tokens_decoder"),
    *("additional_special_tokens", "extra_special_tokens"),
)
_WORTH_LOADING = 1 << 19  # characters; the library `tokenizers` encodes them in about the time of loading gigatoken
_ROLES_OF_GPT2 = ("bos_token", "eos_token", "unk_token")
_SPECIAL_ROLES = (*_ROLES_OF_GPT2, "pad_token", "cls_token", "sep_token", "mask_token")
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_MODEL_CONFIGS = ("generation_config.json", "config.json")
CHAT_TEMPLATE_FILE = "chat_template.jinja"
_ADDITIONAL_FILES = ("generation_config.json", "added_tokens.json", MODEL_FILE, CHAT_TEMPLATE_FILE)
_FILES = (TOKENIZER_FILE, *_CONFIGS, *_ADDITIONAL_FILES)
_LLAMA_SPECIAL = ("<s>", "</s>", "<unk>")
_USUAL_EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]")
_ROLES = ("bos", "eos", "pad", "unk", "cls", "sep", "mask")


class Backend(ABC):
    """Encoder and decoder of a library.

    Attributes:
        special_ids: ids of the tokens that the files flag as special.
        files: names of the files in the folder that decide the ids.
    """

    ids: dict[str, int]
    special_ids: frozenset[int]
    files: tuple[str, ...]

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    @property
    def token_sizes(self) -> NDArray[np.int64] | None:
        """Return what `Tokenizer.token_sizes` does."""
        return None

    def array_encoder(self, expected_bytes: int, *, plain: bool) -> ArrayEncoder | None:
        """Return an encoder, `plain` if it adds nothing around a text; None if there is no faster one than `encode`."""
        return None

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return ids and ranges of characters as `Tokenizer` does; None if the library does not tell."""
        return None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, in order."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens written out."""


class _FastBackend(Backend):
    """Backend of the library `tokenizers`."""

    def __init__(self, tokenizer: Any, files: tuple[str, ...], special: Sequence[str], *, add_special: bool) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if special:
            tokenizer.add_special_tokens(list(special))
        self._tokenizer, self._add_special, self.files = tokenizer, add_special, files
        self.ids = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=self._add_special).ids
        return ids

    @cached_property
    def token_sizes(self) -> NDArray[np.int64] | None:
        if not is_byte_level(json.loads(self._tokenizer.to_str())):
            return None
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        sizes = np.zeros(1 + max(self.ids.values()), np.int64)
        for token, number in self.ids.items():
            sizes[number] = len(token.encode() if token in added else bytes_of(token))
        return sizes

    def array_encoder(self, expected_bytes: int, *, plain: bool) -> ArrayEncoder:
        add_special, normalizes = self._add_special and not plain, self._tokenizer.normalizer is not None

        def encode(text: str) -> list[int]:
            ids: list[int] = self._tokenizer.encode(require_text(text), add_special_tokens=add_special).ids
            return ids

        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        return BytePairArrays(
            lambda: gigatoken_model(self._tokenizer.to_str(), add_special=add_special),
            encode,
            lambda: True,
            takes=lambda text: is_stable(text, normalizes=normalizes),
            expected_bytes=expected_bytes,
            worth_loading=_WORTH_LOADING,
            probes=[text.join(["", *added, ""]) for text in ("a", " b ", "\n\n")],
            other="tokenizers",
        )

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(found.ids, np.int64), np.array(found.offsets, np.int64).reshape(-1, 2)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch(texts, add_special_tokens=self._add_special)]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def read_tokenizer_json(path: Path) -> Any:
    """Read a tokenizer.json. Raises DataError if it is damaged."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{path} is damaged, or made by a newer version of tokenizers: {error}") from error


def _convert_with_transformers(folder: Path, slow_files: Sequence[str]) -> Any:
    """Convert the files of a folder with transformers. Runs no code of the folder.

    Raises:  DataError if transformers is not installed, or cannot convert them.
    """
    without = f"{folder} has no {TOKENIZER_FILE} ({', '.join(slow_files)} alone is not enough)"
    once = "make it once with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    try:
        library = import_for(f"a folder without {TOKENIZER_FILE}", "transformers", "hf")
    except DataError as error:
        raise DataError(f"{without}; {once}; {error}") from error
    try:
        made = library.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return made.backend_tokenizer
    except Exception as error:  # its many classes raise different errors for unknown files
        raise DataError(f"{without}; transformers cannot convert them: {error}") from error


def _build_byte_level(
    folder: Path, settings: Mapping[str, Any], named_tokens: Callable[[str], Iterable[str]]
) -> Any | None:
    """Build the tokenizer of a folder with GPT-2's vocab.json and merges.txt and no tokenizer.json.

    Return None if the folder has other files or settings, which need transformers.

    Raises:  DataError if a file is damaged, or does not belong to the other.
    """
    paths = [folder / name for name in BYTE_LEVEL_FILES]
    if (
        not all(path.is_file() for path in paths)
        or settings.get("tokenizer_class") not in ("GPT2Tokenizer", "GPT2TokenizerFast")
        or any(settings.get(name) for name in _UNSUPPORTED_BYTE_LEVEL_SETTINGS)
        or any(isinstance(token, dict) and any(map(token.get, MATCHING_OPTIONS)) for token in settings.values())
        or (folder / "added_tokens.json").is_file()
    ):
        return None
    vocabulary = read_byte_pair_vocabulary(*map(str, paths))
    special: list[str] = []
    for role in _SPECIAL_ROLES:
        by_default = (END_OF_TEXT,) if role in _ROLES_OF_GPT2 and role not in settings else ()
        named = dict.fromkeys(named_tokens(role)) or by_default
        if len(named) > 1 or any(token not in vocabulary.ids for token in named):
            return None  # transformers assigns the next id to a token outside the vocabulary
        special += named
    return byte_level_tokenizer(vocabulary, dict.fromkeys(special))


class _LlamaBackend(Backend):
    """Backend of a SentencePiece model with Llama's special tokens, whose names in a text become their ids."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], special: Iterable[str], *, add_special: bool) -> None:
        self._model = load_model("HuggingFaceTokenizer", folder / MODEL_FILE)
        self.files = (MODEL_FILE,)
        self.ids = {self._model.id_to_piece(number): number for number in range(self._model.get_piece_size())}
        for number, token in sorted(_added_tokens(settings).items()):
            self.ids.setdefault(token, number)
        special = [token for token in dict.fromkeys((*special, *_added_tokens(settings).values())) if token in self.ids]
        self._token_of = {self.ids[token]: token for token in special}
        self.special_ids = frozenset(self._token_of)
        self._special_pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        begins = add_special and settings.get("add_bos_token", True) and self._model.bos_id() >= 0
        ends = add_special and settings.get("add_eos_token", False) and self._model.eos_id() >= 0
        self._prefix_ids = [self._model.bos_id()] if begins else []
        self._suffix_ids = [self._model.eos_id()] if ends else []

    def encode(self, text: str) -> list[int]:
        return [
            *self._prefix_ids,
            *encode_with_special(text, self._special_pattern, self.ids, self._model),
            *self._suffix_ids,
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return decode_with_special(ids, self._token_of, self._model, "")


def _added_tokens(settings: Mapping[str, Any]) -> dict[int, str]:
    """Return the special tokens that tokenizer_config.json lists, by id."""
    listed = settings.get("added_tokens_decoder")
    return {
        int(number): token["content"]
        for number, token in (listed.items() if isinstance(listed, dict) else ())
        if str(number).isdigit() and isinstance(token, dict) and isinstance(token.get("content"), str)
    }


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder's tokenizer, and those of Hugging Face tools beside them, by name."""
    return {name: folder / name for name in _FILES if (folder / name).is_file()}


def holds_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds the files of a tokenizer."""
    alone = ((TOKENIZER_FILE,), (MODEL_FILE, _CONFIGS[0]), (*BYTE_LEVEL_FILES, _CONFIGS[0]))
    return any(all((folder / name).is_file() for name in names) for names in alone)


def find_folder(named: str) -> Path:
    """Return the folder of `--tokenizer-model`: a folder, a file in it, or a model in the Hugging Face cache.

    The cache is where `hf download` and transformers store models, see `hub_cache`.

    Raises:  DataError if there is none.
    """
    path = Path(fetched(named, HUB_FILES))
    if path.is_file() and path.name in (TOKENIZER_FILE, *SLOW_FILES):
        return path.parent
    if path.is_dir():
        return path
    if path.exists():
        raise DataError(f"--tokenizer-model {named} is neither folder nor {TOKENIZER_FILE}; give the model's folder")
    found = _find_cached_snapshot(named)
    if found is None:
        raise DataError(
            f"--tokenizer-model {named} is not a folder; give one with a {TOKENIZER_FILE}, or the name of a model in "
            f"{hub_cache(os.environ)}. Nothing is downloaded without a prefix: hf:{named} fetches it from the "
            f"Hugging Face Hub, ms:{named} from ModelScope"
        )
    return found


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the cache folder of models: HF_HUB_CACHE, else HF_HOME/hub, else huggingface/hub in the cache folder.

    An empty variable counts as unset; `~` and variables in a path are resolved.
    Source:  huggingface_hub 1.x, `constants.py`.
    """
    caches = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{caches}/huggingface"
    folder = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(folder)).expanduser()


def _find_cached_snapshot(name: str) -> Path | None:
    """Return the cached snapshot of a model's main branch; None if there is none."""
    parts = name.split("/")
    if len(parts) > 2 or not all(parts) or any(part.startswith(".") for part in parts):
        return None
    model = hub_cache(os.environ) / f"models--{'--'.join(parts)}"
    try:
        snapshot = model / "snapshots" / (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return snapshot if snapshot.is_dir() else None


class HuggingFaceTokenizer(Tokenizer):
    """Megatron's `HuggingFaceTokenizer`, for local folders.

    Args:
        named: folder with tokenizer.json and, for the end of a text, tokenizer_config.json or similar; or that file; or
            the name of a model in the Hugging Face cache. A folder without tokenizer.json needs the library for its
            files.
        special_tokens: additional special tokens, which get the next ids unless the tokenizer has them.
        add_special_tokens: whether to add the tokens that the tokenizer adds around every text.

    Raises:  DataError if a file is missing or damaged, or no file says which token ends a text.
    """

    def __init__(
        self, named: str | Path, *, special_tokens: Sequence[str] = (), add_special_tokens: bool = True
    ) -> None:
        self._name_or_path, self._special_tokens = str(named), tuple(special_tokens)
        self._add_special = add_special_tokens
        self._folder = find_folder(str(named))
        self._backend = self._load()
        ids = self._backend.ids
        self.vocab_size = max(len(ids), 1 + max(ids.values(), default=-1))
        self.eod = self._find_eod(ids)
        special = {
            role: ids[token]
            for role in _ROLES
            if (token := next((name for name in self._named_tokens(f"{role}_token") if name in ids), None)) is not None
        }
        self.special = {"eod": self.eod, **special}
        # Padding with the id of the end of a text would mask every end.
        self.pad = None if special.get("pad") == self.eod else special.get("pad")
        extra = list[int]()
        while (number := ids.get(f"<extra_id_{len(extra)}>")) is not None:
            extra.append(number)
        self.extra_ids = tuple(extra)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return (self._backend.special_ids | set(self.special.values())) - set(self.extra_ids)

    @property
    def token_sizes(self) -> NDArray[np.int64] | None:
        return self._backend.token_sizes

    def array_encoder(self, expected_bytes: int = 0, *, plain: bool = False) -> ArrayEncoder | None:
        """Return the batch encoder for so much text; `fast_bpe.array_encoder` calls this."""
        return self._backend.array_encoder(expected_bytes, plain=plain)

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(require_text(text))

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self._backend.encode_with_offsets(require_text(text)) or super().encode_with_offsets(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._backend.encode_batch([require_text(text) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        require_ids(ids, self.vocab_size)
        return self._backend.decode(ids)

    def _settings(self) -> dict[str, Any] | None:
        settings: dict[str, Any] = {}
        if not self._add_special:
            settings["include_special_tokens"] = False
        if self._special_tokens:
            settings["special_tokens"] = list(self._special_tokens)
        return settings or None

    def _tokens(self) -> Iterable[tuple[str, int]]:
        return self._backend.ids.items()

    @cached_property
    def _hashes(self) -> dict[str, str]:
        """Hash the files that decide the ids of a text."""
        return file_hashes({name: self._folder / name for name in self._backend.files})

    def identity(self) -> dict[str, Any]:
        return {"class": "_HuggingFaceTokenizer", "tokenizer_path": [self._name_or_path]}

    def files(self) -> dict[str, Path]:
        return {**tokenizer_files(self._folder), **{name: self._folder / name for name in self._backend.files}}

    def _load(self) -> Backend:
        folder = self._folder
        if (folder / TOKENIZER_FILE).is_file():
            return self._fast(read_tokenizer_json(folder / TOKENIZER_FILE), (TOKENIZER_FILE,))
        settings = _read_object(folder / _CONFIGS[0])
        slow = [name for name in SLOW_FILES if (folder / name).is_file()]
        if not slow:
            raise DataError(f"{folder} has no {TOKENIZER_FILE} and no other tokenizer file ({', '.join(SLOW_FILES)})")
        is_llama = str(settings.get("tokenizer_class", "LlamaTokenizer")).startswith("LlamaTokenizer")
        if MODEL_FILE in slow and is_llama and not self._special_tokens:
            special = [token for role in _ROLES_OF_GPT2 for token in self._named_tokens(role)]
            return _LlamaBackend(folder, settings, special or _LLAMA_SPECIAL, add_special=self._add_special)
        settings = {**_read_object(folder / _CONFIGS[1]), **settings}
        own = _build_byte_level(folder, settings, self._named_tokens)
        return (
            self._fast(_convert_with_transformers(folder, slow), slow)
            if own is None
            else self._fast(own, BYTE_LEVEL_FILES)
        )

    def _fast(self, tokenizer: Any, files: Sequence[str]) -> Backend:
        return _FastBackend(tokenizer, tuple(files), self._special_tokens, add_special=self._add_special)

    def _find_eod(self, ids: Mapping[str, int]) -> int:
        """Find the id that ends a text: eos_token, else the model's eos_token_id, else a token with a usual name."""
        for token in self._named_tokens("eos_token"):
            if token in ids:
                return ids[token]
        for name in _MODEL_CONFIGS:
            number = _read_object(self._folder / name).get("eos_token_id")
            number = number[0] if isinstance(number, list) and number else number
            if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < self.vocab_size:
                return number
        for token in (*self._named_tokens("sep_token"), *_USUAL_EOD_TOKENS):
            if token in ids:
                return ids[token]
        raise DataError(
            f"nothing in {self._folder} says which token ends a text; add tokenizer_config.json with an eos_token that "
            f"is in {TOKENIZER_FILE}"
        )

    def _named_tokens(self, role: str) -> Iterator[str]:
        """Yield the tokens with a role, as the files name them: a text, or an object with its content."""
        for name in _CONFIGS:
            token = _read_object(self._folder / name).get(role)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                yield token


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file does not exist. Raises DataError if it is damaged."""
    return json_object(path) if path.exists() else {}
