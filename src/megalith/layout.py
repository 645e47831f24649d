"""Which rank does what, in pure integers: rank <-> coordinates, groups, shards, layers of stages, recomputation.

Rank order is Megatron's, fastest first: tensor, context, data, pipeline. With world size tp * cp * dp * pp
(docs/reference/checkpoints.md#layer-placement),

    rank = tp_index + tp * (cp_index + cp * (dp_index + dp * pp_index))

Experts add no ranks: the tp * cp * dp ranks of a pipeline stage, in rank order, are folded into etp ranks that share
each expert, fastest, times ep that have different ones, times edp that hold the same (the axes `FOLDED`). Where etp is
tp, which it is unless it is given, those of ep and edp are the ranks that hold the same dense weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from megalith.errors import LayoutError

AXES = ("tp", "cp", "dp", "pp")
"""The axes, fastest first."""
FOLDED = ("etp", "ep", "edp")
"""The axes of the experts, fastest first: ranks with parts of the same expert, with other ones, and with the same."""


@dataclass(frozen=True)
class Layout:
    """How many ranks each kind of parallelism has; `ep` and `etp` (tp unless given) divide those of a stage."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes, in the order of `AXES`."""
        return (self.tp, self.cp, self.dp, self.pp)

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of a rank on each axis."""
        result = {}
        for axis, size in zip(AXES, self.sizes, strict=True):
            rank, result[axis] = divmod(rank, size)
        return result

    def rank(self, coordinates: dict[str, int]) -> int:
        """Return the rank at these coordinates; the inverse of `coordinates`."""
        result = 0
        for axis, size in reversed(list(zip(AXES, self.sizes, strict=True))):
            result = result * size + coordinates[axis]
        return result

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return the sets of ranks that differ on these axes only, each in rank order; together all ranks once.

        Args:
            axes: of `AXES`, or one of `FOLDED` alone.
        """
        if axes[0] in FOLDED:
            (axis,) = axes
            return [ranks for stage in self.groups("tp", "cp", "dp") for ranks in self._fold(stage, axis)]
        along = [range(size) if axis in axes else (0,) for axis, size in zip(AXES, self.sizes, strict=True)]
        others = [(0,) if axis in axes else range(size) for axis, size in zip(AXES, self.sizes, strict=True)]
        offsets = sorted(self.rank(dict(zip(AXES, place, strict=True))) for place in product(*along))
        bases = sorted(self.rank(dict(zip(AXES, place, strict=True))) for place in product(*others))
        return [tuple(base + offset for offset in offsets) for base in bases]

    def _fold(self, stage: tuple[int, ...], axis: str) -> list[tuple[int, ...]]:
        """Return the sets of ranks of a stage that differ on an axis of the experts only."""
        parts, share = self.expert_tp, self.expert_tp * self.ep
        assert len(stage) % share == 0, "a rule of the configuration"
        if axis == "etp":
            return [stage[start : start + parts] for start in range(0, len(stage), parts)]
        if axis == "edp":
            return [stage[start::share] for start in range(share)]
        shares = [stage[start : start + share] for start in range(0, len(stage), share)]
        return [ranks[index::parts] for ranks in shares for index in range(parts)]

    def __str__(self) -> str:
        sizes = zip((*AXES, "ep"), (*self.sizes, self.ep), strict=True)
        parts = [f"{axis}{size}" for axis, size in sizes if size > 1]
        parts += [f"etp{self.etp}"] * (self.expert_tp != self.tp)
        return " x ".join(parts) or "one process"


def shard_range(extent: int, parts: int, index: int) -> tuple[int, int]:
    """Return [start, stop) of the index-th of `parts` nearly equal parts of `extent`; the first are longer by one."""
    size, longer = divmod(extent, parts)
    start = index * size + min(index, longer)
    return start, start + size + (index < longer)


