"""Saving beside the training, and checkpoints of which only the last is kept, as a user meets them (F03, F05, F25)."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from megalith.checkpoint import DirectoryStore

from .checkpoints import assert_same, curve_of, state_of
from .test_resume import KILLED_RUN, command
from .warm import WarmProcess

ASYNC = [*KILLED_RUN, "--async-save"]
LISTED = {"iter_0000003", "iter_0000006", "iter_0000008", "latest_checkpointed_iteration.txt", "run"}


@pytest.fixture(scope="module")
def uninterrupted(warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saves at once."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert warm.run(command(folder / "c", *KILLED_RUN), folder).code == 0
    return folder / "c"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def saves_of(save: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (save / "run/metrics.jsonl").open()]
    return [record for record in records if record["event"] == "save"]


def test_the_same_run_with_other_words(warm: WarmProcess, tmp_path: Path, uninterrupted: Path) -> None:
    save = tmp_path / "c"
    done = warm.run(command(save, *ASYNC), tmp_path)
    assert done.code == 0, done.text
    assert f"  scheduled an async checkpoint save at iteration       3 to {save}\n" in done.text
    assert f"successfully saved checkpoint from iteration       3 to {save} [ t 1/1, p 1/1 ]" in done.text
    assert_same(state_of(uninterrupted, 8), state_of(save, 8))
    assert_same(state_of(uninterrupted, 3), state_of(save, 3))
    assert curve_of(uninterrupted) == curve_of(save)
    assert names(save) == LISTED
    assert [saved["iteration"] for saved in saves_of(save)] == [3, 6, 8]
    for saved in saves_of(save):
        assert 0 < saved["stall_seconds"] < saved["seconds"] + 0.1 and saved["gigabytes_per_second"] > 0
        assert saved["num_bytes"] > 100_000
    assert "GB/s" in (save / "run/log.txt").read_text()


FULL = pytest.mark.full  # the other points are passed with less around them in tests/unit and tests/distributed


@pytest.mark.parametrize(
    "point",
    [
        "mid_save",
        "mid_commit",
        *(pytest.param(point, marks=FULL) for point in ("pre_save", "pre_commit", "post_commit")),
    ],
)
def test_a_kill_at_any_point_of_a_save(warm: WarmProcess, tmp_path: Path, uninterrupted: Path, point: str) -> None:
    save = tmp_path / "c"
    killed = warm.run(command(save, *ASYNC), tmp_path, MEGALITH_FAULT=f"kill9@step=6,point={point}")
    assert killed.code == -9, killed.text
    resumed = warm.run(command(save, *ASYNC), tmp_path)
    assert resumed.code == 0, resumed.text
    last_saved = 6 if point == "post_commit" else 3
    assert f" loading distributed checkpoint from {save} at iteration {last_saved}" in resumed.text
    assert_same(state_of(uninterrupted, 8), state_of(save, 8))
    assert curve_of(uninterrupted) == curve_of(save)
    assert names(save) == LISTED


def test_a_thread_that_fails_ends_the_run(warm: WarmProcess, tmp_path: Path) -> None:
    save = tmp_path / "c"
    failed = warm.run(command(save, *ASYNC), tmp_path, MEGALITH_FAULT="raise@step=6,point=mid_save")
    assert failed.code not in (0, 75) and "MEGALITH_FAULT at step 6, point mid_save" in failed.text
    assert DirectoryStore(save).newest_verified() == (3, [])
    assert names(save) == {"iter_0000003", "latest_checkpointed_iteration.txt", "run"}


def test_a_stop_while_a_save_is_under_way_completes_it(warm: WarmProcess, tmp_path: Path, uninterrupted: Path) -> None:
    save = tmp_path / "c"
    slow = "slow@step=3,point=mid_save"
    running = warm.start(command(save, *ASYNC), tmp_path, MEGALITH_FAULT=slow)
    running.wait_for("scheduled an async checkpoint save at iteration       3")
    running.send(signal.SIGTERM)
    stopped = running.finish()
    assert stopped.code == 75, stopped.text
    assert "successfully saved checkpoint from iteration       3" in stopped.text
    store = DirectoryStore(save)
    latest = store.latest()
    assert latest is not None and f"iteration {latest}; resume" in stopped.text
    assert 3 in store.iterations() and store.newest_verified() == (latest, [])
    resumed = warm.run(command(save, *ASYNC), tmp_path)
    assert resumed.code == 0, resumed.text
    assert_same(state_of(uninterrupted, 8), state_of(save, 8))
    assert not any(name.startswith(".") for name in names(save))


def test_a_save_that_is_late_is_waited_for_and_that_is_said(warm: WarmProcess, tmp_path: Path) -> None:
    save = tmp_path / "c"
    words = command(save, "--train-iters", 4, "--save-interval", 1, "--eval-interval", 50, "--async-save")
    done = warm.run(words, tmp_path, MEGALITH_FAULT="slow@step=1,point=mid_save")
    assert done.code == 0, done.text
    assert re.search(r"iteration 1\b.* waited 0\.", done.text)
    assert DirectoryStore(save).iterations() == [1, 2, 3, 4]
    assert all(saved["waited_seconds"] > 0.1 for saved in saves_of(save))


LIMITED = """
import os, resource, signal, sys
os.dup2(1, 2)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (60000, resource.RLIM_INFINITY))
from megalith.cli.main import main
sys.exit(main(["train", *WORDS]))
"""


@pytest.mark.parametrize("beside", [pytest.param(False, marks=FULL), True], ids=["", "beside"])
def test_a_disk_that_takes_no_more(warm: WarmProcess, tmp_path: Path, uninterrupted: Path, beside: bool) -> None:
    """F05: a limit of the size of files stands for a full disk, which a test cannot make without being root."""
    save = tmp_path / "c"
    words = command(save, *(ASYNC if beside else KILLED_RUN))
    assert warm.run([*words, "--exit-interval", 3], tmp_path).code == 0
    done = warm.start_script(LIMITED.replace("WORDS", repr([str(word) for word in words])), tmp_path).finish()
    assert done.code == 4, done.text
    assert "ulimit -f" in done.text and "File too large" in done.text
    assert "Traceback" not in done.text
    assert names(save) == {"iter_0000003", "latest_checkpointed_iteration.txt", "run"}
    assert warm.run(words, tmp_path).code == 0
    assert_same(state_of(uninterrupted, 8), state_of(save, 8))


PASSING = [*KILLED_RUN, "--non-persistent-save-interval", 2, "--non-persistent-ckpt-type", "global"]


@pytest.fixture(scope="module")
def killed_at_5(warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of iteration 3 and, of those of which only the last is kept, of 4."""
    folder = tmp_path_factory.mktemp("passing")
    killed = warm.run(command(folder / "c", *PASSING), folder, MEGALITH_FAULT="kill9@step=5,point=fwd")
    assert killed.code == -9
    assert names(folder / "c" / "non_persistent") >= {"iter_0000004", "latest_checkpointed_iteration.txt"}
    assert DirectoryStore(folder / "c" / "non_persistent").iterations() == [4]
    assert DirectoryStore(folder / "c").iterations() == [3]
    return folder / "c"


