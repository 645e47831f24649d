"""One optimizer step: accumulate gradients over micro-batches, check the step, apply and report it.

Reading order: `train_step` -> `StageWork.forward` -> `models.gpt.GPT.losses`. A run without pipeline parallelism
computes its micro-batches one after the other; a pipeline runs its schedule (`run_pipeline`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.models.language_model import Inputs, LanguageModel
from megalith.nn.precision import at_least_fp32
from megalith.optim.optimizer import StepOutcome
from megalith.parallel import pipeline
from megalith.schedules.pipeline import Op, default_schedule, make_schedule
from megalith.train.consensus import NeverStop, RankConsensus
from megalith.train.moe import MoEHook
from megalith.train.results import StepResult
from megalith.train.state import TrainState
from megalith.train.step_hooks import StepHook
from megalith.train.timers import Timers

Batch = Mapping[str, Tensor]
"""One micro-batch: the fields of its samples, [B, ...] each; the model family defines which.

A loss_mask [B, S] is among them. GPT's are tokens, labels, position_ids [B, S] int64; attention stays inside documents
if it has document_ids [B, S] int32. Samples are counted by dataset if it has dataset_id [B] int64.
"""

Totals = Callable[[Tensor], Tensor]
"""Sums the numbers of this rank over all ranks: losses, their terms, and those of step hooks."""

REJECT_ALL = -1.0  # every gradient norm is above it


def totals_of(state: TrainState) -> Totals:
    """Return the sum over all ranks of a run that counts each token once; all ranks call it together."""
    return RankConsensus(NeverStop(), state.context, counts=state.counts_losses).totals


def train_step(
    state: TrainState,
    batches: Iterator[Batch],
    num_micro_batches: int,
    *,
    schedule: str | None = None,
    totals: Totals | None = None,
    hooks: Sequence[StepHook] = (),
    timers: Timers | None = None,
    apply: bool = True,
) -> StepResult:
    """Accumulate the gradients of the next `num_micro_batches` micro-batches, and update the weights.

    The gradient is that of the average over micro-batches of each one's mean loss per unmasked token, or under
    --calculate-per-token-loss that of the mean over all unmasked tokens of all micro-batches and replicas. The reported
    loss weighs all tokens of the step alike. A step that the loss scaler skips or `state.check` finds anomalous is not
    applied: it consumes its samples but does not advance the schedule.

    Args:
        state: Of the run; all ranks take the step together.
        batches: The micro-batches of this replica.
        schedule: Name of the pipeline schedule (schedules.pipeline); the default one if None.
        totals: Sums over all ranks (`RankConsensus.totals`); `totals_of(state)` if None.
        hooks: Code to run inside the step, before that of the model's own MoE layers.
        timers: Measure the parts of the step.
        apply: Whether to update the weights.

    Source: docs/reference/training.md#optimizers, docs/reference/training.md#loss.
    """
    started, timers = time.perf_counter(), timers or Timers()
    work = _begin(state, batches, num_micro_batches, hooks, timers)
    with timers.time("forward-backward", level=1):
        if state.context.pp.size == len(state.chunks) == 1 and state.deferred is None:
            for micro_batch in range(num_micro_batches):
                work.prepare(Op("F", 0, micro_batch))
                with timers.time("forward-compute", level=2):
                    loss = work.forward(0, micro_batch, None)
                work.prepare(Op("B", 0, micro_batch))
                with timers.time("backward-compute", level=2):
                    loss.backward()
                work.release(micro_batch)
                del loss  # and what its graph still holds
        else:
            run_pipeline(state, work, schedule or default_schedule(len(state.chunks)), num_micro_batches, timers)
    decision = _decide(state, work, totals or totals_of(state))
    update = _apply(state, work, decision, apply=apply)
    return _report(state, work, decision, update, time.perf_counter() - started)


def _begin(
    state: TrainState, batches: Iterator[Batch], num_micro_batches: int, hooks: Sequence[StepHook], timers: Timers
) -> StageWork:
    """Prepare model, gradients and hooks for a step."""
    work = StageWork(
        state.chunks,
        batches,
        state.context,
        num_micro_batches=num_micro_batches,
        loss_scale=state.optimizer.loss_scale,
        hooks=(*hooks, MoEHook(state)) if state.model.config.mixture else tuple(hooks),
        step=state.iteration + 1,
        timers=timers,
    )
    for chunk in state.chunks:
        chunk.train()
    state.optimizer.zero_grad(num_micro_batches)
    for hook in work.hooks:
        hook.begin(work)
    return work


@dataclass(frozen=True)
class _Decision:
    """The losses of a step over all ranks, their anomaly, and the schedule's values for the update."""

    losses: list[float]
    anomaly: str  # empty for none
    learning_rate: float
    decoupled_lr: float | None
    weight_decay: float


