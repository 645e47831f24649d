"""Everything that a run changes as it goes, in one object: what a checkpoint saves and a resume restores."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.distributed.rng import RandomStreams
from megalith.models.gpt import GPT
from megalith.optim.optimizer import Optimizer
from megalith.schedules.parameters import ParameterSchedule


@dataclass
class TrainState:
    """The model, its optimizer, the random streams and the counters.

    Attributes:
        iteration: optimizer steps done, skipped ones included.
        consumed_samples: samples drawn from the training data.
        consumed_valid_samples: samples drawn from the validation data.
        schedule_samples: samples of applied steps: where the schedule stands.
        flops: model FLOPs spent so far.
        updating: an update of the weights is under way, so that the state is between two iterations.
    """

    model: GPT
    optimizer: Optimizer
    streams: RandomStreams
    schedule: ParameterSchedule
    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0
    schedule_samples: int = 0
    flops: float = 0.0
    updating: bool = False

    @property
    def learning_rate(self) -> float:
        """What the next step uses."""
        return self.schedule.learning_rate.lr(self.schedule_samples)

    @property
    def weight_decay(self) -> float:
        """What the next step uses."""
        return self.schedule.weight_decay.weight_decay(self.schedule_samples)
