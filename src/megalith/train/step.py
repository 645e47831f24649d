"""One optimizer step: accumulate gradients over micro-batches, check the step, apply and report it.

Reading order: `train_step` -> `MicroBatchRunner.forward` -> `models.gpt.GPT.losses`. A run without pipeline parallelism
computes its micro-batches one after the other; a pipeline runs its schedule (`run_pipeline`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.kernels.transfer import to_device
from megalith.models.language_model import Inputs, LanguageModel
from megalith.nn.precision import at_least_fp32
from megalith.optim.optimizer import StepOutcome
from megalith.parallel import pipeline
from megalith.schedules.pipeline import Op, default_schedule, make_schedule
from megalith.train.consensus import NeverStop, RankConsensus
from megalith.train.moe import MoEHook
from megalith.train.results import StepResult
from megalith.train.state import TrainState
from megalith.train.step_hooks import BufferHook, StepHook
from megalith.train.timers import Timers

MicroBatch = Mapping[str, Tensor]
"""Fields of the samples of one micro-batch, [B, ...] each; the model family defines which.

A loss_mask [B, S] is among them. GPT's are tokens, labels, position_ids [B, S] int64; attention stays inside documents
if it has document_ids [B, S] int32. Samples are counted by dataset if it has dataset_id [B] int64.
"""

SumOverRanks = Callable[[Tensor], Tensor]
"""All-reduces (sum) loss sums, token counts and hook statistics."""


def make_sum_over_ranks(state: TrainState) -> SumOverRanks:
    """Return a function that sums over all ranks and counts each token once; all ranks call it together."""
    return RankConsensus(NeverStop(), state.context, contributes=state.contributes_losses).sum_over_ranks


def train_step(
    state: TrainState,
    batches: Iterator[MicroBatch],
    num_micro_batches: int,
    *,
    pipeline_schedule: str | None = None,
    sum_over_ranks: SumOverRanks | None = None,
    hooks: Sequence[StepHook] = (),
    timers: Timers | None = None,
    apply: bool = True,
) -> StepResult:
    """Accumulate the gradients of the next `num_micro_batches` micro-batches, and update the weights.

    By default the loss is averaged over the unmasked tokens of each micro-batch, then over micro-batches. With
    --calculate-per-token-loss it is averaged over all unmasked tokens of the step. The reported loss is always the
    average over all tokens of the step. A step that the loss scaler skips or `state.check` finds anomalous is not
    applied: it consumes its samples but does not advance the learning rate and weight decay schedules.

    Args:
        state: Of the run; all ranks call `train_step` together.
        batches: The micro-batches of this replica.
        pipeline_schedule: Name of the pipeline schedule (schedules.pipeline); the default one if None.
        sum_over_ranks: `RankConsensus.sum_over_ranks` of the run; `make_sum_over_ranks(state)` if None.
        hooks: Code to run inside the step, before that of the model's own MoE layers.
        timers: Measure the parts of the step.
        apply: Whether to update the weights. `state.iteration` and `consumed_samples` advance either way.

    Source: docs/reference/training.md#optimizers, docs/reference/training.md#loss.
    """
    started, timers = time.perf_counter(), timers or Timers()
    runner = _begin(state, batches, num_micro_batches, hooks, timers)
    with timers.time("forward-backward", level=1):
        if state.context.pp.size == len(state.chunks) == 1 and state.deferred is None:
            for micro_batch in range(num_micro_batches):
                runner.prepare(Op("F", 0, micro_batch))
                with timers.time("forward-compute", level=2):
                    loss = runner.forward(0, micro_batch, None)
                runner.prepare(Op("B", 0, micro_batch))
                with timers.time("backward-compute", level=2):
                    loss.backward()
                runner.release(micro_batch)
                del loss  # and what its graph still holds
        else:
            schedule = pipeline_schedule or default_schedule(len(state.chunks))
            run_pipeline(state, runner, schedule, num_micro_batches, timers)
    reduced = _reduce(state, runner, sum_over_ranks or make_sum_over_ranks(state))
    update = _apply(state, runner, reduced, apply=apply)
    return _report(state, runner, reduced, update, time.perf_counter() - started)


def _begin(
    state: TrainState, batches: Iterator[MicroBatch], num_micro_batches: int, hooks: Sequence[StepHook], timers: Timers
) -> MicroBatchRunner:
    """Prepare model, gradients and hooks for a step."""
    config = state.model.config
    of_model = [MoEHook(state)] * bool(config.mixture) + [BufferHook(state)] * bool(config.registered_layers)
    runner = MicroBatchRunner(
        state.chunks,
        batches,
        state.context,
        num_micro_batches=num_micro_batches,
        loss_scale=state.optimizer.loss_scale,
        hooks=(*hooks, *of_model),
        step=state.iteration + 1,
        timers=timers,
    )
    for chunk in state.chunks:
        chunk.train()
    state.optimizer.zero_grad(num_micro_batches)
    for hook in runner.hooks:
        hook.begin(runner)
    return runner


@dataclass(frozen=True)
class _ReducedStep:
    """The losses of a step over all ranks, their anomaly, and what its update is made with."""

    losses: list[float]
    measured: list[float]  # by `Optimizer.measure`
    anomaly: str  # empty for none
    learning_rate: float
    decoupled_lr: float | None
    weight_decay: float


def _reduce(state: TrainState, runner: MicroBatchRunner, sum_over_ranks: SumOverRanks) -> _ReducedStep:
    """Sum the losses and the hooks' values over all ranks in one collective, measure the gradients, check the loss.

    All numbers are read at once: the host waits for the device nowhere else in a step. The update comes after it and
    keeps the device busy while the host prepares the next step.
    """
    if state.model.config.calculate_per_token_loss:
        normalize_grads_per_token(state, runner)
    local = runner.loss_totals()
    of_hooks = [(hook, own.to(local)) for hook in runner.hooks if (own := hook.values_to_reduce(runner)) is not None]
    lengths = [len(local), *(len(own) for _, own in of_hooks)]
    loss_sums, *hook_sums = sum_over_ranks(torch.cat([local, *(own for _, own in of_hooks)])).split(lengths)
    for hook in runner.hooks:
        hook.on_phase("opt", runner.step)
    with runner.timers.time("optimizer", level=1):
        tensors = [mean_losses(loss_sums), state.optimizer.measure(), *hook_sums]
        numbers = iter(torch.cat([tensor.double() for tensor in tensors]).tolist())
    losses, measured, *hook_values = (list(islice(numbers, len(tensor))) for tensor in tensors)
    for (hook, _), values in zip(of_hooks, hook_values, strict=True):
        hook.on_reduced(values)
    anomaly = state.check.loss_anomaly(sum(losses))
    return _ReducedStep(losses, measured, anomaly, state.learning_rate, state.decoupled_lr, state.weight_decay)


def _apply(state: TrainState, runner: MicroBatchRunner, reduced: _ReducedStep, *, apply: bool) -> StepOutcome:
    """Update the weights if `apply` is set and the step is not anomalous, and advance the counters."""
    for hook in runner.hooks:
        hook.before_update()
    state.updating = True
    with runner.timers.time("optimizer", level=1):
        update = state.optimizer.complete_step(
            reduced.measured,
            reduced.learning_rate,
            reduced.weight_decay,
            decoupled_lr=reduced.decoupled_lr,
            reject_norm_above=state.check.reject_norm_above,
            apply=apply and not reduced.anomaly,
        )
    num_samples = runner.num_samples * state.context.dp.size
    state.iteration = runner.step
    state.consumed_samples += num_samples
    if update.applied:
        state.lr_schedule_samples += num_samples
        for hook in runner.hooks:
            hook.after_update()
    state.updating = False
    return update


def _report(
    state: TrainState, runner: MicroBatchRunner, reduced: _ReducedStep, update: StepOutcome, seconds: float
) -> StepResult:
    replicas = state.context.dp.size
    (loss, *further), (_, *names) = reduced.losses, state.model.loss_names
    fields = [field for hook in runner.hooks for field in hook.report().items()]
    return StepResult(
        iteration=state.iteration,
        loss=loss,
        applied=update.applied,
        learning_rate=state.learning_rate,
        weight_decay=reduced.weight_decay,
        loss_scale=state.optimizer.loss_scale,
        grad_norm=update.grad_norm,
        num_zeros=update.num_zeros,
        params_norm=None,
        consumed_samples=state.consumed_samples,
        num_samples=runner.num_samples * replicas,
        num_tokens=runner.num_tokens * replicas,
        seconds=seconds,
        anomaly=reduced.anomaly or state.check.norm_anomaly(update.grad_norm),
        decoupled_lr=state.decoupled_lr,
        skipped_samples=state.skipped_samples,
        further_losses=dict(zip(names, further, strict=True)),
        **dict(fields),
    )


@torch.no_grad()
def normalize_grads_per_token(state: TrainState, runner: MicroBatchRunner) -> None:
    """Scale the mean over replicas of summed gradients to the gradient of the mean over all unmasked tokens."""
    state.optimizer.gradients.finish()
    factor = state.context.dp.size / runner.unmasked_tokens().clamp(min=1.0)
    for gradient in state.optimizer.gradients.grad_shards.values():
        gradient.mul_(factor)


def run_pipeline(
    state: TrainState, runner: MicroBatchRunner, schedule: str, num_micro_batches: int, timers: Timers | None = None
) -> None:
    """Run the micro-batches of a step or an evaluation through the stages, in the order of a schedule."""
    context = state.context
    order = make_schedule(schedule, context.pp.size, len(state.chunks), num_micro_batches)
    timed = pipeline.no_timer if timers is None else partial(timers.time, level=2)
    pipeline.run(order.program(context.pp.index), runner, context.p2p_channels, state.deferred, timed)


def mean_losses(loss_sums: Tensor) -> Tensor:
    """Return the mean of each loss [num_losses] from interleaved (sum, count) [2 * num_losses]."""
    summed, denominators = loss_sums.view(-1, 2).unbind(dim=1)
    return summed / denominators.clamp(min=1.0)


@dataclass(eq=False)
class MicroBatchRunner:
    """Forward passes of this rank's chunks over the micro-batches of a step; a `pipeline.StageRunner`."""

    chunks: Sequence[LanguageModel]
    batches: Iterator[MicroBatch]  # micro-batches in order, each held from its first use on this rank to its last
    context: ParallelContext
    _: KW_ONLY
    num_micro_batches: int = 1  # divides the loss
    loss_scale: float = 1.0  # multiplies the loss
    training: bool = True  # False for an evaluation, which calls no hooks
    hooks: Sequence[StepHook] = ()
    step: int = 0
    timers: Timers = field(default_factory=Timers)
    current_op: Op | None = field(default=None, init=False)
    # per micro-batch: interleaved (sum, count) of each loss, shape [2 * num_losses]; empty on ranks without the loss
    loss_sums: list[Tensor] = field(default_factory=list, init=False)
    num_samples: int = field(default=0, init=False)
    num_tokens: int = field(default=0, init=False)
    _inputs: dict[int, Inputs] = field(default_factory=dict, init=False)
    _num_loaded: int = field(default=0, init=False)
    _unmasked_counts: list[Tensor] = field(default_factory=list, init=False)

    def activation_shape(self, micro_batch: int) -> tuple[tuple[int, int, int], torch.dtype]:
        """Return shape [S, B, D] and dtype of the hidden states that go from stage to stage."""
        return self.chunks[0].activation_shape(self._load_up_to(micro_batch))

    def prepare(self, op: Op) -> None:
        """Load the micro-batch of a forward pass, and call the hooks of that phase of the step."""
        if not self.training:
            return
        self.current_op = op
        if op.kind == "F":
            self._call_hooks("data")
            self._load_up_to(op.micro_batch)
            self._call_hooks("fwd")
        elif op.kind == "B":
            self._call_hooks("bwd")

    def _call_hooks(self, phase: str) -> None:
        for hook in self.hooks:
            hook.on_phase(phase, self.step)

    def forward(self, chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        """Return the hidden states for the next chunk, or the loss to differentiate.

        The loss is the weighted sum of the model's losses, divided by the number of micro-batches and multiplied by
        the loss scale. Each loss is the mean over its terms (GPT's: unmasked tokens) in the micro-batch on all
        context-parallel ranks, whose gradients add up. With --calculate-per-token-loss it is the sum over these terms,
        and not divided by the number of micro-batches (see `train_step`).
        """
        inputs, model = self._load_up_to(micro_batch), self.chunks[chunk]
        if not model.stage.is_last:
            return model.forward_stage(inputs, hidden)
        losses = model.losses(inputs, hidden)
        summed = torch.stack([loss.summed for loss in losses])
        denominators = torch.stack([loss.count for loss in losses])
        for hook in self.hooks:
            summed = hook.on_losses(micro_batch, summed)
        reported, count = summed.detach(), denominators
        if model.reports_means:
            reported, count = reported / count.clamp(min=1.0), torch.ones_like(count)
        self.loss_sums.append(torch.stack((reported, count), dim=1).flatten())
        if any(loss.weight != 1.0 for loss in losses):
            summed = torch.stack([one * loss.weight for one, loss in zip(summed.unbind(), losses, strict=True)])
        if model.config.calculate_per_token_loss:
            return summed.sum() * self.loss_scale
        if self.context.cp.size > 1:
            denominators = comm.all_reduce(denominators, self.context.cp)
        return (summed / denominators.clamp(min=1.0)).sum() / self.num_micro_batches * self.loss_scale

    def release(self, micro_batch: int) -> None:
        """Free the inputs of a micro-batch after its last use on this rank."""
        del self._inputs[micro_batch]

    def loss_totals(self) -> Tensor:
        """Return the sum of `loss_sums`; zeros on a stage that computes no losses."""
        if self.loss_sums:
            return torch.stack(self.loss_sums).sum(dim=0)
        losses = len(self.chunks[0].loss_names)
        return torch.zeros(2 * losses, dtype=at_least_fp32(self.chunks[0].dtype), device=self.context.device)

    def unmasked_tokens(self) -> Tensor:
        """Return the number of unmasked tokens of the step, over all replicas; all their ranks call it together."""
        return comm.all_reduce(torch.stack(self._unmasked_counts).sum(), self.context.flatten_axes("cp", "dp"))

    def _load_up_to(self, micro_batch: int) -> Inputs:
        while self._num_loaded <= micro_batch:
            with self.timers.time("batch-generator", level=2):
                batch = next(self.batches)
            model, fields = self.chunks[0], dict(batch)
            self.num_samples += batch[model.tokens_field].shape[0]
            self.num_tokens += batch[model.tokens_field].numel()
            for hook in self.hooks:
                hook.on_batch(batch)
            fields.pop("dataset_id", None)
            inputs = model.prepare(fields)
            tensors = {name: to_device(tensor, model.device) for name, tensor in inputs.tensors.items()}
            inputs = replace(inputs, tensors=tensors)
            self._inputs[self._num_loaded] = inputs
            self._unmasked_counts.append(inputs.tensors["loss_mask"].sum())
            self._num_loaded += 1
        return self._inputs[micro_batch]
