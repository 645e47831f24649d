"""The card of a tokenizer: who it is, wherever its files lie. Kept beside datasets and in checkpoints, and compared.

Token ids mean nothing without the tokenizer that made them, and a wrong one trains without a complaint. A card holds
the class, the number of ids, a hash of the vocabulary (id -> token), the special ids, the hash of each file and the
settings that change ids. Two cards with the same vocabulary agree, whatever the classes and files are called: a model
imported from Hugging Face reads data made by GPT2BPETokenizer. Cards of older versions have no hash of the vocabulary;
against those, classes, files and settings are compared.

Beside a dataset PREFIX.bin, PREFIX.idx it is PREFIX.card, JSON. The one ending matters: Megatron's own
tools/merge_datasets.py takes every file of a folder for half of a pair, and finds the pair of this one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megalith.errors import DataError

_ABSENT = "-"
_ORDER = ("class", "vocabulary", "vocab_size", "special", "setting", "file")
_SHOWN_OF_HASH = 12
_BY_CASE = "BertWordPiece"  # BertWordPieceCase and BertWordPieceLowerCase give one text different ids of one vocabulary


def card_path(prefix: str) -> Path:
    """Where the card of a dataset lies."""
    return Path(prefix + ".card")


def file_hashes(files: Mapping[str, Path]) -> dict[str, str]:
    """The sha256 of each file, by the name that it has in the card."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def vocabulary_hash(tokens: Iterable[tuple[str, int]]) -> str:
    """Return the sha256 of a vocabulary without `--vocab-extra-ids`, whatever order it comes in."""
    digest = hashlib.sha256()
    for token, number in sorted(tokens, key=lambda entry: (entry[1], entry[0])):
        digest.update(f"{number}\t{token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def write_card(prefix: str, card: Mapping[str, Any]) -> None:
    """Lay the card of its tokenizer beside a dataset, in place of another. Raises DataError if it cannot be written."""
    path = card_path(prefix)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(card, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error


def read_card(prefix: str) -> dict[str, Any] | None:
    """The card beside a dataset; None where there is none, as with Megatron's. Raises DataError if it is damaged."""
    path = card_path(prefix)
    try:
        card = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}; without it nothing is compared") from error
    if not isinstance(card, dict) or not isinstance(card.get("class"), str):
        raise DataError(f"{path} is no tokenizer card; without it nothing is compared")
    return card


def card_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return what differs between two cards, by name of the entry; empty where ids mean the same tokens.

    A special id that only one card names is no difference: cards name more of them from version to version.
    """
    left, right = _flat(one), _flat(other)
    is_known = left.get("vocabulary") is not None and right.get("vocabulary") is not None
    is_same = is_known and left["vocabulary"] == right["vocabulary"]
    differing = {}
    for name in sorted(dict.fromkeys((*left, *right)), key=_place):
        values = left.get(name), right.get(name)
        kind = name.partition(" ")[0]
        if values[0] == values[1] or (kind == "special" and None in values):
            continue
        if (name == "vocabulary" and not is_known) or (is_same and not _changes_ids(kind, one, other)):
            continue
        differing[name] = (_shown(values[0]), _shown(values[1]))
    return differing


def _changes_ids(kind: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a difference of this kind matters between cards with the same vocabulary."""
    classes = str(one.get("class")), str(other.get("class"))
    if kind == "class":
        return all(name.startswith(_BY_CASE) for name in classes)
    if kind == "setting":
        return classes[0] == classes[1]
    return kind != "file"


def side_by_side(names: tuple[str, str], differences: Mapping[str, tuple[str, str]]) -> list[str]:
    """Two cards as lines of three columns: the entry, and its value in each."""
    rows = [("", *names), *((name, *values) for name, values in differences.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return ["  ".join([row[0].ljust(widths[0]), row[1].ljust(widths[1]), row[2]]).rstrip() for row in rows]


def require_same(names: tuple[str, str], one: Mapping[str, Any], other: Mapping[str, Any], remedy: str) -> None:
    """Stop where two cards, which `names` have, are of different tokenizers; the `remedy` ends the message.

    Raises:  DataError with both cards side by side, what is equal left out.
    """
    differing = card_differences(one, other)
    if differing:
        head = f"{names[0]} and {names[1]} have different tokenizers (what is equal is left out):"
        raise DataError("\n  ".join([head, *side_by_side(names, differing), remedy]))


def require_tokenizer_of_data(prefix: str, here: Mapping[str, Any]) -> str | None:
    """Compare the card of a dataset with that of the tokenizer of this run.

    Return what the user should hear where nothing could be compared, else None.

    Raises:  DataError if the dataset was made with another tokenizer, or its card is damaged.
    """
    card = read_card(prefix)
    if card is None:
        return f"{prefix} has no tokenizer card (made by Megatron or an older version): its tokenizer is not compared"
    if here.get("class") == "NullTokenizer" != card["class"]:
        return _with_null_tokenizer(prefix, card, here)
    require_same(
        (prefix, "this run"),
        _without_sentinels(card),
        _without_sentinels(here),
        _remedy(prefix, card),
    )
    return None


def _remedy(prefix: str, card: Mapping[str, Any]) -> str:
    remedy = "give this run the tokenizer that made the data, or make the data anew with this one"
    if card.get("vocabulary") is not None:
        return f"{remedy} (the tokenizer of the data is described in {card_path(prefix)})"
    return (
        f"{remedy}. {card_path(prefix)} was written by an older version, which did not record the vocabulary, so that "
        "classes and files are compared instead. If you know that both give the same ids, remove it: then nothing is "
        "compared"
    )


def _without_sentinels(card: Mapping[str, Any]) -> Mapping[str, Any]:
    """A card without the tokens of `--vocab-extra-ids`, which stand behind all others and in no text.

    Megatron's command lines make the data of T5 without them, and train with them.
    """
    settings = dict(card.get("settings", {}))
    count = int(settings.pop("vocab_extra_ids", 0) or 0)
    return {**card, "vocab_size": int(card["vocab_size"]) - count, "settings": settings} if count else card


def _with_null_tokenizer(prefix: str, card: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """A run that measures speed on real data may have a tokenizer that is none, if all ids have a place in it."""
    if int(card.get("vocab_size", 0)) <= int(here.get("vocab_size", 0)):
        return (
            f"{prefix} was made with {card['class']}, and NullTokenizer has room for its ids: good for measuring "
            "speed, but such a model cannot turn its ids into text"
        )
    raise DataError(
        f"{prefix} has ids up to {int(card['vocab_size']) - 1} (made with {card['class']}), and the NullTokenizer of "
        f"this run {here.get('vocab_size')} ids; give --vocab-size {card['vocab_size']}, or the tokenizer of the data"
    )


def entries(card: Mapping[str, Any]) -> dict[str, str]:
    """The entries of a card without levels, as they are shown: hashes by their first digits."""
    return {name: _shown(value) for name, value in _flat(card).items()}


def _flat(card: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a card without levels, under names as they are shown."""
    flat: dict[str, Any] = {}
    for name, value in card.items():
        if isinstance(value, Mapping):
            singular = {"files": "file", "settings": "setting"}.get(name, name)
            flat.update({f"{singular} {key}": inner for key, inner in value.items()})
        else:
            flat[name] = value
    return flat


def _place(name: str) -> int:
    """What says most comes first."""
    kind = name.partition(" ")[0]
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def _shown(value: Any) -> str:
    if value is None:
        return _ABSENT
    text = str(value)
    is_hash = len(text) == hashlib.sha256().digest_size * 2 and not text.strip("0123456789abcdef")
    return f"sha256 {text[:_SHOWN_OF_HASH]}" if is_hash else text