def _decide(state: TrainState, work: StageWork, totals: Totals) -> _Decision:
    """Sum the losses and the hooks' numbers over all ranks in one collective, and check the loss."""
    if state.model.config.calculate_per_token_loss:
        divide_by_tokens(state, work)
    local = work.loss_totals()
    of_hooks = [(hook, sums.to(local)) for hook in work.hooks if (sums := hook.sums(work)) is not None]
    lengths = [len(local), *(len(sums) for _, sums in of_hooks)]
    loss_sums, *hook_sums = totals(torch.cat([local, *(sums for _, sums in of_hooks)])).split(lengths)
    for (hook, _), sums in zip(of_hooks, hook_sums, strict=True):
        hook.on_sums(sums)
    losses = mean_losses(loss_sums)
    return _Decision(
        losses, state.check.loss_anomaly(sum(losses)), state.learning_rate, state.decoupled_lr, state.weight_decay
    )


def _apply(state: TrainState, work: StageWork, decision: _Decision, *, apply: bool) -> StepOutcome:
    """Update the weights, unless the step is anomalous or is not to be applied, and advance the counters."""
    for hook in work.hooks:
        hook.at("opt", work.step)
        hook.before_update()
    state.updating = True
    with work.timers.time("optimizer", level=1):
        update = state.optimizer.step(
            decision.learning_rate,
            decision.weight_decay,
            decoupled_lr=decision.decoupled_lr,
            largest_norm=state.check.largest_norm if apply and not decision.anomaly else REJECT_ALL,
        )
    num_samples = work.num_samples * state.context.dp.size
    state.iteration = work.step
    state.consumed_samples += num_samples
    if update.applied:
        state.schedule_samples += num_samples
        for hook in work.hooks:
            hook.after_update()
    state.updating = False
    return update


def _report(state: TrainState, work: StageWork, decision: _Decision, update: StepOutcome, seconds: float) -> StepResult:
    replicas = state.context.dp.size
    (loss, *further), (_, *names) = decision.losses, state.model.loss_names
    fields = [field for hook in work.hooks for field in hook.report().items()]
    return StepResult(
        iteration=state.iteration,
        loss=loss,
        applied=update.applied,
        learning_rate=state.learning_rate,
        weight_decay=decision.weight_decay,
        loss_scale=state.optimizer.loss_scale,
        grad_norm=update.grad_norm,
        num_zeros=update.num_zeros,
        params_norm=None,
        consumed_samples=state.consumed_samples,
        num_samples=work.num_samples * replicas,
        num_tokens=work.num_tokens * replicas,
        seconds=seconds,
        anomaly=decision.anomaly or state.check.norm_anomaly(update.grad_norm),
        decoupled_lr=state.decoupled_lr,
        skipped_samples=state.skipped_samples,
        further_losses=dict(zip(names, further, strict=True)),
        **dict(fields),
    )


@torch.no_grad()
def divide_by_tokens(state: TrainState, work: StageWork) -> None:
    """Scale the mean over replicas of summed gradients to the gradient of the mean over all unmasked tokens."""
    state.optimizer.gradients.finish()
    factor = state.context.dp.size / work.unmasked_tokens().clamp(min=1.0)
    for gradient in state.optimizer.gradients.grad_shards.values():
        gradient.mul_(factor)


def run_pipeline(
    state: TrainState, work: StageWork, schedule: str, num_micro_batches: int, timers: Timers | None = None
) -> None:
    """Run the micro-batches of a step or an evaluation through the stages, in the order of a schedule."""
    context = state.context
    order = make_schedule(schedule, context.pp.size, len(state.chunks), num_micro_batches)
    timed = pipeline.no_timer if timers is None else partial(timers.time, level=2)
    pipeline.run(order.program(context.pp.index), work, context.p2p_channels, state.deferred, timed)


def mean_losses(loss_sums: Tensor) -> list[float]:
    """Return each mean loss from [sum, number of terms] of each, in the dtype of the sums; waits for the device."""
    summed, counts = loss_sums.view(-1, 2).unbind(dim=1)
    means: list[float] = (summed / counts.clamp(min=1.0)).tolist()
    return means


