"""One optimizer step: micro-batches forward and backward through the pipeline, then the update."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.models.language_model import Inputs, LanguageModel
from megalith.nn.moe.router import NAMES, Router
from megalith.nn.precision import at_least_fp32
from megalith.parallel import pipeline
from megalith.schedules.pipeline import Op, default_schedule, make_schedule
from megalith.train.faults import Probe, no_probe
from megalith.train.results import StepResult
from megalith.train.signals import STOP_SIGNALS, StopSignals
from megalith.train.state import TrainState
from megalith.train.timers import Timers

if TYPE_CHECKING:
    from megalith.train.checkpoint_saver import BackgroundSaver


Batch = Mapping[str, Tensor]
"""One micro-batch: the fields of its samples, [B, ...] each; which ones is the business of the family of the model.

A loss_mask [B, S] is among them. GPT's are tokens, labels, position_ids [B, S] int64; attention stays inside documents
if it has document_ids [B, S] int32. Samples are counted by where they come from if it has dataset_id [B] int64.
"""

Totals = Callable[[Tensor], Tensor]
"""The sums over all ranks of what this rank has summed: losses and their terms, samples of each source of a blend."""

NOTHING = -1.0  # no gradient has a norm as small


def totals_of(state: TrainState) -> Totals:
    """Return the sum over all ranks of a run that counts each token once; all ranks call it together."""
    return Agreement(NeverStop(), state.context, counts=state.speaks).totals


def train_step(
    state: TrainState,
    batches: Iterator[Batch],
    num_micro_batches: int,
    *,
    schedule: str | None = None,
    totals: Totals | None = None,
    before_update: Callable[[], None] | None = None,
    with_params_norm: bool = False,
    probe: Probe = no_probe,
    timers: Timers | None = None,
    sums: list[Tensor] | None = None,
    apply: bool = True,
    inject_nan: bool = False,
    sources: Sequence[str] = (),
) -> StepResult:
    """Take one step on the next `num_micro_batches` micro-batches and advance the counters of `state`.

    The gradient is that of the average over micro-batches of each one's mean loss per unmasked token, or under
    --calculate-per-token-loss that of the mean over all unmasked tokens of all micro-batches and replicas: then it is
    summed, and divided when all are done. The reported loss weighs all tokens of the step alike. A step that the loss
    scaler skips consumes its samples but leaves the schedule, and so does a bad one (`state.check`), which is not
    applied.

    Args:
        state: of the run; all its ranks take the step together.
        batches: the micro-batches of this replica.
        schedule: the order of a pipeline's work (schedules.pipeline); the usual one if None.
        totals: sums over all ranks, and whatever else they agree on meanwhile; `totals_of(state)` if None.
        before_update: called when the gradients are there and before anything that a checkpoint holds changes.
        probe: called at the points of the step.
        sums: gets [sum, terms] of each loss, of each micro-batch that was predicted here.
        apply: whether to update the weights.
        inject_nan: make the loss of the first micro-batch NaN, as `--error-injection-rate` asks.
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
        inject_nan=inject_nan,
    )
    with timers.time("forward-backward", level=1):
        run_pipeline(state, work, schedule or default_schedule(len(state.chunks)), num_micro_batches, timers)
    if per_token:
        divide_by_tokens(state, work)
    names = loss_names(model)
    auxiliary = auxiliary_losses(state.chunks, names, num_micro_batches, state.context)
    load = expert_load(state.chunks, state.context)
    total = work.total()
    # Context-parallel ranks have parts of the same samples, which the first of them counts.
    drawn = [float(work.samples_of[number]) * state.context.cp.is_first for number in range(len(sources))]
    mine = [total, total.new_tensor(drawn), auxiliary.to(total), load.flatten().to(total)]
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
    if before_update is not None:
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


