"""Steps of a tokenizer.json, and whether gigatoken gives the ids of the library `tokenizers` for them.

Both cut the added tokens out of a text, normalise what is left, split it into words by a pattern, merge the bytes of
each word, and add special tokens around the text. What is known to be the same in both is listed here. Their tables of
Unicode are of different versions, so that texts with letters newer than Unicode 12.1 are not gigatoken's, nor are texts
that a normalizer would change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from unicodedata import is_normalized

from megalith.tokenizers.byte_level import BYTE_OF_CHARACTER
from megalith.tokenizers.fast_bpe import GigatokenModel

MATCHING_OPTIONS = ("lstrip", "rstrip", "single_word")
"""Options of an added token: how it is matched in a text."""
_REWRITING_OPTIONS = ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?LETTERS+|NUMBERS| ?[^\s\p{L}MARKS\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PATTERNS = {
    _WORDS.replace("LETTERS", letters).replace("NUMBERS", numbers).replace("MARKS", marks)
    for letters, numbers, marks in (
        (r"\p{L}", r"\p{N}{1,3}", ""),  # Llama 3, OLMo 2 and 3
        (r"\p{L}", r"\p{N}", ""),  # Qwen 2, 2.5 and 3
        (r"[\p{L}\p{M}]", r"\p{N}", r"\p{M}"),  # Qwen 3.5
    )
}
# Letters, numbers, marks and spaces that Unicode 13 to 18 added, in ranges that have older ones in their gaps.
_RECENT = re.compile(
    "[\u0558\u058b-\u058c\u05c8-\u05c9\u0870-\u089f\u08b5-\u08d2\u0b53-\u0b55\u0c3c\u0c5c-\u0c5d\u0cdc-\u0cdd\u0cf3\u0d04"
    "\u0d81\u0ece\u170d-\u171f\u180f\u1abf-\u1af0\u1b4c\u1c89-\u1c8a\u1dfa\u208f-\u209f\u2c2f\u2c5f\u31bb-\u31bf"
    "\u4db6-\u4dbf\u9ff0-\u9fff\ua7c0-\ua7f6\ua82c\uab68-\uab6d\U00010570-\U0001e7ff\U0001fbf0-\U0001fbf9"
    "\U0002a6d7-\U0002a6ff\U0002b735-\U0002b73f\U0002b81e-\U0002b81f\U0002cea2-\U0002ceaf\U0002ebe1-\U0002f7ff"
    "\U00030000-\U0003ffff]"
)


def gigatoken_model(text: str, *, add_special: bool) -> GigatokenModel | None:
    """Return what gigatoken is to load for a tokenizer.json; None if it is not known to give the same ids.

    Args:
        add_special: whether the tokens are wanted that the tokenizer adds around every text.
    """
    content = json.loads(text)
    added, vocabulary = content["added_tokens"], content["model"]["vocab"]
    around = _added_around(content["post_processor"]) if add_special else ((), ())
    if around is None or not is_byte_level(content) or not _has_known_pattern(content["pre_tokenizer"]):
        return None
    # `tokenizers` cuts out the tokens of one kind before those of the other
    kinds = [set("".join(token["content"] for token in added if token["normalized"] is kind)) for kind in (True, False)]
    names = {token["content"] for token in added}
    letters = set[str]().union(*(token for token in vocabulary if token not in names))
    if (
        not kinds[0].isdisjoint(kinds[1])
        or not all(is_stable(name, normalizes=True) for name in names)
        or not letters == BYTE_OF_CHARACTER.keys() <= vocabulary.keys()
    ):
        return None
    return GigatokenModel(text, *around)


def is_stable(text: str, *, normalizes: bool) -> bool:
    """Return whether no step of a tokenizer depends on the version of Unicode, nor NFC changes the text."""
    return text.isascii() or not (_RECENT.search(text) or (normalizes and not is_normalized("NFC", text)))


def is_byte_level(content: Mapping[str, Any]) -> bool:
    """Return whether the bytes of the tokens make up every normalised text, by the content of a tokenizer.json."""
    splits = content["pre_tokenizer"] or {}
    *before, last = splits.get("pretokenizers") or [splits]
    return (
        content["model"]["type"] == "BPE"
        and not any(map(content["model"].get, _REWRITING_OPTIONS))
        and content["normalizer"] in (None, {"type": "NFC"})
        and last.get("type") == "ByteLevel"
        and not last["add_prefix_space"]
        and all(step["type"] in ("Split", "Digits") and step.get("behavior") != "Removed" for step in before)
        and not any(token[option] for token in content["added_tokens"] for option in MATCHING_OPTIONS)
    )


def _has_known_pattern(splits: Mapping[str, Any]) -> bool:
    """Return whether a byte-level pre-tokenizer splits by GPT-2's pattern, or by one of `_PATTERNS`."""
    if "pretokenizers" not in splits:
        return bool(splits["use_regex"])
    *before, last = splits["pretokenizers"]
    return (
        [step["type"] for step in before] == ["Split"]
        and before[0]["pattern"].get("Regex") in _PATTERNS
        and (before[0]["behavior"], before[0]["invert"], last["use_regex"]) == ("Isolated", False, False)
    )


def _added_around(processor: Mapping[str, Any] | None) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return the ids that a post-processor puts before and behind every text; None if it may do something else."""
    before, behind = list[int](), list[int]()
    for step in processor.get("processors", [processor]) if processor else ():
        if step["type"] == "ByteLevel":
            continue
        pieces = step["single"] if step["type"] == "TemplateProcessing" else ()
        if ["Sequence" in piece for piece in pieces].count(True) != 1:
            return None
        at = next(number for number, piece in enumerate(pieces) if "Sequence" in piece)
        ids = [
            [] if "Sequence" in piece else step["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
            for piece in pieces
        ]
        before, behind = sum(ids[:at], []) + before, behind + sum(ids[at:], [])
    return before, behind
