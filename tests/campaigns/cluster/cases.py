"""Training over two hosts: equal to one host, also after kills; wrong addresses and interfaces end with their names.

The cases under SLURM and MPI run where their programs are installed (Debian: slurm-wlm munge openmpi-bin mpich).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...e2e.checkpoints import assert_same, state_of
from ..material import REPOSITORY, TRAIN, prepare_data
from . import slurm
from .hosts import Cluster, Host, cluster

LAST = 12
PORT = 29400
_SCRIPT = REPOSITORY / "pretrain_gpt.py"
_PATIENCE_SECONDS = 240.0
_FROZEN_SECONDS = 75.0  # longer than the timeout of a minute
_LONG = 300  # iterations, so that a run is still under way when something happens to it
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
    for case, programs in CASES.items():
        name, began = case.__name__.replace("_", " ").strip(), time.monotonic()
        if missing := [program for program in programs if shutil.which(program) is None]:
            rows.append([name, "-", f"skipped, not installed: {', '.join(missing)}"])
            continue
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
    logs = [_log(place, number) for number in range(2)]
    return "".join(log.read_text(errors="replace") for log in logs if log.exists())


def _wait_for_iteration(place: Path, iteration: int) -> None:
    _wait_for_text(place, rf"successfully saved checkpoint from iteration +{iteration} ")


def _wait_for_text(place: Path, pattern: str) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not re.search(pattern, _text(place)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{pattern} was not printed:\n{_text(place)}")
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
    slow = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if again else {}
    words = _words("c", "--keep-last", 2, last=_LONG)
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


def a_batch_script_without_srun(hosts: Cluster, place: Path) -> None:
    with slurm.slurm(hosts, place) as commands:
        _without_srun(commands, place)


def a_script_that_a_task_submits(hosts: Cluster, place: Path) -> None:
    """It inherits the variables of the task's step."""
    with slurm.slurm(hosts, place) as commands:
        _without_srun(commands, place, by=["srun", "--ntasks", 2, "--nodes", 1, "sh", "-c"])


def _without_srun(commands: slurm.Slurm, place: Path, by: Sequence[object] = ()) -> None:
    """In a script of four tasks each command is one process, `--nproc` aside."""
    (place / "text.txt").write_text("\n\n".join(f"at den {number} fill gow" for number in range(2000)))
    lines = ["#!/bin/sh -ex", _command("-m", "megalith", "preprocess", *_preprocess("batch"))]
    lines += [
        _command(_SCRIPT, *_words("alone", last=3)),
        _command("-m", "megalith", "train", "--nproc", 2, *_words("c")),
    ]
    script = place / "script.sh"
    script.write_text("\n".join(lines))
    submit = ["sbatch", "--wait", "--ntasks", 4, "--output", _log(place, 0), script]
    if by:
        submit = [*by, f"[ $SLURM_PROCID != 0 ] || {shlex.join(map(str, submit))}"]
    code = commands.start(submit, _log(place, 1)).wait(_PATIENCE_SECONDS)
    _require(code == 0, f"exit code {code}", place)
    _require("SLURM_NTASKS=4" in _text(place), "no word of the tasks that srun did not start", place)
    state_of(place / "alone", 3)
    _equal_to_one_host(place)
    _require(_datasets(place, "batch*") == ["batch_text_document.idx"], "not one dataset", place)


def srun_over_two_hosts(hosts: Cluster, place: Path) -> None:
    (place / "text.txt").write_text("\n\n".join(f"at den {number} fill gow" for number in range(120_000)))
    preprocess = ["-m", "megalith", "preprocess"]
    with slurm.slurm(hosts, place) as commands:
        for words in ([_SCRIPT, *_words("c")], [*preprocess, *_preprocess("shares")]):
            _require(_srun(commands, place, words) == 0, "srun failed", place)
        merge = ["-m", "megalith", "data", "merge", "--shares", "--output-prefix", "shares"]
        for words in ([*preprocess, *_preprocess("whole")], merge):
            code = commands.start([sys.executable, *words], _log(place, 1)).wait(_PATIENCE_SECONDS)
            _require(code == 0, f"exit code {code}", place)
    _equal_to_one_host(place)
    _require(len(_datasets(place, "shares_share*")) == 2, "not two shares", place)
    for end in ("idx", "bin"):
        shares, whole = (place / f"{name}_text_document.{end}" for name in ("shares", "whole"))
        _require(shares.read_bytes() == whole.read_bytes(), f"{end} differs", place)


