"""Where a difference comes from: the layer, the axis that alone shows it, and the operation that is likely wrong."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from megalith.prove.compare import ROUNDED, Difference

_ANY = ""
_LIKELY: tuple[tuple[str, str, str, str], ...] = (
    # kind, axis, pattern of the name, operation
    ("number", _ANY, "^(validation|test).*num_samples", "the number of samples of an evaluation"),
    ("number", _ANY, "^(validation|test)", "the sums of losses and tokens of an evaluation over the ranks"),
    (
        "number",
        _ANY,
        "aux|z_loss|load_balancing",
        "auxiliary losses of experts: their sums over tokens of all ranks",
    ),
    ("number", "tp", "loss", "the cross-entropy over the divided vocabulary"),
    ("number", "cp", "loss", "the sums of losses and tokens over context-parallel ranks"),
    ("number", "pp", "loss", "the losses of the last stage"),
    ("number", _ANY, "loss", "the sums of losses and tokens over the ranks"),
    ("number", _ANY, "grad_norm", "the gradient norm: each element once, summed over all ranks that divide the model"),
    ("number", _ANY, "num_zeros", "the count of zeros: each element once"),
    ("number", _ANY, "params_norm", "the norm of the weights: each element once"),
    ("number", _ANY, "learning_rate|weight_decay", "the schedule, which counts samples"),
    ("number", _ANY, "samples|tokens|FLOPs", "the counts of samples and tokens over replicas"),
    ("output", "ep", _ANY, "the dispatch of tokens to experts and back"),
    ("output", "etp", _ANY, "the sums over the ranks that share an expert"),
    ("output", "tp", _ANY, "the all-reduce (or reduce-scatter and all-gather) around tensor-parallel products"),
    ("output", "cp", _ANY, "the positions of context-parallel ranks, or the exchange of keys and values"),
    ("output", "pp", _ANY, "the messages between stages, or their layers"),
    ("output", "dp", _ANY, "the samples that each replica reads"),
    ("gradient", _ANY, "router", "the sum of the router's gradients over the ranks"),
    ("gradient", _ANY, "local_experts|mlp.experts", "the gradients of experts: their scale, and the sum over replicas"),
    ("gradient", "pp", "embedding|output_layer", "the gradient of tied embeddings, summed over first and last stage"),
    ("gradient", "tp", "norm|bias", "the sum of replicated weights' gradients over tensor-parallel ranks"),
    ("gradient", "tp", _ANY, "the all-reduce (or reduce-scatter) of input gradients in the backward pass"),
    ("gradient", "cp", _ANY, "the sum of gradients over context-parallel ranks, or attention's exchange backward"),
    ("gradient", "dp", _ANY, "the all-reduce (or reduce-scatter) of gradients over replicas, or its scale"),
    ("gradient", "pp", _ANY, "the messages of the backward pass, or the scale by micro-batches"),
    ("gradient", _ANY, _ANY, "the scale of gradients"),
    ("weight", "dp", _ANY, "the optimizer's shards (ZeRO), or the gather of updated weights"),
    ("moment", "dp", _ANY, "the optimizer's shards (ZeRO)"),
    ("tensor", _ANY, _ANY, "the export of this tensor, or reading it"),
    ("logit", _ANY, _ANY, "the order of an exported tensor's elements, or its place in the model"),
    ("weight", _ANY, _ANY, "clipping, or the update"),
    ("moment", _ANY, _ANY, "clipping, or the update of moments"),
)


@dataclass(frozen=True)
class Cause:
    """The first difference of a miniature and what it points to.

    Attributes:
        axes: The fewest axes with which it shows.
        layer: Number of the layer; None outside of layers.
    """

    difference: Difference
    axes: tuple[str, ...]
    layer: int | None
    operation: str

    def __str__(self) -> str:
        where = "outside of layers" if self.layer is None else f"layer {self.layer}"
        axes = " x ".join(self.axes) or "one process"
        return f"{self.difference}\n  where: {where}; axis: {axes}; likely: {self.operation}"


def find_cause(difference: Difference, axes: Collection[str]) -> Cause:
    """Return what a difference that shows with these axes points to."""
    layer = re.search(r"layers\.(\d+)", difference.name)
    named = (*(axis for axis in ("ep", "etp", "tp", "cp", "pp", "dp") if axis in axes), _ANY)
    operation = next(
        (
            text
            for kind, axis, pattern, text in _LIKELY
            if kind == difference.kind.removeprefix(ROUNDED) and axis in named and re.search(pattern, difference.name)
        ),
        "unknown",
    )
    if difference.kind == "gradient" and difference.ratio is not None:
        operation += f" (all elements times {difference.ratio:.6g})"
    return Cause(difference, tuple(axes), int(layer[1]) if layer else None, operation)
