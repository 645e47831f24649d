"""Texts to arrays of ids: what preprocessing calls once for every text, and what makes GPT-2's byte pairs fast.

gigatoken (an extra package) finds the same ids as tiktoken at more than ten times its speed, and takes about a second
to load. So a process begins with tiktoken and changes over when it has seen enough text for that to be worth it. Before
it is trusted, and now and then after that, its ids are compared with tiktoken's.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.errors import DataError
from megalith.tokenizers.byte_level import BytePairVocabulary
from megalith.tokenizers.protocol import Tokenizer
from megalith.tokenizers.text import require_text

logger = logging.getLogger(__name__)

ArrayEncoder = Callable[[str], NDArray[Any]]
"""The ids of a text as whole numbers, of the type `SURE_IDS` if all of them are in the vocabulary whatever the text is.
Raises DataError as `Tokenizer.encode` does."""

SURE_IDS = np.dtype(np.uint32)

_WORTH_LOADING = 1 << 22  # characters; tiktoken encodes them in about the time that loading takes
_COMPARED_EACH = 1024  # texts
_LONGEST_COMPARED = 1 << 15  # characters; of a text that tiktoken has to encode once more
_PROBES = (
    "The year 2021 isn't over: they'll say 'tis  2022!\n\n\tindent \r\n  \n x",
    "\u4e2d\u56fd\u4eba\uff0c\u3053 \u0645\u0631\u062d \u0394\u03ac\u03c3\u03c2 caf\u00e9 cafe\u0301 \u00bd\u2167",
    "\U0001f600\U0001f1e9\U0001f1ea\u200d\u00a0\u2028\u3000\x0b\x1c\x85 \ufeff\ufffd<|endoftext|>",
    "'s'S'\u017f ''re 'LL aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa                              ----------------",
)


def array_encoder(tokenizer: Tokenizer, expected_bytes: int = 0) -> ArrayEncoder:
    """The fastest encoder of a tokenizer for so much text; each process makes its own."""
    make = getattr(tokenizer, "array_encoder", None)
    if make is not None:
        made: ArrayEncoder = make(expected_bytes)
        return made
    return lambda text: ids_as_array(tokenizer.encode(text))


def is_fast(tokenizer_type: str) -> bool:
    """Whether a process encodes 100 MB in the time that it takes to start, by this class and what is installed."""
    return tokenizer_type == "GPT2BPETokenizer" and importlib.util.find_spec("gigatoken") is not None


def ids_as_array(ids: list[int]) -> NDArray[Any]:
    """Ids of any tokenizer.

    Raises:
        DataError: a number that is no id of any vocabulary, as NullTokenizer takes it out of a text.
    """
    try:
        return np.array(ids, np.int64)
    except OverflowError as error:
        raise DataError(f"token {max(ids, key=abs)} is no id of any vocabulary") from error


class BytePairArrays:
    """An `ArrayEncoder` over a byte-level BPE that changes over to gigatoken.

    Args:
        vocabulary: reads the vocabulary, which is not kept for the processes that never load it.
        encode: its ids as a list, by tiktoken.
        expected_bytes: of text, as far as it shows; if that is much, gigatoken is loaded at once.
        worth_loading: characters that are encoded before gigatoken is loaded otherwise.
    """

    def __init__(
        self,
        vocabulary: Callable[[], BytePairVocabulary],
        encode: Callable[[str], list[int]],
        *,
        expected_bytes: int = 0,
        worth_loading: int = _WORTH_LOADING,
    ) -> None:
        self._vocabulary, self._encode, self._left = vocabulary, encode, worth_loading
        self._fast: ArrayEncoder | None = None
        self._until_compared = _COMPARED_EACH
        if expected_bytes > 2 * worth_loading:
            self.change_over()

    def __call__(self, text: str) -> NDArray[Any]:
        if self._fast is None:
            if self._left > 0:
                self._left -= len(text)
                if self._left <= 0:
                    self.change_over()
            return np.array(self._encode(text), np.uint32)
        ids = self._fast(require_text(text))
        self._until_compared -= 1
        if self._until_compared <= 0 and len(text) <= _LONGEST_COMPARED:
            self._until_compared = _COMPARED_EACH
            self._compare(text, ids)
        return ids

    def change_over(self) -> None:
        """Load gigatoken now, if it is there and does."""
        self._left, self._fast = 0, self._load()

    def _load(self) -> ArrayEncoder | None:
        """gigatoken's encoder; None where it is not installed or does not do."""
        try:
            library = importlib.import_module("gigatoken")
        except ImportError:
            return None
        try:
            fast: ArrayEncoder = library.Tokenizer.from_json(_as_tokenizer_json(self._vocabulary())).encode
            wrong = [text for text in _PROBES if fast(text).tolist() != self._encode(text)]
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            logger.warning("gigatoken is installed and cannot be used (%s); tiktoken encodes, more slowly", error)
            return None
        if wrong:
            logger.warning("gigatoken gives other ids than tiktoken for %r; tiktoken encodes, more slowly", wrong[0])
            return None
        return fast

    def _compare(self, text: str, ids: NDArray[Any]) -> None:
        if ids.tolist() != self._encode(text):
            raise DataError(
                f"gigatoken gives other ids than tiktoken for a text that begins {text[:60]!r}: what it has encoded so "
                "far is not to be trusted; remove it (pip uninstall gigatoken), begin anew, and report the text"
            )


def _as_tokenizer_json(vocabulary: BytePairVocabulary) -> str:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    made = Tokenizer(BPE(vocab=vocabulary.ids, merges=vocabulary.merges))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    text: str = made.to_str()
    return text
