"""What a pass computes and sends, as integers: launches by their FLOPs and bytes, and collectives. Without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_BY_INDEX = {"gather", "index_select", "index", "scatter_", "_index_put_impl_", "embedding"}
_PRODUCTS = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "_linear_pointwise": 0}
"""Operator -> place of its first factor among its tensors."""
_DTYPES = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}
_KINDS = {
    "bits": ("random_",),
    "random": ("bernoulli", "uniform", "normal_", "dropout"),
    "gelu": ("gelu",),
    "math": ("silu", "sigmoid", "tanh", "exp", "softmax", "log", "pow", "sin", "cos", "rsqrt", "erf"),
}
"""Kind of a pass -> what the names of its operators contain."""


class Op(NamedTuple):
    """Launches that are alike.

    Attributes:
        flops: of a matrix product or of attention, 0 for others.
        bytes: read and written, each tensor once.
        number: how many.
        kind: "product" or "attention" and the dtype multiplied ("product bf16"), or what a pass over memory does:
            "memory", or one of `_KINDS`, which are slower on a CPU, with the dtype if it is a half ("gelu bf16").
    """

    flops: float
    bytes: float
    number: float = 1.0
    kind: str = "memory"


class Sent(NamedTuple):
    """Collectives that are alike, of `bytes` before they are divided; `under`: what is computed meanwhile."""

    axis: str
    operation: str
    bytes: float
    number: float = 1.0
    under: tuple[Op, ...] = ()

    @classmethod
    def from_json(cls, saved: Sequence[Any]) -> Sent:
        axis, operation, size, number, under = saved
        return cls(axis, operation, size, number, tuple(Op(*one) for one in under))


@dataclass(frozen=True)
class Work:
    """What a rank does in a pass."""

    ops: tuple[Op, ...] = ()
    sent: tuple[Sent, ...] = ()

    @classmethod
    def of(cls, works: Iterable[Work]) -> Work:
        """Return the sum of works, like entries in one."""
        ops, sent = Counter[tuple[float, float, str]](), Counter[Any]()
        for work in works:
            for op in work.ops:
                ops[op.flops, op.bytes, op.kind] += op.number  # type: ignore[assignment]
            for one in work.sent:
                sent[one._replace(number=0)] += one.number  # type: ignore[assignment]
        return cls(
            tuple(Op(flops, moved, number, kind) for (flops, moved, kind), number in ops.items()),
            tuple(one._replace(number=number) for one, number in sent.items()),
        )

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Work:
        return cls(tuple(Op(*one) for one in saved["ops"]), tuple(Sent.from_json(one) for one in saved["sent"]))


def size_of(value: Any) -> int:
    """Return the bytes of all tensors in nested lists."""
    if hasattr(value, "element_size"):
        return int(value.numel() * value.element_size())
    return sum(map(size_of, value)) if isinstance(value, (list, tuple)) else 0


def count_op(name: str, given: Sequence[Any], found: Any, *, causal: bool = False) -> Op:
    """Return what an operator of torch computes and moves.

    Args:
        name: without its overload.
        causal: whether attention computes half of its square.
    """
    tensors = [value for value in given if hasattr(value, "element_size")]
    moved = size_of(given) + size_of(found)
    if name in _BY_INDEX:  # of what they read or write in there are only some places
        moved = 2 * size_of(found) or 2 * size_of(given[1:])
    if name in _PRODUCTS:
        first = tensors[_PRODUCTS[name]]
        columns = tensors[_PRODUCTS[name] + 1].shape[0 if name == "_linear_pointwise" else -1]
        return Op(2 * first.numel() * columns, moved, kind=f"product {_DTYPES.get(str(first.dtype), 'fp32')}")
    if "attention" in name:
        backward = "backward" in name
        q, k = tensors[int(backward) : int(backward) + 2]
        flops = (10 if backward else 4) * q.numel() * k.shape[-2]
        return Op(flops / 2 if causal else flops, moved, kind=f"attention {_DTYPES.get(str(q.dtype), 'fp32')}")
    kind = next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), "memory")
    dtype = _DTYPES.get(str(tensors[0].dtype), "fp32") if tensors else "fp32"
    return Op(0, moved, kind=f"{kind} {dtype}" if kind in ("gelu", "math") and dtype != "fp32" else kind)