def test_the_newer_of_both_is_resumed_from(
    warm: WarmProcess, tmp_path: Path, uninterrupted: Path, killed_at_5: Path
) -> None:
    save = tmp_path / "c"
    shutil.copytree(killed_at_5, save)
    resumed = warm.run(command(save, *PASSING, "--async-save"), tmp_path)
    assert resumed.code == 0, resumed.text
    assert f" loading distributed checkpoint from {save / 'non_persistent'} at iteration 4" in resumed.text
    assert_same(state_of(uninterrupted, 8), state_of(save, 8))
    assert curve_of(uninterrupted) == curve_of(save)
    assert DirectoryStore(save / "non_persistent").iterations() == [4]
    again = warm.run(command(save, *PASSING), tmp_path)
    assert f" loading distributed checkpoint from {save} at iteration 8" in again.text


def test_one_on_the_disk_of_the_machine_is_resumed_from(
    warm: WarmProcess, tmp_path: Path, uninterrupted: Path, killed_at_5: Path
) -> None:
    save, local = tmp_path / "c", tmp_path / "local"
    shutil.copytree(killed_at_5, save)
    (save / "non_persistent").rename(local)
    kind = ["--non-persistent-ckpt-type", "local", "--non-persistent-local-ckpt-dir", local]
    resumed = warm.run(command(save, *KILLED_RUN, "--non-persistent-save-interval", 2, *kind), tmp_path)
    assert resumed.code == 0, resumed.text
    assert f" loading distributed checkpoint from {local} at iteration 4" in resumed.text
    assert_same(state_of(uninterrupted, 8), state_of(save, 8))
    assert DirectoryStore(local).iterations() == [4] and not (save / "non_persistent").exists()