def balanced_positions(length: int, parts: int, index: int) -> tuple[range, ...]:
    """Return the positions of a sequence that the index-th of `parts` ranks holds, in ascending order.

    Of 2 * parts equal chunks rank r holds the r-th and the r-th from the end (two ranks: 0 1 1 0), so that under a
    causal mask all ranks have the same work.

    Raises:
        LayoutError: the length is not a multiple of 2 * parts.
    """
    if parts == 1:
        return (range(length),)
    size, rest = divmod(length, 2 * parts)
    if rest or not size:
        unit = 2 * parts
        nearest = f"{size * unit} or {(size + 1) * unit}" if size else f"{unit}"
        raise LayoutError(
            f"--seq-length {length} does not divide into 2 x --context-parallel-size {parts} = {unit} equal chunks; "
            f"nearest lengths: {nearest}"
        )
    starts = (index * size, (2 * parts - 1 - index) * size)
    return tuple(range(start, start + size) for start in starts)


Stages = tuple[tuple[range, ...], ...]
"""Layers by [stage][chunk]."""


def split_layers(
    num_layers: int,
    stages: int,
    chunks: int = 1,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding_counts: bool = False,
    loss_counts: bool = False,
) -> Stages:
    """Return the layers of each pipeline stage, as [stage][chunk]; chunk c of stage s follows chunk c of s - 1.

    Args:
        num_layers: layers of the model.
        stages: pipeline stages.
        chunks: virtual stages of each stage.
        first, last: layers of the first and of the last stage, the others share the rest (chunks 1 only).
        embedding_counts, loss_counts: the embedding, the loss count as a layer in the split.

    Raises:
        LayoutError: the layers cannot be divided so.
    """
    parts = stages * chunks
    if first is None and last is None:
        counts = _even_counts(num_layers, parts, embedding_counts, loss_counts)
    else:
        counts = _given_counts(num_layers, stages, chunks, first, last)
    return _staged(counts, stages)


_LETTERS = {"E": "the embedding", "t": "a layer", "m": "a layer of multi-token prediction", "L": "the loss"}


def read_parts(text: str) -> tuple[str, ...]:
    """Return the parts of Megatron's `--pipeline-model-parallel-layout`, each in the letters of what it computes.

    `t*3` repeats a letter and `(tt|)*3` a group, which may hold the ends of parts; commas mean nothing.

    Raises:
        LayoutError: another letter.
    """
    plain = text.replace(",", "")
    for repeated in (r"\(([^()]+)\)\*(\d{1,4})", r"([EtmL|])\*(\d{1,4})"):
        plain = re.sub(repeated, lambda found: found[1] * int(found[2]), plain)
    if unknown := set(plain) - {*_LETTERS, "|"}:
        known = ", ".join(f"{letter} is {what}" for letter, what in _LETTERS.items())
        raise LayoutError(
            f"{' '.join(sorted(unknown))} cannot be read; {known}, | ends a stage, and *N repeats a letter or a (group)"
        )
    return tuple(plain.split("|"))


def predictions_last(text: str) -> str:
    """Return a layout as it is computed here: layers of multi-token prediction are beside the loss."""
    *others, last = read_parts(text)
    predictions = sum(part.count("m") for part in others)
    if not predictions:
        return text
    return "|".join([*(part.replace("m", "") for part in others), "m" * predictions + last])


