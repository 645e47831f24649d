"""Training commands without the price of the imports: a process that has imported everything forks for each command.

Each command is a real process of its own that can be signalled and killed; it only skips the seconds that importing
torch takes. The template process itself runs no tensor operation, so that its children find a clean torch.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from megalith.nn.precision import product_dtype_on

MOCK_DOCUMENTS = 2000
"""Documents of `--mock-data` in commands that the template starts without MOCK_DOCUMENTS; 100,000 elsewhere."""
_TEMPLATE = """
import json, os, signal, sys
import megalith.assemble.ranks, megalith.assemble.training
import megalith.cli.train, megalith.cli.train_start, megalith.cli.train_hooks
import megalith.train.metrics, megalith.train.records
import megalith.data.mock
from functools import partial
from tests.spoil import spoil_runs
from megalith.cli.main import main

# The peak only scales a figure in the log: it is not worth a quarter of a second in each rank.
training = megalith.assemble.training
training.measure_peak = partial(training.measure_peak, budget_seconds=0.01)
running = set()
for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
        running.remove(request["wait"])
        continue
    child = os.fork()
    if child == 0:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        if "script" not in request:
            os.dup2(log, 2)
        os.chdir(request["cwd"])
        os.environ.update(request["env"])
        # At a context of 16 tokens the index of Megatron's 100,000 documents takes most of the time of a short run.
        megalith.data.mock.NUM_DOCUMENTS = int(os.environ["MOCK_DOCUMENTS"])
        if "SPOIL" in request["env"]:
            spoil_runs(request["env"]["SPOIL"])
        sys.argv = ["pretrain_gpt.py", *request.get("argv", ())]
        code = 1
        try:
            if "script" in request:
                exec(request["script"], {"__name__": "__main__"})
                code = 0
            else:
                code = main([request["command"], *request["argv"]])
        except SystemExit as end:
            code = end.code
        except BaseException:
            import traceback
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    running.add(child)
    print(child, flush=True)
for child in running:  # what a failed test has left behind
    os.kill(child, signal.SIGKILL)
"""


def free_port() -> int:
    """A port that nobody listens on, below the range from which Linux gives ports to clients (32768 and up).

    One of that range can go to a connection of another program before the ranks listen on it.
    """
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", secrets.choice(range(15000, 32000))))
            return int(probe.getsockname()[1])


def other_warnings(text: str) -> list[str]:
    """Return the warnings of a run, but for the one that processors without bf16 give about checkpoints of others."""
    multiplies_bf16 = product_dtype_on("cpu", torch.bfloat16) == torch.bfloat16
    found = [line for line in text.splitlines() if "WARNING" in line]
    return found if multiplies_bf16 else [line for line in found if "written, and are computed in float32" not in line]


@dataclass(frozen=True)
class Finished:
    """A command that has ended. `code` is negative for a signal."""

    code: int
    text: str
    seconds: float


class Running:
    """A command that may still run."""

    def __init__(self, warm: WarmProcess, pid: int, log: Path) -> None:
        self._warm, self.pid, self._log, self._started = warm, pid, log, time.monotonic()

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self._log.read_text() if self._log.exists() else ""

    def wait_for(self, needle: str, seconds: float = 60.0) -> None:
        """Wait until it has printed `needle`."""
        deadline = time.monotonic() + seconds
        while needle not in self.text:
            ended = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            late = time.monotonic() > deadline
            assert not (ended or late), f"no {needle!r} {'at all' if ended else f'within {seconds} s'} in:\n{self.text}"
            time.sleep(0.002)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it alone."""
        os.kill(self.pid, number)

    def finish(self) -> Finished:
        """Wait for its end."""
        code = self._warm.ask({"wait": self.pid})
        return Finished(code, self.text, time.monotonic() - self._started)


class WarmProcess:
    """The template. One request at a time.

    Args:
        logs: folder for what commands print.
        env: additional variables of its environment.
    """

    def __init__(self, logs: Path, **env: str) -> None:
        self._logs, self._count = logs, 0
        bare = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI_"))}
        self._environment = {**bare, "OMP_NUM_THREADS": "1", "MOCK_DOCUMENTS": str(MOCK_DOCUMENTS), **env}
        self._process = self._start_template()

    def _start_template(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _TEMPLATE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
            cwd=Path(__file__).parents[2],  # where the package of these tests is found
        )

    def ask(self, request: Mapping[str, object]) -> int:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())
        except BaseException:  # such as a timeout: its answer, when it comes, must not be taken for the next one
            self._process.kill()
            self._process = self._start_template()
            raise

    def start(self, argv: Sequence[object], cwd: Path, *, command: str = "train", **env: str) -> Running:
        """Start `pretrain_gpt.py argv`, or `megalith command argv`, in a folder."""
        self._count += 1
        log = self._logs / f"command-{self._count}.txt"
        words = [str(word) for word in argv]
        pid = self.ask({"command": command, "argv": words, "cwd": str(cwd), "env": env, "log": str(log)})
        return Running(self, pid, log)

    def start_script(self, script: str, cwd: Path, **env: str) -> Running:
        """Start a program of these lines. Its text is what it writes to stdout."""
        self._count += 1
        log = self._logs / f"script-{self._count}.txt"
        return Running(self, self.ask({"script": script, "cwd": str(cwd), "env": env, "log": str(log)}), log)

    def run(self, argv: Sequence[object], cwd: Path, *, command: str = "train", **env: str) -> Finished:
        """Start it and wait for its end."""
        return self.start(argv, cwd, command=command, **env).finish()

    def start_ranks(self, number: int, argv: Sequence[object], cwd: Path, **env: str) -> list[Running]:
        """Start it once for each rank, as torchrun does: rank 0 first."""
        place = {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1"}
        common = {**{name: str(value) for name, value in place.items()}, "MASTER_PORT": str(free_port()), **env}
        return [self.start(argv, cwd, **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(number)]

    def run_ranks(self, number: int, argv: Sequence[object], cwd: Path, **env: str) -> list[Finished]:
        """Start all ranks and wait for their ends."""
        return [running.finish() for running in self.start_ranks(number, argv, cwd, **env)]

    def close(self) -> None:
        self._process.stdin.close() if self._process.stdin else None
        self._process.wait()
