"""Wrong numbers put into a run on purpose, to see what it does about them.

`nan@step=7,point=activation,module=decoder.layers.1.mlp,rank=1,micro_batch=0` makes one element of the output of that
module a NaN on that rank, whenever that step is computed; with `times=1` the first time only. Points are weight,
activation, grad (of the output of the module) and loss; `inf` is the other value, and `spike` multiplies the loss by
ten thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from megalith.models.language_model import Inputs, LanguageModel
from megalith.schedules.pipeline import Op
from megalith.train.state import TrainState
from megalith.train.step import MicroBatchRunner

VALUES = {"nan": math.nan, "inf": math.inf, "spike": 1.0e4}


@dataclass(frozen=True)
class Spoil:
    """What is spoiled, and where.

    Attributes:
        action: a key of `VALUES`.
        step: that makes this iteration.
        point: weight, activation, grad or loss.
        module: a module, or a parameter for the point "weight"; not for the loss.
        rank: the only rank that it strikes; every rank that has the module if None.
        micro_batch: of the step.
        times: after which it is over; never if None.
    """

    action: str
    step: int
    point: str
    module: str = ""
    rank: int | None = None
    micro_batch: int = 0
    times: int | None = None


def parse_spoil(text: str) -> Spoil:
    """Read the text form."""
    action, _, rest = text.partition("@")
    fields: dict[str, Any] = dict(part.partition("=")[::2] for part in rest.split(","))
    return Spoil(action, **{name: int(value) if value.isdigit() else value for name, value in fields.items()})


class _Spoiler:
    """Carries out what strikes this rank."""

    def __init__(self, spoils: Sequence[Spoil], state: TrainState) -> None:
        self._state, self._micro_batch = state, 0
        own = [spoil for spoil in spoils if spoil.rank in (None, state.context.rank)]
        self.left = {spoil: math.inf if spoil.times is None else spoil.times for spoil in own}
        self._weights = {name: weight for chunk in state.chunks for name, weight in chunk.named_parameters()}

    def begin(self) -> None:
        """A step is about to be computed."""
        for spoil in self.left:
            weight = self._weights.get(spoil.module)
            self._micro_batch = spoil.micro_batch
            if spoil.point == "weight" and weight is not None and self._strikes(spoil):
                with torch.no_grad():
                    weight.view(-1)[0] = VALUES[spoil.action]

    def on(self, micro_batch: int) -> None:
        """A pass of this micro-batch begins."""
        self._micro_batch = micro_batch

    def losses(self, chunk: LanguageModel) -> Any:
        """The method of a chunk that computes the losses, spoiled or not."""
        compute = chunk.losses

        def losses(inputs: Inputs, hidden: Tensor | None) -> Any:
            found = compute(inputs, hidden)
            struck = [spoil for spoil in self.left if chunk.training and spoil.point == "loss" and self._strikes(spoil)]
            for spoil in struck[:1]:
                found = tuple(replace(loss, summed=loss.summed * VALUES[spoil.action]) for loss in found)
            return found

        return losses

    def hook(self, spoil: Spoil) -> Any:
        """A forward hook that spoils an output or its gradient."""

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            if not self._strikes(spoil):
                return None
            mark = torch.zeros_like(output)
            mark.view(-1)[0] = VALUES[spoil.action]
            if spoil.point == "activation":
                return output + mark
            output.register_hook(lambda grad: grad + mark)
            return None

        return hook

    def _strikes(self, spoil: Spoil) -> bool:
        if (spoil.step, spoil.micro_batch) != (self._state.iteration + 1, self._micro_batch) or self.left[spoil] < 1:
            return False
        self.left[spoil] -= 1
        return True


@contextmanager
def spoiled(state: TrainState, spoils: Sequence[str]) -> Iterator[None]:
    """Put wrong numbers into the steps of a run within the block."""
    spoiler, prepare = _Spoiler([parse_spoil(text) for text in spoils], state), MicroBatchRunner.prepare
    gradients = state.optimizer.gradients
    begin = gradients.begin

    def begin_step(num_micro_batches: int | None = None) -> None:
        begin(num_micro_batches)
        spoiler.begin()

    def note(work: MicroBatchRunner, op: Op) -> None:
        spoiler.on(op.micro_batch)
        prepare(work, op)

    with ExitStack() as stack:
        stack.enter_context(patch.object(gradients, "begin", begin_step))
        stack.enter_context(patch.object(MicroBatchRunner, "prepare", note))
        for chunk in state.chunks:
            stack.enter_context(patch.object(chunk, "losses", spoiler.losses(chunk)))
            modules = dict(chunk.named_modules())
            for spoil in spoiler.left:
                if spoil.point in ("activation", "grad") and spoil.module in modules:
                    stack.callback(modules[spoil.module].register_forward_hook(spoiler.hook(spoil)).remove)
        yield


def spoil_runs(text: str) -> None:
    """Put wrong numbers into the run that this process is about to start from the command line."""
    from megalith.assemble import training

    build, stack = training.anomaly_policy, ExitStack()

    def build_spoiled(config: Any, state: TrainState) -> Any:
        stack.enter_context(spoiled(state, [text]))
        return build(config, state)

    training.anomaly_policy = build_spoiled
