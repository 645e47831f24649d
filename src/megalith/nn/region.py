"""The port through which tensor parallelism enters model code.

A tensor-parallel layer is an ordinary layer between two conjugate operators, f and g of Shoeybi et al. 2019
(arXiv:1909.08053): `enter` (identity forward, sum over ranks backward) and `leave` (the reverse). A layer asks its
region how much of each dimension it holds and calls the operators around its math; it never names a rank, a group
or a collective. `Solo` is the region of a single device and the default, so that each module is a plain module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from megalith.nn.linear import Linear


@dataclass(frozen=True)
class Shard:
    """The part [start, stop) of a dimension that is held here; `replicas` ranks hold the same part."""

    start: int
    stop: int
    replicas: int = 1

    @property
    def size(self) -> int:
        return self.stop - self.start


class Region(Protocol):
    """What a layer may know of the ranks that share it."""

    def shard(self, extent: int, unit: int = 1) -> Shard:
        """Return the part of `extent` held here, cut only at multiples of `unit`.

        Raises:
            LayoutError: `extent` cannot be divided so.
        """
        ...

    def enter(self, x: Tensor) -> Tensor:
        """The operator f: hands the input to the sharded layers."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """The operator g: makes one output of the partial outputs."""
        ...

    def column(self, x: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
        """`enter`, then linears whose outputs are sharded; they share one gather of `x`."""
        ...

    def row(self, x: Tensor, linear: Linear) -> Tensor:
        """A linear whose input is sharded, `leave`, then its bias, once."""
        ...


class Solo:
    """The region of one device: everything is here and the operators are identities."""

    def shard(self, extent: int, unit: int = 1) -> Shard:
        return Shard(0, extent)

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor) -> Tensor:
        return x

    def column(self, x: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in linears)

    def row(self, x: Tensor, linear: Linear) -> Tensor:
        return linear(x)
