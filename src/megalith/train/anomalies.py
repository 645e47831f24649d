"""The anomaly policy of a run: locate the first non-finite number, then stop, skip the update or recompute the step.

An anomalous step is never applied (`StepCheck` decides before the update), so that restoring the counters and random
streams restores the state before it. Its micro-batches are kept until it is accepted. All ranks decide by the same
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from megalith.distributed import comm
from megalith.errors import MegalithError
from megalith.optim.gradients import GradientBuffers
from megalith.optim.loss_scale import ConstantLossScale, DynamicLossScale
from megalith.train.results import BadStep, FirstNonFinite, StepResult
from megalith.train.state import Snapshot, TrainState
from megalith.train.step import MicroBatch, MicroBatchRunner, run_pipeline
from megalith.train.step_hooks import NaNInjector, StepHook

MAX_CONSECUTIVE = 20  # skipped steps in a row after which the run stops, also at the smallest loss scale
_NEVER_RECOVER = (
    "Weights that are not finite never recover: continue from the last checkpoint (--load), or start "
    "a new run with a smaller --init-method-std"
)
_NO_SCALE_HELPS = "No loss scale helps against this overflow: use --bf16 or fp32 instead of --fp16, lower "
_OTHER_REMEDIES = "--lr or --init-method-std, or continue from an earlier checkpoint (--load, --ckpt-step)"

TakeStep = Callable[..., StepResult]
"""`train_step` with the options of a run: (batches, num_micro_batches, *, apply=True) -> StepResult."""


class BadStepError(MegalithError):
    """The anomaly policy ended the run at a step with an anomalous loss or gradient."""


@dataclass
class Attempt:
    """The first computation of a step.

    Attributes:
        batches: The micro-batches to compute it on, each kept in `drawn` until the step is accepted.
        before: Counters and random streams before the step.
        apply: Whether its update may be applied at once.
        rejected: Treat the result as anomalous in any case (--error-injection-type correct_result).
        loss_sums: Per micro-batch: interleaved (sum, count) of each loss; empty on ranks without the loss.
    """

    batches: Iterator[MicroBatch]
    drawn: list[MicroBatch]
    before: Snapshot
    apply: bool
    rejected: bool
    loss_sums: Sequence[Tensor] = ()


class _LossSums(StepHook):
    """Keeps the sums of the losses of each micro-batch of the last step."""

    last: Sequence[Tensor] = ()

    def values_to_reduce(self, runner: MicroBatchRunner) -> None:
        self.last = runner.loss_sums


@dataclass
class AnomalyPolicy:
    """Stops the run at an anomalous step, skips its update, or recomputes it.

    Attributes:
        pipeline_schedule: Name of the pipeline schedule.
        policy: "stop", "skip" or "rerun".
        compare: Compute every step twice and count those whose loss or gradient norm differs.
        injector: Fault injection into losses.
        num_bad, num_different, num_compared: Steps so far.
    """

    state: TrainState
    pipeline_schedule: str
    policy: str = "stop"
    compare: bool = False
    injector: NaNInjector = field(default_factory=NaNInjector)
    num_bad: int = 0
    num_different: int = 0
    num_compared: int = 0
    _consecutive: int = 0
    _consecutive_overflows: int = 0
    _sums: _LossSums = field(default_factory=_LossSums)
    _at_lowest_scale: bool = False

    @property
    def hooks(self) -> tuple[StepHook, ...]:
        """Step hooks that each computation of a step must run."""
        return (self.injector, self._sums)

    def begin(self, batches: Iterator[MicroBatch]) -> Attempt:
        """Prepare the first computation of a step."""
        self._at_lowest_scale = self.state.optimizer.scaler.is_lowest
        injected = self.injector.strikes(self.state.iteration + 1)
        rejected = injected and self.injector.kind == "correct_result"
        self.injector.active = injected and not rejected
        drawn = list[MicroBatch]()
        apply = not (rejected or self.compare)
        return Attempt(_record(batches, drawn), drawn, self.state.snapshot(), apply, rejected)

    def resolve(
        self, attempt: Attempt, result: StepResult, take_step: TakeStep, notify: Callable[[BadStep], None]
    ) -> StepResult:
        """Accept the first result of a step, or apply the policy to it; BadStepError on every rank to stop the run.

        `take_step` recomputes the step, `notify` receives the report of an anomaly.
        """
        state, attempt.loss_sums = self.state, self._sums.last
        self.injector.active = self.injector.active and self.injector.kind == "persistent_error"
        if self.compare and not result.anomaly:
            state.restore_snapshot(attempt.before)
            result = self._compare(result, take_step(iter(attempt.drawn), len(attempt.drawn)), notify)
        if attempt.rejected:
            result = replace(result, anomaly="the result is treated as wrong (--error-injection-type correct_result)")
        if result.anomaly:
            self.num_bad, self._consecutive = self.num_bad + 1, self._consecutive + 1
            result = self._handle(result, attempt, take_step, notify)
        elif alarm := state.check.alarm(result.loss):
            notify(replace(self._report(result, "alarm", self._worst_samples(result, attempt), None, ""), reason=alarm))
        if not result.anomaly:
            self._consecutive = 0
            if result.applied:
                state.check.remember(result.loss, result.grad_norm)
            overflowed = self._at_lowest_scale and not result.applied
            self._consecutive_overflows = self._consecutive_overflows + 1 if overflowed else 0
            if self._consecutive_overflows == MAX_CONSECUTIVE:
                self._stop_at_lowest_scale(result, attempt, notify)
        self.injector.active = False
        return result

    def summary(self) -> str:
        """Return one line about the steps that were computed twice; empty if none were."""
        if not self.num_compared:
            return ""
        return f"{self.num_different} of {self.num_compared} steps had another result when they were recomputed"

    def _compare(self, first: StepResult, second: StepResult, notify: Callable[[BadStep], None]) -> StepResult:
        self.num_compared += 1
        if (first.loss, first.grad_norm) != (second.loss, second.grad_norm):
            self.num_different += 1
            reason = (
                f"recomputed steps that differ: {self.num_different}; loss {first.loss!r} and {second.loss!r}, "
                f"gradient norm {first.grad_norm!r} and {second.grad_norm!r},"
            )
            samples = second.consumed_samples - second.num_samples, second.consumed_samples - 1
            notify(replace(self._report(second, "alarm", samples, None, ""), reason=reason))
        return second

    def _handle(
        self, result: StepResult, attempt: Attempt, take_step: TakeStep, notify: Callable[[BadStep], None]
    ) -> StepResult:
        state, drawn = self.state, attempt.drawn
        samples = self._worst_samples(result, attempt)
        if self.policy == "rerun":
            state.restore_snapshot(attempt.before)
            second = take_step(iter(drawn), len(drawn))
            if not second.anomaly:
                unchanged = second.loss == result.loss and second.grad_norm == result.grad_norm
                found = "equal" if unchanged else "finite"
                notify(self._report(result, "rerun", samples, None, found))
                return replace(second, seconds=second.seconds + result.seconds)
        numbers = result.loss, math.nan if result.grad_norm is None else result.grad_norm
        first, searched = None, not all(map(math.isfinite, numbers))
        if searched:
            after = state.snapshot()
            state.restore_snapshot(attempt.before)
            first = find_first_non_finite(state, drawn, self.pipeline_schedule, (self.injector,))
            state.restore_snapshot(after)
        found = "non-finite" if first else "finite" if searched else ""
        if self.policy == "rerun":
            found = "anomalous"
        if first is not None and first.micro_batch is not None:
            samples = self._samples_of_micro_batch(result, drawn, first.micro_batch, first.replica)
        stuck = first is not None and first.weight  # a weight that is not finite stays so
        action = "skip" if self.policy == "skip" and not stuck and self._consecutive < MAX_CONSECUTIVE else "stop"
        report = self._report(result, action, samples, first, found)
        notify(report)
        if action == "skip":
            return result
        raise BadStepError(_error_text(report, result, self.policy, self._consecutive, _fixed_scale(state)))

    def _stop_at_lowest_scale(self, result: StepResult, attempt: Attempt, notify: Callable[[BadStep], None]) -> None:
        """Stop a run that skips every step at the smallest loss scale, or at a fixed one."""
        samples = self._worst_samples(result, attempt)
        self.state.restore_snapshot(attempt.before)
        first = find_first_non_finite(self.state, attempt.drawn, self.pipeline_schedule)
        self.num_bad += 1
        scaler, where, remedy = self.state.optimizer.scaler, "", f"Lower {_fixed_scale(self.state)}"
        if isinstance(scaler, DynamicLossScale):
            where, remedy = f" at the smallest loss scale, {result.loss_scale:g}", _NO_SCALE_HELPS
        reason = f"{MAX_CONSECUTIVE} steps in a row are skipped{where} (the loss is {result.loss}),"
        report = self._report(replace(result, anomaly=reason), "stop", samples, first, "")
        notify(report)
        remedy = _NEVER_RECOVER if first is not None and first.weight else remedy + _OTHER_REMEDIES
        raise BadStepError(f"{report}; nothing of this step is saved. {remedy}")

    def _report(
        self, result: StepResult, action: str, samples: tuple[int, int], first: FirstNonFinite | None, recomputed: str
    ) -> BadStep:
        return BadStep(
            result.iteration,
            result.anomaly,
            result.loss,
            result.grad_norm,
            action,
            *samples,
            first,
            recomputed,
            self.num_bad,
        )

    def _worst_samples(self, result: StepResult, attempt: Attempt) -> tuple[int, int]:
        """Return the first and the last sample of the micro-batch with the highest loss."""
        context = self.state.context
        local = [float(pair[0] / pair[1].clamp(min=1.0)) for pair in attempt.loss_sums]
        gathered = comm.all_gather_objects((context.dp.index, local), context.world)
        losses = [
            (math.inf if math.isnan(loss) else loss, micro_batch, replica)
            for replica, losses in gathered
            for micro_batch, loss in enumerate(losses)
        ]
        _, micro_batch, replica = max(losses, key=lambda worst: worst[0])
        return self._samples_of_micro_batch(result, attempt.drawn, micro_batch, replica)

    def _samples_of_micro_batch(
        self, result: StepResult, drawn: Sequence[MicroBatch], micro_batch: int, replica: int
    ) -> tuple[int, int]:
        size = drawn[0][self.state.model.tokens_field].shape[0]
        block = micro_batch * self.state.context.dp.size + replica
        first = result.consumed_samples - result.num_samples + block * size
        return first, first + size - 1


def _record(batches: Iterator[MicroBatch], drawn: list[MicroBatch]) -> Iterator[MicroBatch]:
    for batch in batches:
        drawn.append(batch)
        yield batch


def _fixed_scale(state: TrainState) -> str:
    """Return the flag of a fixed loss scale that may be too large, with a comma; "" without one."""
    scaler = state.optimizer.scaler
    return "--loss-scale, " if isinstance(scaler, ConstantLossScale) and scaler.value > 1.0 else ""


def _error_text(report: BadStep, result: StepResult, policy: str, in_a_row: int, scale: str) -> str:
    first = result.consumed_samples - result.num_samples
    text = (
        f"{report} (the step has training samples {first} to {result.consumed_samples - 1}, learning rate "
        f"{result.learning_rate:g}); nothing of this step is saved. "
    )
    if report.first is not None and report.first.weight:
        return text + _NEVER_RECOVER
    if policy == "skip":
        return text + f"It is bad step {in_a_row} in a row: --nan-policy skip does not help here"
    return text + (
        f"Lower {scale}--lr, lengthen the warm-up or look at these samples; --nan-policy skip skips such steps, "
        "--no-check-for-nan-in-loss-and-grad disables this check"
    )


@dataclass(frozen=True, order=True)
class _Finding:
    """A non-finite number; the smallest of several occurred first."""

    phase: int  # 0 weights, 1 forward passes, 2 losses, 3 backward passes, 4 gradients of weights
    # micro_batch, stage, call: its order within the phase; the stage is negative in phase 3, which runs backwards
    micro_batch: int
    stage: int  # virtual pipeline stage
    call: int
    rank: int
    what: str


class _NonFiniteSearch:
    """Records the first non-finite number of each phase on this rank."""

    def __init__(self, state: TrainState, runner: MicroBatchRunner) -> None:
        self._state, self._runner = state, runner
        self.first: dict[int, _Finding] = {}
        self._calls = 0

    def check(self, phase: int, what: str, tensor: Tensor, chunk: int = 0) -> None:
        self._calls += 1
        if phase in self.first or not tensor.is_floating_point() or bool(tensor.isfinite().all()):
            return
        context, op = self._state.context, self._runner.current_op
        stage = chunk * context.pp.size + context.pp.index
        micro_batch = -1 if op is None or phase in (0, 4) else op.micro_batch
        self.first[phase] = _Finding(
            phase, micro_batch, -stage if phase == 3 else stage, self._calls, context.rank, what
        )

    def hook(self, name: str, chunk: int) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in output if isinstance(output, tuple) else (output,):
                if isinstance(tensor, Tensor):
                    self.check(1, f"the output of {name}", tensor.detach(), chunk)
                    if tensor.requires_grad:
                        tensor.register_hook(
                            lambda grad: self.check(3, f"the gradient of the output of {name}", grad, chunk)
                        )

        return after


def find_first_non_finite(
    state: TrainState, batches: Sequence[MicroBatch], pipeline_schedule: str, hooks: Sequence[StepHook] = ()
) -> FirstNonFinite | None:
    """Recompute a step from the state before it with hooks on every module, and find its first non-finite number.

    All ranks call it together, after a step was found anomalous, and get the same answer; None if everything was finite
    this time. `state` is that before the step; its gradients and random streams are invalid afterwards.

    Forward passes precede backward passes; within these the order is micro-batch, virtual stage, call. A non-finite
    number spreads to the ranks of the next collective, so that the first rank in this order is its origin.
    """
    runner = MicroBatchRunner(
        state.chunks,
        iter(batches),
        state.context,
        num_micro_batches=len(batches),
        loss_scale=state.optimizer.loss_scale,
        step=state.iteration + 1,
        hooks=hooks,
    )
    search, gradients = _NonFiniteSearch(state, runner), state.optimizer.gradients
    with ExitStack() as stack:
        for chunk, module in enumerate(state.chunks):
            for name, submodule in module.named_modules():
                if name:
                    stack.callback(submodule.register_forward_hook(search.hook(name, chunk)).remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        gradients.begin()  # nothing is reduced before `finish`, so that gradients are those of this rank until then
        if isinstance(gradients, GradientBuffers):
            gradients.flat.zero_()
        for box in state.optimizer.weight_boxes():
            search.check(0, f"the weight {box.name}", box.tensor)
        run_pipeline(state, runner, pipeline_schedule, len(batches))
    runner.current_op = None
    for number, sums in enumerate(runner.loss_sums):
        search.check(2, f"the loss of micro-batch {number}", sums)
    if isinstance(gradients, GradientBuffers):
        for name, grad in gradients.grads.items():
            search.check(4, f"the gradient of {name}", grad)
    gradients.finish()
    local = list(search.first.values())
    gathered = [finding for found in comm.all_gather_objects(local, state.context.world) for finding in found]
    if not gathered:
        return None
    first = min(gathered)
    coordinates = state.context.layout.coordinates(first.rank)
    micro_batch = first.micro_batch if first.micro_batch >= 0 else None
    if first.phase == 2:
        micro_batch = int(first.what.rpartition(" ")[2])
    return FirstNonFinite(first.rank, first.what, micro_batch, coordinates["dp"], weight=first.phase == 0)
