"""Batch encoding of texts to arrays of ids, for preprocessing, with gigatoken for byte-level BPE.

gigatoken (an optional package) gives the ids of tiktoken, or of the library `tokenizers`, at more than ten times the
speed and takes about a second to load. A process therefore starts with the other library and switches when it has seen
enough text. Before the switch, and at intervals after it, the ids of both are compared. gigatoken caches every word
that it has seen (about 70 bytes each), so it is reloaded when the process has grown by `_LARGEST_GROWTH`.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.errors import DataError
from megalith.tokenizers.byte_level import BytePairVocabulary
from megalith.tokenizers.protocol import Tokenizer, require_text

logger = logging.getLogger(__name__)

ArrayEncoder = Callable[[Sequence[str]], list[NDArray[Any]]]
"""The ids of each text as whole numbers, of the type `SURE_IDS` if all of them are in the vocabulary whatever the texts
are. Raises DataError as `Tokenizer.encode` does."""

SURE_IDS = np.dtype(np.uint32)

_WORTH_LOADING = 1 << 22  # characters; tiktoken encodes them in about the time of loading gigatoken
_COMPARE_INTERVAL = 1024  # texts
_LARGEST_GROWTH = 1 << 27  # bytes; reloading gigatoken takes about as long as encoding 40 MB
_MEMORY_CHECK_INTERVAL = 1 << 21  # characters
_LONGEST_COMPARED = 1 << 15  # characters; longer texts are not compared
_PROBES = (
    "The year 2021 isn't over: they'll say 'tis  2022!\n\n\tindent \r\n  \n x",
    "\u4e2d\u56fd\u4eba\uff0c\u3053 \u0645\u0631\u062d \u0394\u03ac\u03c3\u03c2 caf\u00e9 cafe\u0301 \u00bd\u2167",
    "\U0001f600\U0001f1e9\U0001f1ea\u200d\u00a0\u2028\u3000\x0b\x1c\x85 \ufeff\ufffd<|endoftext|>",
    "'s'S'\u017f ''re 'LL aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa                              ----------------",
)
_ArrayEncode = Callable[[str], NDArray[Any]]
_SURROGATE = "a lone surrogate: \ud800"


def array_encoder(tokenizer: Tokenizer, expected_bytes: int = 0, *, plain: bool = False) -> ArrayEncoder:
    """Return the fastest encoder of a tokenizer for so much text; each process needs its own.

    Args:
        plain: leave out what the tokenizer adds around every text; only where its `token_sizes` are known.
    """
    make = getattr(tokenizer, "array_encoder", None)
    made: ArrayEncoder | None = None if make is None else make(expected_bytes, plain=plain)
    return made or (lambda texts: [ids_as_array(tokenizer.encode(text)) for text in texts])


def plain_array_encoder(tokenizer: Tokenizer, expected_bytes: int = 0) -> ArrayEncoder | None:
    """Return an encoder that adds nothing around a text; None if `Tokenizer.token_sizes` are unknown."""
    return None if tokenizer.token_sizes is None else array_encoder(tokenizer, expected_bytes, plain=True)


def ids_as_array(ids: list[int]) -> NDArray[Any]:
    """Convert ids to an array (i64). Raises DataError for a number beyond 64 bits, which NullTokenizer accepts."""
    try:
        return np.array(ids, np.int64)
    except OverflowError as error:
        raise DataError(f"token {max(ids, key=abs)} is not an id of any vocabulary") from error


@dataclass(frozen=True)
class GigatokenModel:
    """Model for gigatoken.

    Attributes:
        content: a tokenizer.json.
        before: ids in front of those of every text.
        behind: ids after those of every text.
    """

    content: str | bytes
    before: Sequence[int] = ()
    behind: Sequence[int] = ()


class BytePairArrays:
    """`ArrayEncoder` over a byte-level BPE that switches from another library to gigatoken.

    Args:
        model: makes what gigatoken is to load; None if it gives other ids.
        encode: the ids of one text, by which gigatoken is judged.
        is_proved: whether gigatoken can be used for this vocabulary; asked while it loads.
        takes: whether gigatoken may encode a text.
        expected_bytes: expected amount of text; if it is large, gigatoken is loaded at once.
        worth_loading: otherwise, characters to encode before gigatoken is loaded.
        probes: texts besides `_PROBES` on which the two must agree.
        other: name of the library that `encode` uses.
    """

    def __init__(
        self,
        model: Callable[[], GigatokenModel | None],
        encode: Callable[[str], list[int]],
        is_proved: Callable[[], bool],
        *,
        takes: Callable[[str], bool] | None = None,
        expected_bytes: int = 0,
        worth_loading: int = _WORTH_LOADING,
        probes: Sequence[str] = (),
        other: str = "tiktoken",
    ) -> None:
        self._model, self._encode, self._is_proved, self._takes, self._other = model, encode, is_proved, takes, other
        self._probes = (*_PROBES, *probes)
        self._left_until_loading = worth_loading
        self._gigatoken: _ArrayEncode | None = None
        self._make: Callable[[], _ArrayEncode] | None = None
        self._until_memory_check, self._baseline_bytes = _MEMORY_CHECK_INTERVAL, 0
        self._until_compared = _COMPARE_INTERVAL
        if expected_bytes > 2 * worth_loading:
            self.use_gigatoken()

    def __call__(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        arrays = list[NDArray[Any]]()
        while self._gigatoken is None and len(arrays) < len(texts):
            text = texts[len(arrays)]
            arrays.append(self._encode_by_other(text))
            if self._left_until_loading > 0:
                self._left_until_loading -= len(text)
                if self._left_until_loading <= 0:
                    self.use_gigatoken()
        if self._gigatoken is None:
            return arrays
        rest = texts[len(arrays) :] if arrays else texts
        fast, takes, slow = self._gigatoken, self._takes, self._encode_by_other
        try:
            found = list(map(fast, rest)) if takes is None else [(fast if takes(one) else slow)(one) for one in rest]
        except TypeError:
            for text in rest:
                require_text(text)  # raises DataError for a lone surrogate
            raise
        self._compare_some(rest, found)
        self._bound_memory(rest)
        return arrays + found if arrays else found

    def _encode_by_other(self, text: str) -> NDArray[Any]:
        return np.array(self._encode(text), SURE_IDS)

    def use_gigatoken(self) -> None:
        """Load gigatoken now, if it is installed and passes the comparison."""
        self._left_until_loading, self._gigatoken = 0, self._load()
        self._baseline_bytes = _resident_bytes()

    def _load(self) -> _ArrayEncode | None:
        """Load gigatoken's encoder; None if it is not installed or fails the comparison."""
        try:
            library = importlib.import_module("gigatoken")
        except ImportError:
            return None
        try:
            model = self._model()
            if model is None:
                return None
            self._make = partial(_make_encoder, library, model.content, model.before, model.behind)
            with ThreadPoolExecutor(1) as beside:  # gigatoken releases the GIL while it loads
                loading = beside.submit(self._make)
                if not self._is_proved():
                    return None
            fast = loading.result()
            wrong = [text for text in self._probes if fast(text).tolist() != self._encode(text)]
            wrong += [_SURROGATE] if _accepts(fast, _SURROGATE) else []
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            logger.warning(
                "gigatoken is installed but cannot be used (%s); using %s, which is slower", error, self._other
            )
            return None
        if wrong:
            logger.warning(
                "gigatoken gives other ids than %s for %r; using %s, which is slower",
                self._other,
                wrong[0],
                self._other,
            )
            return None
        return fast

    def _bound_memory(self, texts: Sequence[str]) -> None:
        """Reload gigatoken if its cache of words has grown too large with these texts."""
        self._until_memory_check -= sum(map(len, texts))
        if self._until_memory_check > 0 or self._make is None:
            return
        self._until_memory_check = _MEMORY_CHECK_INTERVAL
        if _resident_bytes() > self._baseline_bytes + _LARGEST_GROWTH:
            self._gigatoken = None  # freed before the next one is loaded
            self._gigatoken = self._make()
            self._baseline_bytes = _resident_bytes()

    def _compare_some(self, texts: Sequence[str], arrays: Sequence[NDArray[Any]]) -> None:
        """Compare every `_COMPARED_EACH`-th text with the other library, skipping texts that are too long."""
        at = self._until_compared - 1
        while at < len(texts):
            if len(texts[at]) > _LONGEST_COMPARED:
                at += 1
                continue
            self._compare(texts[at], arrays[at])
            at += _COMPARE_INTERVAL
        self._until_compared = at + 1 - len(texts)

    def _compare(self, text: str, ids: NDArray[Any]) -> None:
        if ids.tolist() != self._encode(text):
            raise DataError(
                f"gigatoken gives other ids than {self._other} for a text that begins {text[:60]!r}: the output so far "
                "cannot be trusted; remove it (pip uninstall gigatoken), preprocess again, and report the text"
            )


def _make_encoder(library: Any, content: str | bytes, before: Sequence[int], behind: Sequence[int]) -> _ArrayEncode:
    encode: _ArrayEncode = library.Tokenizer.from_json(content).encode
    if not (before or behind):
        return encode
    first, last = np.array(before, SURE_IDS), np.array(behind, SURE_IDS)
    return lambda text: np.concatenate([first, encode(text), last])


def _accepts(encode: Callable[[str], Any], text: str) -> bool:
    """Return whether an encoder accepts a text with a lone surrogate instead of raising TypeError."""
    try:
        encode(text)
    except TypeError:
        return False
    return True


def _resident_bytes() -> int:
    """Return the resident memory of this process; 0 on systems without /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


def as_tokenizer_json(vocabulary: BytePairVocabulary) -> str | bytes:
    """Return the tokenizer.json of this vocabulary as the library `tokenizers` writes it, without importing it."""
    model = {"type": "BPE", "vocab": vocabulary.ids, "merges": vocabulary.merges}
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": model}
    try:
        written: bytes = importlib.import_module("orjson").dumps(content)  # of the same extra, and 7 times as fast
    except ImportError:
        return json.dumps(content)
    return written
