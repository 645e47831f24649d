"""Launch environment of a process: variables of srun and mpirun translated to those of torchrun.

Variables of torchrun take precedence: torchrun runs inside SLURM jobs, and users export MASTER_PORT by hand. This
module reads only the given mapping, the host file that it names, and the loopback address.
"""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megalith.errors import ConfigError

_BRACKETS = re.compile(r"\[(\d+)[^]]*\]")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_FIRST_PORT, _PORTS = 12288, 16384  # below the ports that Linux gives to clients


def loopback() -> str:
    """Return the loopback address of this machine: 127.0.0.1, or ::1 where it has no other."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with suppress(OSError), socket.socket(family) as trial:
            trial.bind((address, 0))
            return address
    return "127.0.0.1"


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Open a listening socket at an address of either family; an empty host means all interfaces of both."""
    if not host and socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be switched off
            return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def read_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for this process, and its launcher in MEGALITH_LAUNCHER.

    Raises:
        ConfigError: the launcher's variables are incomplete, or those of mpirun and srun contradict each other.
    """
    own = {name: environ[name] for name in _OF_TORCHRUN if name in environ}
    if "RANK" in environ or "WORLD_SIZE" in environ:
        by = environ.get("MEGALITH_LAUNCHER") or ("torchrun" if "TORCHELASTIC_RUN_ID" in environ else "hand")
        return {**_complete(own), "MEGALITH_LAUNCHER": by}
    if "OMPI_COMM_WORLD_RANK" in environ:
        return {**_mpi(environ, _OPEN_MPI), **own}
    if "PMI_RANK" in environ and "MPI_LOCALRANKID" in environ:  # Hydra: in a SLURM job its proxies are an srun step
        return {**_mpi(environ, _PMI), **own}
    if _in_slurm_step(environ) and _count(environ, *_OF_TASKS) != 1:
        return {**_slurm(environ), **own}
    if "PMI_RANK" in environ and "PMI_SIZE" in environ:
        return {**_mpi(environ, _PMI), **own}
    return own


def first_of_machine(environ: Mapping[str, str]) -> bool:
    """Return whether this process is the first on its machine, which prints for all of them.

    Rank 0 and the only process of a machine print whatever LOCAL_RANK says: no other would.
    """
    alone = environ.get("RANK") == "0" or environ.get("LOCAL_WORLD_SIZE") == "1"
    return alone or next((environ[name] for name in _PLACES if name in environ), "0") == "0"


# Not RANK: a pod with RANK only has its own output.
# SLURM last: processes of mpirun inside a SLURM job inherit SLURM_LOCALID=0.
_PLACES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_PMI = {
    "RANK": "PMI_RANK",
    "WORLD_SIZE": "PMI_SIZE",
    "LOCAL_RANK": "MPI_LOCALRANKID",
    "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
}
_OF_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")  # of the step, else of the job
_OF_A_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS")
_JOB_OF_MPI = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")


def _complete(variables: dict[str, str]) -> dict[str, str]:
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return variables
    there, missing = ("RANK", "WORLD_SIZE") if "RANK" in variables else ("WORLD_SIZE", "RANK")
    raise ConfigError(
        f"environment variable {there}={variables[there]} is set and {missing} is not; a launcher sets both (torchrun, "
        f"srun, mpirun, megalith train --nproc N): set {missing}, or unset {there} for one process"
    )


def checked_launch(variables: dict[str, str], names: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return torchrun's variables if they are possible; ConfigErrors call each as `names`, by torchrun's, does."""
    names = names or {name: name for name in _OPEN_MPI}
    given = {name: variables[name] for name in names if name in variables}
    shown = {name: f"{names[name]}={value}" for name, value in given.items()}
    problems = [
        f"environment variable {shown[name]}: not a whole number from 0; leave it to the launcher"
        for name, value in given.items()
        if not value.strip().isdecimal()
    ]
    problems = problems or [
        f"environment variable {shown[rank]} with {shown[size]}: {whose} count from 0 to {int(given[size]) - 1}"
        for rank, size, whose in (
            ("RANK", "WORLD_SIZE", "ranks"),
            ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "ranks of a machine"),
        )
        if {rank, size} <= set(given) and int(given[rank]) >= int(given[size]) > 0
    ]
    if problems:
        raise ConfigError(problems)
    return variables


