"""The interface of code that runs inside an optimizer step: counters, fault injection, MoE routers, savers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megalith.distributed import comm
from megalith.distributed.context import Axis
from megalith.kernels.transfer import to_device
from megalith.models.saved import saved_tensors
from megalith.nn.moe.router import Router
from megalith.nn.placement import Replicated
from megalith.train.faults import Probe
from megalith.train.state import TrainState

if TYPE_CHECKING:
    from megalith.train.step import MicroBatchRunner


class StepHook:
    """Code that runs inside `train_step` and sees its tensors; each method does nothing by default.

    All ranks pass the same hooks in the same order, because their values are reduced together. See also `results.Hook`.
    """

    def on_phase(self, phase: str, step: int) -> None:
        """Run before a phase of the step that makes iteration `step`: "data", "fwd", "bwd" (per micro-batch), "opt"."""

    def begin(self, runner: MicroBatchRunner) -> None:
        """Run before the first micro-batch."""

    def on_batch(self, batch: Mapping[str, Tensor]) -> None:
        """Receive each micro-batch of this replica, as the loader returned it."""

    def on_losses(self, micro_batch: int, sums: Tensor) -> Tensor:
        """Return the sum over terms of each loss of a micro-batch [losses], which is then differentiated."""
        return sums

    def values_to_reduce(self, runner: MicroBatchRunner) -> Tensor | None:
        """Return values [n] to sum over all ranks, together with the losses, once all gradients are computed."""
        return None

    def on_reduced(self, sums: list[float]) -> None:
        """Receive the sums over all ranks [n] of what `values_to_reduce` returned."""

    def before_update(self) -> None:
        """Run before anything that a checkpoint holds changes."""

    def after_update(self) -> None:
        """Run after an update was applied, not after a skipped one."""

    def report(self) -> dict[str, Any]:
        """Return further fields of the StepResult."""
        return {}


class BlendCount(StepHook):
    """Counts the tokens of each dataset of a blend, by the `dataset_id` of the samples.

    Args:
        names: Of the datasets, in the order of their numbers.
    """

    def __init__(self, state: TrainState, names: Sequence[str]) -> None:
        self._context, self._names, self._tokens_field = state.context, names, state.model.tokens_field
        self._samples, self._sample_tokens, self._totals = Counter[int](), 0, list[float]()

    def begin(self, runner: MicroBatchRunner) -> None:
        self._samples.clear()

    def on_batch(self, batch: Mapping[str, Tensor]) -> None:
        self._samples.update(batch["dataset_id"].tolist())
        tokens = batch[self._tokens_field]
        self._sample_tokens = tokens.numel() // tokens.shape[0]

    def values_to_reduce(self, runner: MicroBatchRunner) -> Tensor:
        # Context-parallel ranks have parts of the same samples, which the first of them counts.
        counts = [float(self._samples[number]) * self._context.cp.is_first for number in range(len(self._names))]
        return to_device(torch.tensor(counts, dtype=torch.float64), self._context.device)

    def on_reduced(self, sums: list[float]) -> None:
        self._totals = sums

    def report(self) -> dict[str, Any]:
        pairs = zip(self._names, self._totals, strict=True)
        return {"source_tokens": {name: round(number) * self._sample_tokens for name, number in pairs}}


class BufferHook(StepHook):
    """Gives all replicas the buffers of the first, as DistributedDataParallel does.

    A registered module may change them in its forward pass, by the samples of one replica: BatchNorm's means are such.
    Outside of steps they are equal, so that evaluations and checkpoints do not depend on the rank. Sequence-parallel
    ranks see different tokens too; of their buffers those that a checkpoint saves whole are made equal, as others may
    belong to the shard of a rank.
    """

    def __init__(self, state: TrainState) -> None:
        self._state, self._replicas = state, state.context.flatten_axes("cp", "dp")

    @torch.no_grad()
    def before_update(self) -> None:
        chunks = self._state.chunks
        if self._state.model.region.needs_grad_reduce:
            saved = [item for chunk in chunks for item in saved_tensors(chunk) if not isinstance(item[1], Parameter)]
            whole = [buffer for _, buffer, placement in saved if isinstance(placement, Replicated)]
            _broadcast(whole, self._state.context.tp)
        # Those of routers have a meaning of their own; MoEHook reduces them.
        modules = [one for chunk in chunks for one in chunk.modules() if not isinstance(one, Router)]
        _broadcast([buffer for module in modules for buffer in module.buffers(recurse=False)], self._replicas)


def _broadcast(buffers: Iterable[Tensor], axis: Axis) -> None:
    """Give all ranks of an axis the buffers of its first."""
    buffers = [buffer for buffer in buffers if buffer.numel()]
    if axis.size == 1 or not buffers:
        return
    parts = [buffer.reshape(-1).view(torch.uint8) for buffer in buffers]
    first = comm.broadcast(torch.cat(parts), axis)
    for buffer, part in zip(buffers, first.split([len(part) for part in parts]), strict=True):
        buffer.copy_(part.clone().view(buffer.dtype).view_as(buffer))  # a view of another dtype must be aligned


class ProbeHook(StepHook):
    """Calls the probe of a run at each phase of a step."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def on_phase(self, phase: str, step: int) -> None:
        self._probe(phase, step)


class BeforeUpdate(StepHook):
    """Calls a function before anything that a checkpoint holds changes, such as `AsyncSaver.wait_for_copies`."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.before_update = act  # type: ignore[method-assign]


@dataclass
class NaNInjector(StepHook):
    """Megatron's `--error-injection-rate` and `--error-injection-type`: makes the loss of the first micro-batch NaN.

    Attributes:
        rate: One step in so many is hit; none for 0.
        kind: "transient_error", "persistent_error" or "correct_result", which the anomaly policy tells apart.
        active: Whether the computation under way is hit.
    """

    rate: int = 0
    kind: str = "transient_error"
    seed: int = 0
    active: bool = False

    def strikes(self, iteration: int) -> bool:
        """Return whether an error is injected into this iteration; equal on every rank and after a resume."""
        return self.rate > 0 and Random(f"{self.seed} {iteration}").randrange(self.rate) == 0

    def on_losses(self, micro_batch: int, sums: Tensor) -> Tensor:
        return sums * math.nan if self.active and micro_batch == 0 else sums
