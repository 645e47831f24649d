"""The mean loss over a part of a held-out split."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from megalith.train.faults import Probe, no_probe
from megalith.train.hooks import Hook
from megalith.train.results import Evaluation
from megalith.train.state import TrainState
from megalith.train.step import Batch, device_of, loss_and_tokens, mean_loss, on_device


def evaluate(
    state: TrainState,
    batches: Iterator[Batch],
    *,
    split: str,
    iterations: int,
    num_micro_batches: int,
    final: bool = False,
    hook: Hook,
    should_stop: Callable[[], bool] = lambda: False,
    probe: Probe = no_probe,
) -> Evaluation | None:
    """Average the loss over `iterations` global batches, every unmasked token weighing the same.

    Args:
        state: its counters are left alone; the model is back in training mode afterwards.
        batches: the split's micro-batches.
        should_stop: asked after each global batch; the evaluation is given up when it says so.

    Returns:
        The result, or None if it was given up.

    Source: spec/training-behaviour.md section 11, points 9 and 10: single-precision sums over the micro-batches of a
    global batch, then added to the running total.
    """
    started = time.perf_counter()
    num_samples = 0
    device = device_of(state.model)
    total = torch.zeros(2, device=device)
    state.model.eval()
    try:
        with torch.no_grad():
            for number in range(1, iterations + 1):
                probe("eval", state.iteration)
                hook.before_evaluation_iteration(number, iterations, final=final)
                sums = []
                for _ in range(num_micro_batches):
                    batch = on_device(next(batches), device)
                    sums.append(loss_and_tokens(state.model, batch))
                    num_samples += batch["tokens"].shape[0]
                total = total + torch.stack(sums).sum(dim=0)
                if should_stop():
                    return None
    finally:
        state.model.train()
    return Evaluation(
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        split=split,
        loss=mean_loss(total),
        num_samples=num_samples,
        seconds=time.perf_counter() - started,
        final=final,
    )
