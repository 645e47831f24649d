"""The mean loss over a part of a held-out split."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from megalith.train.faults import Probe, no_probe
from megalith.train.hooks import Hook
from megalith.train.results import Evaluation
from megalith.train.state import TrainState
from megalith.train.step import Totals, mean_losses, run_pipeline, totals_of
from megalith.train.work import Batch, StageWork


def evaluate(
    state: TrainState,
    batches: Iterator[Batch],
    *,
    split: str,
    iterations: int,
    num_micro_batches: int,
    final: bool = False,
    hook: Hook,
    totals: Totals | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    probe: Probe = no_probe,
) -> Evaluation | None:
    """Average the loss over `iterations` global batches, every unmasked token weighing the same.

    Args:
        state: its counters are left alone; the model is back in training mode afterwards.
        batches: the split's micro-batches, those of this replica.
        totals: as of `train_step`.
        should_stop: asked after each global batch; the evaluation is given up when it says so.

    Returns:
        The result, or None if it was given up.

    Source: docs/reference/training.md#the-loop: single-precision sums over the micro-batches of a global batch, then
    added to the running total.
    """
    started = time.perf_counter()
    num_samples, totals = 0, totals or totals_of(state)
    _, *further = state.model.loss_names
    total = torch.zeros(2 * len(further) + 2, device=state.context.device)
    for chunk in state.chunks:
        chunk.eval()
    try:
        for number in range(1, iterations + 1):
            probe("eval", state.iteration)
            hook.before_evaluation_iteration(number, iterations, final=final)
            work = StageWork(state.chunks, batches, state.context, training=False)
            run_pipeline(state, work, "forward", num_micro_batches)
            total = total + totals(work.total())
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
        split=split,
        loss=loss,
        further_losses=dict(zip(further, others, strict=True)),
        num_samples=num_samples,
        seconds=time.perf_counter() - started,
        final=final,
    )
