"""Fingerprint of a tokenizer, independent of paths; stored beside datasets and in checkpoints, and compared.

Token ids mean nothing without the tokenizer that made them, and training with a wrong one raises no error. A
fingerprint holds the class, the number of ids, a hash of the vocabulary (id -> token), the special ids, the hash of
each file and the settings that change ids. Two fingerprints with the same vocabulary agree, whatever the names of
classes and files: a model imported from Hugging Face reads data made by GPT2BPETokenizer. Fingerprints of older
versions have no hash of the vocabulary; against those, classes, files and settings are compared.

Beside a dataset PREFIX.bin, PREFIX.idx it is stored as JSON in PREFIX.card. The suffix matters: Megatron's
tools/merge_datasets.py takes every file of a folder for half of a pair, and finds the other half of this one. That of a
share of the input also holds digests of the settings of its run, so that shares of different runs are not merged.
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
_RUN = "run"  # entry of the digests
_ORDER = ("class", "vocabulary", "vocab_size", "special", "setting", "file")
_SHOWN_OF_HASH = 12
_BY_CASE = "BertWordPiece"  # Case and LowerCase: different ids with the same vocabulary


def fingerprint_path(prefix: str) -> Path:
    """Return the path of the fingerprint of a dataset, PREFIX.card."""
    return Path(prefix + ".card")


def file_hashes(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the sha256 of each file, by its name in the fingerprint."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def vocabulary_hash(tokens: Iterable[tuple[str, int]]) -> str:
    """Return the sha256 of a vocabulary without `--vocab-extra-ids`, whatever its order."""
    lines = [f"{number}\t{token}\n" for number, token in sorted((number, token) for token, number in tokens)]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def write_fingerprint(prefix: str, fingerprint: Mapping[str, Any], run: Mapping[str, str] | None = None) -> None:
    """Write the fingerprint of a dataset, replacing an older one; with the digests of the `run` that made a share.

    Raises:  DataError if it cannot be written.
    """
    path = fingerprint_path(prefix)
    if run is not None:
        fingerprint = {**fingerprint, _RUN: dict(run)}
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(fingerprint, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error


def read_fingerprint(prefix: str) -> dict[str, Any] | None:
    """Read the fingerprint of a dataset; None if there is none, as with Megatron. Raises DataError if it is damaged."""
    card = _read_card(prefix)
    return None if card is None else {name: value for name, value in card.items() if name != _RUN}


def read_run_digests(prefix: str) -> dict[str, str] | None:
    """Read the digests of the settings of the run that made a share, by name; None if an older version made it.

    Raises:  DataError if the fingerprint is damaged.
    """
    run = (_read_card(prefix) or {}).get(_RUN)
    return run if isinstance(run, dict) else None


def _read_card(prefix: str) -> dict[str, Any] | None:
    path = fingerprint_path(prefix)
    try:
        fingerprint = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}; remove it to skip the comparison") from error
    if not isinstance(fingerprint, dict) or not isinstance(fingerprint.get("class"), str):
        raise DataError(f"{path} is not a tokenizer fingerprint; remove it to skip the comparison")
    return fingerprint


def fingerprint_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the differences of two fingerprints, by name of the entry; empty if ids mean the same tokens.

    A special id that only one fingerprint has is not a difference: later versions record more.
    """
    left, right = _flatten(one), _flatten(other)
    is_known = left.get("vocabulary") is not None and right.get("vocabulary") is not None
    is_same = is_known and left["vocabulary"] == right["vocabulary"]
    differing = {}
    for name in sorted(dict.fromkeys((*left, *right)), key=_rank):
        values = left.get(name), right.get(name)
        kind = name.partition(" ")[0]
        if values[0] == values[1] or (kind == "special" and None in values):
            continue
        if (name == "vocabulary" and not is_known) or (is_same and not _changes_ids(kind, one, other)):
            continue
        differing[name] = (_shown(values[0]), _shown(values[1]))
    return differing