def srun_with_rank_0_on_the_second_host(hosts: Cluster, place: Path) -> None:
    beta, alpha = hosts.hosts[1].name, hosts.hosts[0].name
    order = place / "order.txt"
    order.write_text(f"# rank 0 first\n{beta}*1\n{alpha}\n")
    arbitrary = ["--distribution", "arbitrary"]
    with slurm.slurm(hosts, place) as commands:
        code = _srun(commands, place, [_SCRIPT, *_words("c")], *arbitrary, SLURM_HOSTFILE=str(order))
        _require(code == 0, f"exit code {code}", place)
        by_list = [*arbitrary, "--nodelist", f"{beta},{alpha}"]
        code = _srun(commands, place, [_SCRIPT, *_words("refused")], *by_list)
        _require(code == 2 and "SLURM_HOSTFILE" in _text(place), f"exit code {code}", place)
        code = _srun(commands, place, [_SCRIPT, *_words("named")], *by_list, MASTER_ADDR=beta)
        _require(code == 0, f"exit code {code}", place)
    _equal_to_one_host(place)


def scancel_while_waiting_and_training(hosts: Cluster, place: Path) -> None:
    words = [sys.executable, _SCRIPT, *_words("c", last=3000)]
    late = f"[ $SLURM_PROCID = 0 ] || sleep 600; exec {shlex.join(map(str, words))}"
    with slurm.slurm(hosts, place) as commands:
        waiting = commands.start(["srun", "--ntasks", 2, "--nodes", 2, "sh", "-c", late], _log(place, 0))
        _wait_for_text(place, "has waited")
        began = time.monotonic()
        commands.ask("scancel", commands.job())
        waiting.wait(_PATIENCE_SECONDS)
        _require(time.monotonic() - began < 20, "waited on", place)
        _require("SIGTERM" in _text(place) and "finishing this step" not in _text(place), "wrong words", place)
        training = commands.start(["srun", "--ntasks", 2, "--nodes", 2, *words], _log(place, 1))
        _wait_for_iteration(place, 3)
        commands.ask("scancel", commands.job())
        training.wait(_PATIENCE_SECONDS)
    stopped = re.search(r"stopped at iteration (\d+)", _log(place, 1).read_text())
    _require(stopped is not None, "scancel did not end the training after a step", place)
    state_of(place / "c", int(stopped[1]) if stopped else 0)


def a_suspended_job(hosts: Cluster, place: Path) -> None:
    """`scontrol suspend` for longer than the timeout."""
    words = [_SCRIPT, *_words("c", "--keep-last", 2, last=_LONG)]
    with slurm.slurm(hosts, place) as commands:
        running = commands.start(["srun", "--ntasks", 2, "--nodes", 2, sys.executable, *words], _log(place, 0))
        _wait_for_iteration(place, 3)
        job = commands.job()
        commands.ask("scontrol", "suspend", job)
        _wait_until_stopped(hosts.hosts)
        time.sleep(_FROZEN_SECONDS)
        _require(running.poll() is None, "ended before it was suspended", place)
        commands.ask("scontrol", "resume", job)
        code = running.wait(_PATIENCE_SECONDS)
    _require(code == 0, f"exit code {code}", place)
    state_of(place / "c", _LONG)


def a_frozen_launcher_and_its_ranks(hosts: Cluster, place: Path) -> None:
    words = [sys.executable, "-m", "megalith", "train", "--nproc", 2, *_words("c", "--keep-last", 2, last=_LONG)]
    running = hosts.hosts[0].start(words, _log(place, 0), place)
    _wait_for_iteration(place, 3)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in [*hosts.hosts[0].pids("megalith"), running.pid]:  # nsenter stops with what it has started
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            _wait_until_stopped(hosts.hosts[:1])
            time.sleep(_FROZEN_SECONDS)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while hosts.hosts[0].pids("megalith") and time.monotonic() < deadline:
        time.sleep(0.1)
    running.send_signal(signal.SIGCONT)  # it may have seen its child stop, and stop itself only when it is continued
    code = running.wait(_PATIENCE_SECONDS)
    _require(code == 0, f"exit code {code}", place)
    state_of(place / "c", _LONG)


