"""What turns text into ids for the files of a Hugging Face folder: tokenizer.json, or those of older tokenizers.

tokenizer.json needs the library `tokenizers` alone. The SentencePiece model of a Llama folder is read by sentencepiece,
as the older tokenizer class of transformers did. What else lies in folders without tokenizer.json is turned into one by
transformers, in memory, if that is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megalith.errors import DataError
from megalith.tokenizers.byte_level import END_OF_TEXT, byte_level_tokenizer, read_byte_pair_vocabulary
from megalith.tokenizers.extras import import_for
from megalith.tokenizers.sentence_piece import MODEL_FILE, load_model

TOKENIZER_FILE = "tokenizer.json"
SLOW_FILES = (MODEL_FILE, "vocab.json", "vocab.txt", "spiece.model", "merges.txt")
"""Files of tokenizers without tokenizer.json."""
BYTE_LEVEL_FILES = ("vocab.json", "merges.txt")
_BEYOND_BYTE_LEVEL = (
    *("add_prefix_space", "add_bos_token", "added_tokens_decoder"),
    *("additional_special_tokens", "extra_special_tokens"),
)
_MATCHING = ("lstrip", "rstrip", "single_word")  # how an added token is found in a text
_ROLES_OF_GPT2 = ("bos_token", "eos_token", "unk_token")
_SPECIAL_ROLES = (*_ROLES_OF_GPT2, "pad_token", "cls_token", "sep_token", "mask_token")


class Engine(Protocol):
    """Text to ids and back."""

    @property
    def ids(self) -> Mapping[str, int]:
        """Token -> id, added tokens too."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that the files flag as special."""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files in the folder that decide the ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, in order."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens written out."""


