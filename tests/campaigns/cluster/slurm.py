"""SLURM on the hosts of a cluster, from the packages of the distribution: a controller, and slurmd on each host."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .hosts import Cluster, Host

PROGRAMS = ("srun", "slurmctld", "slurmd", "munged")
_START_SECONDS = 60.0
_CONFIGURATION = """
ClusterName=campaign
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=60
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
PartitionName=all Nodes=ALL Default=YES
{nodes}
"""


class Slurm:
    """The commands of SLURM on the first host of a cluster.

    Attributes:
        environ: the variables that they need.
    """

    def __init__(self, host: Host, place: Path, configuration: Path) -> None:
        self.environ = {"SLURM_CONF": str(configuration)}
        self._host, self._place = host, place

    def start(
        self, words: Sequence[object], log: Path, environ: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command; its output is appended to `log`."""
        return self._host.start(words, log, self._place, {**self.environ, **(environ or {})})

    def ask(self, *words: object) -> str:
        """Return what a command prints."""
        answer = self._place / "answer.txt"
        answer.unlink(missing_ok=True)
        code = self.start(words, answer).wait()
        if code:
            raise RuntimeError(f"{words[0]} ended with exit code {code}: {answer.read_text()}")
        return answer.read_text().strip()

    def job(self) -> str:
        """Return the number of the only job."""
        return self.ask("squeue", "--noheader", "--format=%A")


@contextmanager
def slurm(hosts: Cluster, place: Path) -> Iterator[Slurm]:
    """Run SLURM on all hosts for the time of the block, behind which the hosts are gone."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:  # a short path: sockets have at most 108 letters
        folder, log = Path(name), place / "slurm.txt"
        nodes = "\n".join(f"NodeName={host.name} NodeAddr={host.address} CPUs=4" for host in hosts.hosts)
        configuration = folder / "slurm.conf"
        configuration.write_text(_CONFIGURATION.format(first=hosts.hosts[0], folder=folder, nodes=nodes))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n")
        commands = Slurm(hosts.hosts[0], place, configuration)
        (folder / "state").mkdir()
        munged, daemons = _start_munge(folder, log), list[subprocess.Popen[bytes]]()
        try:
            daemons.append(commands.start(["slurmctld", "-D", "-i"], log))
            daemons += [
                host.start(["slurmd", "-D", "-N", host.name], log, place, commands.environ) for host in hosts.hosts
            ]
            _wait_for_nodes(commands, len(hosts.hosts))
            yield commands
        finally:
            for host in hosts.hosts:
                host.crash()
            munged.kill()
            for process in [*daemons, munged]:
                process.wait()


def _start_munge(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start munged outside the hosts, which reach its socket by its path."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    words = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    words += [f"--{kind}-file={folder}/munge.{kind}" for kind in ("pid", "seed", "log")]
    with log.open("ab") as output:
        return subprocess.Popen(words, stdout=output, stderr=output)


def _wait_for_nodes(commands: Slurm, count: int) -> None:
    deadline, states = time.monotonic() + _START_SECONDS, ""
    while states.split() != ["idle"] * count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"SLURM's nodes did not become idle: {states}")
        time.sleep(0.5)
        try:
            states = commands.ask("sinfo", "--noheader", "--Node", "--format=%T")
        except RuntimeError as error:  # the controller is not up yet
            states = str(error)