@dataclass(eq=False)
class StageWork:
    """The forward passes of the chunks of this rank over the micro-batches of a step: a `pipeline.StageRunner`."""

    chunks: Sequence[LanguageModel]
    batches: Iterator[Batch]  # micro-batches in order, each held from its first use here to its last
    context: ParallelContext
    _: KW_ONLY
    # num_micro_batches, loss_scale: the loss is divided by the one and multiplied by the other
    num_micro_batches: int = 1
    loss_scale: float = 1.0
    training: bool = True  # whether the loss is to be differentiated
    probe: Probe = no_probe
    step: int = 0
    timers: Timers = field(default_factory=Timers)
    inject_nan: bool = False  # as of `train_step`
    at: Op | None = field(default=None, init=False)  # the operation that is under way
    # of each micro-batch that was predicted here the sum and the number of terms of each loss, [2 x losses]
    sums: list[Tensor] = field(default_factory=list, init=False)
    num_samples: int = field(default=0, init=False)
    num_tokens: int = field(default=0, init=False)
    samples_of: Counter[int] = field(default_factory=Counter, init=False)  # number of a source -> its samples
    _held: dict[int, Inputs] = field(default_factory=dict, init=False)
    _drawn: int = field(default=0, init=False)
    _unmasked: list[Tensor] = field(default_factory=list, init=False)

    def border(self, micro_batch: int) -> tuple[tuple[int, int, int], torch.dtype]:
        """Shape [S, B, D] and dtype of the hidden states that go from stage to stage."""
        return self.chunks[0].border(self._batch(micro_batch))

    def before(self, op: Op) -> None:
        """Draw the data of a forward pass; tell the probe where the step is."""
        if not self.training:
            return
        self.at = op
        if op.kind == "F":
            self.probe("data", self.step)
            self._batch(op.micro_batch)
            self.probe("fwd", self.step)
        elif op.kind == "B":
            self.probe("bwd", self.step)

    def forward(self, chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        """Hidden states for the next chunk, or the loss to differentiate.

        That is the sum of the weighed losses, each a mean over its terms in the micro-batch (GPT's: unmasked tokens),
        those of other context-parallel ranks included, over the number of micro-batches, times the loss scale; the
        gradients of these ranks are parts that add up. Under --calculate-per-token-loss it is the sum over these terms
        times the loss scale (see `train_step`).
        """
        inputs, model = self._batch(micro_batch), self.chunks[chunk]
        if not model.stage.predicts:
            return model.part(inputs, hidden)
        losses = model.losses(inputs, hidden)
        summed, counts = torch.stack([loss.summed for loss in losses]), torch.stack([loss.count for loss in losses])
        if self.inject_nan and self.training and micro_batch == 0:
            summed = summed * math.nan
        known, terms = summed.detach(), counts
        if model.reports_means:
            known, terms = known / terms.clamp(min=1.0), torch.ones_like(terms)
        self.sums.append(torch.stack((known, terms), dim=1).flatten())
        summed = summed * summed.new_tensor([loss.weight for loss in losses])
        if model.config.calculate_per_token_loss:
            return summed.sum() * self.loss_scale
        if self.context.cp.size > 1:
            counts = comm.all_reduce(counts, self.context.cp)
        return (summed / counts.clamp(min=1.0)).sum() / self.num_micro_batches * self.loss_scale

    def end(self, micro_batch: int) -> None:
        """Nothing more is done for this micro-batch here."""
        del self._held[micro_batch]

    def total(self) -> Tensor:
        """The sum of `sums`; zeros on a stage that predicts nothing."""
        if self.sums:
            return torch.stack(self.sums).sum(dim=0)
        losses = len(self.chunks[0].loss_names)
        return torch.zeros(2 * losses, dtype=at_least_fp32(self.chunks[0].dtype), device=self.context.device)

    def unmasked_tokens(self) -> Tensor:
        """Of all micro-batches of all replicas that were drawn; every rank of the replicas calls this."""
        return comm.all_reduce(torch.stack(self._unmasked).sum(), self.context.join("cp", "dp"))

    def _batch(self, micro_batch: int) -> Inputs:
        while self._drawn <= micro_batch:
            with self.timers.time("batch-generator", level=2):
                whole = next(self.batches)
            model, own = self.chunks[0], dict(whole)
            self.num_samples += whole[model.tokens_field].shape[0]
            self.num_tokens += whole[model.tokens_field].numel()
            if (sources := own.pop("dataset_id", None)) is not None:
                self.samples_of.update(sources.tolist())
            inputs = model.prepare(own)
            inputs = replace(inputs, tensors=on_device(inputs.tensors, model.device))
            self._held[self._drawn] = inputs
            self._unmasked.append(inputs.tensors["loss_mask"].sum())
            self._drawn += 1
        return self._held[micro_batch]


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch where the model is; to a GPU it goes through pinned memory, beside the computation."""
    if device.type == "cuda":
        return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}
    return {name: tensor.to(device) for name, tensor in batch.items()}


class NeverStop:
    """In place of `StopSignals`: no one asks the run to stop."""

    requested: str | None = None


@dataclass(eq=False)
class Agreement:
    """What all ranks must decide alike, as of the last `totals`: the loss of a step, requests to stop, the time limit.

    One small sum over all ranks after each step carries everything, so that no rank leaves a loop that another one is
    still in. One process agrees with itself, at once and without a sum.
    """

    stop: StopSignals | NeverStop
    context: ParallelContext
    counts: bool = True  # whether the sums of this rank count; they are the same on several ranks, and one speaks
    writers: BackgroundSaver | None = None
    out_of_time: bool = field(default=False, init=False)  # the clock of a rank says that time is up
    busy: bool = field(default=False, init=False)  # a rank is still at work for a checkpoint
    failed: bool = field(default=False, init=False)  # a rank could not do its part of one
    _requested: str | None = field(default=None, init=False)

    @property
    def alone(self) -> bool:
        """One process, which needs to ask no one."""
        return self.context.world.size == 1

    @property
    def requested(self) -> str | None:
        """The signal that any rank has got; of several the first in the order of `STOP_SIGNALS`."""
        return self.stop.requested if self.alone else self._requested

    def totals(self, sums: Tensor, *, out_of_time: bool = False) -> Tensor:
        """Sum `sums` [n] over the ranks that count, in double precision; renews what is agreed."""
        busy = self.writers is not None and self.writers.busy
        failed = self.writers is not None and self.writers.failed
        if self.alone:
            self.out_of_time, self.busy, self.failed = out_of_time, busy, failed
            return sums
        own = sums.double() if self.counts else torch.zeros_like(sums, dtype=torch.float64)
        requests = [float(self.stop.requested == number.name) for number in STOP_SIGNALS]
        states = [float(out_of_time), float(busy), float(failed)]
        flags = torch.tensor([*requests, *states], dtype=torch.float64, device=sums.device)
        total = comm.all_reduce(torch.cat([own, flags]), self.context.world)
        *asked, late, busy, failed = (count > 0 for count in total[len(sums) :].tolist())
        names = [number.name for number, there in zip(STOP_SIGNALS, asked, strict=True) if there]
        self._requested = names[0] if names else None
        self.out_of_time, self.busy, self.failed = late, busy, failed
        return total[: len(sums)].to(sums.dtype)


def routers(chunks: Iterable[LanguageModel]) -> list[Router]:
    """The routers of this rank."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]


def begin_step(chunks: Sequence[LanguageModel], scale: float) -> None:
    """Forget the step before; auxiliary losses are scaled by `scale`, as the main loss of a micro-batch is."""
    for chunk in chunks:
        chunk.auxiliary.scale = scale
        chunk.auxiliary.recorded.clear()
    for router in routers(chunks):
        router.begin_step()


def loss_names(model: ModelConfig) -> list[str]:
    """The auxiliary losses of a model, as Megatron names them."""
    if not model.mixture:
        return []
    return [NAMES[kind] for kind in model.balancing] + (["z_loss"] if model.moe_z_loss_coeff is not None else [])


def auxiliary_losses(
    chunks: Sequence[LanguageModel], names: Sequence[str], num_micro_batches: int, context: ParallelContext
) -> Tensor:
    """What this replica adds to the mean of each loss over layers, micro-batches and replicas, [names], fp64.

    The sum over context-parallel ranks and replicas is that mean; tensor-parallel ranks and stages have the same.
    """
    if not names:
        return torch.zeros(0, dtype=torch.float64, device=context.device)
    model = chunks[0].config
    mixtures = sum(1 for experts in (*model.experts, *model.experts[-1:] * model.predictions) if experts)
    sums = torch.zeros(len(names), dtype=torch.float64)
    for chunk in chunks:
        recorded = [chunk.auxiliary.recorded.get(name, {}).values() for name in names]
        sums += torch.tensor([sum(map(float, values)) for values in recorded], dtype=torch.float64)
    return _of_all_layers(sums / (mixtures * num_micro_batches * context.dp.size), chunks, context)


@torch.no_grad()
def expert_load(chunks: Sequence[LanguageModel], context: ParallelContext) -> Tensor:
    """How often the tokens here chose each expert in this step, [layers x experts], 0 for dense layers; fp64.

    Layers of multi-token prediction stand behind the others.

    The sum over context-parallel ranks and replicas is that of all tokens; tensor-parallel ranks and stages have the
    same.
    """
    model = chunks[0].config
    layers = model.num_layers + model.predictions
    load_LE = torch.zeros(layers, model.num_experts or 0, dtype=torch.float64, device=context.device)
    for router in routers(chunks):
        load_LE[router.layer] = router.load_E
    return _of_all_layers(load_LE, chunks, context) if model.mixture else load_LE


def _of_all_layers(sums: Tensor, chunks: Sequence[LanguageModel], context: ParallelContext) -> Tensor:
    """Sums of the layers and tokens here, put together with those of other stages and of other parts of a sequence."""
    sums = sums.to(context.device)
    if chunks[0].region.partial_gradients:
        sums = comm.all_reduce(sums, context.tp)
    return comm.all_reduce(sums, context.pp)


@torch.no_grad()
def set_offsets(chunks: Sequence[LanguageModel], context: ParallelContext, memory: float) -> None:
    """Set the offsets of experts that quantiles balance, to those that this step asked for.

    These are means over the micro-batches of all replicas, of which the share `memory` of what was before is kept. What
    all experts have in common is taken away, for it decides nothing.

    Source: Megatron-LM pull request 5349 (June 2026).
    """
    for router in routers(chunks):
        if router.qb_beta is not None:
            batches = max(router.offset_batches, 1) * context.dp.size
            asked_E = comm.all_reduce(router.offsets_E / batches, context.dp)
            offsets_E = memory * router.qb_beta + (1.0 - memory) * asked_E
            router.qb_beta.copy_(offsets_E - offsets_E.mean())


@torch.no_grad()
def move_biases(chunks: Sequence[LanguageModel], context: ParallelContext, rate: float) -> None:
    """Raise the bias of each expert that had less than its share of this step's choices, and lower that of the others.

    Ranks with the same tokens count them again, which does not change who is above the mean.

    Source: arXiv:2408.15664, algorithm 1, with the sign as Megatron has it.
    """
    for router in routers(chunks):
        if router.expert_bias is not None:
            load = router.load_E.clone()
            for axis in (context.tp, context.cp, context.dp):
                load = comm.all_reduce(load, axis)
            router.expert_bias += rate * torch.sign(load.mean() - load)