@dataclass(eq=False)
class StageWork:
    """Forward passes of this rank's chunks over the micro-batches of a step; a `pipeline.StageRunner`."""

    chunks: Sequence[LanguageModel]
    batches: Iterator[Batch]  # micro-batches in order, each held from its first use on this rank to its last
    context: ParallelContext
    _: KW_ONLY
    # num_micro_batches, loss_scale: the loss is divided by the one and multiplied by the other
    num_micro_batches: int = 1
    loss_scale: float = 1.0
    training: bool = True  # whether the loss is to be differentiated
    hooks: Sequence[StepHook] = ()
    step: int = 0
    timers: Timers = field(default_factory=Timers)
    current_op: Op | None = field(default=None, init=False)
    # of each micro-batch whose losses were computed on this rank the sum and number of terms of each, [2 x losses]
    loss_sums: list[Tensor] = field(default_factory=list, init=False)
    num_samples: int = field(default=0, init=False)
    num_tokens: int = field(default=0, init=False)
    _held: dict[int, Inputs] = field(default_factory=dict, init=False)
    _drawn: int = field(default=0, init=False)
    _unmasked_counts: list[Tensor] = field(default_factory=list, init=False)

    def activation_shape(self, micro_batch: int) -> tuple[tuple[int, int, int], torch.dtype]:
        """Return shape [S, B, D] and dtype of the hidden states that go from stage to stage."""
        return self.chunks[0].activation_shape(self._batch(micro_batch))

    def prepare(self, op: Op) -> None:
        """Draw the data of a forward pass, and call the hooks of that point of the step."""
        if not self.training:
            return
        self.current_op = op
        if op.kind == "F":
            self._call_hooks("data")
            self._batch(op.micro_batch)
            self._call_hooks("fwd")
        elif op.kind == "B":
            self._call_hooks("bwd")

    def _call_hooks(self, point: str) -> None:
        for hook in self.hooks:
            hook.at(point, self.step)

    def forward(self, chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        """Return the hidden states for the next chunk, or the loss to differentiate.

        The loss is the sum of the weighted losses, each a mean over its terms in the micro-batch (GPT's: unmasked
        tokens), those of other context-parallel ranks included, over the number of micro-batches, times the loss scale;
        the gradients of these ranks add up. Under --calculate-per-token-loss it is the sum over these terms times the
        loss scale (see `train_step`).
        """
        inputs, model = self._batch(micro_batch), self.chunks[chunk]
        if not model.stage.is_last:
            return model.forward_stage(inputs, hidden)
        losses = model.losses(inputs, hidden)
        summed, counts = torch.stack([loss.summed for loss in losses]), torch.stack([loss.count for loss in losses])
        for hook in self.hooks:
            summed = hook.on_losses(micro_batch, summed)
        reported, terms = summed.detach(), counts
        if model.reports_means:
            reported, terms = reported / terms.clamp(min=1.0), torch.ones_like(terms)
        self.loss_sums.append(torch.stack((reported, terms), dim=1).flatten())
        summed = summed * summed.new_tensor([loss.weight for loss in losses])
        if model.config.calculate_per_token_loss:
            return summed.sum() * self.loss_scale
        if self.context.cp.size > 1:
            counts = comm.all_reduce(counts, self.context.cp)
        return (summed / counts.clamp(min=1.0)).sum() / self.num_micro_batches * self.loss_scale

    def release(self, micro_batch: int) -> None:
        """Free the inputs of a micro-batch after its last use on this rank."""
        del self._held[micro_batch]

    def loss_totals(self) -> Tensor:
        """Return the sum of `loss_sums`; zeros on a stage that computes no losses."""
        if self.loss_sums:
            return torch.stack(self.loss_sums).sum(dim=0)
        losses = len(self.chunks[0].loss_names)
        return torch.zeros(2 * losses, dtype=at_least_fp32(self.chunks[0].dtype), device=self.context.device)

    def unmasked_tokens(self) -> Tensor:
        """Return the number of unmasked tokens of the step, over all replicas; all their ranks call it together."""
        return comm.all_reduce(torch.stack(self._unmasked_counts).sum(), self.context.flatten_axes("cp", "dp"))

    def _batch(self, micro_batch: int) -> Inputs:
        while self._drawn <= micro_batch:
            with self.timers.time("batch-generator", level=2):
                batch = next(self.batches)
            model, fields = self.chunks[0], dict(batch)
            self.num_samples += batch[model.tokens_field].shape[0]
            self.num_tokens += batch[model.tokens_field].numel()
            for hook in self.hooks:
                hook.on_batch(batch)
            fields.pop("dataset_id", None)
            inputs = model.prepare(fields)
            inputs = replace(inputs, tensors=on_device(inputs.tensors, model.device))
            self._held[self._drawn] = inputs
            self._unmasked_counts.append(inputs.tensors["loss_mask"].sum())
            self._drawn += 1
        return self._held[micro_batch]


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device of the model; to a GPU through pinned memory, asynchronously."""
    if device.type == "cuda":
        return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}
    return {name: tensor.to(device) for name, tensor in batch.items()}
