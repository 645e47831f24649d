"""Scalars of a run under Megatron's names, for TensorBoard and Weights & Biases.

A writer that fails (a full disk, an unreachable service) is disabled with one warning; the run continues. Every number
is also in metrics.jsonl.

Source: docs/reference/console.md#tensorboard-and-wb.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from megalith.config.groups import LogConfig
from megalith.errors import ConfigError, install_command
from megalith.train.results import Evaluation, Hook, SavedCheckpoint, StepResult, Times, WindowReport
from megalith.train.streams import warn

_MEMORY = {
    "mem-reserved-bytes": "reserved_bytes",
    "mem-allocated-bytes": "allocated_bytes",
    "mem-max-allocated-bytes": "max_allocated_bytes",
    "mem-resident-bytes": "resident_bytes",
}


class Records(Hook):
    """Gives the points to the sinks.

    After a resume from an earlier checkpoint the steps done again appear twice, as in Megatron.
    """

    def __init__(
        self,
        sinks: Sequence[TensorBoard | WandB],
        log: LogConfig | None = None,
        world_size: int = 1,
        memory: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._sinks, self._log, self._memory = list(sinks), log or LogConfig(), memory
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

    def close(self) -> None:
        for sink in list(self._sinks):
            self._attempt(sink, sink.close)

    def _draw(self, values: Mapping[str, float | None], iteration: int, samples: int | None = None) -> None:
        there = {name: value for name, value in values.items() if value is not None}
        for sink in list(self._sinks) if there else ():
            self._attempt(sink, partial(sink.scalars, there, iteration, samples))

    def _attempt(self, sink: TensorBoard | WandB, act: Callable[[], None]) -> None:
        try:
            act()
        except sink.errors as error:
            self._sinks.remove(sink)
            warn(f"WARNING: no more is recorded by {sink.name}: {error}")


def require_package(name: str, flag: str) -> None:
    """Raise a ConfigError, before anything is built, if the package behind a flag is not installed."""
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"{flag} needs the package {name}: {install_command('track')}")


class TensorBoard:
    """Event files in `directory`, with each curve against consumed samples too where Megatron draws it so.

    A purge step after a resume would hide the points before it, and with them most of the curves over samples: the
    viewer compares it with either kind of step. So none is given. The arguments of the run are kept as text.
    """

    name = "TensorBoard"
    errors: tuple[type[Exception], ...] = (OSError,)  # what it raises when it can draw no more

    def __init__(
        self, directory: str, *, queue_size: int = 32, arguments: Mapping[str, Any] | None = None, iteration: int = 0
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory, max_queue=queue_size, flush_secs=10)
        for name, value in (arguments or {}).items():
            self._writer.add_text(name, str(value), global_step=iteration)

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        """Draw a point of each curve; `samples` consumed where Megatron draws it over these too."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
            if samples is not None:
                self._writer.add_scalar(f"{name} vs samples", value, samples)

    def close(self) -> None:
        """Write what waits."""
        self._writer.close()


def chosen_mode(wandb: Any, environ: Mapping[str, str]) -> str | None:
    """Return the mode that the user chose by WANDB_MODE, `wandb offline` or `wandb disabled`; None without a choice."""
    if environ.get("WANDB_MODE"):
        return environ["WANDB_MODE"]
    settings = wandb.setup().settings
    return settings.mode if settings.mode not in (None, "online") else None


def is_logged_in(wandb: Any) -> bool:
    """Return whether the package finds credentials, without a prompt or a verification."""
    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False, verify=False))
    return bool(wandb.api.api_key)  # before 0.31


class WandB:
    """A run of a W&B project: the same curves, sent to its server, or kept in files where it is not to be reached.

    Nothing is sent unless the user asks by --wandb-project. Where W&B knows no credentials the run is recorded offline
    instead of waiting for someone to log in: `wandb sync FOLDER` sends it later. WANDB_MODE says otherwise.

    Args:
        folder: for W&B's files unless the flags name one.
        run_id: of the run that a resume continues; WANDB_RUN_ID wins.

    Attributes:
        mode: "online", "offline" or what WANDB_MODE says.
        logged_in: whether credentials were found; None where the user chose the mode.

    Raises:
        ConfigError: W&B does not begin, such as online without a network.
    """

    name = "W&B"

    def __init__(
        self,
        log: LogConfig,
        folder: Path,
        arguments: Mapping[str, Any],
        environ: Mapping[str, str],
        run_id: str | None = None,
    ) -> None:
        import wandb

        self.folder = log.wandb_save_dir or str(folder)
        self.errors: tuple[type[Exception], ...] = (OSError, wandb.Error)
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        try:
            chosen = chosen_mode(wandb, environ)
            self.logged_in = is_logged_in(wandb) if chosen is None else None
            self.mode = chosen or ("online" if self.logged_in else "offline")
            self._run = wandb.init(
                dir=self.folder,
                name=log.wandb_exp_name,
                project=log.wandb_project,
                entity=log.wandb_entity,
                config=dict(arguments),
                mode=self.mode,
                **self._continued(environ, run_id),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"--wandb-project {log.wandb_project}: W&B does not begin: {error}; WANDB_MODE=offline records in files"
            ) from error

        self.run_id: str = self._run.id

    def _continued(self, environ: Mapping[str, str], run_id: str | None) -> dict[str, Any]:
        """Return the arguments of `wandb.init` that continue a run."""
        if run_id is None or environ.get("WANDB_RUN_ID"):
            return {}
        resumes = self.mode == "online" and not environ.get("WANDB_RESUME")
        return {"id": run_id, **({"resume": "allow"} if resumes else {})}

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        """Write a point of each curve."""
        extra = {} if samples is None else {"samples vs steps": samples}
        self._run.log({**values, **extra}, step=iteration)

    def close(self) -> None:
        """Write what waits."""
        self._run.finish()


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
