"""Starting ranks: who does not come, comes twice or differs is named; `--nproc` starts, stops and restarts them."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megalith.checkpoint import DirectoryStore
from megalith.cli import train
from megalith.config import RunConfig, load
from megalith.distributed.machine import AwakeClock
from megalith.tokenizers.byte_level import BYTE_OF_CHARACTER, END_OF_TEXT

from .checkpoints import assert_same, state_of
from .small_run import MODEL, write_text
from .test_hangs import boards_of
from .test_signals import processes_with, wait_for
from .warm import Finished, Running, WarmProcess, free_port


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


# The meeting of the ranks (F29, F17, F18).

MEET = """
import os, sys
from datetime import timedelta
import torch
from megalith.config.environment import read_launch
from megalith.config.groups import LaunchConfig
from megalith.distributed import launch
from megalith.errors import MegalithError
launch.WARN_AFTER_SECONDS, launch.to_stderr = 0.3, print
kinds = dict(RANK=int, WORLD_SIZE=int, LOCAL_RANK=int, LOCAL_WORLD_SIZE=int, MASTER_PORT=int, MASTER_ADDR=str)
config = LaunchConfig(**{n.lower(): kinds[n](v) for n, v in read_launch(os.environ).items() if n in kinds})
try:
    join = timedelta(seconds=JOIN)
    with launch.connect(config, torch.device("cpu"), "gloo", timedelta(seconds=5), join=join):
        print(f"rank {config.rank} of {config.world_size} was there")
except MegalithError as error:
    print(type(error).__name__, error)
    sys.exit(error.exit_code)
"""


class Meeting:
    """Starts processes that look for each other."""

    def __init__(self, warm: WarmProcess, folder: Path) -> None:
        self._warm, self._folder = warm, folder

    def __call__(
        self, *environments: dict[str, str], port: int | None = None, join: float = 1.5, script: str = MEET
    ) -> list[tuple[int, str]]:
        """Start one process with each of these environments; returns exit codes and outputs."""
        port = port or free_port()
        return self.end(*(self.send(variables, port, join, script) for variables in environments))

    def send(self, variables: dict[str, str], port: int, join: float, script: str = MEET) -> Running:
        environ = {"MASTER_PORT": str(port), **variables}
        return self._warm.start_script(script.replace("JOIN", str(join)), self._folder, **environ)

    def end(self, *started: Running) -> list[tuple[int, str]]:
        return [(ended.code, ended.text) for ended in [running.finish() for running in started]]


@pytest.fixture
def meet(warm: WarmProcess, tmp_path: Path) -> Meeting:
    return Meeting(warm, tmp_path)


def place(rank: int, size: int = 2, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), **more}


def test_a_process_joins_its_ranks_again(meet: Meeting) -> None:
    again = MEET.replace("try:", "try:\n  for number in range(3):").replace(" was there", " was there, {number}")
    for rank, (code, output) in enumerate(meet(place(0), place(1), join=20, script=again)):
        assert code == 0, output
        there = [line for line in output.splitlines() if " was there" in line]  # a late rank is waited for
        assert there == [f"rank {rank} of 2 was there, {number}" for number in range(3)]


def test_no_rank_leaves_before_the_others_are_ready(meet: Meeting) -> None:
    # Launchers end the other ranks when one exits with 75, and rank 0 may have a tracker to close.
    late = MEET.replace("        print(", "        time.sleep(1.5 * (config.rank == 0)); print(").replace(
        "sys\n", "sys, time\n"
    )
    late = late.replace("except MegalithError", "    print(f'left {time.time()}')\nexcept MegalithError")
    late = late.replace("was there", "was there {time.time()}")
    (code, first), (other_code, second) = meet(place(0), place(1), join=20, script=late)
    assert code == other_code == 0, first + second
    ready = re.search(r"was there ([\d.]+)", first)
    left = re.search(r"left ([\d.]+)", second)
    assert ready and left and float(left[1]) > float(ready[1])


def test_two_joins_at_once_are_refused_with_what_to_do(meet: Meeting) -> None:
    again = "with launch.connect(config, torch.device('cpu'), 'gloo', timedelta(seconds=5)):"
    within = f"torch.distributed.barrier()\n        {again}\n            print"
    for code, output in meet(place(0), place(1), join=20, script=MEET.replace("print(f", f"{within}(f")):
        assert code == 2 and "ConfigError" in output and "ParallelContext.create" in output
        assert "--node_rank" not in output


SLURM = {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_JOB_ID": "4711"}
SLURM["SLURM_STEP_ID"] = "0"
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(("common", "rank"), [(SLURM, "SLURM_PROCID"), (OPEN_MPI, "OMPI_COMM_WORLD_RANK")])
def test_srun_and_mpirun(warm: WarmProcess, tmp_path: Path, text: Path, common: dict[str, str], rank: str) -> None:
    words = [*MODEL, "--data-path", text, "--train-iters", 2]
    environ = {**common, "MASTER_PORT": str(free_port())}
    started = [warm.start(words, tmp_path, **environ, **{rank: number}) for number in "01"]
    ends = [running.finish() for running in started]
    assert [end.code for end in ends] == [0, 0], ends
    assert "using world size: 2, data-parallel size: 2" in ends[0].text and ends[1].text == ""


@pytest.fixture
def agents_store() -> dist.TCPStore:
    """The store that torchrun's agents keep over all restarts of the ranks."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def elastic(rank: int, restarts: int) -> dict[str, str]:
    by_agents = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "run", "LOCAL_WORLD_SIZE": "1"}
    return place(rank, **by_agents, TORCHELASTIC_RESTART_COUNT=str(restarts))


