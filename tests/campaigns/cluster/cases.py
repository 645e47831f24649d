"""Training over two hosts: equal to one host, also after kills; wrong addresses and interfaces end with their names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...e2e.checkpoints import assert_same, state_of
from ..material import REPOSITORY, TRAIN, prepare_data
from .hosts import Cluster, cluster

LAST = 12
PORT = 29400
_SCRIPT = REPOSITORY / "pretrain_gpt.py"
_PATIENCE_SECONDS = 240.0
_MUTE = "import socket, time; s = socket.create_server(('', {port})); time.sleep(600)"
Case = Callable[[Cluster, Path], None]


def run(folder: Path) -> tuple[list[list[str]], list[str]]:
    """Try every case; returns the table and the findings."""
    missing = [program for program in ("ip", "unshare", "nsenter") if shutil.which(program) is None]
    if os.geteuid() != 0 or missing:
        print(f"cluster: skipped, it needs root{''.join(f' and {program}' for program in missing)}")
        return [["case", "result"]], []
    prepare_data(folder)
    rows, findings = [["case", "seconds", "result"]], list[str]()
    _whole_run(folder)
    for case in CASES:
        name, began = case.__name__.replace("_", " ").strip(), time.monotonic()
        place = folder / case.__name__
        place.mkdir()
        for shared in ("data", "cache"):
            (place / shared).symlink_to(folder / shared)
        result = "ok"
        try:
            with cluster(["alpha", "beta"], place) as hosts:
                case(hosts, place)
        except Exception as error:
            result = f"{type(error).__name__}: {str(error)[-1500:]}"
            findings.append(f"{name}: {result}")
        rows.append([name, f"{time.monotonic() - began:.0f}", result.splitlines()[0][:80]])
    return rows, findings


def _whole_run(folder: Path) -> None:
    words = [sys.executable, _SCRIPT, "--nproc", 2, *_words("whole")]
    subprocess.run([str(word) for word in words], cwd=folder, check=True, capture_output=True)


def _words(save: str, *more: object, last: int = LAST) -> list[object]:
    limits = ["--train-iters", last, "--lr-decay-iters", LAST, "--save", save, "--load", save, "--save-interval", 3]
    return [*TRAIN, *limits, "--distributed-timeout-minutes", 1, *more]


def _by_hand(hosts: Cluster, place: Path, addresses: Sequence[str], *, env: dict[str, str] | None = None) -> list[int]:
    """One rank on each host under plain variables. Returns the exit codes."""
    running = []
    for rank, host in enumerate(hosts.hosts):
        where = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": addresses[rank], "MASTER_PORT": str(PORT)}
        where |= env or {}
        running.append(host.start([sys.executable, _SCRIPT, *_words("c")], _log(place, rank), place, where))
    return [process.wait(_PATIENCE_SECONDS) for process in running]


def _agent(hosts: Cluster, place: Path, number: int, words: Sequence[object], **env: str) -> subprocess.Popen[bytes]:
    """torchrun on a host, which starts one rank there."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 1]
    command += ["--max_restarts", 3, "--rdzv_backend", "c10d", "--rdzv_id", "run"]
    command += ["--rdzv_endpoint", f"{hosts.hosts[0].address}:{PORT}", "--local_addr", hosts.hosts[number].address]
    command += ["--rdzv_conf", f"is_host={int(number == 0)},keep_alive_interval=1,keep_alive_max_attempt=3"]
    return hosts.hosts[number].start([*command, _SCRIPT, *words], _log(place, number), place, env)


def _log(place: Path, number: int) -> Path:
    return place / f"log-{number}.txt"


def _text(place: Path) -> str:
    return "".join(_log(place, number).read_text(errors="replace") for number in range(2))


def _wait_for_iteration(place: Path, iteration: int) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not re.search(rf"successfully saved checkpoint from iteration +{iteration} ", _text(place)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"iteration {iteration} was not saved:\n{_text(place)}")
        time.sleep(0.1)


