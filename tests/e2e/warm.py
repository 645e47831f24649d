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

from megalith.nn.precision import product_dtype

MOCK_DOCUMENTS = 2000
"""Documents of `--mock-data` in commands that the template starts without MOCK_DOCUMENTS; 100,000 elsewhere."""
PRELOADED = (
    *("megalith.assemble.ranks", "megalith.assemble.training", "megalith.cli.train", "megalith.cli.train_start"),
    *("megalith.cli.train_hooks", "megalith.train.metrics", "megalith.train.records", "megalith.data.mock"),
    *("megalith.checkpoint.store.saving", "megalith.parallel.fsdp", "megalith.train.user_hooks", "torch._dynamo"),
    *("megalith.checkpoint.convert", "megalith.assemble.trained", "megalith.serve.model_runner", "megalith.api"),
    *("megalith.cli.generate", "megalith.cli.evaluate", "megalith.cli.preprocess", "megalith.cli.checkpoint"),
    *("megalith.cli.serve", "megalith.serve.http.app", "megalith.serve.http.server", "megalith.cli.planned"),
    *(
        "megalith.cli.prove",
        "megalith.cli.from_megatron",
        "megalith.text_model",
        "rich.console",
        "rich.table",
        "rich.tree",
    ),
)
"""What commands import, many of them only where they use it; those that an extra lacks are left out."""
_TEMPLATE = """
import gc, importlib, json, os, signal, sys
from contextlib import suppress
from functools import partial
for name in sys.argv[1:]:
    with suppress(ImportError):
        importlib.import_module(name)
import megalith.assemble.training, megalith.data.mock
from tests.spoil import spoil_runs
from megalith.cli.main import main
from megalith.distributed.consistency import source_digest
from megalith.plan.remember import versions

source_digest(), versions()  # of all sources: once for all commands
# The peak only scales a figure in the log: it is not worth a quarter of a second in each rank.
training = megalith.assemble.training
training.measure_peak = partial(training.measure_peak, budget_seconds=0.01)
gc.collect()
gc.freeze()  # a collection in a command would write to, and so copy, the pages of all objects
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


def places(number: int) -> list[dict[str, str]]:
    """Return the variables that torchrun gives to each rank."""
    common = {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    each = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(number)]
    return [{name: str(value) for name, value in place.items()} for place in each]


def other_warnings(text: str) -> list[str]:
    """Return the warnings of a run, but for the one that processors without bf16 give about checkpoints of others."""
    multiplies_bf16 = product_dtype(torch.empty(0, dtype=torch.bfloat16)) == torch.bfloat16
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
        self._code: int | None = None

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self._log.read_text() if self._log.exists() else ""

    def wait_for(self, needle: str, seconds: float = 60.0) -> None:
        """Wait until it has printed `needle`."""
        deadline = time.monotonic() + seconds
        while needle not in self.text:
            ended = self.ended
            late = time.monotonic() > deadline
            assert not (ended or late), f"no {needle!r} {'at all' if ended else f'within {seconds} s'} in:\n{self.text}"
            time.sleep(0.002)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it alone."""
        os.kill(self.pid, number)

    @property
    def ended(self) -> bool:
        """Whether it has ended, waited for or not."""
        return self._code is not None or Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def kill(self) -> None:
        """End it, unless it has ended."""
        if self._code is None:
            self.send(signal.SIGKILL)
            self.finish()

    def finish(self) -> Finished:
        """Wait for its end."""
        if self._code is None:
            self._code = self._warm.ask({"wait": self.pid})
        return Finished(self._code, self.text, time.monotonic() - self._started)


class WarmProcess:
    """The template. One request at a time.

    Args:
        logs: folder for what commands print.
        env: additional variables of its environment.
    """

    def __init__(self, logs: Path, **env: str) -> None:
        self._logs, self._count = logs, 0
        others = ("SLURM_", "OMPI_", "PMI_", "MEGALITH_", "WANDB_")
        bare = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        self._environment = {**bare, "OMP_NUM_THREADS": "1", "MOCK_DOCUMENTS": str(MOCK_DOCUMENTS), **env}
        self._process = self._start_template()

    def _start_template(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _TEMPLATE, *PRELOADED],
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

    def start(
        self, argv: Sequence[object], cwd: Path, *, command: str = "train", log: Path | None = None, **env: str
    ) -> Running:
        """Start `pretrain_gpt.py argv`, or `megalith command argv`, in a folder; it prints into a new file or `log`."""
        self._count += 1
        log = log or self._logs / f"command-{self._count}.txt"
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

    def start_ranks(
        self, number: int, argv: Sequence[object], cwd: Path, *, command: str = "train", **env: str
    ) -> list[Running]:
        """Start a command once for each rank, as torchrun does: rank 0 first."""
        return [self.start(argv, cwd, command=command, **{**place, **env}) for place in places(number)]

    def run_ranks(self, number: int, argv: Sequence[object], cwd: Path, **env: str) -> list[Finished]:
        """Start all ranks and wait for their ends."""
        return [running.finish() for running in self.start_ranks(number, argv, cwd, **env)]

    def close(self) -> None:
        self._process.stdin.close() if self._process.stdin else None
        self._process.wait()