def test_ranks_meet_again_though_each_agent_counts_its_own_restarts(meet: Meeting, agents_store: dist.TCPStore) -> None:
    """A worker that dies counts on its own node; on the other one the membership has changed, which is no restart."""
    for counts in ((0, 0), (0, 1)):
        places = [elastic(rank, count) for rank, count in enumerate(counts)]
        met = meet(*places, port=agents_store.port, join=30)
        assert [code for code, _ in met] == [0, 0], met


def test_ranks_meet_though_an_earlier_rank_0_died_while_it_waited(meet: Meeting, agents_store: dist.TCPStore) -> None:
    first = meet.send(elastic(0, 0), agents_store.port, 30)
    agents_store.wait(["megalith/round"], timedelta(seconds=30))
    first.send(signal.SIGKILL)
    first.finish()
    met = meet(elastic(0, 0), elastic(1, 0), port=agents_store.port, join=30)
    assert [code for code, _ in met] == [0, 0], met


def test_a_rank_that_dies_when_it_was_admitted_is_replaced(meet: Meeting, agents_store: dist.TCPStore) -> None:
    """Rank 0 has let it in and waits for it to sign in; another process of that rank comes instead."""
    others = dist.PrefixStore("megalith/round-1", agents_store)
    others.set("asks/1", "a process that is dead")
    started = [meet.send(elastic(0, 0), agents_store.port, 30)]
    others.wait(["closed"], timedelta(seconds=30))
    started.append(meet.send(elastic(1, 1), agents_store.port, 30))
    met = meet.end(*started)
    assert [code for code, _ in met] == [0, 0], met


def test_all_ranks_under_torchrun_name_the_one_that_does_not_come(meet: Meeting, agents_store: dist.TCPStore) -> None:
    def at(rank: int) -> dict[str, str]:
        return {**elastic(rank, 0), "WORLD_SIZE": "3"}

    for code, text in meet(at(0), at(1), port=agents_store.port, join=6):
        assert code == 6 and re.search(r"PeerError rank [01]\b.*\brank 2 of 3\b", text), text


def test_a_rank_that_never_comes(meet: Meeting) -> None:
    ((code, text),) = meet(place(0, 3))
    assert code == 6
    assert re.search(r"(?m)^(?!PeerError).*\brank 0 on \S+ .*\b[0-2] s\b.*\branks 1, 2 of 3\b", text)
    assert re.search(r"PeerError rank 0 on \S+ .*\b[12] s\b.*--distributed-timeout-minutes.*\branks 1, 2 of 3\b", text)


def test_rank_0_never_comes(meet: Meeting) -> None:
    ((code, text),) = meet(place(1))
    assert code == 6
    assert re.search(r"PeerError rank 1 .*\brank 0\b.* 127\.0\.0\.1:\d+ \(Connection", text)


def test_a_wrong_master_address(meet: Meeting) -> None:
    ((code, text),) = meet(place(1, MASTER_ADDR="no-such-host.invalid", LOCAL_WORLD_SIZE="1"))
    assert code == 6 and "MASTER_ADDR=no-such-host.invalid" in text


