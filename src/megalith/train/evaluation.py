"""Evaluation on held-out data: the mean loss over a number of global batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megalith.train.faults import Probe, no_probe
from megalith.train.results import Evaluation, Hook
from megalith.train.state import TrainState
from megalith.train.step import Batch, StageWork, Totals, mean_losses, run_pipeline, totals_of


@dataclass(frozen=True)
class EvaluationSet:
    """Held-out data.

    Attributes:
        name: In the log, such as "validation".
        batches: The micro-batches of this replica.
        iterations: Global batches of one evaluation.
    """

    name: str
    batches: Iterator[Batch]
    iterations: int


def evaluate(
    state: TrainState,
    held_out: EvaluationSet,
    num_micro_batches: int,
    *,
    final: bool = False,
    hook: Hook | None = None,
    totals: Totals | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    probe: Probe = no_probe,
) -> Evaluation | None:
    """Average the loss over the global batches of a set, all unmasked tokens alike; None if it was stopped early.

    Args:
        state: Its counters are left alone; the model is in training mode afterwards.
        num_micro_batches: Of a global batch on this replica.
        final: It is an evaluation after the last step.
        hook: Is called before each global batch.
        totals: As of `train_step`.
        should_stop: Asked after each global batch; the evaluation ends when it returns True.
        probe: Called before each global batch.

    Source: docs/reference/training.md#the-loop: single-precision sums over the micro-batches of a global batch, then
    added to the running total.
    """
    started, hook = time.perf_counter(), hook or Hook()
    num_samples, totals = 0, totals or totals_of(state)
    _, *further = state.model.loss_names
    total = torch.zeros(2 * len(further) + 2, device=state.context.device)
    for chunk in state.chunks:
        chunk.eval()
    try:
        for number in range(1, held_out.iterations + 1):
            probe("eval", state.iteration)
            hook.before_evaluation_iteration(number, held_out.iterations, final=final)
            work = StageWork(state.chunks, held_out.batches, state.context, training=False)
            run_pipeline(state, work, "forward", num_micro_batches)
            total = total + totals(work.loss_totals())
            num_samples += work.num_samples * state.context.dp.size
            if should_stop():
                return None
    finally:
        for chunk in state.chunks:
            chunk.train()
    loss, *others = mean_losses(total)
    return Evaluation(
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        split=held_out.name,
        loss=loss,
        further_losses=dict(zip(further, others, strict=True)),
        num_samples=num_samples,
        seconds=time.perf_counter() - started,
        final=final,
    )