def _require(holds: bool, what: str, place: Path) -> None:
    if not holds:
        raise AssertionError(f"{what}:\n{_text(place)}")


def _equal_to_one_host(place: Path) -> None:
    assert_same(state_of(place.parent / "whole", LAST), state_of(place / "c", LAST))


def two_hosts_by_hand(hosts: Cluster, place: Path) -> None:
    codes = _by_hand(hosts, place, ["alpha", "alpha"])
    _require(codes == [0, 0], f"exit codes {codes}", place)
    _equal_to_one_host(place)


def localhost_on_rank_0(hosts: Cluster, place: Path) -> None:
    codes = _by_hand(hosts, place, ["localhost", "alpha"])
    _require(codes == [0, 0], f"exit codes {codes}", place)
    _equal_to_one_host(place)


def an_interface_that_leads_nowhere(hosts: Cluster, place: Path) -> None:
    began = time.monotonic()
    codes = _by_hand(hosts, place, ["alpha", "alpha"], env={"GLOO_SOCKET_IFNAME": "lo"})
    _require(codes == [6, 6] and time.monotonic() - began < 100, f"exit codes {codes}", place)
    for number in range(2):
        text = _log(place, number).read_text()
        _require(
            all(word in text for word in ("GLOO_SOCKET_IFNAME", "on alpha: lo 127.0.0.1", "on beta: lo")),
            "unnamed",
            place,
        )


def an_interface_that_does_not_exist(hosts: Cluster, place: Path) -> None:
    codes = _by_hand(hosts, place, ["alpha", "alpha"], env={"GLOO_SOCKET_IFNAME": "ib0"})
    _require(codes == [2, 2] and "GLOO_SOCKET_IFNAME=ib0" in _text(place), f"exit codes {codes}", place)


def a_mute_listener_at_the_port(hosts: Cluster, place: Path) -> None:
    hosts.hosts[0].start([sys.executable, "-c", _MUTE.format(port=PORT)], place / "mute.txt", place)
    time.sleep(1.0)
    began = time.monotonic()
    codes = _by_hand(hosts, place, ["alpha", "alpha"])
    _require(codes == [2, 6] and time.monotonic() - began < 100, f"exit codes {codes}", place)


def a_killed_worker_under_torchrun(hosts: Cluster, place: Path) -> None:
    _killed_under_torchrun(hosts, place, again=False)


def a_node_that_crashes_and_comes_again(hosts: Cluster, place: Path) -> None:
    _killed_under_torchrun(hosts, place, again=True)


def _killed_under_torchrun(hosts: Cluster, place: Path, *, again: bool) -> None:
    slow, last = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if again else {}, 300
    words = _words("c", "--keep-last", 2, last=last)
    agents = [_agent(hosts, place, number, words, **slow) for number in range(2)]
    _wait_for_iteration(place, 3)
    if again:
        hosts.hosts[1].crash()
        agents[1].wait(_PATIENCE_SECONDS)
        hosts.hosts[1] = hosts.boot(1)
        agents[1] = _agent(hosts, place, 1, words, **slow)
    else:
        hosts.hosts[1].kill(f"-u {_SCRIPT} ")  # not the agent, which has the words too
    codes = [agent.wait(_PATIENCE_SECONDS) for agent in agents]
    loaded = re.findall(r"successfully loaded checkpoint .* at iteration (\d+)", _text(place))
    _require(codes == [0, 0] and bool(loaded), f"exit codes {codes}", place)


CASES: tuple[Case, ...] = (
    two_hosts_by_hand,
    localhost_on_rank_0,
    an_interface_that_leads_nowhere,
    an_interface_that_does_not_exist,
    a_mute_listener_at_the_port,
    a_killed_worker_under_torchrun,
    a_node_that_crashes_and_comes_again,
)
