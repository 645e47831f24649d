"""Everything that a run changes as it goes, in one object: what a checkpoint saves and a resume restores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.models.language_model import LanguageModel
from megalith.optim.optimizer import Optimizer
from megalith.parallel.deferred import DeferredSink
from megalith.schedules.parameters import ParameterSchedule
from megalith.train.noise import NoiseScale
from megalith.train.step_check import StepCheck


@dataclass(frozen=True)
class Moment:
    """The counters, random streams and loss scale before a step."""

    iteration: int
    consumed_samples: int
    schedule_samples: int
    streams: dict[str, Any]
    scaler: dict[str, float | int]


@dataclass
class TrainState:
    """The model, its optimizer, the random streams and the counters.

    Attributes:
        chunks: the parts of the model that are computed here, in the order of the layers; one but with virtual stages.
        context: the ranks of the run.
        iteration: optimizer steps done, skipped ones included.
        consumed_samples: samples drawn from the training data.
        consumed_valid_samples: samples drawn from the validation data.
        schedule_samples: samples of applied steps: where the schedule stands.
        flops: model FLOPs spent so far.
        deferred: what the layers give their weight gradients to, where the schedule puts these off.
        updating: an update of the weights is under way, so that the state is between two iterations.
        check: what makes a step a bad one, and what it remembers of the last steps.
        skipped_samples: samples drawn and passed over (`--iterations-to-skip`).
        noise: the gradient noise scale so far (`--log-gradient-noise-scale`).
        wandb_run_id: of the W&B run that records this one, on the first rank (`--wandb-project`).
    """

    chunks: Sequence[LanguageModel]
    optimizer: Optimizer
    streams: RandomStreams
    schedule: ParameterSchedule
    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0
    schedule_samples: int = 0
    flops: float = 0.0
    updating: bool = False
    context: ParallelContext = field(default_factory=ParallelContext.solo)
    deferred: DeferredSink | None = None
    check: StepCheck = field(default_factory=StepCheck)
    skipped_samples: int = 0
    noise: NoiseScale = field(default_factory=NoiseScale)
    wandb_run_id: str | None = None

    @property
    def model(self) -> LanguageModel:
        """The first of the chunks; with one process the whole model."""
        return self.chunks[0]

    @property
    def speaks(self) -> bool:
        """Whether the losses of this rank count: it computes them, and no other rank does so for the same tokens."""
        return self.chunks[-1].stage.predicts and self.context.tp.is_first

    def moment(self) -> Moment:
        """Where the run is, but for the weights and the optimizer's states."""
        return Moment(
            self.iteration,
            self.consumed_samples,
            self.schedule_samples,
            self.streams.state(),
            self.optimizer.scaler.state(),
        )

    def go_back(self, moment: Moment) -> None:
        """Be there again. No update may have been applied in between."""
        self.iteration, self.consumed_samples = moment.iteration, moment.consumed_samples
        self.schedule_samples = moment.schedule_samples
        self.streams.load_state(moment.streams)
        self.optimizer.scaler.load_state(moment.scaler)

    @property
    def learning_rate(self) -> float:
        """What the next step uses."""
        return self.schedule.learning_rate.lr(self.schedule_samples)

    @property
    def decoupled_lr(self) -> float | None:
        """What the next step uses for the word embeddings and the output layer; None where it is the same."""
        decoupled = self.schedule.decoupled
        return None if decoupled is None else decoupled.lr(self.schedule_samples)

    @property
    def weight_decay(self) -> float:
        """What the next step uses."""
        return self.schedule.weight_decay.weight_decay(self.schedule_samples)
