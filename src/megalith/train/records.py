"""Curves of a run under Megatron's names, the same for every tracker.

A tracker that fails (a full disk, an unreachable service) is left with one warning; the run continues. Every number is
also in metrics.jsonl.

Source: docs/reference/console.md#tensorboard-and-wb.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from megalith.config.groups import LogConfig
from megalith.train.results import Evaluation, Hook, Samples, SavedCheckpoint, StepResult, Times, WindowReport
from megalith.train.streams import warn
from megalith.train.trackers import Threaded, Tracker

_MEMORY = {
    "mem-reserved-bytes": "reserved_bytes",
    "mem-allocated-bytes": "allocated_bytes",
    "mem-max-allocated-bytes": "max_allocated_bytes",
    "mem-resident-bytes": "resident_bytes",
}


class Records(Hook):
    """Gives the points, the samples, and the paths of checkpoints to the trackers.

    Args:
        resumed_at: iteration from which the run continues, whose samples the trackers have; -1 for a new run.
    """

    def __init__(
        self,
        sinks: Sequence[Tracker],
        log: LogConfig | None = None,
        world_size: int = 1,
        memory: Callable[[], Mapping[str, int]] = dict,
        resumed_at: int = -1,
    ) -> None:
        self._sinks, self._log, self._memory = list(sinks), log or LogConfig(), memory
        self._resumed_at = resumed_at
        self._world_size = world_size if self._log.log_world_size_to_tensorboard else None

    def after_step(self, result: StepResult) -> None:
        if result.iteration % self._log.tensorboard_log_interval:
            return
        values = {
            "learning-rate": result.learning_rate,
            "decoupled-learning-rate": result.decoupled_lr,
            "batch-size": float(result.num_samples),
            "lm loss": result.loss if result.applied else None,
            **(result.further_losses if result.applied else {}),
            "loss-scale": result.loss_scale if self._log.log_loss_scale_to_tensorboard else None,
            "world-size": self._world_size,
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
        if self._log.log_memory_to_tensorboard:
            self._draw_memory(result.iteration)

    def after_window(self, report: WindowReport) -> None:
        values = {
            "iteration-time": report.seconds_per_step,
            "throughput": report.teraflops,
            "tokens-per-second": report.tokens_per_second,
        }
        self._draw(values, report.iteration)
        if self._log.trackers and not self._log.log_memory_to_tensorboard:
            self._draw_memory(report.iteration)

    def after_timing(self, iteration: int, times: Times) -> None:
        if self._log.log_timers_to_tensorboard:
            self._draw({f"{name}-time": max(seconds) for name, seconds in times.items()}, iteration)

    def after_evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.final:
            return
        for kind, loss in {"lm loss": evaluation.loss, **evaluation.further_losses}.items():
            name = f"{kind} {evaluation.split}"
            self._draw({name: loss}, evaluation.iteration, evaluation.consumed_samples)
            if self._log.log_validation_ppl_to_tensorboard:
                value = math.exp(min(20.0, loss))
                self._draw({f"{name} ppl": value}, evaluation.iteration, evaluation.consumed_samples)

    def after_sampling(self, sampled: Samples) -> None:
        for sink in list(self._sinks) if sampled.iteration > self._resumed_at else ():
            self._attempt(sink, partial(sink.samples, sampled.samples, sampled.iteration))

    def after_save(self, saved: SavedCheckpoint) -> None:
        for sink in list(self._sinks):
            self._attempt(sink, partial(sink.checkpoint, saved.path, saved.iteration))

    def close(self) -> None:
        for sink in self._sinks:
            if isinstance(sink, Threaded):
                sink.end()  # so that they write at the same time
        for sink in list(self._sinks):
            self._attempt(sink, sink.close)

    def _draw_memory(self, iteration: int) -> None:
        figures = self._memory()
        self._draw({name: figures.get(key) for name, key in _MEMORY.items()}, iteration)

    def _draw(self, values: Mapping[str, float | None], iteration: int, samples: int | None = None) -> None:
        there = {name: value for name, value in values.items() if value is not None}
        for sink in list(self._sinks) if there else ():
            self._attempt(sink, partial(sink.scalars, there, iteration, samples))

    def _attempt(self, sink: Tracker, act: Callable[[], None]) -> None:
        try:
            act()
        except sink.errors as error:
            self._sinks.remove(sink)
            warn(f"WARNING: no more is recorded by {sink.name}: {error}")


class ProgressLog(Hook):
    """Appends a line a start and a checkpoint to `path`, as Megatron's --log-progress.

    A disk that fails costs the lines, with a warning, not the training. `flops` were spent before this start;
    `flops_per_step` is of all processes together.
    """

    def __init__(self, path: Path, world_size: int, flops: float, flops_per_step: float, job: str = "") -> None:
        self._path, self._world_size, self._job = path, world_size, job
        self._flops, self._flops_per_step = flops, flops_per_step
        self._spent, self._seconds, self._tokens, self._pace = 0.0, 0.0, 0, 0.0
        self._line("Starting job")

    def after_step(self, result: StepResult) -> None:
        self._spent += self._flops_per_step
        self._seconds += result.seconds
        self._tokens = result.consumed_samples * (result.num_tokens // result.num_samples)

    def after_window(self, report: WindowReport) -> None:
        self._pace = report.teraflops

    def after_save(self, saved: SavedCheckpoint) -> None:
        job = self._spent / self._seconds / 1e12 / self._world_size if self._seconds else 0.0
        self._line(
            f"Saved checkpoint\tIteration: {saved.iteration}\tJob throughput: {job:.1f} TFLOP/s/GPU\t"
            f"Last throughput: {self._pace:.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {self._flops + self._spent:.2e}\t"
            f"Tokens (in billions): {self._tokens / 1e9:.2f}"
        )

    def _line(self, text: str) -> None:
        now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{now}\tJob ID: {self._job}\t# GPUs: {self._world_size}\t{text}\n")
        except OSError as error:
            warn(f"WARNING: {self._path} is not written: {error}")
