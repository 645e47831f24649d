"""Experiment trackers: TensorBoard, W&B, trackio, MLflow and SwanLab as receivers of the same curves.

Each is recorded offline unless the user has logged in or named a server. Trackers that may use a network have a thread
of their own (`Threaded`): the training waits five seconds for a network at its start and at its end, never in between;
without a network it waits at a save. A tracker that fails ends its records with one warning, not the run.

Source: docs/reference/console.md#tensorboard-and-wb.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol
from urllib.parse import urlsplit

from megalith.config.groups import LogConfig
from megalith.errors import ConfigError, install_command
from megalith.train.streams import warn

_LONGEST_WAIT, _LONGEST_LOCAL_WAIT = 5.0, 60.0  # seconds, where a network is used and where there is none
_MOST_WAITING = 100_000  # calls


class Tracker(Protocol):
    """Receives the curves of a run. `errors` are what its methods raise when it can record no more."""

    name: str
    errors: tuple[type[Exception], ...]

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        """Record a point of each curve; `samples` consumed where Megatron draws it over these too."""

    def samples(self, samples: Sequence[Mapping[str, str]], iteration: int) -> None:
        """Record answers to prompts (`results.Samples`) as `samples`."""

    def checkpoint(self, path: str, iteration: int) -> None:
        """Record the path of a checkpoint."""

    def close(self) -> None:
        """Write what waits."""


@dataclass(frozen=True)
class TrackedRun:
    """The names, folder, arguments and id of a run that every tracker receives."""

    project: str
    name: str
    folder: Path  # the run folder
    arguments: Mapping[str, Any]
    run_id: str  # a new one, or that of the run which a resume continues
    resumes: bool


_IN_THE_EXTRA = ("tensorboard", "wandb")


def require_package(name: str, flag: str) -> None:
    """Raise a ConfigError, before anything is built, if the package behind a flag is not installed."""
    if importlib.util.find_spec(name) is None:
        command = install_command("track") if name in _IN_THE_EXTRA else f"pip install {name}"
        raise ConfigError(f"{flag} needs the package {name}: {command}")


class TrackerStopped(Exception):
    """A tracker can record no more."""


class Threaded:
    """A tracker whose calls are made in a thread of its own, in order.

    Args:
        make: makes the tracker, in that thread or in this one (`here`); what it and its methods raise ends the records.
        local: it uses no network: what waits is written before `checkpoint` and `close` return.
    """

    errors: tuple[type[Exception], ...] = (TrackerStopped,)

    def __init__(self, name: str, make: Callable[[], Tracker], *, local: bool = False, here: bool = False) -> None:
        self.name = name
        self._is_local, self._patience = local, _LONGEST_LOCAL_WAIT if local else _LONGEST_WAIT
        self.tracker: Tracker | None = None  # when it has begun
        self._calls: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self._failure: Exception | None = None
        self._begun = threading.Event()
        self._deadline = 0.0
        self._thread = threading.Thread(target=self._run, args=(make,), name=f"tracker-{name}", daemon=True)
        if here:
            self._begin(make)
        self._thread.start()

    def _begin(self, make: Callable[[], Tracker]) -> None:
        try:
            self.tracker = make()
        except Exception as error:  # of another's library: whatever it is, it ends the records and not the run
            self._failure = error
        self._begun.set()

    def _run(self, make: Callable[[], Tracker]) -> None:
        if not self._begun.is_set():
            self._begin(make)
        if self.tracker is None:
            return
        try:
            while (call := self._calls.get()) is not None:
                call(self.tracker)
            self.tracker.close()
        except Exception as error:  # as in `_begin`
            self._failure = error

    def wait_until_begun(self) -> None:
        """Wait until the tracker has begun or failed, some seconds at most; its calls wait in the queue meanwhile."""
        self._begun.wait(_LONGEST_WAIT)

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        self._call(methodcaller("scalars", values, iteration, samples))

    def samples(self, samples: Sequence[Mapping[str, str]], iteration: int) -> None:
        self._call(methodcaller("samples", samples, iteration))

    def checkpoint(self, path: str, iteration: int) -> None:
        self._call(methodcaller("checkpoint", path, iteration))
        if self._is_local:  # a resume from here finds the whole curve, even after a SIGKILL
            written = threading.Event()
            self._call(lambda _: written.set())
            deadline = time.monotonic() + _LONGEST_LOCAL_WAIT
            while not written.wait(0.02) and self._thread.is_alive() and time.monotonic() < deadline:
                pass

    def end(self) -> None:
        """Have the tracker write what waits and close; the time until `close` gives up begins."""
        self._calls.put(None)
        self._deadline = time.monotonic() + self._patience

    def close(self) -> None:
        if not self._deadline:
            self.end()
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        self._raise_failure()
        if self._thread.is_alive():
            raise TrackerStopped(f"it has not written all after {self._patience:g} s")

    def _call(self, call: Callable[[Tracker], None]) -> None:
        self._raise_failure()
        if self._calls.qsize() >= _MOST_WAITING:
            raise TrackerStopped(f"{_MOST_WAITING} records wait for it")
        self._calls.put(call)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise TrackerStopped(f"{type(self._failure).__name__}: {self._failure}") from self._failure


class TensorBoard:
    """Event files in `directory`, with each curve against consumed samples too where Megatron draws it so.

    Points of a run that goes back to an earlier checkpoint are removed from the files (`drop_points_after`). (A purge
    step would hide the curves over samples too: viewers compare it with either kind of step.) The arguments of the run
    are kept as text.
    """

    name = "TensorBoard"
    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(
        self,
        directory: str,
        *,
        queue_size: int = 32,
        arguments: Mapping[str, Any] | None = None,
        iteration: int = 0,
        samples: int = 0,
        resumes: bool = False,
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if resumes:
            drop_points_after(Path(directory), iteration, samples)
        self._writer = SummaryWriter(directory, max_queue=queue_size, flush_secs=10)
        for name, value in (arguments or {}).items():
            self._writer.add_text(name, str(value), global_step=iteration)

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
            if samples is not None:
                self._writer.add_scalar(f"{name}{_VS_SAMPLES}", value, samples)

    def samples(self, samples: Sequence[Mapping[str, str]], iteration: int) -> None:
        self._writer.add_text("samples", _markdown(samples), global_step=iteration)

    def checkpoint(self, path: str, iteration: int) -> None:
        self._writer.add_text("checkpoint", path, global_step=iteration)

    def close(self) -> None:
        self._writer.close()


_VS_SAMPLES = " vs samples"


def drop_points_after(folder: Path, iteration: int, samples: int) -> None:
    """Remove what the event files of a folder hold of later steps than those of a checkpoint that the run resumes from.

    From the newest file back to the first that has nothing to remove: older ones are what the start of that file left.
    """
    files = folder.glob("events.out.tfevents.*")
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        kept, found, dropped = bytearray(), False, False
        for record, event in _events(path.read_bytes()):
            tags = [value.tag for value in event.summary.value]
            later = [event.step > (samples if tag.endswith(_VS_SAMPLES) else iteration) for tag in tags]
            found, dropped = found or bool(tags), dropped or any(later)
            kept += b"" if any(later) else record
        if dropped:
            new = path.with_name(f".{path.name}.partial")
            new.write_bytes(kept)
            os.replace(new, path)
        elif found:
            return


def _events(data: bytes) -> Any:
    """Yield each whole record of an event file, and its event; what a crash has cut off at the end is left out.

    A record is the length of the event in 8 bytes, 4 of its checksum, the event, 4 of its checksum.
    Source: github.com/tensorflow/tensorflow, core/lib/io/record_writer.h.
    """
    from tensorboard.compat.proto.event_pb2 import Event

    start = 0
    while start + 16 <= len(data):
        (size,) = struct.unpack_from("<Q", data, start)
        stop = start + 16 + size
        if stop > len(data):
            return
        yield data[start:stop], Event.FromString(data[start + 12 : stop - 4])
        start = stop


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

    Nothing is sent unless the user asks for W&B. Where W&B knows no credentials, or its server does not answer within
    seconds, the run is recorded offline: `wandb sync FOLDER` sends it later. WANDB_MODE says otherwise.

    Args:
        folder: for W&B's files unless the flags name one.
        run_id: of the run that a resume continues; WANDB_RUN_ID wins.

    Attributes:
        mode: "online", "offline" or what WANDB_MODE says.
        why_offline: why nothing is sent though nobody chose so; "" otherwise.
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
        chosen, self.why_offline = chosen_mode(wandb, environ), ""
        if chosen is None and not is_logged_in(wandb):
            self.why_offline = "not logged in: set WANDB_API_KEY or run `wandb login`"
        self.mode = chosen or ("offline" if self.why_offline else "online")
        begin: dict[str, Any] = {
            **{"dir": self.folder, "name": log.wandb_exp_name, "project": log.wandb_project},
            **{"entity": log.wandb_entity, "config": dict(arguments)},
        }
        if self.mode == "online" and not _answers(wandb.setup().settings.base_url):
            self.mode, self.why_offline = "offline", "its server does not answer"
        patience = {"settings": wandb.Settings(init_timeout=_LONGEST_WAIT - 1)} if self.mode == "online" else {}
        try:
            self._run = wandb.init(**begin, mode=self.mode, **patience, **self._continued(environ, run_id))
        except wandb.Error as error:
            if self.mode != "online":
                raise
            self.mode, self.why_offline = "offline", f"its server cannot be used: {error}"
            self._run = wandb.init(**begin, mode=self.mode, **self._continued(environ, run_id))
        self.run_id: str = self._run.id

    def _continued(self, environ: Mapping[str, str], run_id: str | None) -> dict[str, Any]:
        """Return the arguments of `wandb.init` that continue a run."""
        if run_id is None or environ.get("WANDB_RUN_ID"):
            return {}
        resumes = self.mode == "online" and not environ.get("WANDB_RESUME")
        return {"id": run_id, **({"resume": "allow"} if resumes else {})}

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        self._run.log(_with_samples(values, samples), step=iteration)

    def samples(self, samples: Sequence[Mapping[str, str]], iteration: int) -> None:
        import wandb

        self._run.log({"samples": wandb.Table(**_rows(samples))}, step=iteration)

    def checkpoint(self, path: str, iteration: int) -> None:
        self._run.summary["checkpoint"] = path  # W&B passes over records of earlier steps, as of asynchronous saves

    def close(self) -> None:
        self._run.finish()


def _with_samples(values: Mapping[str, float], samples: int | None) -> dict[str, Any]:
    """Return the values with the consumed samples as a curve, in place of a second axis."""
    return {**values, **({} if samples is None else {"samples vs steps": samples})}


def _markdown(samples: Sequence[Mapping[str, str]]) -> str:
    """Return the texts of samples as blocks of code, in which nothing is markup."""
    texts = ((number, name, text) for number, each in enumerate(samples, start=1) for name, text in each.items())
    return "\n\n".join(
        f"**{number}: {name.replace('_', ' ')}**\n\n    " + text.replace("\n", "\n    ") for number, name, text in texts
    )


def _rows(samples: Sequence[Mapping[str, str]]) -> dict[str, list[Any]]:
    """Return the arguments of a Table of W&B or trackio."""
    columns = list(dict.fromkeys(name for sample in samples for name in sample))
    return {"columns": columns, "data": [[sample.get(name, "") for name in columns] for sample in samples]}


class Trackio:
    """A run of trackio's database on this machine, in TRACKIO_DIR; `trackio show` draws it."""

    name = "trackio"
    errors: tuple[type[Exception], ...] = (Exception,)

    @staticmethod
    def is_local() -> bool:
        """Return whether no network is used."""
        return not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"))

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        name = f"{run.name}-{run.run_id}"  # a run is known by its name
        self._run = trackio.init(run.project, name=name, config=dict(run.arguments), resume="allow", embed=False)

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        self._run.log(_with_samples(values, samples), step=iteration)

    def samples(self, samples: Sequence[Mapping[str, str]], iteration: int) -> None:
        import trackio

        self._run.log({"samples": trackio.Table(**_rows(samples))}, step=iteration)

    def checkpoint(self, path: str, iteration: int) -> None:
        self._run.log({"checkpoint": path}, step=iteration)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of an MLflow experiment, at MLFLOW_TRACKING_URI or where MLflow keeps runs by default."""

    name = "MLflow"
    errors: tuple[type[Exception], ...] = (Exception,)
    _TAG = "megalith.run"

    @staticmethod
    def is_local() -> bool:
        """Return whether no network is used."""
        return os.environ.get("MLFLOW_TRACKING_URI", "").partition(":")[0] in ("", "file", "sqlite")

    def __init__(self, run: TrackedRun) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric, self._client, self._keeps_samples = Metric, mlflow.MlflowClient(), True
        experiment = self._client.get_experiment_by_name(run.project)
        where = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        wanted = f"tags.`{self._TAG}` = '{run.run_id}'"
        earlier = self._client.search_runs([where], wanted, max_results=1) if run.resumes else []
        if earlier:
            self._run_id = earlier[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        made = self._client.create_run(where, run_name=run.name, tags={self._TAG: run.run_id})
        self._run_id = made.info.run_id
        given = [Param(name, str(value)) for name, value in run.arguments.items()]
        for start in range(0, len(given), 100):  # the most of one request
            self._client.log_batch(self._run_id, params=given[start : start + 100])

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        now = int(time.time() * 1000)
        named = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in _with_samples(values, samples).items()}
        self._client.log_batch(
            self._run_id, [self._metric(name, float(value), now, iteration) for name, value in named.items()]
        )

    def samples(self, samples: Sequence[Mapping[str, str]], iteration: int) -> None:
        if not self._keeps_samples:
            return
        try:
            self._client.log_text(self._run_id, _markdown(samples), f"samples/iter_{iteration:07d}.md")
        except Exception as error:  # files have a store of their own: the curves go on without it
            self._keeps_samples = False
            warn(f"WARNING: no more samples are recorded by MLflow: {error}")

    def checkpoint(self, path: str, iteration: int) -> None:
        self._client.set_tag(self._run_id, "checkpoint", path)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class SwanLab:
    """A run of a SwanLab project, sent where the user has logged in; its files are in `swanlog` of the run folder.

    SWANLAB_MODE says otherwise; `swanlab sync` sends a run that was recorded offline.
    """

    name = "SwanLab"
    errors: tuple[type[Exception], ...] = (Exception,)

    @staticmethod
    def is_local() -> bool:
        """Return whether no network is used: nobody has logged in, or SWANLAB_MODE says so."""
        if mode := os.environ.get("SWANLAB_MODE"):
            return mode in ("offline", "local", "disabled")
        own = Path(os.environ.get("SWANLAB_SAVE_DIR") or Path.home() / ".swanlab")
        return not (os.environ.get("SWANLAB_API_KEY") or (own / ".netrc").is_file())

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        mode, interrupt = os.environ.get("SWANLAB_MODE"), signal.getsignal(signal.SIGINT)
        if self.is_local() or not _answers(os.environ.get("SWANLAB_API_HOST") or "https://api.swanlab.cn"):
            mode = mode if mode in ("local", "disabled") else "offline"
        self._text, folder = swanlab.Text, run.folder / "swanlog"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = swanlab.init(
                project=run.project,
                experiment_name=run.name,
                config=dict(run.arguments),
                logdir=str(folder),
                mode=mode,
                id=run.run_id,
                resume="allow",
            )
        finally:
            signal.signal(signal.SIGINT, interrupt)  # SwanLab's own would end the run instead of saving it

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        self._run.log(_with_samples(values, samples), step=iteration)

    def samples(self, samples: Sequence[Mapping[str, str]], iteration: int) -> None:
        self._run.log({"samples": self._text(_markdown(samples))}, step=iteration)

    def checkpoint(self, path: str, iteration: int) -> None:
        self._run.log({"checkpoint": self._text(path)}, step=iteration)

    def close(self) -> None:
        try:
            self._run.finish()
        except ValueError as error:  # the last thing that it does is to set a handler of signals: all is written
            if "main thread" not in str(error):
                raise


def _answers(url: str) -> bool:
    """Return whether a server accepts connections within a few seconds; a proxy is left to find out itself."""
    if {"http_proxy", "https_proxy", "all_proxy"} & {name.lower() for name in os.environ}:
        return True
    parts = urlsplit(url)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    with suppress(OSError), socket.create_connection((parts.hostname or "", port), _LONGEST_WAIT - 2):
        return True
    return False


THREADED: Mapping[str, type[Trackio] | type[MLflow] | type[SwanLab]] = {
    "trackio": Trackio,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}
"""Name of `--tracker` -> the trackers that need no settings of their own."""
