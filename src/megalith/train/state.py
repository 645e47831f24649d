"""The state of a run: what training changes, a checkpoint saves and a resume restores."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, pstdev
from typing import Any

from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.models.language_model import LanguageModel
from megalith.optim.optimizer import Optimizer
from megalith.parallel.pipeline import DeferredWeightGrads
from megalith.schedules.parameters import ParameterSchedule

REMEMBERED = 100  # steps, as many as Megatron looks at
FACTOR = 10.0  # Megatron's, of --check-for-spiky-loss and --check-for-large-grads
FEWEST = 10  # steps before a comparison means something
ALARM_DEVIATIONS, ALARM_SHARE = 8.0, 0.25  # standard deviations and share of the mean that a loss may rise by unnoticed


@dataclass
class StepCheck:
    """The test for anomalous steps: a loss or gradient norm that is not finite, or far above those of the steps before.

    It is decided before the update, from numbers that are equal on all ranks, so that all ranks decide equally. The
    numbers of the last steps are part of a checkpoint, so that a resumed run decides as an uninterrupted one.
    """

    not_finite: bool = True
    # spiky_loss, large_norm: whether one of 10 times the largest remembered is
    spiky_loss: bool = False
    large_norm: bool = False
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def loss_anomaly(self, loss: float) -> str:
        """Return why the loss of a step is anomalous; empty if it is not."""
        if not math.isfinite(loss):
            return f"the loss is {loss}" if self.not_finite else ""
        limit = _limit(self.losses) if self.spiky_loss else math.inf
        return f"the loss is {loss:.6g}, {_times(loss, self.losses)}," if loss > limit else ""

    @property
    def reject_norm_above(self) -> float:
        """Gradient norm above which a step is anomalous."""
        return _limit(self.norms) if self.large_norm else math.inf

    def norm_anomaly(self, norm: float | None) -> str:
        """Return why the gradient norm of a step, None for an overflow, is anomalous; empty if it is not."""
        if norm is None:
            return "a gradient is not finite" if self.not_finite else ""
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}" if self.not_finite else ""
        return f"the gradient norm is {norm:.6g}, {_times(norm, self.norms)}," if norm > self.reject_norm_above else ""

    def alarm(self, loss: float) -> str:
        """Return a warning about a loss that stands out though the step is applied; empty where it does not."""
        if len(self.losses) < FEWEST or not math.isfinite(loss):
            return ""
        mean = fmean(self.losses)
        if loss <= mean + max(ALARM_DEVIATIONS * pstdev(self.losses), ALARM_SHARE * abs(mean)):
            return ""
        return f"the loss is {loss:.6g}, where the mean of the last {len(self.losses)} steps is {mean:.6g}"

    def remember(self, loss: float, norm: float | None) -> None:
        """Record an applied step."""
        if math.isfinite(loss):
            self.losses.append(loss)
        if norm is not None and math.isfinite(norm):
            self.norms.append(norm)

    def state(self) -> dict[str, list[float]]:
        """Return what a checkpoint keeps."""
        return {"losses": list(self.losses), "norms": list(self.norms)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        for kept, name in ((self.losses, "losses"), (self.norms, "norms")):
            kept.clear()
            kept.extend(float(value) for value in state.get(name, ()))


def _limit(remembered: Sequence[float]) -> float:
    return FACTOR * max(remembered) if len(remembered) >= FEWEST else math.inf


def _times(value: float, remembered: Sequence[float]) -> str:
    return f"{value / max(remembered):.3g} times the largest of the last {len(remembered)} steps"


DECAY = 0.9  # of the running averages, from one report to the next


@dataclass
class NoiseScale:
    """The gradient noise scale: the batch size, in samples, up to which larger batches pay.

    The expected squared norm of a gradient over a batch of B samples is |G|^2 + tr(S)/B, with the true gradient G and
    the covariance S of the gradient of one sample. Two batch sizes give both unknowns, and tr(S)/|G|^2 is the scale:
    far below it a batch of twice the size does nearly twice the work, far above it nothing. The small batch is the
    first micro-batches of the step, computed once more by themselves; both parts are averaged over the reports before
    they are divided, for each alone is noisy.

    Source: McCandlish et al. 2018, arXiv:1812.06162, section 2.2 and appendix A.1.
    """

    signal: float = 0.0  # of |G|^2, not yet corrected for its start from zero
    noise: float = 0.0  # of tr(S), likewise

    def add(self, small: int, small_norm: float, large: int, large_norm: float) -> float | None:
        """Add the gradient norms of two batch sizes; return the noise scale in samples.

        None while the average of |G|^2 is not positive, and for norms that are not numbers, which are left out.
        """
        assert 0 < small < large
        if not (math.isfinite(small_norm) and math.isfinite(large_norm)):
            return None
        signal = (large * large_norm**2 - small * small_norm**2) / (large - small)
        noise = (small_norm**2 - large_norm**2) / (1.0 / small - 1.0 / large)
        self.signal += (1.0 - DECAY) * (signal - self.signal)
        self.noise += (1.0 - DECAY) * (noise - self.noise)
        return max(0.0, self.noise) / self.signal if self.signal > 0.0 else None

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return asdict(self)

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue from what `state` returned; without it the averages start from zero."""
        self.signal, self.noise = float(state.get("signal", 0.0)), float(state.get("noise", 0.0))


