"""`megalith train --rehearse-resume`: a shadow process resumes from the first checkpoint and is compared with the run.

The shadow is one process on the CPU, with one thread, the lowest priority, a process group of its own and a bound on
its memory; the kernel ends it before the run where memory is short. It loads the checkpoint as a resume would, in the
layout of one process, and takes two steps: the loss of the second depends on what the first did with optimizer states.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megalith.cli.launch import package_environment
from megalith.config import RunConfig, check_run
from megalith.errors import ConfigError
from megalith.prove.miniature import layout_settings
from megalith.train.results import Hook, SavedCheckpoint, StepResult

STEPS = 2
_AT_THE_END = 60.0  # seconds that a finished run waits for the shadow
_EXACT = (
    "applied",
    "consumed_samples",
    "num_samples",
    "num_tokens",
    "learning_rate",
    "weight_decay",
    "skipped_samples",
)
_OVERHEAD = 3 * 2**30  # bytes besides the states of the model


class Rehearsal(Hook):
    """Starts the shadow after the first checkpoint to keep, compares, and says what it found.

    Attributes:
        mismatch: How the shadow differs from the run; empty if it does not, or is not known to.
    """

    def __init__(
        self, config: RunConfig, say: Callable[[str], None], warn: Callable[[str], None], event: Callable[..., None]
    ) -> None:
        self._config, self._say, self._warn, self._event = config, say, warn, event
        self._live: dict[int, StepResult] = {}
        self._shadow: subprocess.Popen[str] | None = None
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # closed by `close`
        self._saved, self._done, self.mismatch = 0, False, ""
        self._path = Path()

    def after_step(self, result: StepResult) -> None:
        if not self._done:
            self._live[result.iteration] = result
            if self._shadow is None:  # an asynchronous save is reported some steps later, which are needed then
                self._live.pop(result.iteration - 1000, None)
            elif self._shadow.poll() is not None and self._saved + STEPS in self._live:
                self._compare()

    def after_save(self, saved: SavedCheckpoint) -> None:
        last = self._config.train_iters or 0
        persistent = saved.folder == str(Path(self._config.checkpoint.save or ""))
        if self._done or self._shadow is not None or not persistent or saved.iteration + STEPS > last:
            return
        self._saved, self._path = saved.iteration, Path(saved.path)
        bound = 2 * saved.num_bytes + _OVERHEAD
        if bound > 0.5 * _available():
            return self._leave(f"it would take {bound / 1e9:.0f} GB, more than half of the free memory")
        settings = shadow_settings(self._config, saved.iteration)
        try:
            run = RunConfig.from_dict(settings, self._config.registry)
            check_run(run)
        except ConfigError as error:
            return self._leave(f"one process cannot resume it: {error}")
        request = {"settings": settings, "imports": [one.name for one in self._config.registry.imports], "bytes": bound}
        self._shadow = subprocess.Popen(
            [sys.executable, "-m", "megalith.cli.rehearse"],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=_environment(),
        )
        assert self._shadow.stdin is not None
        with suppress(BrokenPipeError):
            self._shadow.stdin.write(json.dumps(request))
            self._shadow.stdin.close()
        self._say(f"rehearsing a resume from iteration {saved.iteration}: one process, at most {bound / 1e9:.1f} GB")

    def after_training(self, iteration: int) -> None:
        """Wait some time for the shadow of a run that has finished."""
        if self._shadow is None or self._done:
            return
        with suppress(subprocess.TimeoutExpired):
            self._shadow.wait(_AT_THE_END)
            self._compare()
            return
        self._leave(f"the run ended {_AT_THE_END:.0f} s before it had taken {STEPS} steps")

    def close(self) -> None:
        if self._shadow is not None and self._shadow.poll() is None:
            self._shadow.kill()
            self._shadow.wait()
        if not self._done and self._shadow is not None:
            self._leave("the run ended before it")
        if self.mismatch:
            self._warn(self._verdict)
        self._output.close()

    @property
    def _verdict(self) -> str:
        return f"ERROR: --rehearse-resume: a resume from iteration {self._saved} is another run: {self.mismatch}"

    def _leave(self, why: str) -> None:
        """Say that nothing was compared."""
        self._done = True
        self._warn(f"WARNING: --rehearse-resume: not rehearsed from iteration {self._saved}: {why}")
        self._event("rehearsal", iteration=self._saved, verdict="not rehearsed", detail=why)

    def _compare(self) -> None:
        assert self._shadow is not None
        self._output.seek(0)
        lines = self._output.read().splitlines()
        results = [json.loads(line) for line in lines if line.startswith('{"iteration"')]
        if self._shadow.returncode and not self._path.exists():
            return self._leave("the checkpoint was deleted meanwhile")
        if self._shadow.returncode == -9:
            return self._leave("the shadow was killed, most likely for its memory")
        if self._shadow.returncode:
            differences = [f"it does not resume: {lines[-1] if lines else 'no output'}"]
        else:
            differences = [
                text for here in results for text in differing(self._config, self._live[here["iteration"]], here)
            ]
        self._done, self.mismatch = True, "; ".join(differences)
        if self.mismatch:
            self._warn(self._verdict)
        else:
            losses = ", ".join(f"{here['loss']:.6g}" for here in results)
            self._say(f"a resume from iteration {self._saved} in one process is the same run: losses {losses}")
        self._event(
            "rehearsal", iteration=self._saved, verdict="mismatch" if self.mismatch else "equal", detail=self.mismatch
        )


def differing(config: RunConfig, live: StepResult, here: Mapping[str, Any]) -> list[str]:
    """List what a step of the shadow has otherwise than that of the run, beyond rounding."""
    wanted, found = asdict(live), []
    for name in _EXACT:
        if wanted[name] != here[name]:
            found.append(f"{name} {here[name]} instead of {wanted[name]} at iteration {live.iteration}")
    for name, factor in (("loss", 1.0), ("grad_norm", 10.0)):
        was, now, bound = wanted[name], here[name], factor * tolerance(config)
        if (was is None) != (now is None) or (was is not None and not abs(now - was) <= bound * abs(was)):
            found.append(f"{name} {now} instead of {was} at iteration {live.iteration}")
    return found


def tolerance(config: RunConfig) -> float:
    """Return the largest relative difference of a loss: what rounding makes, and dropout in another layout."""
    dropout = config.model.hidden_dropout or config.model.attention_dropout
    if config.launch.world_size > 1 and dropout:  # masks are drawn by layout
        return 0.2
    half = config.precision.bf16 or config.precision.fp16
    return 1e-2 if half else 1e-4


def shadow_settings(config: RunConfig, iteration: int) -> dict[str, dict[str, Any]]:
    """Return the saved configuration of one process on a CPU that resumes from a checkpoint and saves nothing."""
    settings = config.to_dict()
    settings.pop("launch", None)
    checkpoint = config.checkpoint
    changes = layout_settings({}) | {
        **{"save": None, "load": checkpoint.save, "ckpt_step": iteration, "rehearse_resume": False},
        **{"no_load_optim": checkpoint.no_save_optim, "no_load_rng": checkpoint.no_save_rng, "finetune": False},
        **{"pretrained_checkpoint": None, "save_interval": None, "non_persistent_save_interval": None},
        **{"override_opt_param_scheduler": False, "prove": None, "hooks": [], "device": "cpu", "compile": False},
        **{"num_workers": 0, "exit_on_missing_checkpoint": True, "async_save": False, "keep_best": False},
    }
    for group in settings.values():
        group |= {name: value for name, value in changes.items() if name in group}
    return settings


def _available() -> float:
    """Return the bytes of memory that are free; infinite where the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        return 1024.0 * float(text.split("MemAvailable:")[1].split()[0])
    return float("inf")


def _environment() -> dict[str, str]:
    """Return the environment of the shadow: without the launcher's variables, GPUs and faults."""
    kept = {name: value for name, value in package_environment().items() if not name.startswith("MEGALITH_")}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Be the shadow: read a request from standard input and print the results of its steps, a line each."""
    request = json.load(sys.stdin)
    os.nice(19)
    with suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    resource.setrlimit(resource.RLIMIT_DATA, (request["bytes"], request["bytes"]))
    from megalith.assemble.ranks import join_ranks
    from megalith.assemble.training import build_run
    from megalith.registry import EMPTY, collect
    from megalith.train.loop import train

    registry = collect(request["imports"]) if request["imports"] else EMPTY
    began, number = time.monotonic(), 0
    config = RunConfig.from_dict(request["settings"], registry)
    with join_ranks(config) as context, closing(build_run(config, context).run) as run:
        for result in train(run):
            print(json.dumps(asdict(result) | {"seconds": time.monotonic() - began}), flush=True)
            number += 1
            if number == STEPS:
                return


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        raise SystemExit(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
