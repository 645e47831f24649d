"""Cores shared by the processes of a machine, and who has set OMP_NUM_THREADS."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megalith.cli import threads
from megalith.config.groups import LaunchConfig

FOUR = LaunchConfig(world_size=4, local_world_size=4, launcher="torchrun")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def test_cores_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    said = threads.divide_cores(FOUR)
    assert said.startswith("2 threads ") and "OMP_NUM_THREADS" in said
    assert os.environ.pop("OMP_NUM_THREADS") == "2"


def test_one_process_keeps_its_threads() -> None:
    assert threads.divide_cores(LaunchConfig()) == "" and "OMP_NUM_THREADS" not in os.environ


def test_a_container_with_the_time_of_some_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 3)
    note = threads.divide_cores(LaunchConfig())
    assert note.startswith("3 threads ") and "8 cores" in note
    assert os.environ.pop("OMP_NUM_THREADS") == "3"
    threads.divide_cores(FOUR)
    assert os.environ.pop("OMP_NUM_THREADS") == "1"
    assert threads._cores("mpirun", 2) == 1, "a container binds no process to cores"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads.divide_cores(LaunchConfig()) == "" and os.environ["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize("number", ["1", "3"])
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", number)
    own = LaunchConfig(world_size=4, local_world_size=4, launcher="megalith")
    assert threads.divide_cores(own) == "" and os.environ["OMP_NUM_THREADS"] == number


@pytest.mark.parametrize(("at_the_launcher", "kept"), [(None, False), ("1", True)])
def test_the_one_thread_of_torchrun_is_told_from_that_of_the_user(at_the_launcher: str | None, kept: bool) -> None:
    """A process that sets the variable for its child as torchrun does, started without and with it."""
    child = (
        "import os; from megalith.cli.threads import _set_by_launcher; print(_set_by_launcher('torchrun', os.environ))"
    )
    launcher = (
        "import os, subprocess, sys; os.environ.setdefault('OMP_NUM_THREADS', '1'); "
        f"subprocess.run([sys.executable, '-c', {child!r}])"
    )
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if at_the_launcher:
        environ["OMP_NUM_THREADS"] = at_the_launcher
    finished = subprocess.run([sys.executable, "-c", launcher], env=environ, capture_output=True, text=True)
    assert finished.stdout.strip() == str(not kept)


@pytest.mark.parametrize(
    ("launcher", "usable", "per_task", "cores"),
    [
        ("srun", 8, "3", 3),
        ("srun", 8, None, 2),
        ("srun", 2, None, 2),  # bound: the machine is divided already
        ("mpirun", 1, None, 1),
        ("mpirun", 8, None, 2),
        ("torchrun", 6, None, 1),  # a container with six of the cores, for all processes
    ],
)
def test_what_a_launcher_has_bound_is_respected(
    monkeypatch: pytest.MonkeyPatch, launcher: str, usable: int, per_task: str | None, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(usable)), raising=False)
    if per_task:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", per_task)
    assert threads._cores(launcher, 4) == cores
