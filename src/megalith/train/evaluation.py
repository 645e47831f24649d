"""Evaluation on held-out data: the mean loss over a number of global batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megalith.train import step
from megalith.train.faults import Probe, no_probe
from megalith.train.results import Evaluation, Hook
from megalith.train.state import TrainState
from megalith.train.step import MicroBatch, MicroBatchRunner, SumOverRanks, make_sum_over_ranks


@dataclass(frozen=True)
class EvaluationSet:
    """Held-out data.

    Attributes:
        name: In the log, such as "validation".
        batches: The micro-batches of this replica.
        iterations: Global batches of one evaluation.
    """

    name: str
    batches: Iterator[MicroBatch]
    iterations: int


def evaluate(
    state: TrainState,
    eval_set: EvaluationSet,
    num_micro_batches: int,
    *,
    final: bool = False,
    hook: Hook | None = None,
    sum_over_ranks: SumOverRanks | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    probe: Probe = no_probe,
) -> Evaluation | None:
    """Average the loss over all unmasked tokens of the global batches of a set; None if it was stopped early.

    Args:
        state: Its counters are left alone; the model is in training mode afterwards.
        num_micro_batches: Of a global batch on this replica.
        final: It is an evaluation after the last step.
        hook: Is called before each global batch.
        sum_over_ranks: As of `train_step`.
        should_stop: Asked after each global batch; the evaluation ends when it returns True.
        probe: Called before each global batch.

    Source: docs/reference/training.md#the-loop: single-precision sums over the micro-batches of a global batch, then
    added to the running total.
    """
    started, hook = time.perf_counter(), hook or Hook()
    num_samples, sum_over_ranks = 0, sum_over_ranks or make_sum_over_ranks(state)
    _, *further = state.model.loss_names
    total = torch.zeros(2 * len(further) + 2, device=state.context.device)
    for chunk in state.chunks:
        chunk.eval()
    try:
        for number in range(1, eval_set.iterations + 1):
            probe("eval", state.iteration)
            hook.before_evaluation_iteration(number, eval_set.iterations, final=final)
            runner = MicroBatchRunner(state.chunks, eval_set.batches, state.context, training=False)
            step.run_pipeline(state, runner, "forward", num_micro_batches)
            total = total + sum_over_ranks(runner.loss_totals())
            num_samples += runner.num_samples * state.context.dp.size
            if should_stop():
                return None
    finally:
        for chunk in state.chunks:
            chunk.train()
    loss, *others = step.mean_losses(total).tolist()
    return Evaluation(
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        split=eval_set.name,
        loss=loss,
        further_losses=dict(zip(further, others, strict=True)),
        num_samples=num_samples,
        seconds=time.perf_counter() - started,
        final=final,
    )
