"""Activation recomputation (activation checkpointing): layers keep only their input until the backward pass.

Megatron's `--recompute-method` selects among the layers of a stage (with virtual stages, of each of them):

| method  | recomputed                              | kept between the passes                               |
|---------|-----------------------------------------|-------------------------------------------------------|
| uniform | all, in groups of N, each group as one  | the input of each group                               |
| block   | the first N, one by one                 | the input of each of these, and all of the other layers |

Selective recomputation (`--recompute-modules`) instead names parts of every layer: core_attn, the scores and weights of
attention, if they are kept; mlp, the feed-forward layer; moe, the MoE layer; shared_experts, its shared experts;
layernorm, the output of the norms (`RecomputedNorm`); moe_act, the activations between the two projections of experts,
and mla_up_proj, the heads of multi-latent attention (`RecomputedOutputs`).

The activations of a group are in memory while it is recomputed. The second computation equals the first: it draws the
same random numbers, from torch's streams and from the region's, and all ranks of a region call their collectives again
in the same order. It computes no gradients; those of the weights are written once, in the backward pass.

Source: Chen et al. 2016, arXiv:1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalith.kernels.torch_private import memory_of
from megalith.layout import Recompute as Recompute  # its public name
from megalith.nn.region import Region


class _Repetition(AbstractContextManager[None]):
    """Context of each recomputation: replayed random draws, and a new context from `context_fn`."""

    def __init__(
        self, replay: AbstractContextManager[None], context_fn: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._replay, self._context_fn, self._entered = replay, context_fn, ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._replay)
            stack.enter_context(self._context_fn())
            self._entered = stack.pop_all()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._entered.__exit__(kind, error, trace)


def recomputed(
    compute: Callable[..., Any],
    *inputs: Tensor,
    region: Region,
    context_fn: Callable[[], AbstractContextManager[None]] = nullcontext,
    in_graph: bool = False,
) -> Any:
    """Return `compute(*inputs)` and recompute it in the backward pass, as `torch.utils.checkpoint` does.

    Only the inputs are saved; the recomputation runs in the context that `context_fn` returns. `compute` is a part of a
    layer that is compiled as one graph if `in_graph`, and then draws from torch's default stream alone and needs no
    context; in other compiled layers it runs uncompiled. Whole compiled layers may be inside.

    Custom autograd functions inside must take tensors for their backward passes from `ctx.saved_tensors`, and must not
    compare their identity: they are not the tensors that were saved.
    """
    if torch.compiler.is_compiling():
        if in_graph:
            return checkpoint(compute, *inputs, use_reentrant=False)
        from megalith.nn.operators import keep_inputs_outside  # it loads the compiler, which takes a second

        return keep_inputs_outside(compute, *inputs, region=region, context_fn=context_fn)
    return keep_inputs(compute, *inputs, region=region, context_fn=context_fn)


def keep_inputs(
    compute: Callable[..., Tensor],
    *inputs: Tensor,
    region: Region,
    context_fn: Callable[[], AbstractContextManager[None]],
) -> Any:
    """Implement `recomputed`."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _Repetition(region.replay(), context_fn)

    # Shapes need no comparison: the recomputation is the same code on the same input.
    return checkpoint(compute, *inputs, use_reentrant=False, context_fn=contexts, determinism_check="none")


class RecomputedNorm:
    """Output of a norm, recomputed from its input when the next layer needs it in the backward pass.

    A norm keeps its input for its backward pass, so that its output, which the following linear layer keeps, can be
    recomputed cheaply. Around that layer:

        normed = RecomputedNorm(norm, x)
        with normed.not_kept():
            y = layer(normed.output)
    """

    def __init__(self, norm: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self._norm, self._x = norm, x
        self.output: Tensor = norm(x)

    def not_kept(self) -> AbstractContextManager[None]:
        """Keep the input in place of the output that autograd is about to save."""
        norm, x, where = self._norm, self._x.detach(), _place_of(self.output)

        def keep(tensor: Tensor) -> Tensor | None:
            return None if _place_of(tensor) == where else tensor

        def again(kept: Tensor | None) -> Tensor:
            if kept is not None:
                return kept
            with torch.no_grad():
                return norm(x)

        return torch.autograd.graph.saved_tensors_hooks(keep, again)


def _place_of(tensor: Tensor) -> tuple[int, int, torch.Size]:
    return memory_of(tensor), int(tensor.storage_offset()), tensor.shape


class _Place(NamedTuple):
    """Where a tensor lies in the memory of an output."""

    output: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class RecomputedOutputs:
    """Outputs of a function that are recomputed from its inputs when the next layer needs them in the backward pass.

    Neither they nor the intermediate tensors are saved for the backward pass:

        heads = RecomputedOutputs(project, latent)
        with heads.not_kept():
            y = attend(*heads.outputs)

    They are recomputed once, with a graph, which their own backward pass then uses. `compute` draws no random
    numbers; all ranks of a region call its collectives again in the same order.
    """

    def __init__(self, compute: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> None:
        self._compute = compute
        self._inputs = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
        self._found: tuple[Tensor, ...] | None = None
        self.outputs: tuple[Tensor, ...] = _RecomputedOutputsFunction.apply(self, *inputs)

    def _again(self) -> tuple[Tensor, ...]:
        if self._found is None:
            with torch.enable_grad():
                self._found = self._compute(*self._inputs)
        return self._found

    def not_kept(self) -> AbstractContextManager[None]:
        """Keep a reference in place of each output, or view of it, that autograd is about to save."""
        memory = {memory_of(x): number for number, x in enumerate(self.outputs) if x.numel()}
        again, self.outputs = self._again, ()  # else the graph would keep them for its own node

        def keep(tensor: Tensor) -> Tensor | _Place:
            number = memory.get(memory_of(tensor))
            if number is None:
                return tensor
            return _Place(number, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

        def found(kept: Tensor | _Place) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            return again()[kept.output].detach().as_strided(kept.size, kept.stride, kept.offset)

        return torch.autograd.graph.saved_tensors_hooks(keep, found)


class _RecomputedOutputsFunction(torch.autograd.Function):
    """The outputs, without a graph; backward through the one of the second computation."""

    @staticmethod
    def forward(ctx: Any, owner: RecomputedOutputs, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.owner = owner
        ctx.save_for_backward(*inputs)
        return owner._compute(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        owner: RecomputedOutputs = ctx.owner
        _ = ctx.saved_tensors  # where torch raises if they were changed in place
        outputs, owner._found = owner._again(), None
        torch.autograd.backward(outputs, grads)
        found = tuple(x.grad for x in owner._inputs)
        for x in owner._inputs:
            x.grad = None
        return None, *found
