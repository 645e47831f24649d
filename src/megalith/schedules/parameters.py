"""Learning rate and weight decay together: what the optimizer is told at each step, and what a checkpoint keeps of it.

The keys and the refusal text are Megatron's, so that its checkpoints and its users' log searches keep working.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalith.errors import CheckpointError
from megalith.schedules.learning_rate import LearningRateSchedule
from megalith.schedules.weight_decay import WeightDecaySchedule

# Key in a checkpoint's `opt_param_scheduler` -> name on the console, in Megatron's order of reporting.
REPORTED_NAMES = {
    "max_lr": "learning rate",
    "min_lr": "minimum learning rate",
    "lr_warmup_steps": "warmup iterations",
    "lr_decay_steps": "total number of iterations",
    "lr_decay_style": "learning rate decay style",
    "start_wd": "start weight decay",
    "end_wd": "end weight decay",
    "wd_incr_steps": "total number of weight decay iterations",
    "wd_incr_style": "weight decay incr style",
}


@dataclass(frozen=True)
class ParameterSchedule:
    """What one optimizer step is told, as a function of the samples trained on.

    Attributes:
        decoupled: the rate of the word embeddings and the output layer; None where it is that of the rest. It keeps
            its peak and its floor whatever a resume does, as Megatron's groups do.
    """

    learning_rate: LearningRateSchedule
    weight_decay: WeightDecaySchedule
    decoupled: LearningRateSchedule | None = None

    def state_dict(self, num_samples: int) -> dict[str, Any]:
        """Megatron's `opt_param_scheduler` entry. All its "steps" are samples."""
        return {
            "max_lr": self.learning_rate.max_lr,
            "lr_warmup_steps": self.learning_rate.warmup_samples,
            "num_steps": num_samples,
            "lr_decay_style": self.learning_rate.style,
            "lr_decay_steps": self.learning_rate.decay_samples,
            "min_lr": self.learning_rate.min_lr,
            "start_wd": self.weight_decay.start,
            "end_wd": self.weight_decay.end,
            "wd_incr_style": self.weight_decay.style,
            "wd_incr_steps": self.weight_decay.increment_samples,
        }

    def with_values(self, values: Mapping[str, Any]) -> ParameterSchedule:
        """The schedule with the values of a checkpoint (keys of `state_dict`) in place of its own."""
        shape = {
            "warmup_samples": values["lr_warmup_steps"],
            "decay_samples": values["lr_decay_steps"],
            "style": values["lr_decay_style"],
        }
        return ParameterSchedule(
            replace(self.learning_rate, max_lr=values["max_lr"], min_lr=values["min_lr"], **shape),
            WeightDecaySchedule(values["start_wd"], values["end_wd"], values["wd_incr_steps"], values["wd_incr_style"]),
            None if self.decoupled is None else replace(self.decoupled, **shape),
        )


@dataclass(frozen=True)
class ResumedSchedule:
    """The schedule after a resume, where it stands, and which values it took, for the console.

    Attributes:
        num_samples: samples of applied steps so far.
        values: (console name, value) in Megatron's order.
        overridden: the values are the command line's, not the checkpoint's.
    """

    schedule: ParameterSchedule
    num_samples: int
    values: tuple[tuple[str, Any], ...]
    overridden: bool


def _without_effect(values: Mapping[str, Any]) -> set[str]:
    """The keys of a schedule whose values do not change what it gives."""
    idle = {"lr_decay_steps", "min_lr"} if values["lr_decay_style"] == "constant" else set()
    if values["start_wd"] == values["end_wd"]:
        idle |= {"wd_incr_steps", "wd_incr_style"}
    return idle


def resume_schedule(
    current: ParameterSchedule,
    saved: Mapping[str, Any],
    *,
    override: bool = False,
    use_checkpoint: bool = False,
    changed: Sequence[str] = (),
) -> ResumedSchedule:
    """Bring the command line's schedule and a checkpoint's together.

    A value that has no effect in either, such as the length over which a constant weight decay grows, may differ,
    other than in Megatron; that of the command line is kept.

    Args:
        current: what the command line asks for.
        saved: the checkpoint's `opt_param_scheduler`.
        override: the command line wins (`--override-opt-param-scheduler`).
        use_checkpoint: the checkpoint wins (`--use-checkpoint-opt-param-scheduler`).
        changed: the flags that schedules follow from and whose values have changed since, for the message.

    Raises:
        CheckpointError: without either flag the values differ; names every difference.
    """
    own = current.state_dict(saved["num_steps"])
    # Checkpoints from before the weight-decay schedules have no such keys: the command line's values then count.
    stored = {key: saved.get(key, own[key]) for key in REPORTED_NAMES}
    if override:
        return _resumed(current, saved["num_steps"], own, overridden=True)
    stored |= {key: own[key] for key in _without_effect(own) & _without_effect(stored)}
    differences = [
        f"OptimizerParamScheduler: class input value {own[key]} and checkpointvalue {stored[key]} "
        f"for {name} do not match"
        for key, name in REPORTED_NAMES.items()
        if own[key] != stored[key]
    ]
    if differences and not use_checkpoint:
        if changed:
            differences.append(f"changed since the checkpoint, from which this follows: {', '.join(changed)}")
        lengths = [key for key in ("lr_decay_steps", "wd_incr_steps") if own[key] != stored[key]]
        if lengths:
            give = {"lr_decay_steps": "the decay, unless --lr-decay-iters or --lr-decay-samples gives it"}
            what = [give.get(key, "the growth of the weight decay") for key in lengths]
            differences.append(
                f"(the length of the run times the batch size is the length, in samples, of {' and of '.join(what)})"
            )
        differences.append(
            "add --override-opt-param-scheduler to continue with the values of the command line, or "
            "--use-checkpoint-opt-param-scheduler to continue with those of the checkpoint"
        )
        raise CheckpointError("\n".join(differences))
    return _resumed(current.with_values(stored), saved["num_steps"], stored, overridden=False)


def _resumed(
    schedule: ParameterSchedule, num_samples: int, values: Mapping[str, Any], *, overridden: bool
) -> ResumedSchedule:
    reported = tuple((name, values[key]) for key, name in REPORTED_NAMES.items())
    return ResumedSchedule(schedule, num_samples, reported, overridden)
