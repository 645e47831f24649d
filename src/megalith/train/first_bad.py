"""Where in a step the first number that is not finite comes up: rank, module, micro-batch.

The step is computed once more from the state before it, on the micro-batches that it had, with hooks on every module:
nothing of this costs anything while all is well. All ranks do it together, and all of them learn the answer.

Forward passes come before backward passes, and in these the order of the work decides: micro-batch, place in the
model, order of calls. A number that is not finite spreads to the ranks that take part in the next collective, so the
rank where it came up first is the one that is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalith.distributed import comm
from megalith.optim.gradients import GradientBuffers
from megalith.train.results import FirstBad
from megalith.train.spoil import Spoiler
from megalith.train.state import TrainState
from megalith.train.step import run_pipeline
from megalith.train.work import Batch, StageWork


@dataclass(frozen=True, order=True)
class _Finding:
    """Something not finite; of several the smallest is the first.

    Attributes:
        phase: 0 weights, 1 forward passes, 2 losses, 3 backward passes, 4 gradients of weights.
        micro_batch, place, call: its order within the phase; the place in the model counts backwards in phase 3.
        rank: where.
        what: in words.
    """

    phase: int
    micro_batch: int
    place: int
    call: int
    rank: int
    what: str


class _Search:
    """Notes the first finding of each phase on this rank, as hooks and checks report them."""

    def __init__(self, state: TrainState, work: StageWork) -> None:
        self._state, self._work = state, work
        self._first: dict[int, _Finding] = {}
        self._calls = 0

    def note(self, phase: int, what: str, tensor: Tensor, chunk: int = 0) -> None:
        self._calls += 1
        if phase in self._first or not tensor.is_floating_point() or bool(tensor.isfinite().all()):
            return
        context, at = self._state.context, self._work.at
        place = chunk * context.pp.size + context.pp.index
        micro_batch = -1 if at is None or phase in (0, 4) else at.micro_batch
        order = -place if phase == 3 else place
        self._first[phase] = _Finding(phase, micro_batch, order, self._calls, context.rank, what)

    def hook(self, name: str, chunk: int) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in output if isinstance(output, tuple) else (output,):
                if isinstance(tensor, Tensor):
                    self.note(1, f"the output of {name}", tensor.detach(), chunk)
                    if tensor.requires_grad:
                        tensor.register_hook(
                            lambda grad: self.note(3, f"the gradient of the output of {name}", grad, chunk)
                        )

        return after

    @property
    def findings(self) -> list[_Finding]:
        return sorted(self._first.values())


def find_first_bad(
    state: TrainState, batches: Sequence[Batch], schedule: str, spoiler: Spoiler | None = None
) -> FirstBad | None:
    """Compute a step once more and look for what is not finite. All ranks call this together.

    Args:
        state: as it was before the step; its gradients and the position of its random streams are of no use afterwards.
        batches: the micro-batches of this replica.
        schedule: the order of the work.
        spoiler: spoils numbers as it did the first time.

    Returns:
        What came up first; None if everything was finite this time.
    """
    work = StageWork(
        state.chunks,
        iter(batches),
        state.context,
        num_micro_batches=len(batches),
        loss_scale=state.optimizer.loss_scale,
        step=state.iteration + 1,
        spoiler=spoiler,
    )
    search, gradients = _Search(state, work), state.optimizer.gradients
    with ExitStack() as stack:
        for chunk, module in enumerate(state.chunks):
            for name, part in module.named_modules():
                if name:
                    stack.callback(part.register_forward_hook(search.hook(name, chunk)).remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        gradients.begin()  # nothing is reduced before `finish`, so that gradients are those of this rank until then
        if isinstance(gradients, GradientBuffers):
            gradients.flat.zero_()
        if spoiler is not None:
            spoiler.begin(state.iteration + 1)
        for box in state.optimizer.weight_boxes():
            search.note(0, f"the weight {box.name}", box.tensor)
        run_pipeline(state, work, schedule, len(batches))
    work.at = None
    for number, sums in enumerate(work.sums):
        search.note(2, f"the loss of micro-batch {number}", sums)
    if isinstance(gradients, GradientBuffers):
        for name, grad in gradients.grads.items():
            search.note(4, f"the gradient of {name}", grad)
    gradients.finish()
    every = [finding for own in comm.all_gather_objects(search.findings, state.context.world) for finding in own]
    if not every:
        return None
    first = min(every)
    place = state.context.layout.coordinates(first.rank)
    micro_batch = first.micro_batch if first.micro_batch >= 0 else None
    if first.phase == 2:
        micro_batch = int(first.what.rpartition(" ")[2])
    return FirstBad(first.rank, first.what, micro_batch, place["dp"], weight=first.phase == 0)