def _changes_ids(kind: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether a difference of this kind matters between fingerprints with the same vocabulary."""
    classes = str(one.get("class")), str(other.get("class"))
    if kind == "class":
        return all(name.startswith(_BY_CASE) for name in classes)
    if kind == "setting":
        return classes[0] == classes[1]
    return kind != "file"


def side_by_side(names: tuple[str, str], differences: Mapping[str, tuple[str, str]]) -> list[str]:
    """Format differences as lines of three columns: the entry, and its value in each fingerprint."""
    rows = [("", *names), *((name, *values) for name, values in differences.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return ["  ".join([row[0].ljust(widths[0]), row[1].ljust(widths[1]), row[2]]).rstrip() for row in rows]


def require_same(names: tuple[str, str], one: Mapping[str, Any], other: Mapping[str, Any], remedy: str) -> None:
    """Raise DataError if two fingerprints are of different tokenizers, showing where they differ.

    `names` are the owners of the two in the message, which ends with the `remedy`.
    """
    differing = fingerprint_differences(one, other)
    if differing:
        head = f"{names[0]} and {names[1]} have different tokenizers (equal entries are left out):"
        raise DataError("\n  ".join([head, *side_by_side(names, differing), remedy]))


def require_tokenizer_of_data(prefix: str, here: Mapping[str, Any]) -> str | None:
    """Compare the fingerprint of a dataset with that of the run's tokenizer.

    Return a note for the user if nothing could be compared, else None.

    Raises:  DataError if the dataset was made with another tokenizer, or its fingerprint is damaged.
    """
    saved = read_fingerprint(prefix)
    if saved is None:
        path = fingerprint_path(prefix)
        return f"{path} is missing (made by Megatron or an older version): the tokenizer of the data is not compared"
    if here.get("class") == "NullTokenizer" != saved["class"]:
        return _require_room_for_null_tokenizer(prefix, saved, here)
    require_same(
        (prefix, "this run"),
        _without_sentinels(saved),
        _without_sentinels(here),
        _remedy(prefix, saved),
    )
    return None


def _remedy(prefix: str, saved: Mapping[str, Any]) -> str:
    remedy = "give this run the tokenizer of the data, or preprocess the text again with this one"
    if saved.get("vocabulary") is not None:
        return f"{remedy} (the tokenizer of the data is described in {fingerprint_path(prefix)})"
    return (
        f"{remedy}. {fingerprint_path(prefix)} was written by an older version without the vocabulary, so classes and "
        "files are compared instead. If both are known to give the same ids, remove the file: then nothing is compared"
    )


def _without_sentinels(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drop the tokens of `--vocab-extra-ids`, whose ids follow all others and which occur in no text.

    Megatron's command lines preprocess the data of T5 without them, and train with them.
    """
    settings = dict(saved.get("settings", {}))
    count = int(settings.pop("vocab_extra_ids", 0) or 0)
    return {**saved, "vocab_size": int(saved["vocab_size"]) - count, "settings": settings} if count else saved


def _require_room_for_null_tokenizer(prefix: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return the note on a NullTokenizer used to measure speed. Raises DataError if ids of the data exceed it."""
    if int(saved.get("vocab_size", 0)) <= int(here.get("vocab_size", 0)):
        return (
            f"{prefix} was made with {saved['class']}, and NullTokenizer has room for its ids: sufficient to measure "
            "speed, but the model's ids cannot be decoded to text"
        )
    raise DataError(
        f"{prefix} has ids up to {int(saved['vocab_size']) - 1} (made with {saved['class']}), but the NullTokenizer of "
        f"this run has {here.get('vocab_size')}; give --vocab-size {saved['vocab_size']}, or the tokenizer of the data"
    )


def shown_entries(fingerprint: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a fingerprint without nesting, as displayed: hashes are shortened."""
    return {name: _shown(value) for name, value in _flatten(fingerprint).items()}


def _flatten(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a fingerprint without nesting, under their displayed names."""
    flat: dict[str, Any] = {}
    for name, value in fingerprint.items():
        if isinstance(value, Mapping):
            singular = {"files": "file", "settings": "setting"}.get(name, name)
            flat.update({f"{singular} {key}": inner for key, inner in value.items()})
        else:
            flat[name] = value
    return flat


def _rank(name: str) -> int:
    """Return the sort position of an entry; the most telling come first."""
    kind = name.partition(" ")[0]
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def _shown(value: Any) -> str:
    if value is None:
        return _ABSENT
    text = str(value)
    is_hash = len(text) == hashlib.sha256().digest_size * 2 and not text.strip("0123456789abcdef")
    return f"sha256 {text[:_SHOWN_OF_HASH]}" if is_hash else text