def test_a_port_in_use(meet: Meeting) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ((code, text),) = meet(place(0), port=port)
    assert code == 2
    assert re.search(rf"rank 0 .*\b{port}\b.*: {os.strerror(errno.EADDRINUSE)}", text)


def test_a_mute_listener_at_the_port_of_rank_0(meet: Meeting) -> None:
    """It takes connections and never answers; torch would wait in native code, longer than it was told."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port, began = mute.getsockname()[1], time.monotonic()
        ((code, text),) = meet(place(1), port=port, join=2)
    assert code == 6 and time.monotonic() - began < 30
    assert re.search(rf"PeerError rank 1 .*127\.0\.0\.1:{port} .*\bMASTER_PORT\b", text)
    assert "frame #" not in text


def test_an_interface_that_does_not_exist_ends_all_ranks(meet: Meeting) -> None:
    met = meet(place(0), place(1, GLOO_SOCKET_IFNAME="eth77"), join=30)
    assert [code for code, _ in met] == [2, 2], met
    for _, text in met:
        assert re.search(r"ConfigError rank 1 on \S+: GLOO_SOCKET_IFNAME=eth77: .*\blo\b", text)


CONNECT = MEET.replace(
    "try:", "import time\nif config.rank == 1:\n    launch.dist.init_process_group = lambda *a, **k: FAULT\ntry:", 1
)


@pytest.mark.parametrize(
    "fault",
    ["time.sleep(60)", "exec('raise RuntimeError(\"no way\\\\nLast error:\\\\nDuplicate GPU\\\\nframe #0: x\")')"],
)
def test_ranks_that_meet_and_cannot_connect_all_end(meet: Meeting, fault: str) -> None:
    """As with an interface that leads nowhere: one rank gets an exception, others wait in native code."""
    began, script = time.monotonic(), CONNECT.replace("FAULT", fault)
    met = meet(place(0, GLOO_SOCKET_IFNAME="lo"), place(1, GLOO_SOCKET_IFNAME="lo"), join=6, script=script)
    assert [code for code, _ in met] == [6, 6] and time.monotonic() - began < 30, met
    for _, text in met:
        assert "GLOO_SOCKET_IFNAME" in text and "frame #" not in text
        assert "exec" not in fault or "no way Last error: Duplicate GPU" in text
        assert re.search(r"  rank 0 on \S+: lo 127\.0\.0\.1.*\n  rank 1 on \S+: lo 127\.0\.0\.1", text), text


def test_master_addr_localhost_on_rank_0_alone(meet: Meeting) -> None:
    """Some operators tell rank 0 `localhost` and the others the name of a service."""
    met = meet(place(0, MASTER_ADDR="localhost"), place(1, MASTER_ADDR="127.0.0.2"), join=20)
    assert [code for code, _ in met] == [0, 0], met


def test_a_place_that_is_given_by_hand(meet: Meeting) -> None:
    """Without variables of a launcher the group says whether other hosts can have ranks."""
    by_hand = MEET.replace("read_launch(os.environ).items()", "read_launch(given).items()")
    by_hand = by_hand.replace(
        "launch.WARN_AFTER_SECONDS", "given = {n: os.environ.pop(n) for n in PLACE}\nlaunch.WARN_AFTER_SECONDS"
    )
    by_hand = by_hand.replace("PLACE", "('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')")
    met = meet(*(place(rank, MASTER_ADDR="127.0.0.2") for rank in range(2)), join=20, script=by_hand)
    assert [code for code, _ in met] == [0, 0], met


def test_a_wait_ends_though_each_look_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one for a name server that does not answer; only what is longer than such waits was a suspension."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = AwakeClock()
    for _ in range(4):
        now += 40.0
        clock.elapsed()
    assert clock.elapsed() >= 50.0
    now += 10_000.0
    assert clock.elapsed() < 100.0


def test_rank_0_doubts_an_address_that_is_not_its_own(meet: Meeting) -> None:
    ((code, text),) = meet(place(0, MASTER_ADDR="192.0.2.1"))
    assert code == 6 and "MASTER_ADDR=192.0.2.1 " in text


def start(warm: WarmProcess, cwd: Path, text: Path, *places: tuple[int, int, Sequence[object]]) -> list[Finished]:
    """Start ranks one by one with (rank, number of ranks, flags)."""
    started, port = [], str(free_port())
    for rank, size, flags in places:
        words = [*MODEL, "--train-iters", 2, "--data-path", text, *flags]
        environ = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "MASTER_PORT": port}
        started.append(warm.start(words, cwd, **environ))
    return [running.finish() for running in started]


def test_a_forgotten_node_rank_is_explained(warm: WarmProcess, tmp_path: Path, text: Path) -> None:
    ends = start(warm, tmp_path, text, (0, 4, []), (1, 4, []), (1, 4, []))
    assert [end.code for end in ends] == [2, 2, 2]
    for end in ends:
        assert "rank 1" in end.text and "--node_rank" in end.text


def test_another_number_of_ranks(warm: WarmProcess, tmp_path: Path, text: Path) -> None:
    ends = start(warm, tmp_path, text, (0, 2, []), (1, 4, []))
    assert [end.code for end in ends] == [2, 2]
    assert all(re.search(r"world size [24], others have [42]", end.text) for end in ends)


def write_vocabularies(folder: Path) -> list[list[object]]:
    """The flags of two GPT-2 tokenizers of one size, which differ in the order of their merges alone."""
    tokens = [*BYTE_OF_CHARACTER, "ab", "ba", END_OF_TEXT]
    flags: list[list[object]] = []
    for name, merges in (("one", "a b\nb a\n"), ("other", "b a\na b\n")):
        (folder / name).mkdir()
        vocabulary, merge_file = folder / name / "vocab.json", folder / name / "merges.txt"
        vocabulary.write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
        merge_file.write_text("#version: 0.2\n" + merges)
        kind = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", vocabulary, "--merge-file", merge_file]
        flags.append(kind)
    return flags


def test_unequal_settings_and_data_of_a_run(warm: WarmProcess, tmp_path: Path, text: Path) -> None:
    """F17, F18: settings, seed, length, data and the hashes of the tokenizer's files; both values are shown."""
    other, words = write_text(tmp_path, scale=2), write_vocabularies(tmp_path)
    for common, flags, differences in (
        (
            [],
            ["--clip-grad", 2, "--seed", 5, "--seq-length", 4],
            {"--clip-grad": "[12]\\.0", "--seed": "(5|1234)", "--seq-length": "[48]"},
        ),
        ([], ["--data-path", other], {"data digest": r"\w+", "data source": r"\w+"}),
        (words[0], words[1], {"tokenizer file merges.txt": r"sha256 \w{12}"}),
    ):
        ends = start(warm, tmp_path, text, (0, 2, common), (1, 2, [*common, *flags]))
        assert [end.code for end in ends] == [2, 2], ends
        for end in ends:
            listed = [line for line in end.text.splitlines() if re.search(r" on rank [01] \(\S+\), ", line)]
            assert len(listed) == len(differences), end.text
            for name, value in differences.items():
                found = re.search(rf"  {name}: ({value}) on rank [01] \(\S+\), ({value}) on rank [01] ", end.text)
                assert found and len(set(found.groups())) >= 2, end.text


