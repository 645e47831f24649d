"""Fixtures of the tests that run on a GPU: the same body on a CPU and on CUDA, where the code is not CUDA's alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from ..distributed.conftest import Ranks
from .small import ON_GPU, words


class Command(Protocol):
    """Runs `megalith COMMAND WORDS --device DEVICE`, expects an exit code, and returns what it printed."""

    def __call__(self, command: str, *words: object, code: int = 0, **env: str) -> str: ...


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    """A device: the CPU shows that the body of a test is right, CUDA what it is for."""
    return str(request.param)


@pytest.fixture
def command(device: str, repository: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Command:
    """Commands in `tmp_path`. On a GPU, and of several ranks, each is a program of its own: CUDA does not survive
    a fork."""

    def run(command: str, *given: object, code: int = 0, **env: str) -> str:
        argv = [*words(*given), "--device", device]
        if device == "cpu" and "--nproc" not in argv:
            done = request.getfixturevalue("warm").run(argv, tmp_path, command=command, **env)
            found, text = done.code, done.text
        else:
            program = [sys.executable, "-m", "megalith", command, *argv]
            path = os.pathsep.join([str(repository / "src"), os.environ.get("PYTHONPATH", "")])
            environment = {**os.environ, "PYTHONPATH": path, **env}
            ran = subprocess.run(program, cwd=tmp_path, env=environment, text=True, capture_output=True)
            found, text = ran.returncode, ran.stdout + ran.stderr
        assert found == code, text
        return text

    return run


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[dict[str, Ranks]]:
    """A pool of ranks for each kind of device."""
    pools = {"cpu": Ranks(), "cuda": Ranks("cuda")}
    yield pools
    for ranks in pools.values():
        ranks.close()