def _mpi(environ: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    variables = checked_launch({ours: environ[theirs] for ours, theirs in names.items() if theirs in environ}, names)
    variables["MEGALITH_LAUNCHER"] = "mpirun"
    variables["MASTER_PORT"] = _port(" ".join(environ.get(name, "") for name in _JOB_OF_MPI))
    one_host = variables.get("LOCAL_WORLD_SIZE") == variables.get("WORLD_SIZE")
    if one_host:
        variables["MASTER_ADDR"] = loopback()
    elif "MASTER_ADDR" not in environ:
        raise ConfigError(
            "mpirun over several hosts does not say where rank 0 is: export MASTER_ADDR, the name of the first host, "
            "to all processes (mpirun -x MASTER_ADDR=... with Open MPI, -genv MASTER_ADDR ... with MPICH and Intel MPI)"
        )
    return variables


def tasks_without_srun(environ: Mapping[str, str]) -> int:
    """Return the number of tasks of a SLURM job whose script or shell runs this process itself; 1 under a launcher."""
    return 1 if "WORLD_SIZE" in read_launch(environ) else _count(environ, "SLURM_NTASKS", "SLURM_NPROCS")


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process. SLURM_PROCID and SLURM_NTASKS are also set in batch scripts, without a
    step.

    A script that a task of another step submitted with sbatch inherits the variables of that step, but not SLURM_GTIDS,
    which lists the tasks started with this process on its node.
    """
    if "SLURM_PROCID" not in environ or not any(name in environ for name in _OF_A_STEP):
        return False
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node, started = environ.get("SLURM_NODEID", ""), environ.get("SLURM_GTIDS", "")
    if not (started and node.isdigit() and int(node) < len(per_node)):
        return True
    return len(started.split(",")) == per_node[int(node)]


def _count(environ: Mapping[str, str], *names: str) -> int:
    """Return the first of these numbers that is set, 1 if none is; 0 if it is not a number."""
    text = next((environ[name] for name in names if environ.get(name)), "1")
    return int(text) if text.isdecimal() else 0


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    of_tasks = next(name for name in _OF_TASKS if environ.get(name))
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": of_tasks, "LOCAL_RANK": "SLURM_LOCALID"}
    variables = checked_launch({ours: environ[theirs] for ours, theirs in names.items() if theirs in environ}, names)
    tasks = variables["WORLD_SIZE"]
    variables["MEGALITH_LAUNCHER"] = "srun"
    variables["MASTER_PORT"] = _port(f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}")
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "")
    node = environ.get("SLURM_NODEID", "0")
    if node.isdigit() and int(node) < len(per_node):
        variables["LOCAL_WORLD_SIZE"] = str(per_node[int(node)])
    elif environ.get("SLURM_NNODES") == "1":
        variables["LOCAL_WORLD_SIZE"] = tasks
    if variables.get("LOCAL_WORLD_SIZE") == tasks:
        variables["MASTER_ADDR"] = loopback()
        return variables
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    arbitrary = environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    host = _first_of_host_file(environ) if arbitrary else first_host(nodes or "")
    if host:
        variables["MASTER_ADDR"] = host
    elif "MASTER_ADDR" not in environ:
        raise ConfigError(
            "srun --distribution=arbitrary without a SLURM_HOSTFILE that this node can read does not say where rank 0 "
            "is: export SLURM_HOSTFILE, with its whole path, in place of -w, or MASTER_ADDR"
            if arbitrary
            else "SLURM_JOB_NODELIST is not set, so that the host of rank 0 is unknown: export MASTER_ADDR"
        )
    return variables


def _first_of_host_file(environ: Mapping[str, str]) -> str:
    """Return the first host of SLURM_HOSTFILE, which has rank 0 under `srun --distribution=arbitrary`.

    Returns "" if the file cannot be read. Its lines may end in `*COUNT` or a comment.
    """
    with suppress(OSError, UnicodeDecodeError):
        for line in Path(environ.get("SLURM_HOSTFILE", "")).read_text(encoding="utf-8").splitlines():
            if hosts := line.partition("#")[0].partition("*")[0].strip():
                return first_host(hosts)
    return ""


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: gpu03-ib for `gpu[03-05,09]-ib,login1`."""
    depth = 0
    for place, letter in enumerate(nodes):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            nodes = nodes[:place]
            break
    return _BRACKETS.sub(r"\1", nodes)


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks on each node from SLURM's short form: 4, 4, 3 for `4(x2),3`."""
    return [int(count) for count, times in _REPEATED.findall(text) for _ in range(int(times or 1))]


def _port(job: str) -> str:
    """Return a port that all processes of a job agree on and other jobs are unlikely to use."""
    return str(_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS)
