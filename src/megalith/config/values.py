"""From a word or a TOML value to the value of a setting, and the legal range of it."""

from __future__ import annotations

import argparse
import ast
import difflib
import math
import os
import re
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from megalith.config.fields import Setting
from megalith.errors import ConfigError
from megalith.hub import MODEL_FILES, TOKENIZER_FILES, fetched, is_named
from megalith.registry import IMPORT_FLAG, Registered

DEVICES = ("auto", "cpu", "cuda")
"""Values of --device."""


class BadValue(ValueError):
    """A value that a setting cannot take; the message completes `--flag value: ...`."""


# With one slash too, as pathlib writes it, where no folder of such a name is likely.
_REMOTE = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]*://|(?:s3a?|gs|gcs|az|abfss?|wasbs?|hdfs|oci|msc|hf|https?|ftp|file):/", re.IGNORECASE
)


def remote(path: str) -> str:
    """Return why a path is invalid if it names another machine or an object store; "" for a local path."""
    found = _REMOTE.match(path)
    if found is None:
        return ""
    if found[0].lower().startswith("file:"):
        return f"give the path without {found[0]}"
    return (
        f"{found[0]} is not read or written here, only paths of the file system: mount the store (s3fs, gcsfuse, "
        "blobfuse2, NFS) and give the folder where it is mounted, or copy the files there and back"
    )


_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_NO_PATHS = ("wandb_project", "wandb_exp_name", "wandb_entity", "tokenizer_special_tokens", "validation_set_names")


def holds_paths(setting: Setting) -> bool:
    """Return whether the value of a setting may be a path."""
    about = setting.about
    named = about.choices or about.registers or about.from_environment
    return setting.kind is str and not named and setting.name not in _NO_PATHS


def expanded(path: str) -> str:
    """Expand `~` and `$VAR` in a path, for quoted arguments and recipes; BadValue if a variable is not set."""
    if os.path.lexists(path):
        return path
    names = [one or other for one, other in _VARIABLE.findall(path)]
    if unset := [name for name in names if name not in os.environ]:
        raise BadValue(f"the variable {unset[0]} is not set")
    return os.path.expanduser(os.path.expandvars(path))


def local_name(text: str) -> str:
    """Convert an argument that is the prefix of a path, as an argparse type."""
    if is_named(text):
        raise argparse.ArgumentTypeError(f"{text}: {_NOT_OF_THE_HUB}")
    if problem := remote(text):
        raise argparse.ArgumentTypeError(f"{text}: {problem}")
    try:
        return expanded(text)
    except BadValue as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def local_path(text: str) -> Path:
    """Convert an argument that is a path, as an argparse type."""
    return Path(local_name(text))


def model_path(text: str) -> Path:
    """Convert an argument that is a path or `hf:ORG/NAME[@REVISION]`, a model to fetch, as an argparse type."""
    try:
        return Path(fetched(text, MODEL_FILES)) if is_named(text) else local_path(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def value_from_words(setting: Setting, words: list[str]) -> Any:
    """Convert the arguments of a flag to its value; BadValue if one is not a number or not among the choices."""
    values = [_from_word(setting, word) for word in words]
    return tuple(values) if setting.many else values[0]


def checked_value(setting: Setting, value: Any) -> Any:
    """Return a TOML or Python value in the type of a setting: a whole number for a float, one value for a list."""
    if value is None and setting.optional:
        return None
    if setting.many:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_checked(setting, item) for item in items)
    return _checked(setting, value)


def out_of_range(setting: Setting, value: Any) -> str:
    """Return why a number is out of range; "" if it is not."""
    if setting.kind not in (int, float) or value is None:
        return ""
    if setting.many:
        return next((complaint for item in value if (complaint := _outside(setting, item))), "")
    return _outside(setting, value)


def _outside(setting: Setting, value: float) -> str:
    about = setting.about
    low_fails = (about.at_least is not None and value < about.at_least) or (
        about.above is not None and value <= about.above
    )
    high_fails = (about.at_most is not None and value > about.at_most) or (
        about.below is not None and value >= about.below
    )
    return f"must be {legal_range(setting)}" if low_fails or high_fails else ""


def legal_range(setting: Setting) -> str:
    """Return the legal range as text, such as `at least 0 and below 1`; "" without one."""
    about = setting.about
    bounds = (("at least", about.at_least), ("above", about.above), ("at most", about.at_most), ("below", about.below))
    shown = (
        (words, number if isinstance(number, int) else f"{number:g}") for words, number in bounds if number is not None
    )
    return " and ".join(f"{words} {number}" for words, number in shown)


