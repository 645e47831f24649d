"""Comparison of two checkpoints of any formats and layouts, tensor by tensor.

Both are read in model space, which is independent of the layout, one layer of one tensor at a time, so that memory is
bounded by the largest of them. Equal means equal bits; the differences of unequal tensors are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.content import CheckpointContent, Chunk
from megalith.checkpoint.formats.megatron_names import parse_name
from megalith.checkpoint.formats.per_rank_layout import OWN_KEYS
from megalith.checkpoint.formats.torch_dist import (
    OPTIMIZER_PREFIX,
    OptimizerScalars,
    is_of_experts,
    read_optimizer_common,
    weight_of,
)
from megalith.checkpoint.sources.adapters import InPrecision, WeightsOnly, args_of, has_vocabulary_rows
from megalith.checkpoint.sources.source import HALF_PRECISION, MAIN_PREFIX, Source, StoredTensor, short

_BLOCK = 2**22  # elements that are compared at once, so that what the arithmetic needs beside them stays small
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COUNTERS = ("consumed_train_samples", "consumed_valid_samples")


@dataclass(frozen=True)
class TensorDifference:
    """Number and size of the differences between two tensors of one name."""

    name: str  # its key; with the layer, where it is one of the stacked ones
    what: str = ""  # in words: missing, another shape, another dtype; "" if these are alike
    differing: int = 0  # number of elements whose bits differ
    elements: int = 0  # that were compared
    # the largest differences; the second over the larger magnitude. Infinite where one is not a number.
    absolute: float = 0.0
    relative: float = 0.0

    @property
    def is_none(self) -> bool:
        return not self.what and self.differing == 0

    def __str__(self) -> str:
        parts = [self.what] if self.what else []
        if self.differing:
            parts.append(
                f"{self.differing} of {self.elements} elements differ, by at most {self.absolute:.3g} absolutely and "
                f"{self.relative:.3g} relatively"
            )
        elif self.what and self.elements:
            parts.append(f"the {self.elements} elements that both have are equal")
        return f"{self.name}: {'; '.join(parts)}"


@dataclass(frozen=True)
class StateDifference:
    """Value beside the tensors that differs."""

    name: str
    one: Any
    other: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.one} and {self.other}"


def compared(source: Source, *, weights: bool) -> Source:
    """Return a source of the tensors to compare: without fp32 copies of fp32 weights, or the weights alone."""
    plain = InPrecision(source)
    return WeightsOnly(plain) if weights else plain


def with_equal_precision(one: Source, other: Source) -> tuple[Source, Source, int | None]:
    """Return two sources whose weights can be equal, and which (0, 1 or None) presents its fp32 master weights.

    A run in half precision has fp32 master weights. A conversion to fp32 writes these, so they are compared.
    """
    pair = [one, other]
    for index, (half, whole) in enumerate(((one, other), (other, one))):
        if _is_half_with_main(half) and _weight_dtypes(whole) == {torch.float32}:
            pair[index] = InPrecision(half, torch.float32)
            return pair[0], pair[1], index
    return one, other, None


def _is_half_with_main(source: Source) -> bool:
    has_main = any(key.startswith(MAIN_PREFIX) for key in source.contents().tensors)
    return has_main and not _weight_dtypes(source).isdisjoint(HALF_PRECISION)


def _weight_dtypes(source: Source) -> set[torch.dtype]:
    return {stored.dtype for key, stored in source.contents().tensors.items() if not key.startswith(OPTIMIZER_PREFIX)}


def tensor_differences(one: Source, other: Source) -> Iterator[TensorDifference]:
    """Compare all tensors of two sources as `compared` gives them, in the order of the first, equal ones too."""
    first, second = one.contents(), other.contents()
    for key, held in first.tensors.items():
        match = second.tensors.get(key)
        if match is None:
            yield TensorDifference(key, "only in the first")
        else:
            yield from _of_key(key, one, held, other, match)
    for key in second.tensors:
        if key not in first.tensors:
            yield TensorDifference(key, "only in the second")


def _of_key(
    key: str, one: Source, held: StoredTensor, other: Source, match: StoredTensor
) -> Iterator[TensorDifference]:
    shape, what = held.shape, []
    if held.dtype != match.dtype:
        what.append(f"{short(held.dtype)} and {short(match.dtype)}")
    if held.shape != match.shape:
        what.append(f"shapes {list(held.shape)} and {list(match.shape)}")
        rows = min(held.shape[0], match.shape[0]) if held.shape else 0
        if not has_vocabulary_rows(key) or held.shape[1:] != match.shape[1:]:
            yield TensorDifference(key, "; ".join(what))
            return
        shape = (rows, *held.shape[1:])
    weight = weight_of(key)
    axes = parse_name(weight).stacked_axes
    for index in product(*map(range, shape[:axes])):
        a, b = _read(one, key, held, shape, index), _read(other, key, match, shape, index)
        yield difference(_named(key, weight, index), a, b, what="; ".join(what))


def _named(key: str, weight: str, index: tuple[int, ...]) -> str:
    kinds = ["layer", "expert"] if len(index) == 2 else ["expert" if is_of_experts(weight) else "layer"]
    places = ", ".join(f"{kind} {at}" for kind, at in zip(kinds, index, strict=False))
    return f"{key} of {places}" if places else key


def _read(source: Source, key: str, stored: StoredTensor, shape: tuple[int, ...], index: tuple[int, ...]) -> Tensor:
    """Read one layer or expert of a stacked tensor, or the first `shape` elements of another."""
    inner = shape[len(index) :]
    tensor = torch.empty((*(1 for _ in index), *inner), dtype=stored.dtype)
    source.read(CheckpointContent([Chunk(key, tensor, (*index, *(0 for _ in inner)), stored.shape)]))
    return tensor


def difference(name: str, one: Tensor, other: Tensor, what: str = "") -> TensorDifference:
    """Compare two tensors of one shape; those of different dtypes by their values."""
    differing, absolute, relative = 0, 0.0, 0.0
    for a, b in zip(one.reshape(-1).split(_BLOCK), other.reshape(-1).split(_BLOCK), strict=True):
        unequal = _bits(a) != _bits(b) if a.dtype == b.dtype else a.double() != b.double()
        if count := int(unequal.count_nonzero()):
            left, right = a[unequal].double(), b[unequal].double()
            gap = (left - right).abs()
            scale = torch.maximum(left.abs(), right.abs())
            differing += count
            absolute = max(absolute, _largest(gap))
            relative = max(relative, _largest(gap / torch.where(scale == 0, 1.0, scale)))
    return TensorDifference(name, what, differing, one.numel(), absolute, relative)


def _largest(values: Tensor) -> float:
    """Return the largest value; infinite if one is NaN."""
    return float(torch.where(values.isnan(), math.inf, values).max())


def _bits(tensor: Tensor) -> Tensor:
    """View the elements as integers, so that NaN equals itself and -0 does not equal 0."""
    return tensor.view(_INTEGERS[tensor.element_size()])


Architecture = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""What Megatron's arguments say of the model, in settings that can be compared."""