def test_a_damaged_newer_one_is_passed_over(
    warm: WarmProcess, tmp_path: Path, uninterrupted: Path, killed_at_5: Path
) -> None:
    save = tmp_path / "c"
    shutil.copytree(killed_at_5, save)
    (save / "non_persistent/iter_0000004/common.pt").write_bytes(b"nonsense")
    resumed = warm.run(command(save, *PASSING), tmp_path)
    assert resumed.code == 0, resumed.text
    assert "WARNING: " in resumed.text and "non_persistent/iter_0000004/common.pt" in resumed.text
    assert f" loading distributed checkpoint from {save} at iteration 3" in resumed.text
    assert_same(state_of(uninterrupted, 8), state_of(save, 8))


def test_a_run_that_goes_back_forgets_the_last_one_of_the_way_that_it_leaves(
    warm: WarmProcess, tmp_path: Path, killed_at_5: Path
) -> None:
    save = tmp_path / "c"
    shutil.copytree(killed_at_5, save)
    back = warm.run([*command(save, *PASSING, "--exit-interval", 3), "--finetune", "--ckpt-step", 3], tmp_path)
    assert back.code == 0, back.text
    assert DirectoryStore(save).latest() == 3
    assert DirectoryStore(save / "non_persistent").iterations() == [2]


def test_the_newest_two_are_kept(warm: WarmProcess, tmp_path: Path, uninterrupted: Path) -> None:
    save = tmp_path / "c"
    words = command(save, *ASYNC, "--keep-last", 2)
    killed = warm.run(words, tmp_path, MEGALITH_FAULT="kill9@step=8,point=mid_save")
    assert killed.code == -9 and DirectoryStore(save).newest_verified() == (6, [])
    assert warm.run(words, tmp_path).code == 0
    assert names(save) == LISTED - {"iter_0000003"}
    assert_same(state_of(uninterrupted, 8), state_of(save, 8))


def test_the_one_before_goes_unless_its_iteration_is_a_multiple(warm: WarmProcess, tmp_path: Path) -> None:
    save = tmp_path / "c"
    assert warm.run(command(save, *KILLED_RUN, "--save-retain-interval", 6), tmp_path).code == 0
    assert names(save) == LISTED - {"iter_0000003"}


def test_a_second_run_into_the_folder_of_passing_checkpoints_is_refused(warm: WarmProcess, tmp_path: Path) -> None:
    words = ["--non-persistent-ckpt-type", "global", "--non-persistent-save-interval", 2]
    words += ["--non-persistent-global-ckpt-dir", tmp_path / "passing"]
    endless = ["--train-iters", 100000, "--save-interval", 100000]
    first = warm.start(command(tmp_path / "a", *endless, *words), tmp_path)
    first.wait_for("iteration        1/")
    second = warm.run(command(tmp_path / "b", *KILLED_RUN, *words), tmp_path)
    assert second.code == 4 and str(tmp_path / "passing") in second.text and str(first.pid) in second.text
    first.send(signal.SIGTERM)
    assert first.finish().code == 75


def test_a_save_folder_that_is_a_loop_of_links_is_refused_before_the_first_step(
    warm: WarmProcess, tmp_path: Path
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused = warm.run(command(tmp_path / "loop", *KILLED_RUN), tmp_path)
    assert refused.code == 2 and f"--save {tmp_path / 'loop'}" in refused.text
    words = [*PASSING, "--non-persistent-global-ckpt-dir", tmp_path / "loop"]
    refused = warm.run(command(tmp_path / "c", *words), tmp_path)
    assert refused.code == 4 and str(tmp_path / "loop") in refused.text
    assert "iteration        1/" not in refused.text and "Traceback" not in refused.text


@pytest.mark.parametrize("words", [[], ["--async-save"]], ids=["", "beside"])
def test_a_save_folder_that_is_renamed_under_the_run_ends_it(
    warm: WarmProcess, tmp_path: Path, words: list[object]
) -> None:
    """It was made again without a lock, with exit code 0."""
    save = tmp_path / "c"
    running = warm.start(command(save, "--train-iters", 100000, "--save-interval", 100000, *words), tmp_path)
    running.wait_for("iteration        1/")
    save.rename(tmp_path / "elsewhere")
    running.send(signal.SIGTERM)
    finished = running.finish()
    assert finished.code == 4 and str(save) in finished.text, finished.text
    assert not save.exists()