def split_as_given(num_layers: int, stages: int, parts: Sequence[str], predictions: int) -> Stages:
    """Return the layers of each pipeline stage, as [stage][chunk], from what `read_parts` has read.

    Layers of multi-token prediction are computed with the loss, whichever stage they are given.

    Args:
        num_layers: layers of the model.
        stages: pipeline stages.
        parts: letters of each part; part chunk * stages + stage is chunk `chunk` of that stage.
        predictions: layers of multi-token prediction.

    Raises:
        LayoutError: the parts are not those of this model, or this version cannot place them so.
    """
    letters = "".join(parts)
    if not (parts[0].startswith("E") and parts[-1].endswith("L") and letters.count("E") == letters.count("L") == 1):
        raise LayoutError("the first stage begins with E, the last ends with L, and both are there once")
    if letters.count("t") != num_layers:
        raise LayoutError(f"{letters.count('t')} t are not the --num-layers {num_layers} of the model")
    if letters.count("m") != predictions:
        raise LayoutError(f"{letters.count('m')} m are not the --mtp-num-layers {predictions} of the model")
    if "m" in letters.rstrip("Lm") or sum("m" in part for part in parts) > 1:
        raise LayoutError("layers of multi-token prediction follow all others, in one stage; put all m right before L")
    if len(parts) % stages or (stages == 1 and len(parts) > 1):
        raise LayoutError(
            f"its {len(parts)} stages are no multiple of --pipeline-model-parallel-size {stages}; use a size of at "
            f"least 2 that divides {len(parts)}"
        )
    if idle := [stage for stage in range(stages - 1) if not set("".join(parts[stage::stages])) - {"m"}]:
        raise LayoutError(f"rank {idle[0]} of the pipeline would compute nothing; give it a layer, or leave it out")
    return _staged([part.count("t") for part in parts], stages)


def _staged(counts: Sequence[int], stages: int) -> Stages:
    """Return the layers as [stage][chunk] from the number of layers of each part."""
    starts = [sum(counts[:part]) for part in range(len(counts))]
    ranges = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return tuple(tuple(ranges[stage::stages]) for stage in range(stages))


def _even_counts(num_layers: int, parts: int, embedding_counts: bool, loss_counts: bool) -> Sequence[int]:
    units = num_layers + embedding_counts + loss_counts
    if units % parts:
        also = [name for name, counts in (("the embedding", embedding_counts), ("the loss", loss_counts)) if counts]
        what = f"{num_layers} layers" + (f" and {' and '.join(also)}" if also else "")
        raise LayoutError(f"{what} do not divide into {parts} equal pipeline parts")
    counts = [units // parts] * parts
    counts[0] -= embedding_counts
    counts[-1] -= loss_counts
    return counts


def _given_counts(num_layers: int, stages: int, chunks: int, first: int | None, last: int | None) -> Sequence[int]:
    if chunks > 1:
        raise LayoutError("a first or last stage with its own number of layers cannot have virtual stages")
    ends = (first is not None) + (last is not None)
    rest, inner = num_layers - (first or 0) - (last or 0), stages - ends
    if rest < 0 or (inner == 0 and rest != 0) or (inner > 0 and rest % inner):
        raise LayoutError(f"{rest} layers are left for {inner} pipeline stages and do not divide equally")
    counts = [rest // inner if inner else 0] * inner
    return ([] if first is None else [first]) + counts + ([] if last is None else [last])


@dataclass(frozen=True)
class Group:
    """Layers that are computed one after the other, by their places in the stage; `again`: in both passes."""

    layers: range
    again: bool


@dataclass(frozen=True)
class Recompute:
    """Which layers are recomputed, or which parts of all layers.

    Attributes:
        method: uniform or block, or "" for parts.
        num_layers: N of the table above, at least 1; there may be fewer layers.
        parts: of core_attn, mlp, moe (the mlp where it is a mixture of experts), layernorm, shared_experts, moe_act and
            mla_up_proj.
    """

    method: str = ""
    num_layers: int = 1
    parts: frozenset[str] = frozenset()

    def groups(self, layers: int) -> Iterator[Group]:
        """Return the groups of a stage's layers, in order; the last group of a uniform division may be smaller."""
        if not self.method:
            yield Group(range(layers), again=False)
            return
        if self.method == "uniform":
            for start in range(0, layers, self.num_layers):
                yield Group(range(start, min(start + self.num_layers, layers)), again=True)
            return
        first = min(self.num_layers, layers)
        yield from (Group(range(layer, layer + 1), again=True) for layer in range(first))
        yield Group(range(first, layers), again=False)
