"""Datasets, weights and splits that `--data-path` and related flags select."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.errors import ConfigError

if TYPE_CHECKING:
    from megalith.config.groups.data import DataConfig

PATHS = (
    *("data_path", "data_args_path"),
    *("train_data_path", "valid_data_path", "test_data_path"),
    "per_split_data_args_path",
)
"""Settings that name datasets."""
SPLIT_FLAGS = ("--train-data-path", "--valid-data-path", "--test-data-path")
SPLIT_KEYS = ("train", "valid", "test")


@dataclass(frozen=True)
class Blend:
    """Weighted mixture of datasets."""

    prefixes: tuple[str, ...]  # paths without `.bin` / `.idx`, at least one
    # how much of each, in any unit, each above 0; None to take the datasets as they are
    weights: tuple[float, ...] | None = None

    @property
    def is_single(self) -> bool:
        """Return whether this is a single dataset without weights."""
        return len(self.prefixes) == 1 and self.weights is None


@dataclass(frozen=True)
class DataSources:
    """Datasets of a run: one blend that `--split` divides, one blend per split, or none."""

    whole: Blend | None = None
    splits: tuple[Blend | None, Blend | None, Blend | None] | None = None

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Return every dataset prefix once."""
        blends = (self.whole,) if self.splits is None else self.splits
        return tuple(dict.fromkeys(prefix for blend in blends if blend is not None for prefix in blend.prefixes))

    @property
    def training(self) -> Blend | None:
        """Return the blend for training."""
        return self.whole if self.splits is None else self.splits[0]


def parse_blend(words: Sequence[str], where: str) -> Blend:
    """Parse prefixes, or alternating weights and prefixes.

    Words are weights and prefixes in turn if there is an even number of them and every other one, from the first on, is
    a number; if none of those is a number, all words are prefixes.

    Args:
        words: at least one.
        where: the flag, for messages.

    Raises:
        ConfigError: some of those words are numbers and others are not, or a weight is not above 0.

    Source:  Megatron-LM `get_blend_from_list`.
    """
    shown = f"{where} {' '.join(words)}"
    if not words:
        raise ConfigError(f"{where}: it names no dataset; give prefixes, or weights and prefixes in turn")
    if len(words) % 2:
        if len(words) > 1 and all(_number(word) is not None for word in words[::2]):
            raise ConfigError(f"{shown}: the last weight has no prefix after it")
        return Blend(tuple(words))
    weights = [_number(word) for word in words[::2]]
    if all(weight is None for weight in weights):
        return Blend(tuple(words))
    for word, weight, prefix in zip(words[::2], weights, words[1::2], strict=True):
        if weight is None:
            raise ConfigError(
                f"{shown}: '{word}' is in the position of the weight of {prefix} and is not a number; give prefixes "
                "alone, or a weight before each of them"
            )
        if not 0 < weight < float("inf"):
            raise ConfigError(f"{shown}: weight {word} of {prefix} is not above 0; leave out data with weight 0")
    return Blend(tuple(words[1::2]), tuple(weight for weight in weights if weight is not None))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def data_sources(data: DataConfig) -> DataSources:
    """Return the datasets that flags and files name; ConfigError if one is unreadable or malformed."""
    if data.per_split_data_args_path is not None:
        return DataSources(splits=_splits_of_file(Path(data.per_split_data_args_path)))
    if any(data.paths_of_splits):
        train, valid, test = (
            parse_blend(words, flag) if words else None
            for words, flag in zip(data.paths_of_splits, SPLIT_FLAGS, strict=True)
        )
        return DataSources(splits=(train, valid, test))
    if data.data_args_path is not None:
        where = f"--data-args-path {data.data_args_path}"
        return DataSources(whole=parse_blend(_read(Path(data.data_args_path), where).split(), where))
    return DataSources(whole=parse_blend(data.data_path, "--data-path") if data.data_path else None)


def with_prefixes(data: DataConfig, names: Mapping[str, str]) -> DataConfig:
    """Return the settings with other names for some prefixes; weights and splits stay. Raises as `data_sources`."""

    def words(blend: Blend | None) -> tuple[str, ...]:
        if blend is None:
            return ()
        prefixes = [names.get(prefix, prefix) for prefix in blend.prefixes]
        pairs = zip(map(repr, blend.weights or ()), prefixes, strict=False)
        return tuple(word for pair in pairs for word in pair) if blend.weights else tuple(prefixes)

    sources = data_sources(data)
    train, valid, test = map(words, sources.splits or (None,) * 3)
    data = replace(data, data_args_path=None, per_split_data_args_path=None, data_path=words(sources.whole))
    return replace(data, train_data_path=train, valid_data_path=valid, test_data_path=test)


def is_text(prefix: str) -> bool:
    """Return whether a word of the data flags names a file or folder of text in place of a .bin/.idx pair."""
    path = Path(prefix)
    if not prefix or path.suffix in (".bin", ".idx") or Path(prefix + ".idx").is_file():
        return False
    return path.is_file() or (path.is_dir() and any(entry.name != "cache" for entry in path.iterdir()))


def _splits_of_file(path: Path) -> tuple[Blend | None, Blend | None, Blend | None]:
    where = f"--per-split-data-args-path {path}"
    try:
        content = json.loads(_read(path, where))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    if not isinstance(content, dict) or not set(content) <= set(SPLIT_KEYS):
        raise ConfigError(f'{where}: not an object with lists "train", "valid" and "test"')
    blends = []
    for key in SPLIT_KEYS:
        words = content.get(key)
        words = words.split() if isinstance(words, str) else words
        if words is not None and not (
            isinstance(words, list) and all(isinstance(word, str | int | float) for word in words)
        ):
            raise ConfigError(f'{where}: "{key}" is not a list of weights and prefixes')
        blends.append(parse_blend([str(word) for word in words], f'{where}, "{key}"') if words else None)
    train, valid, test = blends
    if train is None:
        raise ConfigError(f'{where}: it has no "train", so that nothing is left for training')
    return train, valid, test


def _read(path: Path, where: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise ConfigError(f"{where}: cannot be read: {reason}") from error
