"""One optimizer step: micro-batches forward and backward through the pipeline, then the update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from megalith.parallel import pipeline
from megalith.schedules.pipeline import default_schedule, make_schedule
from megalith.train.agreement import Agreement, NeverStop
from megalith.train.experts import auxiliary_losses, begin_step, expert_load, loss_names, move_biases, set_offsets
from megalith.train.faults import Probe, no_probe
from megalith.train.results import StepResult
from megalith.train.spoil import Spoiler
from megalith.train.state import TrainState
from megalith.train.timers import Timers
from megalith.train.work import Batch, StageWork

Totals = Callable[[Tensor], Tensor]
"""The sums over all ranks of what this rank has summed: losses and their terms, samples of each source of a blend."""


NOTHING = -1.0  # no gradient has a norm as small


def totals_of(state: TrainState) -> Totals:
    """Return the sum over all ranks of a run that counts each token once; all ranks call it together."""
    return Agreement(NeverStop(), state.context, counts=state.speaks).totals


def nothing_before() -> None:
    """Nothing need be waited for before an update."""


def train_step(
    state: TrainState,
    batches: Iterator[Batch],
    num_micro_batches: int,
    *,
    schedule: str | None = None,
    totals: Totals | None = None,
    before_update: Callable[[], None] = nothing_before,
    with_params_norm: bool = False,
    probe: Probe = no_probe,
    timers: Timers | None = None,
    sums: list[Tensor] | None = None,
    apply: bool = True,
    spoiler: Spoiler | None = None,
    sources: Sequence[str] = (),
) -> StepResult:
    """Take one step on the next `num_micro_batches` micro-batches and advance the counters of `state`.

    The gradient is that of the average over micro-batches of each one's mean loss per unmasked token, or under
    --calculate-per-token-loss that of the mean over all unmasked tokens of all micro-batches and replicas: then it is
    summed, and divided when all are done. The reported loss
    weighs all tokens of the step alike. A step that the loss scaler skips consumes its samples but leaves the schedule,
    and so does a bad one (`state.check`), which is not applied.

    Args:
        state: of the run; all its ranks take the step together.
        batches: the micro-batches of this replica.
        num_micro_batches: of this step and this replica.
        schedule: the order of a pipeline's work (schedules.pipeline); the usual one if None.
        totals: sums over all ranks, and whatever else they agree on meanwhile; `totals_of(state)` if None.
        before_update: called when the gradients are there and before anything that a checkpoint holds changes.
        with_params_norm: compute the norm of the parameters too.
        probe: called at the points of the step.
        timers: are told how long the parts of it take.
        sums: gets [sum, terms] of each loss, of each micro-batch that was predicted here.
        apply: whether to update the weights.
        spoiler: puts in wrong numbers, for tests.
        sources: names of the datasets of a blend, whose samples say which one they are of.

    Source: docs/reference/training.md#optimizers, docs/reference/training.md#loss.
    """
    started = time.perf_counter()
    step, timers = state.iteration + 1, timers or Timers()
    model = state.chunks[0].config
    per_token = model.calculate_per_token_loss
    for chunk in state.chunks:
        chunk.train()
    state.optimizer.zero_grad(num_micro_batches)
    begin_step(state.chunks, state.optimizer.loss_scale / (1 if per_token else num_micro_batches))
    work = StageWork(
        state.chunks,
        batches,
        state.context,
        num_micro_batches=num_micro_batches,
        loss_scale=state.optimizer.loss_scale,
        probe=probe,
        step=step,
        timers=timers,
        spoiler=spoiler,
    )
    if spoiler is not None:
        spoiler.begin(step)
    with timers.time("forward-backward", level=1):
        run_pipeline(state, work, schedule or default_schedule(len(state.chunks)), num_micro_batches, timers)
    if per_token:
        divide_by_tokens(state, work)
    names = loss_names(model)
    auxiliary = auxiliary_losses(state.chunks, names, num_micro_batches, state.context)
    load = expert_load(state.chunks, state.context)
    mine = [work.total(), _samples_by_source(work, state, len(sources)), auxiliary.to(work.total())]
    mine.append(load.flatten().to(work.total()))
    _, *further = state.model.loss_names
    parts = (totals or totals_of(state))(torch.cat(mine)).split(
        (2 * len(further) + 2, len(sources), len(names), load.numel())
    )
    (losses, samples_of, auxiliary, chosen), check = parts, state.check
    loss, *others = mean_losses(losses)
    if sums is not None:
        sums += work.sums
    bad = check.of_loss(sum(others, loss))
    probe("opt", step)
    before_update()
    weight_decay = state.weight_decay
    state.updating = True
    with timers.time("optimizer", level=1):
        outcome = state.optimizer.step(
            state.learning_rate,
            weight_decay,
            decoupled_lr=state.decoupled_lr,
            largest_norm=check.largest_norm if apply and not bad else NOTHING,
        )
    bad = bad or check.of_norm(outcome.grad_norm)
    replicas = state.context.dp.size
    state.iteration = step
    state.consumed_samples += work.num_samples * replicas
    if outcome.applied:
        state.schedule_samples += work.num_samples * replicas
        move_biases(state.chunks, state.context, model.moe_router_bias_update_rate)
        set_offsets(state.chunks, state.context, model.moe_router_quantile_balancing_ema)
    state.updating = False
    return StepResult(
        iteration=step,
        loss=loss,
        applied=outcome.applied,
        learning_rate=state.learning_rate,
        weight_decay=weight_decay,
        loss_scale=state.optimizer.loss_scale,
        grad_norm=outcome.grad_norm,
        num_zeros=outcome.num_zeros,
        params_norm=state.optimizer.params_norm() if with_params_norm else None,
        consumed_samples=state.consumed_samples,
        num_samples=work.num_samples * replicas,
        num_tokens=work.num_tokens * replicas,
        seconds=time.perf_counter() - started,
        bad=bad,
        decoupled_lr=state.decoupled_lr,
        skipped_samples=state.skipped_samples,
        source_tokens={
            name: round(number) * (work.num_tokens // work.num_samples)
            for name, number in zip(sources, samples_of.tolist(), strict=True)
        },
        further_losses=dict(zip(further, others, strict=True)),
        auxiliary_losses=dict(zip(names, auxiliary.tolist(), strict=True)),
        expert_load={
            layer: tuple(map(round, choices))
            for layer, choices in enumerate(chosen.view(load.shape).tolist())
            if model.mixture and model.experts[min(layer, model.num_layers - 1)]
        },
    )


def _samples_by_source(work: StageWork, state: TrainState, num_sources: int) -> Tensor:
    """Samples of each source in the micro-batches here, for a sum over all ranks that count; [num_sources].

    Context-parallel ranks have parts of the same samples, which the first of them counts.
    """
    sums = work.total()
    counts = [float(work.samples_of[number]) for number in range(num_sources)]
    return sums.new_tensor(counts if state.context.cp.is_first else [0.0] * num_sources)


@torch.no_grad()
def divide_by_tokens(state: TrainState, work: StageWork) -> None:
    """Make of the mean over replicas of summed gradients the gradient of the mean over all their unmasked tokens."""
    state.optimizer.gradients.finish()
    factor = state.context.dp.size / work.unmasked_tokens().clamp(min=1.0)
    for gradient in state.optimizer.gradients.pieces.values():
        gradient.mul_(factor)


def run_pipeline(
    state: TrainState, work: StageWork, schedule: str, num_micro_batches: int, timers: Timers | None = None
) -> None:
    """Run the micro-batches of a step or an evaluation through the stages, in the order of a schedule."""
    context = state.context
    order = make_schedule(schedule, context.pp.size, len(state.chunks), num_micro_batches)
    timed = pipeline.untimed if timers is None else partial(timers.time, level=2)
    pipeline.run(order.program(context.pp.index), work, context.links, state.deferred, timed)


def mean_losses(sums: Tensor) -> list[float]:
    """Each loss from [sum, number of terms] of each, divided in the precision of the sums; waits for the device."""
    summed, counts = sums.view(-1, 2).unbind(dim=1)
    means: list[float] = (summed / counts.clamp(min=1.0)).tolist()
    return means
