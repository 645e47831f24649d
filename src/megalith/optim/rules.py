"""The interface of update rules, the arithmetic of an optimizer.

A rule computes the update; the `Optimizer` owns and shards master weights, gradients and states. Under ZeRO a rule
whose `unit` is the element receives flattened pieces of parameters, so its update of an element must depend on that
element alone. A rule whose `unit` is the matrix receives whole matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megalith.device import is_host
from megalith.kernels.torch_private import foreach_copy_, foreach_mul_
from megalith.nn.precision import at_least_fp32
from megalith.registry import naming_errors

Shape = tuple[int, ...]


@dataclass(frozen=True)
class UpdateBatch:
    """The parameters that one call of `UpdateRule.update` updates, with their gradients and states.

    Attributes:
        names: Global names of the parameters.
        params: fp32 master weights, to be changed in place.
        grads: Their gradients, unscaled and clipped; may be overwritten.
        states: Name of a state -> the tensor of each parameter, to be changed in place; zeros before the first step.
        lr: Learning rate of these parameters in this step.
        weight_decay: Weight decay of these parameters; 0 for biases and norms.
        steps_done: Number of steps applied before this one.
    """

    names: Sequence[str]
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Mapping[str, Sequence[Tensor]]
    lr: float
    weight_decay: float
    steps_done: int


class UpdateRule:
    """The arithmetic of an optimizer; subclass it and override `update`."""

    __megalith_flag__ = ""  # `--optimizer NAME` of a registered rule; spelled so that no user's attribute is hidden

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states of a parameter; set it as a class attribute."""
        return ()

    def update(self, batch: UpdateBatch) -> None:
        """Change the parameters and their states in place; each in the shape of this rank's shard."""
        raise NotImplementedError

    def group_settings(self) -> dict[str, Any]:
        """Return what the parameter groups in a checkpoint record about the rule, beside lr and weight decay."""
        return {}

    def state_shapes(self, shape: Shape) -> Mapping[str, Shape]:
        """Return the shape of each state of a parameter with this shape; by default its own.

        Rules whose unit is the element have to keep the default. States of another shape are replicated over the
        tensor-parallel ranks.
        """
        return dict.fromkeys(self.state_names, tuple(shape))

    def replicated_states(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        """Return the shapes of the states that are not sharded like their parameter.

        Every tensor-parallel rank holds all of them. `shape` is that of this rank's shard of the parameter `name`.
        """
        shapes = self.state_shapes(shape)
        return {state: tuple(found) for state, found in shapes.items() if tuple(found) != tuple(shape)}


def run_update(rule: UpdateRule, batch: UpdateBatch) -> None:
    """Update parameters by a rule.

    Raises:
        MegalithError: A registered rule raises an exception, which the message names with its file and line.
    """
    flag = rule.__megalith_flag__
    with naming_errors(f"{flag}: update") if flag else nullcontext():
        rule.update(batch)


PIECE_ON_CPU, PIECE_ELEMENTS = 1 << 18, 1 << 24
"""Elements updated at once: fp32 with gradients and states 4 MiB on a CPU, within a core's cache; 256 MiB elsewhere."""

_Piece = tuple[int, slice]
"""Number of a parameter in a batch, and some of its flattened elements."""


def _pieces(params: Sequence[Tensor]) -> list[list[_Piece]]:
    """Divide parameters into what is updated at once: a piece on a CPU, pieces of many parameters elsewhere."""
    host = is_host(params[0].device)
    size = PIECE_ON_CPU if host else PIECE_ELEMENTS
    found, room = list[list[_Piece]](), 0
    for number, param in enumerate(params):
        for start in range(0, param.numel(), size):
            piece = slice(start, min(start + size, param.numel()))
            room -= piece.stop - piece.start
            if host or room < 0 or not found:
                found.append([])
                room = size - (piece.stop - piece.start)
            found[-1].append((number, piece))
    return found


@dataclass
class Fp32Arithmetic(UpdateRule):
    """An elementwise rule over tensors of several dtypes (`--use-precision-aware-optimizer`), with arithmetic in fp32.

    Stored tensors are rounded, the arithmetic is not: pieces of parameters are converted to fp32, updated and rounded,
    so that the fp32 copies stay in the cache of a CPU and never exist for a whole model; an accelerator gets pieces of
    many parameters in one launch. Tensors have no scale: this suffices for bf16 moments and fp16 master weights, but
    not for fp16 or fp8 moments, whose squares would underflow; a rule of the configuration refuses those.
    """

    rule: UpdateRule
    _buffers: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.rule.state_names

    def group_settings(self) -> dict[str, Any]:
        return self.rule.group_settings()

    def update(self, batch: UpdateBatch) -> None:
        self.update_scaled(batch, 1.0, None)

    def update_scaled(self, batch: UpdateBatch, scale: float, weights: Sequence[Tensor] | None) -> None:
        """Update with `scale` x the gradients, and round the new parameters to `weights` unless None.

        Both happen while a piece is in the cache: separate passes would take 50 % longer.
        """
        kinds = [batch.params, batch.grads, *(batch.states[state] for state in self.state_names)]
        for pieces in _pieces(batch.params):
            parts = [[tensors[number].view(-1)[piece] for number, piece in pieces] for tensors in kinds]
            params, grads, *moments = wide = [self._wide(place, part) for place, part in enumerate(parts)]
            if scale != 1.0:
                foreach_mul_(grads, scale)
            names = [batch.names[number] for number, _ in pieces]
            states = dict(zip(self.state_names, moments, strict=True))
            run_update(self.rule, replace(batch, names=names, params=params, grads=grads, states=states))
            for part, result in zip((parts[0], *parts[2:]), (wide[0], *wide[2:]), strict=True):
                if part is not result:
                    foreach_copy_(part, result)
            if weights is not None:
                foreach_copy_([weights[number].view(-1)[piece] for number, piece in pieces], parts[0])

    def _wide(self, place: int, parts: list[Tensor]) -> list[Tensor]:
        """Return `parts` itself if they are at least fp32, else fp32 copies in a reused buffer."""
        dtype, device = at_least_fp32(parts[0].dtype), parts[0].device
        if all(part.dtype == dtype for part in parts):
            return parts
        sizes = [part.numel() for part in parts]
        buffer = self._buffers.get((place, device))
        if buffer is None or buffer.numel() < sum(sizes):
            buffer = self._buffers[place, device] = torch.empty(sum(sizes), dtype=dtype, device=device)
        copies = list(buffer[: sum(sizes)].split(sizes))
        foreach_copy_(copies, parts)
        return copies


STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of the flags `--exp-avg-dtype` and others -> dtype."""