def state_differences(
    one: Mapping[str, Any], other: Mapping[str, Any], architecture: Architecture, *, weights: bool
) -> list[StateDifference]:
    """Compare the metadata: the architecture and, unless `weights`, the progress of the run."""
    first, second = (_state(common, architecture, weights=weights) for common in (one, other))
    names = [*first, *(name for name in second if name not in first)]
    pairs = [(name, first.get(name, "absent"), second.get(name, "absent")) for name in names]
    return [StateDifference(name, a, b) for name, a, b in pairs if a != b]


def _state(common: Mapping[str, Any], architecture: Architecture, *, weights: bool) -> dict[str, Any]:
    args = args_of(common)
    state = {**architecture(args), "padded_vocab_size": args.get("padded_vocab_size")}
    if weights:
        return state
    state["iteration"] = common.get("iteration")
    state |= {name: args.get(name) for name in _COUNTERS}
    state |= {f"scheduler {name}": value for name, value in (common.get("opt_param_scheduler") or {}).items()}
    optimizer = common.get("optimizer") or {}
    if "optimizer" in optimizer or "param_groups" in optimizer or 0 in optimizer:
        state |= _optimizer_state(read_optimizer_common(optimizer))
    return state | _own_state(common)


def _own_state(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a run that Megatron's checkpoints lack, without the W&B run, on which no number depends."""
    own = {key: value for key, value in common.items() if str(key).startswith(OWN_KEYS)}
    own.pop(f"{OWN_KEYS}wandb_run_id", None)
    return dict(_leaves("", {key.removeprefix(OWN_KEYS).replace("_", " "): value for key, value in own.items()}))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested dicts and lists, each with the names and positions that lead to it."""
    if not isinstance(value, Mapping | list):
        yield name, value
        return
    for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _leaves(f"{name} {key}".strip(), part)


def _optimizer_state(scalars: OptimizerScalars) -> dict[str, Any]:
    state: dict[str, Any] = {"optimizer step": scalars.step}
    state |= {f"loss scaler {name}": value for name, value in (scalars.scaler or {}).items()}
    for group in scalars.param_groups:
        name = "with" if group.get("wd_mult") else "without"
        state |= {f"{key} of the group {name} weight decay": group.get(key) for key in ("lr", "weight_decay")}
    return state
