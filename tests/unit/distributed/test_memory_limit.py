"""The memory and the cores that a process may have, from a /proc and control groups as Linux lays them out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megalith.distributed.machine import machine_memory, memory_limit, oom_kills, usable_cores

MIB = 2**20


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def proc(tmp_path: Path, group: str, mounts: str) -> Path:
    write(tmp_path / "proc", {"self/cgroup": group, "self/mountinfo": mounts, "vmstat": "oom_kill 7\n"})
    return tmp_path / "proc"


V2 = "30 23 0:26 {root} {mount} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:27 / {mount}/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 23 0:29 {root} {mount}/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
)


def test_the_own_group_of_version_2_and_its_ancestors(tmp_path: Path) -> None:
    """A job's group is below the one that its memory is limited in, or above."""
    mount = tmp_path / "cgroup"
    write(mount, {"slurm/job_7/memory.max": f"{300 * MIB}\n", "slurm/job_7/step_0/memory.max": "max\n"})
    write(mount, {"slurm/job_7/step_0/memory.events": "low 0\noom 3\noom_kill 2\n", "memory.max": f"{MIB}\n"})
    here = proc(tmp_path, "0::/slurm/job_7/step_0\n", V2.format(root="/", mount=mount))
    assert memory_limit(here) == MIB, "of the outermost too"
    (mount / "memory.max").unlink()
    assert memory_limit(here) == 300 * MIB
    assert oom_kills(here) == 2


def test_the_own_group_of_version_1_beside_an_empty_version_2(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    write(
        mount, {"memory/job/memory.limit_in_bytes": f"{200 * MIB}", "memory/memory.limit_in_bytes": f"{2**63 - 4096}"}
    )
    write(mount, {"memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"})
    mounts = V1.format(root="/", mount=mount) + V2.format(root="/", mount=mount / "unified")
    here = proc(tmp_path, "4:memory:/job\n2:cpu,cpuacct:/\n0::/\n", mounts)
    assert memory_limit(here) == 200 * MIB
    assert oom_kills(here) == 4


def test_a_container_that_sees_only_its_own_group(tmp_path: Path) -> None:
    """Its group has a long name, and is what is mounted."""
    mount = tmp_path / "cgroup"
    write(mount, {"memory/memory.limit_in_bytes": f"{100 * MIB}"})
    here = proc(tmp_path, "4:memory:/docker/abc\n", V1.format(root="/docker/abc", mount=mount))
    assert memory_limit(here) == 100 * MIB


@pytest.mark.parametrize("group", ["0::/\n", "", "4:memory:/x\n"])
def test_no_limit(tmp_path: Path, group: str) -> None:
    here = proc(tmp_path, group, V2.format(root="/", mount=tmp_path / "nothing"))
    assert memory_limit(here) == machine_memory() > 0
    assert oom_kills(here) == 7
    assert memory_limit(tmp_path / "no proc") == machine_memory()


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("5000 100000", 1), ("", 8)]
)
def test_the_time_of_cores_in_version_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    mount = tmp_path / "cgroup"
    write(mount, {"pod/cpu.max": f"{quota}\n", "pod/container/cpu.max": "max 100000\n"})
    here = proc(tmp_path, "0::/pod/container\n", V2.format(root="/", mount=mount))
    assert usable_cores(here) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3), ("1200000", 8)])
def test_the_time_of_cores_in_version_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    mount = tmp_path / "cgroup"
    write(mount, {"cpu/job/cpu.cfs_quota_us": f"{quota}\n", "cpu/job/cpu.cfs_period_us": "100000\n"})
    mounts = V1.format(root="/", mount=mount) + V2.format(root="/", mount=mount / "unified")
    assert usable_cores(proc(tmp_path, "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n", mounts)) == cores
    assert usable_cores(tmp_path / "no proc") == 8