class _Fast:
    """The library `tokenizers`."""

    def __init__(self, tokenizer: Any, files: tuple[str, ...], special_tokens: Sequence[str], *, around: bool) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if special_tokens:
            tokenizer.add_special_tokens(list(special_tokens))
        self._tokenizer, self._around, self.files = tokenizer, around, files
        self.ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=self._around).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=self._around)]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def fast_engine(path: Path, special_tokens: Sequence[str], *, around: bool) -> Engine:
    """The tokenizer of a tokenizer.json.

    Raises:
        DataError: it is damaged.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no class of its own for its errors
        raise DataError(f"{path} is damaged, or made by a later version of tokenizers: {error}") from error
    return _Fast(tokenizer, (TOKENIZER_FILE,), special_tokens, around=around)


def transformers_engine(
    folder: Path, slow_files: Sequence[str], special_tokens: Sequence[str], *, around: bool
) -> Engine:
    """The tokenizer that transformers makes of the files of a folder. Runs no code of the folder.

    Raises:
        DataError: transformers is not installed, or makes none of them.
    """
    without = f"{folder} has no {TOKENIZER_FILE} ({', '.join(slow_files)} alone is not enough)"
    once = "make it once with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    try:
        library = import_for(f"a folder without {TOKENIZER_FILE}", "transformers", "hf")
    except DataError as error:
        raise DataError(f"{without}; {once}; {error}") from error
    try:
        made = library.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        tokenizer = made.backend_tokenizer
    except Exception as error:  # whatever the many classes there raise for files that they do not know
        raise DataError(f"{without}; transformers makes none of it: {error}") from error
    return _Fast(tokenizer, tuple(slow_files), special_tokens, around=around)


def byte_level_engine(
    folder: Path,
    settings: Mapping[str, Any],
    named_tokens: Callable[[str], Iterable[str]],
    special_tokens: Sequence[str],
    *,
    around: bool,
) -> Engine | None:
    """The tokenizer of a folder with GPT-2's vocab.json and merges.txt and no tokenizer.json.

    Args:
        folder: with the files.
        settings: what its tokenizer_config.json and special_tokens_map.json say.
        named_tokens: the tokens that the files name for a role such as "bos_token".
        special_tokens: further ones, which get the next ids.
        around: whether what the tokenizer puts around every text is there.

    Returns:
        None where the folder has other files or settings, which transformers understands.

    Raises:
        DataError: a file is damaged, or does not belong to the other.
    """
    paths = [folder / name for name in BYTE_LEVEL_FILES]
    if (
        not all(path.is_file() for path in paths)
        or settings.get("tokenizer_class") not in ("GPT2Tokenizer", "GPT2TokenizerFast")
        or any(settings.get(name) for name in _BEYOND_BYTE_LEVEL)
        or any(isinstance(token, dict) and any(map(token.get, _MATCHING)) for token in settings.values())
        or (folder / "added_tokens.json").is_file()
    ):
        return None
    vocabulary = read_byte_pair_vocabulary(*map(str, paths))
    special: list[str] = []
    for role in _SPECIAL_ROLES:
        by_default = (END_OF_TEXT,) if role in _ROLES_OF_GPT2 and role not in settings else ()
        named = dict.fromkeys(named_tokens(role)) or by_default
        if len(named) > 1 or any(token not in vocabulary.ids for token in named):
            return None  # transformers gives one that is not in the vocabulary the next id
        special += named
    return _Fast(
        byte_level_tokenizer(vocabulary, dict.fromkeys(special)), BYTE_LEVEL_FILES, special_tokens, around=around
    )


class _LlamaPieces:
    """A SentencePiece model with Llama's special tokens: their names in a text are their ids."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], special: Iterable[str], *, around: bool) -> None:
        self._model = load_model("HuggingFaceTokenizer", folder / MODEL_FILE)
        self.files: tuple[str, ...] = (MODEL_FILE,)
        self.ids: dict[str, int] = {
            self._model.id_to_piece(number): number for number in range(self._model.get_piece_size())
        }
        for number, token in sorted(_added_tokens(settings).items()):
            self.ids.setdefault(token, number)
        special = [token for token in dict.fromkeys((*special, *_added_tokens(settings).values())) if token in self.ids]
        self._token_of = {self.ids[token]: token for token in special}
        self.special_ids = frozenset(self._token_of)
        self._written_out = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        begins = around and settings.get("add_bos_token", True) and self._model.bos_id() >= 0
        ends = around and settings.get("add_eos_token", False) and self._model.eos_id() >= 0
        self._before = [self._model.bos_id()] if begins else []
        self._after = [self._model.eos_id()] if ends else []

    def encode(self, text: str) -> list[int]:
        ids, begin = list(self._before), 0
        for found in self._written_out.finditer(text):
            ids += self._pieces(text[begin : found.start()])
            ids.append(self.ids[found.group()])
            begin = found.end()
        return ids + self._pieces(text[begin:]) + self._after

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        parts, begin = [], 0
        for place, number in enumerate(ids):
            if number in self._token_of:
                parts += [self._text(ids[begin:place]), self._token_of[number]]
                begin = place + 1
        return "".join([*parts, self._text(ids[begin:])])

    def _pieces(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode([int(number) for number in ids])
        return text


def sentence_piece_engine(
    folder: Path, settings: Mapping[str, Any], named_tokens: Callable[[str], Iterable[str]], *, around: bool
) -> Engine:
    """The tokenizer of a Llama folder that has tokenizer.model and no tokenizer.json.

    Args:
        folder: with the model.
        settings: what its tokenizer_config.json says.
        named_tokens: the tokens that the files name for a role such as "bos_token".
        around: whether the beginning of text stands before every text.

    Raises:
        DataError: the model is damaged, or sentencepiece is not installed.
    """
    special = [token for role in ("bos_token", "eos_token", "unk_token") for token in named_tokens(role)]
    return _LlamaPieces(folder, settings, special or ("<s>", "</s>", "<unk>"), around=around)


def _added_tokens(settings: Mapping[str, Any]) -> dict[int, str]:
    """The special tokens that tokenizer_config.json lists by id."""
    listed = settings.get("added_tokens_decoder")
    return {
        int(number): token["content"]
        for number, token in (listed.items() if isinstance(listed, dict) else ())
        if str(number).isdigit() and isinstance(token, dict) and isinstance(token.get("content"), str)
    }
