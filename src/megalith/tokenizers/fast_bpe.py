"""Texts to arrays of ids: what preprocessing calls for many texts at once, and what makes GPT-2's byte pairs fast.

gigatoken (an extra package) finds the same ids as tiktoken at more than ten times its speed, and takes about a second
to load. So a process begins with tiktoken and changes over when it has seen enough text for that to be worth it. Before
it is trusted, and now and then after that, its ids are compared with tiktoken's. It keeps every word that it has seen
(about 70 bytes each), so it is made anew when the process has grown by `_LARGEST_GROWTH`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Callable, Sequence
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

_WORTH_LOADING = 1 << 22  # characters; tiktoken encodes them in about the time that loading takes
_COMPARED_EACH = 1024  # texts
_LARGEST_GROWTH = 1 << 27  # bytes; to make gigatoken anew takes about as long as to encode 40 MB
_LOOKED_EACH = 64  # batches of texts
_LONGEST_COMPARED = 1 << 15  # characters; of a text that tiktoken has to encode once more
_PROBES = (
    "The year 2021 isn't over: they'll say 'tis  2022!\n\n\tindent \r\n  \n x",
    "\u4e2d\u56fd\u4eba\uff0c\u3053 \u0645\u0631\u062d \u0394\u03ac\u03c3\u03c2 caf\u00e9 cafe\u0301 \u00bd\u2167",
    "\U0001f600\U0001f1e9\U0001f1ea\u200d\u00a0\u2028\u3000\x0b\x1c\x85 \ufeff\ufffd<|endoftext|>",
    "'s'S'\u017f ''re 'LL aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa                              ----------------",
)
_Fast = Callable[[str], NDArray[Any]]
_NO_TEXT = "a lone surrogate: \ud800"


def array_encoder(tokenizer: Tokenizer, expected_bytes: int = 0) -> ArrayEncoder:
    """The fastest encoder of a tokenizer for so much text; each process makes its own."""
    make = getattr(tokenizer, "array_encoder", None)
    if make is not None:
        made: ArrayEncoder = make(expected_bytes)
        return made
    return lambda texts: [ids_as_array(tokenizer.encode(text)) for text in texts]


def is_fast(tokenizer_type: str) -> bool:
    """Whether a process encodes 100 MB in the time that it takes to start, by this class and what is installed."""
    return tokenizer_type == "GPT2BPETokenizer" and importlib.util.find_spec("gigatoken") is not None


def ids_as_array(ids: list[int]) -> NDArray[Any]:
    """Ids of any tokenizer. Raises DataError for a number that no vocabulary has (NullTokenizer takes any)."""
    try:
        return np.array(ids, np.int64)
    except OverflowError as error:
        raise DataError(f"token {max(ids, key=abs)} is no id of any vocabulary") from error


class BytePairArrays:
    """An `ArrayEncoder` over a byte-level BPE that changes over to gigatoken.

    Args:
        expected_bytes: of text, as far as it shows; if that is much, gigatoken is loaded at once.
        worth_loading: characters that are encoded before gigatoken is loaded otherwise.
    """

    def __init__(
        self,
        vocabulary: BytePairVocabulary,
        encode: Callable[[str], list[int]],
        *,
        expected_bytes: int = 0,
        worth_loading: int = _WORTH_LOADING,
    ) -> None:
        self._vocabulary, self._encode, self._left = vocabulary, encode, worth_loading
        self._fast: _Fast | None = None
        self._make: Callable[[], _Fast] | None = None
        self._until_looked, self._least = _LOOKED_EACH, 0
        self._until_compared = _COMPARED_EACH
        if expected_bytes > 2 * worth_loading:
            self.change_over()

    def __call__(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        arrays = list[NDArray[Any]]()
        while self._fast is None and len(arrays) < len(texts):
            text = texts[len(arrays)]
            arrays.append(np.array(self._encode(text), np.uint32))
            if self._left > 0:
                self._left -= len(text)
                if self._left <= 0:
                    self.change_over()
        if self._fast is None:
            return arrays
        rest = texts[len(arrays) :] if arrays else texts
        try:
            found = list(map(self._fast, rest))
        except TypeError:
            for text in rest:
                require_text(text)  # which says what is wrong with it
            raise
        self._compare_some(rest, found)
        self._bound_memory()
        return arrays + found if arrays else found

    def change_over(self) -> None:
        """Load gigatoken now, if it is there and does."""
        self._left, self._fast = 0, self._load()
        self._least = _resident_bytes()

    def _load(self) -> _Fast | None:
        """gigatoken's encoder; None where it is not installed or does not do."""
        try:
            library = importlib.import_module("gigatoken")
        except ImportError:
            return None
        try:
            text = _as_tokenizer_json(self._vocabulary)
            self._make = lambda: library.Tokenizer.from_json(text).encode
            fast = self._make()
            wrong = [text for text in _PROBES if fast(text).tolist() != self._encode(text)]
            wrong += [_NO_TEXT] if _takes(fast, _NO_TEXT) else []
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            logger.warning("gigatoken is installed and cannot be used (%s); tiktoken encodes, more slowly", error)
            return None
        if wrong:
            logger.warning("gigatoken gives other ids than tiktoken for %r; tiktoken encodes, more slowly", wrong[0])
            return None
        return fast

    def _bound_memory(self) -> None:
        """Forget the words that were seen, if there are too many by now."""
        self._until_looked -= 1
        if self._until_looked > 0 or self._make is None:
            return
        self._until_looked = _LOOKED_EACH
        if _resident_bytes() > self._least + _LARGEST_GROWTH:
            self._fast = None  # before the next one takes memory
            self._fast = self._make()
            self._least = _resident_bytes()

    def _compare_some(self, texts: Sequence[str], arrays: Sequence[NDArray[Any]]) -> None:
        """Compare one text in so many with tiktoken; one that is too long has the next compared."""
        at = self._until_compared - 1
        while at < len(texts):
            if len(texts[at]) > _LONGEST_COMPARED:
                at += 1
                continue
            self._compare(texts[at], arrays[at])
            at += _COMPARED_EACH
        self._until_compared = at + 1 - len(texts)

    def _compare(self, text: str, ids: NDArray[Any]) -> None:
        if ids.tolist() != self._encode(text):
            raise DataError(
                f"gigatoken gives other ids than tiktoken for a text that begins {text[:60]!r}: what it has encoded so "
                "far is not to be trusted; remove it (pip uninstall gigatoken), begin anew, and report the text"
            )


def _takes(encode: Callable[[str], Any], text: str) -> bool:
    """Whether an encoder takes what is no text, instead of saying so."""
    try:
        encode(text)
    except TypeError:
        return False
    return True


def _resident_bytes() -> int:
    """Memory that this process has; 0 on systems without /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


def _as_tokenizer_json(vocabulary: BytePairVocabulary) -> str:
    """What the library `tokenizers` writes for this model, without loading it."""
    model = {"type": "BPE", "vocab": vocabulary.ids, "merges": vocabulary.merges}
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": model})