@dataclass
class BestEvaluation:
    """The lowest validation loss so far, for `--early-stopping-patience` and `--keep-best`.

    Of several validation sets the mean of their losses counts. It is equal on all ranks, and part of a checkpoint.
    """

    loss: float = math.inf
    iteration: int | None = None  # None before the first evaluation
    later: int = 0  # evaluations since

    def add(self, iteration: int, losses: Sequence[float]) -> None:
        """Record an evaluation, one loss of each validation set."""
        loss = fmean(losses)
        if loss < self.loss:
            self.loss, self.iteration, self.later = loss, iteration, 0
        else:
            self.later += 1

    def state(self) -> dict[str, float | int | None]:
        """Return what a checkpoint keeps."""
        return asdict(self)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; without it no evaluation counts."""
        own = BestEvaluation(**state)
        self.loss, self.iteration, self.later = own.loss, own.iteration, own.later


@dataclass(frozen=True)
class Snapshot:
    """The counters, random streams and loss scale before a step."""

    iteration: int
    consumed_samples: int
    lr_schedule_samples: int
    rng_state: dict[str, Any]
    scaler: dict[str, float | int]


@dataclass
class TrainState:
    """The model, its optimizer, the random streams and the counters."""

    # the parts of the model that are computed here, in the order of the layers; one but with virtual stages
    chunks: Sequence[LanguageModel]
    optimizer: Optimizer
    rng_streams: RandomStreams
    schedule: ParameterSchedule
    iteration: int = 0  # optimizer steps done, skipped ones included
    consumed_samples: int = 0  # samples drawn from the training data
    consumed_valid_samples: int = 0  # samples drawn from the validation data
    lr_schedule_samples: int = 0  # samples of applied steps: position in the LR and weight decay schedules
    flops: float = 0.0  # model FLOPs spent so far
    updating: bool = False  # an update of the weights is under way, so that the state is between two iterations
    context: ParallelContext = field(default_factory=ParallelContext.solo)
    # what the layers give their weight gradients to, where the schedule puts these off
    deferred: DeferredWeightGrads | None = None
    # what makes a step a bad one, and what it remembers of the last steps
    check: StepCheck = field(default_factory=StepCheck)
    skipped_samples: int = 0  # samples drawn and passed over (`--iterations-to-skip`)
    # the gradient noise scale so far (`--log-gradient-noise-scale`)
    noise: NoiseScale = field(default_factory=NoiseScale)
    best: BestEvaluation = field(default_factory=BestEvaluation)
    lr_scale: float = 1.0  # what a hook has the learning rate of the schedule multiplied by
    wandb_run_id: str | None = None  # of the W&B run that records this one, on the first rank (`--wandb-project`)

    @property
    def model(self) -> LanguageModel:
        """First of the chunks; with one process the whole model."""
        return self.chunks[0]

    @property
    def contributes_losses(self) -> bool:
        """True if this rank's losses enter the sum over ranks: of the ranks with the same losses, one contributes."""
        return self.chunks[-1].stage.is_last and self.context.tp.is_first

    def snapshot(self) -> Snapshot:
        """Return the counters, random streams and loss scale; not the weights and optimizer states."""
        return Snapshot(
            self.iteration,
            self.consumed_samples,
            self.lr_schedule_samples,
            self.rng_streams.state(),
            self.optimizer.scaler.state(),
        )

    def restore_snapshot(self, snapshot: Snapshot) -> None:
        """Restore a snapshot. No update may have been applied since."""
        self.iteration, self.consumed_samples = snapshot.iteration, snapshot.consumed_samples
        self.lr_schedule_samples = snapshot.lr_schedule_samples
        self.rng_streams.load_state(snapshot.rng_state)
        self.optimizer.scaler.load_state(snapshot.scaler)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self.lr_scale * self.schedule.learning_rate.lr(self.lr_schedule_samples)

    @property
    def decoupled_lr(self) -> float | None:
        """Learning rate of the word embeddings and the output layer in the next step; None if it is the same."""
        decoupled = self.schedule.decoupled
        return None if decoupled is None else self.lr_scale * decoupled.lr(self.lr_schedule_samples)

    @property
    def weight_decay(self) -> float:
        """Weight decay of the next step."""
        return self.schedule.weight_decay.weight_decay(self.lr_schedule_samples)
