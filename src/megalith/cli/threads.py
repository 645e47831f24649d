"""Number of CPU threads of tensor operations and how idle threads wait, set before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megalith.config.environment import read_launch
from megalith.config.groups import LaunchConfig
from megalith.distributed.machine import bound_cores, usable_cores

_SHORT_SPINS, _LONG_SPINS = "10000", "300000"
_LARGE_CHECKPOINT = 384 << 20  # bytes


def configure_rank(environ: Mapping[str, str], spins: str = _LONG_SPINS) -> tuple[LaunchConfig, str]:
    """Configure threads and logging of this rank before torch is imported; return its launch and a note on threads.

    `spins` is how long idle threads spin; those of a server also have an event loop and clients to leave room for.
    """
    place = read_launch(environ)
    world_size = place.get("WORLD_SIZE", "1")
    launch = LaunchConfig(
        launcher=place.get("MEGALITH_LAUNCHER", ""),
        rank=int(place.get("RANK", "0")),
        world_size=int(world_size),
        local_world_size=int(place.get("LOCAL_WORLD_SIZE", world_size)),
    )
    note = divide_cores(launch)
    limit_spinning(launch.local_world_size or 1, spins)
    suppress_native_traces(launch)
    return launch, note


def spins_for(checkpoint: Path) -> str:
    """Return how long idle threads of a server spin, by the bytes of its checkpoint's largest folder.

    A thread that sleeps while the event loop sends tokens is late at the next product. A large model gains by spinning
    (124M in fp32: 1.17 times the speed with 16 streams, benchmarks/results/README.md); with a small one the event loop
    and clients need the core more. What the model has of these bytes is not known before torch is imported.
    """
    largest = 0
    for folder, _, names in os.walk(checkpoint):
        with suppress(OSError):  # a save beside this server replaces files
            largest = max(largest, sum(Path(folder, name).stat().st_size for name in names))
    return _LONG_SPINS if largest >= _LARGE_CHECKPOINT else _SHORT_SPINS


def limit_spinning(ranks: int, spins: str = _LONG_SPINS) -> None:
    """Set how long idle OpenMP threads spin before they sleep; must run before torch is imported.

    libgomp spins 300,000 times by default. Where ranks share cores, or other programs use them, threads that spin keep
    those from running that they wait for; threads that sleep take long to wake: a training step of one process takes 5
    to 8 % longer (benchmarks/results/README.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", spins if ranks == 1 else "1000")


def divide_cores(launch: LaunchConfig) -> str:
    """Set OMP_NUM_THREADS to this process's share of the cores, before torch is imported; return a note, or "".

    torchrun sets one thread per process; under srun and mpirun each process takes all cores, and a single one all that
    it is bound to, however little of their time its container has. A number that the user has set is kept.
    """
    ranks = launch.local_world_size or 1
    if not _set_by_launcher(launch.launcher, os.environ) or (ranks == 1 and usable_cores() == bound_cores()):
        return ""
    cores = _cores(launch.launcher, ranks)
    os.environ["OMP_NUM_THREADS"] = str(cores)
    whom = f"each of {ranks} processes" if ranks > 1 else f"the processor time of {cores} of {bound_cores()} cores"
    return f"{cores} thread{'s' if cores > 1 else ''} for {whom}; OMP_NUM_THREADS sets another number"


def _cores(launcher: str, ranks: int) -> int:
    """Return the number of cores per process; a launcher that binds processes to cores has already divided them."""
    usable = usable_cores()
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if launcher == "srun" and given.isdigit():
        return max(1, min(usable, int(given)))
    bound = launcher in ("srun", "mpirun") and bound_cores() < (os.cpu_count() or 1)
    return usable if bound else max(1, usable // ranks)


def _set_by_launcher(launcher: str, environ: Mapping[str, str]) -> bool:
    """Return whether OMP_NUM_THREADS is unset, or is the 1 that torchrun sets if the user has set nothing."""
    if "OMP_NUM_THREADS" not in environ:
        return True
    if launcher != "torchrun" or environ["OMP_NUM_THREADS"] != "1":
        return False
    try:
        of_torchrun = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return False
    return not any(variable.startswith(b"OMP_NUM_THREADS=") for variable in of_torchrun.split(b"\0"))


def suppress_native_traces(launch: LaunchConfig) -> None:
    """Suppress the C++ stack traces that torch logs when a peer closes a connection; distributed/watchdog.py reports
    the cause. Must run before torch is imported; TORCH_CPP_LOG_LEVEL=WARNING brings them back."""
    if launch.world_size > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