def open_mpi(hosts: Cluster, place: Path) -> None:
    words = ["orterun", "--allow-run-as-root", "--oversubscribe", "-n", 2, sys.executable, _SCRIPT, *_words("c")]
    code = hosts.hosts[0].start(words, _log(place, 0), place).wait(_PATIENCE_SECONDS)
    _require(code == 0, f"exit code {code}", place)
    _equal_to_one_host(place)


def mpi_in_a_batch_script(hosts: Cluster, place: Path) -> None:
    """Open MPI on the host of the script; MPICH on both, where its proxies are a step of srun."""
    script, train = place / "script.sh", _command(_SCRIPT, *_words("open"))
    lines = ["#!/bin/sh -ex", f"orterun --allow-run-as-root --oversubscribe --host localhost:2 -n 2 {train}"]
    four = _command(_SCRIPT, *_words("c", "--tensor-model-parallel-size", 2))
    lines += [f"mpiexec.hydra -genv MASTER_ADDR {hosts.hosts[0].name} -n 4 -ppn 2 {four}"]
    script.write_text("\n".join(lines))
    with slurm.slurm(hosts, place) as commands:
        submit = ["sbatch", "--wait", "--nodes", 2, "--ntasks-per-node", 2, "--output", _log(place, 0), script]
        code = commands.start(submit, _log(place, 1)).wait(_PATIENCE_SECONDS)
    _require(code == 0, f"exit code {code}", place)
    state_of(place / "c", LAST)
    assert_same(state_of(place.parent / "whole", LAST), state_of(place / "open", LAST))


def _srun(commands: slurm.Slurm, place: Path, words: Sequence[object], *options: object, **env: str) -> int:
    """Run a Python program as two tasks on two hosts. Returns the exit code."""
    srun = ["srun", "--ntasks", 2, "--nodes", 2, *options, sys.executable, *words]
    return commands.start(srun, _log(place, 0), env).wait(_PATIENCE_SECONDS)


def _command(*words: object) -> str:
    return shlex.join([sys.executable, *map(str, words)])


def _preprocess(prefix: str) -> list[object]:
    words: list[object] = ["--input", "text.txt", "--output-prefix", prefix, "--workers", 1, "--append-eod"]
    words += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "data/vocab.json"]
    return [*words, "--merge-file", "data/merges.txt"]


def _datasets(place: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in place.glob(f"{pattern}.idx"))


def _wait_until_stopped(hosts: Sequence[Host]) -> None:
    """Wait until all Python processes of hosts are stopped."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    folders = [Path("/proc", str(pid)) for host in hosts for pid in host.pids(sys.executable)]
    python = [folder for folder in folders if (folder / "cmdline").read_text().startswith(sys.executable)]
    while not all("State:\tT" in (folder / "status").read_text() for folder in python):
        if time.monotonic() > deadline:
            raise TimeoutError("processes were not stopped")
        time.sleep(0.1)


CASES: dict[Case, tuple[str, ...]] = {
    two_hosts_by_hand: (),
    localhost_on_rank_0: (),
    an_interface_that_leads_nowhere: (),
    an_interface_that_does_not_exist: (),
    a_mute_listener_at_the_port: (),
    a_killed_worker_under_torchrun: (),
    a_node_that_crashes_and_comes_again: (),
    a_frozen_launcher_and_its_ranks: (),
    open_mpi: ("orterun",),
    a_batch_script_without_srun: slurm.PROGRAMS,
    a_script_that_a_task_submits: slurm.PROGRAMS,
    srun_over_two_hosts: slurm.PROGRAMS,
    srun_with_rank_0_on_the_second_host: slurm.PROGRAMS,
    scancel_while_waiting_and_training: slurm.PROGRAMS,
    a_suspended_job: slurm.PROGRAMS,
    mpi_in_a_batch_script: (*slurm.PROGRAMS, "orterun", "mpiexec.hydra"),
}
"""The cases, and the programs that each needs."""
