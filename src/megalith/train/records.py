"""The curves of a run under Megatron's scalar names, for whoever draws them: TensorBoard, Weights & Biases.

A drawer that fails (a full disk, a service that is gone) is left with one warning; the run goes on. Every number is in
metrics.jsonl too.

Source: docs/reference/console.md#tensorboard-and-wb.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from megalith.config.groups import LogConfig
from megalith.train.hooks import Hook
from megalith.train.results import Evaluation, StepResult, Times, WindowReport
from megalith.train.streams import warn

_MEMORY = {
    "mem-reserved-bytes": "reserved_bytes",
    "mem-allocated-bytes": "allocated_bytes",
    "mem-max-allocated-bytes": "max_allocated_bytes",
    "mem-resident-bytes": "resident_bytes",
}


class Sink(Protocol):
    """Draws points.

    Attributes:
        name: what the user calls it.
        errors: what it raises when it can draw no more.
    """

    name: str
    errors: tuple[type[Exception], ...]

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        """Draw a point of each curve; `samples` consumed where Megatron draws it over these too."""
        ...

    def close(self) -> None:
        """No more points come."""
        ...


@dataclass(frozen=True)
class Recorded:
    """What is recorded beside the curves that always are, and how often those of single steps are."""

    interval: int = 1
    loss_scale: bool = True
    perplexity: bool = False
    memory: bool = False
    world_size: int | None = None
    times: bool = False

    @classmethod
    def of(cls, log: LogConfig, world_size: int) -> Recorded:
        """As the flags say."""
        return cls(
            interval=log.tensorboard_log_interval,
            loss_scale=log.log_loss_scale_to_tensorboard,
            perplexity=log.log_validation_ppl_to_tensorboard,
            memory=log.log_memory_to_tensorboard,
            world_size=world_size if log.log_world_size_to_tensorboard else None,
            times=log.log_timers_to_tensorboard,
        )


class Records(Hook):
    """Gives the points to the sinks.

    After a resume from an earlier checkpoint the steps done again appear twice, as in Megatron.

    Args:
        sinks: who draws.
        recorded: what.
        memory: gives figures in bytes.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        recorded: Recorded | None = None,
        memory: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._sinks, self._recorded, self._memory = list(sinks), recorded or Recorded(), memory

    def after_step(self, result: StepResult) -> None:
        if result.iteration % self._recorded.interval:
            return
        values = {
            "learning-rate": result.learning_rate,
            "decoupled-learning-rate": result.decoupled_lr,
            "batch-size": float(result.num_samples),
            "lm loss": result.loss if result.applied else None,
            **(result.further_losses if result.applied else {}),
            "loss-scale": result.loss_scale if self._recorded.loss_scale else None,
            "world-size": self._recorded.world_size,
            "grad-norm": result.grad_norm,
            "num-zeros": result.num_zeros,
            "params-norm": result.params_norm,
        }
        self._draw(values, result.iteration, result.consumed_samples)
        tokens = {f"tokens of {name}": float(number) for name, number in result.source_tokens.items()}
        self._draw(dict(result.auxiliary_losses), result.iteration)
        busiest = {
            f"busiest expert of layer {layer} over the mean": max(load) * len(load) / sum(load)
            for layer, load in result.expert_load.items()
            if sum(load)
        }
        self._draw(busiest, result.iteration)
        skipped = {"skipped-train-samples": float(result.skipped_samples)} if result.skipped_samples else {}
        self._draw(tokens | skipped, result.iteration)
        if self._recorded.memory:
            figures = self._memory()
            self._draw({name: figures.get(key) for name, key in _MEMORY.items()}, result.iteration)

    def after_window(self, report: WindowReport) -> None:
        values = {
            "iteration-time": report.seconds_per_step,
            "throughput": report.teraflops,
            "tokens-per-second": report.tokens_per_second,
        }
        self._draw(values, report.iteration)

    def after_timing(self, iteration: int, times: Times) -> None:
        if self._recorded.times:
            self._draw({f"{name}-time": max(seconds) for name, seconds in times.items()}, iteration)

    def after_evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.final:
            return
        for kind, loss in {"lm loss": evaluation.loss, **evaluation.further_losses}.items():
            name = f"{kind} {evaluation.split}"
            self._draw({name: loss}, evaluation.iteration, evaluation.consumed_samples)
            if self._recorded.perplexity:
                value = math.exp(min(20.0, loss))
                self._draw({f"{name} ppl": value}, evaluation.iteration, evaluation.consumed_samples)

    def close(self) -> None:
        for sink in list(self._sinks):
            self._attempt(sink, sink.close)

    def _draw(self, values: Mapping[str, float | None], iteration: int, samples: int | None = None) -> None:
        there = {name: value for name, value in values.items() if value is not None}
        for sink in list(self._sinks) if there else ():
            self._attempt(sink, partial(sink.scalars, there, iteration, samples))

    def _attempt(self, sink: Sink, act: Callable[[], None]) -> None:
        try:
            act()
        except sink.errors as error:
            self._sinks.remove(sink)
            warn(f"WARNING: no more is recorded by {sink.name}: {error}")