def test_a_stop_while_ranks_are_waited_for_promises_no_save(warm: WarmProcess, tmp_path: Path, text: Path) -> None:
    words = [*MODEL, "--train-iters", 2, "--data-path", text]
    waiting = warm.start(words, tmp_path, **place(0), LOCAL_RANK="0", MASTER_PORT=str(free_port()))
    caught, deadline = 0, time.monotonic() + 60.0
    while not caught >> (signal.SIGTERM - 1) & 1 and time.monotonic() < deadline:  # its handler is installed
        status = Path(f"/proc/{waiting.pid}/status").read_text()
        caught = int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16)
    waiting.send(signal.SIGTERM)
    ended = waiting.finish()
    assert ended.code == 6 and "SIGTERM: " in ended.text and "saving" not in ended.text


def test_a_stop_before_the_ranks_are_started_starts_none(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped_meanwhile(*words: object, **settings: object) -> RunConfig:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10.0
        while "SIGTERM" not in (told := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "SIGTERM: " in told
        return load(*words, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(train, "load", stopped_meanwhile)
    words = [*MODEL, "--train-iters", 2, "--data-path", text, "--nproc", 2]
    assert train.run([str(word) for word in words]) == 128 + signal.SIGTERM
    assert capsys.readouterr().out == ""


def test_a_slow_rank_is_reported_with_its_cost(warm: WarmProcess, tmp_path: Path, text: Path) -> None:
    words = [*MODEL, "--train-iters", 12, "--data-path", text, "--log-straggler", "--log-interval", 4]
    words += ["--global-batch-size", 2]
    ends = warm.run_ranks(2, words, tmp_path, MEGALITH_FAULT="slow@rank=1,step=1,point=fwd")
    assert [end.code for end in ends] == [0, 0], ends
    reports = re.findall(
        r" slow rank: rank 1 \(\S+\) (\S+) ms of work .* wait (\S+) ms of each step \((\d+)%\)", ends[0].text
    )
    assert len(reports) == 2  # the first interval is not reported
    for work, cost, share in reports:
        assert float(work) > 200 and float(cost) > 150 and int(share) > 50


# `--nproc`: the supervisor.


def supervised(
    repository: Path, cwd: Path, words: Sequence[object], nproc: int = 2, **env: str
) -> subprocess.Popen[bytes]:
    """Start `pretrain_gpt.py --nproc N words` with its output in cwd/log.txt."""
    return subprocess.Popen(
        [sys.executable, str(repository / "pretrain_gpt.py"), "--nproc", str(nproc), *map(str, words)],
        cwd=cwd,
        stdout=(cwd / "log.txt").open("wb"),
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        start_new_session=True,
    )


def command(text: Path, save: Path, *more: object) -> list[object]:
    return [*MODEL, "--data-path", text, "--save", save, *more]


NO_IPV4 = ["unshare", "--net", "sh", "-c", 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"', "sh"]


@pytest.fixture
def without_ipv4() -> list[str]:
    """The words before a command that let it see a loopback interface of IPv6 only."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("needs unshare and ip")
    if subprocess.run([*NO_IPV4, "grep", "-q", "0001 01", "/proc/net/if_inet6"], capture_output=True).returncode:
        pytest.skip("needs the right to make a network namespace, and IPv6")
    return NO_IPV4


@pytest.mark.full
def test_ranks_meet_over_ipv6_alone(repository: Path, tmp_path: Path, text: Path, without_ipv4: list[str]) -> None:
    words = [*MODEL, "--data-path", text, "--train-iters", 2, "--device", "cpu", "--nproc", 2]
    command = [*without_ipv4, sys.executable, str(repository / "pretrain_gpt.py"), *map(str, words)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " iteration        2/       2 " in done.stdout


MINE = """
import sys, threading
from megalith.cli.main import main
codes = []
thread = threading.Thread(target=lambda: codes.append(main(["train", *sys.argv[2:], "--nproc", sys.argv[1]])))
if sys.argv[1] == "0":
    thread = threading.Thread(target=lambda: codes.append(main(["train", *sys.argv[2:]])))
thread.start()
thread.join()
print("the end of my program")
sys.exit(codes[0])
"""


@pytest.mark.full
@pytest.mark.parametrize("nproc", [0, 2])
def test_main_runs_in_a_thread_of_another_program(repository: Path, tmp_path: Path, text: Path, nproc: int) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    save = tmp_path / "c"
    words = ["mine.py", nproc, *MODEL, "--data-path", text, "--train-iters", 2, "--save", save]
    words += ["--save-interval", 2, "--device", "cpu"]
    environ = {**os.environ, "PYTHONPATH": str(repository / "src")}
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the end of my program") == 1, "its ranks are Megalith's, not this program again"
    assert DirectoryStore(save).latest() == 2
    assert ("mine.py" in done.stderr) == (nproc > 0)


def assert_no_one_is_left(word: Path) -> None:
    deadline = time.monotonic() + 10
    while left := processes_with(str(word)):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def test_a_mistake_is_found_before_any_process_starts(repository: Path, tmp_path: Path) -> None:
    running = supervised(repository, tmp_path, [*MODEL, "--hidden-size", 15])
    assert running.wait(20) == 2
    log = (tmp_path / "log.txt").read_text()
    assert log.startswith("megalith train: ") and log.count("--hidden-size 15") == 1


def test_a_killed_rank_is_restarted_from_the_last_checkpoint(
    repository: Path, warm: WarmProcess, tmp_path: Path, text: Path
) -> None:
    save, whole = tmp_path / "c", tmp_path / "whole"
    plan = ["--train-iters", 8, "--save-interval", 3]
    fault = {"MEGALITH_FAULT": "kill9@rank=1,step=5,point=bwd"}
    running = supervised(repository, tmp_path, command(text, save, *plan, "--max-restarts", 2), **fault)
    assert [end.code for end in warm.run_ranks(2, command(text, whole, *plan), tmp_path)] == [0, 0]
    assert running.wait(120) == 0
    log = (tmp_path / "log.txt").read_text()
    assert re.search(r"\brank 1 \(\S+, process \d+\) of 2\b.*\bSIGKILL\b.*\bstep 5\b.*\bbackward\b", log)
    assert re.findall(r"\brestart (\d) of 2\b.*\biteration (\d)", log) == [("1", "3")]
    assert "Traceback" not in log
    assert_same(state_of(whole, 8), state_of(save, 8))
    assert_no_one_is_left(save)


@pytest.mark.full
def test_what_happens_again_and_again_ends_the_run(repository: Path, tmp_path: Path, text: Path) -> None:
    save = tmp_path / "c"
    words = command(text, save, "--train-iters", 8, "--save-interval", 2, "--max-restarts", 5)
    running = supervised(repository, tmp_path, words, 1, MEGALITH_FAULT="raise@rank=0,step=3,point=fwd,attempt=all")
    assert running.wait(120) == 1
    *_, resume, last = (tmp_path / "log.txt").read_text().splitlines()
    assert re.match(r"megalith train: rank 0 \(\S+, process \d+\) of 1 .*\bstep 3\b.*\bforward: RuntimeError", last)
    assert resume.strip().startswith("python ") and resume.endswith(f"--load {save}")
    log = (tmp_path / "log.txt").read_text()
    assert re.findall(r"(?<!no )\brestart (\d) of 5\b.*\biteration (\d)", log) == [("1", "2")]
    assert_no_one_is_left(save)


@pytest.mark.parametrize(
    "how",
    [
        "sigusr1 to the supervisor",
        pytest.param("sigterm to one rank", marks=pytest.mark.full),  # test_layouts has it without a supervisor
        "the supervisor dies",
    ],
)
def test_a_stop_saves_on_all_ranks(repository: Path, tmp_path: Path, text: Path, how: str) -> None:
    save, log = tmp_path / "c", tmp_path / "log.txt"
    running = supervised(repository, tmp_path, command(text, save, "--train-iters", 100000, "--save-interval", 100000))
    try:
        wait_for(log, "iteration        3/")
        ranks = [int(pid) for pid in processes_with(str(save)) if int(pid) != running.pid]
        assert boards_of(ranks)
        if how == "sigterm to one rank":
            os.kill(max(ranks), signal.SIGTERM)
        else:
            running.send_signal(signal.SIGUSR1 if "usr1" in how else signal.SIGKILL)
        wait_for(log, "; resume with:")
        assert running.wait(60) == (-9 if how == "the supervisor dies" else 75)
    finally:
        running.kill()
    assert_no_one_is_left(save)
    assert boards_of(ranks) == []
    assert (DirectoryStore(save).latest() or 0) >= 3
    assert len(re.findall(r"(?m)^.*\bSIGUSR1: ", log.read_text())) == ("usr1" in how)
    resume = rf"\biteration {DirectoryStore(save).latest()};.*\n  python \S+pretrain_gpt.py --nproc 2 .*--load"
    assert re.search(resume, log.read_text())


def test_a_data_file_that_shrinks_is_named(repository: Path, tmp_path: Path) -> None:
    """A mapped file that loses its end kills whoever reads there by SIGBUS, without a word (F22)."""
    text = write_text(tmp_path)
    words = [*MODEL, "--data-path", text, "--train-iters", 100000]
    running = supervised(repository, tmp_path, words, 1)
    wait_for(tmp_path / "log.txt", "iteration        3/")
    os.truncate(f"{text}.bin", 0)
    assert running.wait(60) == 128 + signal.SIGBUS
    last = (tmp_path / "log.txt").read_text().splitlines()[-1]
    assert re.match(r"megalith train: rank 0 \(\S+, process \d+\) of 1 .*\bSIGBUS\b.*\bstep \d+\b", last)
    assert re.search(rf" {re.escape(str(text))}\.bin .*\b4000\b.*\b0\b", last)
