"""Registered datasets: any user-defined sequence of samples, shuffled by epoch, and blends of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megalith.config import DataConfig
from megalith.data.blend import BlendedDataset, normalise
from megalith.data.samples import SPLIT_NAMES, Sizes
from megalith.errors import ConfigError, DataError
from megalith.registry import Registered, error_of_user
from megalith.tokenizers import Tokenizer

_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


class RegisteredDataset:
    """Split of a registered dataset.

    Sample i of epoch e is item `p[i]` of what the user's function has made, where p is a permutation drawn from the
    seed and e; with `register_dataset(..., shuffle=False)` it is item i.

    Args:
        name: Of the registered dataset.
        items: Has `len` and `[i]`: the S + 1 tokens of a sample, or a mapping of its fields (tokens and labels [S];
            loss_mask and position_ids [S] where they are not ones and 0 to S - 1).
        split: One of train, valid and test.
        requested: Samples that the run draws; one epoch if None.
    """

    cache_problem: str | None = None

    def __init__(
        self,
        name: Registered,
        items: Any,
        split: str,
        requested: int | None,
        *,
        data: DataConfig,
        seed: int,
        vocab: int,
    ) -> None:
        self.prefix: str | None = str(name)
        self.name, self.requested = split, requested
        self._items, self._length, self._seed, self._vocab = items, data.seq_length, seed, vocab
        self._shuffles = bool(name.entry.options.get("shuffle", True))
        if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
            raise DataError(
                f"--data-source {name}: its {split} split is a {type(items).__name__}; it must have len() and [i], as "
                "a list has"
            )
        self._size = len(items)
        if not self._size:
            raise DataError(f"--data-source {name}: its {split} split is empty")
        self.identity: dict[str, Any] = {"class": str(name), "num_items": self._size, "split": split, "seed": seed}
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        return self._size if self.requested is None else max(self.requested, self._size)

    @property
    def request_text(self) -> str:
        """Describe the requested samples, for messages."""
        return "one epoch" if self.requested is None else f"{self.requested} samples"

    @property
    def summary(self) -> str:
        """Describe the size of the dataset in one line."""
        return f"{self._size} samples of {self.prefix}, repeated in {-(-len(self) // self._size)} epochs"

    def __getitem__(self, item: int, /) -> dict[str, NDArray[Any]]:
        """Return sample `item` in training order."""
        if not 0 <= item < len(self):
            raise IndexError(f"sample {item} of {len(self)}")
        epoch, place = divmod(item, self._size)
        number = int(self._order(epoch)[place]) if self._shuffles else place
        try:
            sample = self._items[number]
        except Exception as error:
            raise DataError(f"{self._place(number)}, of {self._size}: {error_of_user(error)}") from error
        return self._checked(number, sample)

    def _place(self, number: int) -> str:
        return f"--data-source {self.prefix}: sample {number} of its {self.name} split"

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(self._size)

    def _checked(self, number: int, sample: Mapping[str, ArrayLike] | ArrayLike) -> dict[str, NDArray[Any]]:
        where, length = self._place(number), self._length
        if isinstance(sample, Mapping):
            fields = {name: np.asarray(value) for name, value in sample.items()}
            if lacking := [name for name in _FIELDS[:2] if name not in fields]:
                raise DataError(f"{where} has no {' and no '.join(lacking)}")
        else:
            tokens = np.asarray(sample)
            if tokens.shape != (length + 1,):
                raise DataError(
                    f"{where} has the shape {tokens.shape}; it must have --seq-length + 1 = {length + 1} tokens"
                )
            fields = {"tokens": tokens[:-1], "labels": tokens[1:]}
        fields.setdefault("loss_mask", np.ones(length, np.float32))
        fields.setdefault("position_ids", np.arange(length))
        for name in _FIELDS:
            if fields[name].shape != (length,):
                raise DataError(f"{where}: {name} has the shape {fields[name].shape}; it must be [{length}]")
            if name != "loss_mask" and fields[name].dtype.kind not in "iu":
                raise DataError(f"{where}: {name} has the dtype {fields[name].dtype}; it must be integers")
            fields[name] = fields[name].astype(np.float32 if name == "loss_mask" else np.int64, copy=False)
        ids = (fields["tokens"], fields["labels"][fields["loss_mask"] > 0])
        if any(len(part) and not 0 <= part.min() <= part.max() < self._vocab for part in ids):
            raise DataError(f"{where} has an id outside the vocabulary of {self._vocab}")
        return fields


def build_registered_datasets(
    data: DataConfig, tokenizer: Tokenizer, *, sizes: Sizes, seed: int
) -> tuple[RegisteredDataset | BlendedDataset | None, ...]:
    """Build the splits of the datasets that --data-source names, blended by --data-source-weights.

    Raises:
        ConfigError: None of them has a train split.
        DataError: A split is empty.
    """
    built = tuple(_split(data, tokenizer, split, size, seed) for split, size in enumerate(sizes))
    if built[0] is None:
        raise ConfigError(f"--data-source {' '.join(data.data_source)}: it has no train split")
    return built


def _split(
    data: DataConfig, tokenizer: Tokenizer, split: int, size: int | None, seed: int
) -> RegisteredDataset | BlendedDataset | None:
    name, weights = SPLIT_NAMES[split], normalise(data.data_source_weights or (1.0,))
    parts: list[RegisteredDataset] = []
    shares: list[float] = []
    for source, weight in zip(data.data_source, weights, strict=True):
        assert isinstance(source, Registered)
        items = source(data, tokenizer, name, seed)
        if items is not None:
            # The blend may take one more than the weight's share.
            wanted, vocab = None if size is None else math.ceil(size * weight) + 1, tokenizer.vocab_size
            parts.append(RegisteredDataset(source, items, name, wanted, data=data, seed=seed, vocab=vocab))
            shares.append(weight)
    if len(data.data_source) == 1:
        return parts[0] if parts else None
    return BlendedDataset(parts, shares, size, cache_folder=None) if parts else None


def fingerprint_entries(sources: Sequence[str]) -> dict[str, Any]:
    """Return what the fingerprint of a run records of its registered datasets."""
    return {
        f"source {number}": f"{source} {source.settings if isinstance(source, Registered) else ''}".strip()
        for number, source in enumerate(sources, start=1)
    }
