"""TensorBoard scalars under Megatron's names, each also against consumed samples where Megatron does so."""

from __future__ import annotations

import importlib.util
import math

from megalith.errors import ConfigError
from megalith.train.hooks import Hook
from megalith.train.results import Evaluation, StepResult, WindowReport


def require_tensorboard() -> None:
    """Check, before anything is built, that event files can be written.

    Raises:
        ConfigError: the package is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard-dir needs the package tensorboard: pip install 'megalith[track]'")


class TensorBoardWriter(Hook):
    """Event files in `directory`.

    Args:
        interval: iterations between two points of the curves of single steps.

    After a resume from an earlier checkpoint the steps done again appear twice, as in Megatron. A purge step would hide
    the first ones, and with them most of the curves over samples: the viewer compares it with either kind of step.

    Source: spec/training-behaviour.md section 9.
    """

    def __init__(self, directory: str, interval: int = 1) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory, max_queue=32, flush_secs=10)
        self._interval = interval

    def after_step(self, result: StepResult) -> None:
        if result.iteration % self._interval:
            return
        self._add("learning-rate", result.learning_rate, result)
        self._add("batch-size", result.num_samples, result)
        if result.applied:
            self._add("lm loss", result.loss, result)
        self._add("loss-scale", result.loss_scale, result)
        self._add("grad-norm", result.grad_norm, result)
        self._add("num-zeros", result.num_zeros, result)
        self._add("params-norm", result.params_norm, result)

    def after_window(self, report: WindowReport) -> None:
        self._writer.add_scalar("iteration-time", report.seconds_per_step, report.iteration)
        self._writer.add_scalar("throughput", report.teraflops, report.iteration)
        self._writer.add_scalar("tokens-per-second", report.tokens_per_second, report.iteration)

    def after_evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.final:
            return
        name = f"lm loss {evaluation.split}"
        self._writer.add_scalar(name, evaluation.loss, evaluation.iteration)
        self._writer.add_scalar(f"{name} vs samples", evaluation.loss, evaluation.consumed_samples)
        ppl = math.exp(min(20.0, evaluation.loss))
        self._writer.add_scalar(f"{name} ppl", ppl, evaluation.iteration)

    def close(self) -> None:
        self._writer.close()

    def _add(self, name: str, value: float | None, result: StepResult) -> None:
        if value is None:
            return
        self._writer.add_scalar(name, value, result.iteration)
        self._writer.add_scalar(f"{name} vs samples", value, result.consumed_samples)
