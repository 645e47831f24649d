"""Text of old language-model benchmarks as it was before their authors cut it into words.

WikiText, the Penn Treebank and LAMBADA are distributed as words between single spaces. A model that reads subwords is
measured on the text behind them; its loss per subword is then taken over the number of the benchmark's words. What is
replaced, and in which order, is what Megatron replaces, so that numbers can be compared.

Source: docs/reference/evaluation.md#wikitext-103.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Detokenizer = Callable[[str], str]

_DEGREE = "\u00b0"

# (old, new), each applied to the whole text before the next.
_WIKITEXT_BEFORE_PAIRS = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
)
_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
_WIKITEXT_AFTER_PAIRS = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (f" {_DEGREE} ", _DEGREE),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
_PTB = (
    (" '", "'"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" n't", "n't"),
    (" N ", "1 "),  # without the space before it, as Megatron has it
    ("$ 1", "$1"),
    ("# 1", "#1"),
)


def wikitext(text: str) -> str:
    """Undo the tokenisation of WikiText-2 and WikiText-103.

    >>> wikitext("a 3 @.@ 5 ( very ) old = = Top = = town 's")
    "a 3.5 (very) old == Top == town's"
    """
    text = _replaced(text, _WIKITEXT_BEFORE_PAIRS)
    for opening, closing in _PAIRS:
        text = re.sub(rf"{re.escape(opening)}\s*([^{re.escape(closing)}]*?)\s*{re.escape(closing)}", _tight, text)
    return _replaced(text, _WIKITEXT_AFTER_PAIRS)


def ptb(text: str) -> str:
    """Undo the tokenisation of the Penn Treebank.

    >>> ptb("it did n't cost $ N million")
    "it didn't cost $1 million"
    """
    return _replaced(text, _PTB)


def unchanged(text: str) -> str:
    """LAMBADA's jsonl is plain text already."""
    return text


DETOKENIZERS: dict[str, Detokenizer] = {"ptb": ptb, "wiki": wikitext, "lambada": unchanged}
"""Part of a path -> what undoes the tokenisation of that benchmark; the first that fits counts."""


def detokenizer_for(path: str) -> tuple[str, Detokenizer] | None:
    """Name and function by what the path contains, as Megatron chooses; None if nothing fits."""
    return next(((name, function) for name, function in DETOKENIZERS.items() if name in path), None)


def _replaced(text: str, rules: tuple[tuple[str, str], ...]) -> str:
    for old, new in rules:
        text = text.replace(old, new)
    return text


def _tight(match: re.Match[str]) -> str:
    """A pair of brackets or quotes without the blanks inside it."""
    whole = match[0]
    return whole[0] + match[1] + whole[-1]