def closest(word: str, candidates: Iterable[str], cutoff: float = 0.72) -> str:
    """Return the candidate that resembles the word most; "" if none is similar."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else ""


def _from_word(setting: Setting, word: str) -> Any:
    if setting.kind in (int, float):
        try:
            return _whole_number(word) if setting.kind is int else _number(word)
        except BadValue as error:
            legal = legal_range(setting)
            raise BadValue(f"{error}; it must be {legal}" if legal else str(error)) from None
    if not word:
        raise BadValue("the value is empty; is it a variable that is not set?")
    return _chosen(setting, word)


def _checked(setting: Setting, value: Any) -> Any:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if setting.kind is bool and isinstance(value, bool):
        return value
    if setting.kind is int and is_number:
        return _whole_number(str(value))
    if setting.kind is float and is_number:
        return _number(str(value) if isinstance(value, Integral) else repr(float(value)))
    if setting.kind is str and isinstance(value, str | os.PathLike):
        return _chosen(setting, os.fspath(value))
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}
    raise BadValue(f"not {kinds[setting.kind]}")


def _whole_number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        raise BadValue("not a whole number") from None
    if not math.isfinite(number):
        raise BadValue("not a whole number")
    raise BadValue(f"not a whole number in digits; nearest: {round(number)}")


def _number(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        raise BadValue("not a number") from None
    if not math.isfinite(number):
        raise BadValue("not a finite number")
    return number


def _chosen(setting: Setting, word: str) -> str:
    about = setting.about
    if isinstance(word, Registered) and word.entry.kind == about.registers:
        return word
    if not about.choices and not about.registers:
        return _path(setting, word) if holds_paths(setting) else word
    if word in about.choices:
        return word
    choices = ", ".join(about.choices)
    if word in about.later:
        raise BadValue(f"comes with {about.later_with}; in this version: {choices}")
    guess = closest(word, about.choices, cutoff=0.6)
    if about.registers and not guess:
        others = f"not one of {choices}, and" if choices else "but"
        raise BadValue(f"{others} nothing is registered under this name; {IMPORT_FLAG} the module that registers it")
    raise BadValue(f"not one of {choices}" + (f"; did you mean {guess}?" if guess else ""))


_FROM_THE_HUB = {
    "load": MODEL_FILES,
    "pretrained_checkpoint": MODEL_FILES,
    "tokenizer_model": TOKENIZER_FILES,
}
_NOT_OF_THE_HUB = "a name of a hub names no path here"


def _path(setting: Setting, word: str) -> str:
    """Return a local path, where `hf:ORG/NAME` is fetched first."""
    if not is_named(word):
        return expanded(word)
    if setting.name not in _FROM_THE_HUB:
        raise BadValue(_NOT_OF_THE_HUB)
    try:
        return fetched(word, _FROM_THE_HUB[setting.name])
    except ConfigError as error:
        raise BadValue(str(error)) from error


# Layer patterns: a frequency N, or a list of 0 and 1 such as "[0]*3+[1]" or "([1]*3+[0])*2". Megatron evaluates them as
# Python; here only lists, integers, + and * are supported.
_LONGEST = 100_000


def read_pattern(text: str) -> int | tuple[int, ...]:
    """Parse a frequency or a list of layers; raise a ValueError if it is neither."""
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        found = None
    if isinstance(found, int):
        if found < 1:
            raise ValueError(f"{found} is not a frequency; it must be at least 1")
        return found
    if found is None:
        raise ValueError("it must be a number N, or a list of 0 and 1 such as [0]*3+[1]")
    if not set(found) <= {0, 1}:
        raise ValueError("the list may hold 0 and 1 only")
    return tuple(found)


def _value(node: ast.expr) -> int | list[int] | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        parts = [_value(part) for part in node.elts]
        return [part for part in parts if isinstance(part, int)] if all(isinstance(p, int) for p in parts) else None
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(node.op, ast.Mult):
        items, times = (left, right) if isinstance(left, list) else (right, left)
        if isinstance(items, list) and isinstance(times, int) and 0 <= times * len(items) <= _LONGEST:
            return items * times
    return None


def marked_layers(text: str | None, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is marked: every N-th, or those with a 1 in the list; none for None."""
    if text is None:
        return (False,) * num_layers
    pattern = read_pattern(text)
    if isinstance(pattern, int):
        return tuple((layer + 1) % pattern == 0 for layer in range(num_layers))
    return tuple(bool(mark) for mark in pattern[:num_layers])


def read_window(text: str) -> tuple[int, int]:
    """Parse `--window-size LEFT,RIGHT`, with or without brackets; ValueError if it is malformed."""
    parts = text.strip().strip("()[]").split(",")
    try:
        left, right = (int(part) for part in parts)
    except ValueError:
        raise ValueError("it must be two numbers LEFT,RIGHT such as 4096,0") from None
    if left < -1 or right < -1:
        raise ValueError("LEFT and RIGHT must be at least 0, or -1 for no limit")
    return left, right
