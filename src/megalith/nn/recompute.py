"""Activation recomputation: layers that keep their input alone, and compute the rest again in the backward pass.

Of the layers of a stage (with virtual stages, of each of them), as Megatron's `--recompute-method` says:

| method  | recomputed                              | kept between the passes                               |
|---------|-----------------------------------------|-------------------------------------------------------|
| uniform | all, in groups of N, each group as one  | the input of each group                               |
| block   | the first N, one by one                 | the input of each of these, and all of the other layers |

While a group is recomputed its activations are there too. The second computation is exactly the first: it draws the
same random numbers, from torch's streams and from the region's own, and all ranks of a region call their collectives
again in the same order. It makes no gradients; those of the weights are written once, in the backward pass.

Source: Chen et al. 2016, arXiv:1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalith.nn.region import Region


@dataclass(frozen=True)
class Group:
    """Layers that are computed one after the other, by their places in the stage; `again`: in both passes."""

    layers: range
    again: bool


@dataclass(frozen=True)
class Recompute:
    """Which layers are recomputed.

    Attributes:
        method: uniform or block.
        num_layers: N of the table above, at least 1; there may be fewer layers.
    """

    method: str
    num_layers: int

    def groups(self, layers: int) -> Iterator[Group]:
        """The layers of a stage that has `layers`, in order; the last group of a uniform division may be smaller."""
        if self.method == "uniform":
            for start in range(0, layers, self.num_layers):
                yield Group(range(start, min(start + self.num_layers, layers)), again=True)
            return
        first = min(self.num_layers, layers)
        yield from (Group(range(layer, layer + 1), again=True) for layer in range(first))
        yield Group(range(first, layers), again=False)


def recomputed(compute: Callable[[Tensor], Tensor], x: Tensor, region: Region) -> Tensor:
    """`compute(x)`, of which `x` alone is kept for the backward pass.

    Custom autograd functions inside must take tensors for their backward passes from `ctx.saved_tensors`, which are
    others then than those that they saved: nothing may go by their identity.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), region.replay()

    # Shapes need no comparison: what is computed again is the same code on the same input.
    y: Tensor = checkpoint(compute, x, use_reentrant=False, context_fn=contexts, determinism_check="none")
    return y
