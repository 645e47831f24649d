"""Results of a run as plain values without tensors, and the interface of hooks that receive them.

The loop knows no consoles, files or dashboards: it calls one method of each `Hook` per event. A hook must not change
the state of the run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Times = Mapping[str, Sequence[float]]
"""Name of an operation -> its seconds on each rank."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, applied or skipped.

    Attributes:
        iteration: Steps done, this one included.
        loss: Mean over the tokens of the global batch; infinite or NaN where the forward pass was.
        applied: False if the loss scaler skipped the step.
        learning_rate: The schedule's value after the step, which is what Megatron prints.
        loss_scale: After the step (an overflow has already lowered it); 1 without scaling.
        grad_norm: Before clipping; None on a skipped step.
        num_zeros: Exact zeros in the gradients; None unless counted.
        params_norm: After the step; None unless asked for.
        consumed_samples: Samples drawn from the training data so far, those of skipped steps included.
        num_tokens: Tokens of this step (samples x sequence length).
        anomaly: Why the step was found anomalous and was not applied; empty for a normal one.
        decoupled_lr: The rate of the word embeddings and the output layer after the step, where it is another.
        skipped_samples: Samples passed over so far (`--iterations-to-skip`).
        source_tokens: Of a blend, the dataset -> its tokens in this step; empty without a blend.
        auxiliary_losses: Of mixtures of experts, name -> mean over layers and micro-batches.
        expert_load: Of mixtures of experts, the layer -> how often each of its experts was chosen in this step.
        further_losses: Of models that learn more than one thing (BERT's "sop loss"), name -> as `loss`.
    """

    iteration: int
    loss: float
    applied: bool
    learning_rate: float
    weight_decay: float
    loss_scale: float
    grad_norm: float | None
    num_zeros: float | None
    params_norm: float | None
    consumed_samples: int
    num_samples: int
    num_tokens: int
    seconds: float
    anomaly: str = ""
    decoupled_lr: float | None = None
    skipped_samples: int = 0
    source_tokens: Mapping[str, int] = field(default_factory=dict)
    auxiliary_losses: Mapping[str, float] = field(default_factory=dict)
    expert_load: Mapping[int, Sequence[int]] = field(default_factory=dict)
    further_losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FirstNonFinite:
    """The origin of the non-finite numbers of a step."""

    rank: int
    what: str  # in words, such as "the output of decoder.layers.1.mlp"
    micro_batch: int | None  # None if it belongs to none
    replica: int  # data-parallel index of the rank
    weight: bool  # it is a weight

    def __str__(self) -> str:
        of = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        return f"first of all {self.what} is not finite, on rank {self.rank}{of}"


_RECOMPUTED = {
    "equal": "the same, and finite",
    "finite": "finite, so that it was a transient error of a machine",
    "non-finite": "not finite either",
    "anomalous": "anomalous again",
}


@dataclass(frozen=True)
class BadStep:
    """A step with an anomalous loss or gradient, and the action taken."""

    iteration: int
    reason: str
    loss: float
    grad_norm: float | None
    # "stop", "skip" (its update), "rerun" (normal when recomputed), or "alarm": an outlier that is applied
    action: str
    # first_sample, last_sample: of the micro-batch that caused it
    first_sample: int
    last_sample: int
    first: FirstNonFinite | None = None
    recomputed: str = ""  # result of recomputing it: "equal", "finite", "non-finite" or "anomalous"; "" if it was not
    number: int = 0  # number of bad steps of this process, including this one

    def __str__(self) -> str:
        samples = f"training samples {self.first_sample} to {self.last_sample}"
        where = f"{self.first} ({samples})" if self.first else samples
        recomputed = f"; recomputed: {_RECOMPUTED[self.recomputed]}" if self.recomputed else ""
        return f"{self.reason} at iteration {self.iteration}: {where}{recomputed}"


@dataclass(frozen=True)
class GradientNoise:
    """The gradient noise scale (`noise`)."""

    iteration: int
    # small, large: samples of the two batches
    small: int
    large: int
    # small_norm, large_norm: of their gradients
    small_norm: float
    large_norm: float
    scale: float | None  # in samples, smoothed over the reports; None while it is undetermined


@dataclass(frozen=True)
class WindowReport:
    """The steps between two lines of the log: averages and counts; fields without a comment are of the last step."""

    iteration: int
    train_iterations: int
    consumed_samples: int
    seconds_per_step: float
    teraflops: float  # TFLOP/s of this device over the window, model FLOPs counted once
    tokens_per_second: float  # training tokens over wall time, evaluation and saving left out
    # model FLOPs utilisation, of the matmul peak that was measured at the start. Above 1 where something else used the
    # machine then.
    mfu_measured: float
    mfu_datasheet: float | None  # the same, of the peak in the device's datasheet; None where the device is not known
    learning_rate: float
    global_batch_size: int
    loss: float | None  # mean over the applied steps, in single precision as Megatron sums it; None if none was applied
    loss_scale: float
    grad_norm: float | None
    num_zeros: float | None
    params_norm: float | None
    num_skipped: int
    num_nan: int  # skipped steps whose loss was not finite
    skipped_samples: int = 0
    auxiliary_losses: Mapping[str, float] = field(default_factory=dict)
    further_losses: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float:
        """Seconds until the last iteration at the pace of these steps; evaluations and saves come on top."""
        return (self.train_iterations - self.iteration) * self.seconds_per_step


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over a part of a split.

    Attributes:
        split: "validation" or "test".
        final: One of the evaluations after training, which say which split they are on.
    """

    iteration: int
    consumed_samples: int
    split: str
    loss: float
    num_samples: int
    seconds: float
    final: bool
    further_losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Samples:
    """Most likely answers to prompts at an evaluation.

    Attributes:
        samples: Of each prompt the texts `prompt`, `answer` and, where there is one, the `held_out` answer.
    """

    iteration: int
    samples: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class ScheduledSave:
    """A checkpoint that is being written while training continues."""

    iteration: int
    folder: str
    stall_seconds: float  # how long the training stood still for it


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is complete on disk.

    Attributes:
        seconds: From the begin of the save until it was complete.
        stall_seconds: How long the training stood still for it, over all.
        waited_seconds: The part of that spent waiting for the writers of an asynchronous save.
        gigabytes_per_second: Bytes of all ranks over the time of the slowest writer; 0 where nothing is written.
    """

    iteration: int
    path: str
    seconds: float
    num_bytes: int
    stall_seconds: float = 0.0
    waited_seconds: float = 0.0
    gigabytes_per_second: float = 0.0

    @property
    def folder(self) -> str:
        """Save folder that holds the checkpoint."""
        return os.path.dirname(self.path)


@dataclass(frozen=True)
class ExitReason:
    """Why a run ended."""

    # "finished", "signal", "interval" (`--exit-interval`, or the end of a phase), "duration"
    # (`--exit-duration-in-mins`), "early stopping" (`--early-stopping-patience`) or "hook" (one of the user)
    kind: str
    iteration: int
    detail: str = (
        ""  # the signal's name, the minutes the run took, the lowest validation loss, or the reason of the hook
    )


@dataclass
class Progress:
    """Counts of the applied and skipped steps of this process, and the first and last loss of the applied ones."""

    applied: int = 0
    skipped: int = 0
    first_loss: float = math.nan
    last_loss: float = math.nan

    def add(self, result: StepResult) -> None:
        """Count a step."""
        if not result.applied:
            self.skipped += 1
            return
        if not self.applied:
            self.first_loss = result.loss
        self.applied, self.last_loss = self.applied + 1, result.loss

    @property
    def none_applied(self) -> bool:
        """True if there were steps and every one was skipped."""
        return self.skipped > 0 and not self.applied

    def __str__(self) -> str:
        skipped = f" ({self.skipped} skipped)" if self.skipped else ""
        steps = f"{self.applied} applied step{'' if self.applied == 1 else 's'}"
        return f"loss {self.first_loss:.4g} -> {self.last_loss:.4g} in {steps}{skipped}"


@dataclass
class Window:
    """The steps since the last line of the log. Unlike Megatron's, every line starts a new window."""

    results: list[StepResult] = field(default_factory=list)

    def add(self, result: StepResult) -> None:
        """Append a step."""
        self.results.append(result)

    def close(
        self, train_iterations: int, flops_per_step: float, measured_peak: float, datasheet_peak: float | None = None
    ) -> WindowReport:
        """Return the report on the steps and start a new window; both peaks in FLOP/s."""
        results, self.results = self.results, []
        last, applied = results[-1], [result for result in results if result.applied]
        seconds = sum(result.seconds for result in results)
        achieved = flops_per_step * len(results) / seconds
        return WindowReport(
            iteration=last.iteration,
            train_iterations=train_iterations,
            consumed_samples=last.consumed_samples,
            seconds_per_step=seconds / len(results),
            teraflops=achieved / 1e12,
            tokens_per_second=sum(result.num_tokens for result in results) / seconds,
            mfu_measured=achieved / measured_peak,
            mfu_datasheet=achieved / datasheet_peak if datasheet_peak else None,
            learning_rate=last.learning_rate,
            global_batch_size=last.num_samples,
            loss=_mean_in_single_precision([result.loss for result in applied]),
            loss_scale=last.loss_scale,
            grad_norm=last.grad_norm,
            num_zeros=last.num_zeros,
            params_norm=last.params_norm,
            num_skipped=len(results) - len(applied),
            num_nan=sum(1 for result in results if not result.applied and not np.isfinite(result.loss)),
            skipped_samples=last.skipped_samples,
            further_losses={
                name: mean
                for name in last.further_losses
                if (mean := _mean_in_single_precision([result.further_losses[name] for result in applied])) is not None
            },
            auxiliary_losses={
                name: sum(result.auxiliary_losses[name] for result in results) / len(results)
                for name in last.auxiliary_losses
            },
        )


def _mean_in_single_precision(losses: list[float]) -> float | None:
    if not losses:
        return None
    total = np.float32(0.0)
    for loss in losses:
        total = np.float32(total + np.float32(loss))
    return float(total) / len(losses)


class Hook:
    """An observer that receives the events of a run as plain values; each method does nothing by default.

    Code inside a step, which may change losses, is a `step_hooks.StepHook`; fault injection is a `faults.Probe`.
    """

    def after_step(self, result: StepResult) -> None:
        """Receive the result of every optimizer step, applied or skipped."""

    def after_window(self, report: WindowReport) -> None:
        """Receive the report of every `--log-interval` steps."""

    def after_noise(self, noise: GradientNoise) -> None:
        """Receive the gradient noise scale after each measurement."""

    def on_bad_step(self, bad: BadStep) -> None:
        """Receive the report of an anomalous or outlying step, before the action."""

    def on_batch_size_change(self, before: int, after: int) -> None:
        """Receive a change of the global batch size of the next steps, from `before` to `after` samples."""

    def after_timing(self, iteration: int, times: Times) -> None:
        """Receive the times of steps (on average), an evaluation or a save, of all ranks."""

    def before_evaluation(self, split: str, num_samples: int, *, final: bool) -> None:
        """Run before an evaluation; `final` for those after training."""

    def before_evaluation_iteration(self, number: int, total: int, *, final: bool) -> None:
        """Run before global batch `number` of `total` of an evaluation, counted from 1."""

    def after_evaluation(self, evaluation: Evaluation) -> None:
        """Receive the result of an evaluation."""

    def after_sampling(self, sampled: Samples) -> None:
        """Receive answers to prompts, after the result of an evaluation."""

    def before_save(self, iteration: int, *, persistent: bool = True) -> None:
        """Run before a checkpoint is written: one to keep, or one of which only the last is kept."""

    def after_scheduling(self, scheduled: ScheduledSave) -> None:
        """Run after an asynchronous save was started."""

    def after_save(self, saved: SavedCheckpoint) -> None:
        """Run after a checkpoint is complete on disk."""

    def after_training(self, iteration: int) -> None:
        """Run after the last iteration, before the final save and evaluations."""

    def on_exit(self, exit_reason: ExitReason) -> None:
        """Run when the run ends before its last iteration, its state saved."""

    def close(self) -> None:
        """Close files. Runs at the end of the run, whichever way it ended."""


class Hooks(Hook):
    """Several listeners as one, called in order."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks = tuple(hooks)


def _tell_all(moment: str) -> Callable[..., None]:
    def tell(hooks: Hooks, *args: Any, **options: Any) -> None:
        for hook in hooks.hooks:
            getattr(hook, moment)(*args, **options)

    return tell


for _moment in (name for name in vars(Hook) if not name.startswith("_")):
    setattr(Hooks, _moment, _tell_all(_moment))
