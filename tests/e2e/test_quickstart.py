"""The quickstart as a user runs it, with the smallest model: from text to generated text.

Its errors and its parts are tested in tests/unit/quickstart, without further processes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.contract.outputs import fields_of, file_names, problems, recorded

from megalith.cli.quickstart.text import standard_library

COMMAND = (sys.executable, "-m", "megalith", "quickstart")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}


def quickstart(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=400, cwd=cwd, env=ENVIRONMENT)


def write_texts(folder: Path) -> list[str]:
    """Write texts of several hundred thousand characters, half as .jsonl, half as .txt; return the file names."""
    library = Path(os.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in sorted(library.glob("[a-d]*.py"))]
    half = len(texts) // 2
    lines = [json.dumps({"body": text}) for text in texts[:half]]
    (folder / "some.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "more.txt").write_text("\n<|endoftext|>\n".join(texts[half:]), encoding="utf-8")
    return ["some.jsonl", "more.txt"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One whole quickstart on the standard library; the folder that it ran in and its screen."""
    folder = tmp_path_factory.mktemp("quickstart")
    ended = quickstart("--minutes", "0.01", cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not ended.stderr
    return folder, ended.stdout


@pytest.fixture(scope="module")
def report(told: tuple[Path, str]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((told[0] / "quickstart" / "report.json").read_text(encoding="utf-8"))
    return content


def test_one_screen(told: tuple[Path, str]) -> None:
    lines = told[1].splitlines()
    assert len(lines) <= 50
    names = [line.split()[0] for line in lines if line.strip() and not line.startswith(" ")]
    wanted = ["text", "machine", "model", "tokenizer", "preprocess", "train", "resume", "evaluate", "generate", "loss"]
    assert [name for name in names if name in wanted] == wanted


def test_its_report_and_files_are_those_that_are_promised(report: dict[str, Any], told: tuple[Path, str]) -> None:
    pytest.importorskip("matplotlib")
    found = {"report.json": fields_of([report]), "files": file_names(told[0] / "quickstart")}
    assert problems(recorded("quickstart"), found) == []


def test_the_texts_are_written_for_preprocessing(told: tuple[Path, str]) -> None:
    lines = (told[0] / "quickstart" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    assert tuple(json.loads(line)["text"] for line in lines) == standard_library().documents


def test_the_loss_falls(report: dict[str, Any], told: tuple[Path, str]) -> None:
    metrics = told[0] / "quickstart" / "checkpoints" / "run" / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    losses = [record["loss"] for record in records if record["event"] == "step"]
    assert losses[0] == pytest.approx(7.6, abs=0.3)  # log(2048): nothing is known yet
    assert report["losses"]["validation"] < losses[0] - 0.5
    assert set(report["perplexity"]) == {"validation", "test"}


def test_it_was_killed_and_resumed_exactly(report: dict[str, Any]) -> None:
    resume = report["resume"]
    assert 0 < resume["resumed_from"] < resume["killed_at"] < report["iterations"]
    assert resume["num_repeated"] == resume["killed_at"] - resume["resumed_from"]
    assert resume["num_equal"] == resume["num_repeated"]


def test_the_losses_and_their_picture(told: tuple[Path, str]) -> None:
    (shown,) = [line for line in told[1].splitlines() if line.startswith("loss ")]
    first, *_, last = re.findall(r"\d+\.\d\d(?= ->|;)", shown)
    assert float(last) < float(first)
    pytest.importorskip("matplotlib")
    assert (told[0] / "quickstart" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_it_is_fine_tuned_and_asked(tmp_path: Path) -> None:
    ended = quickstart("--minutes", "0.01", "--chat", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "quickstart" / "report.json").read_text(encoding="utf-8"))["chat"]
    assert report["asked"] == 50 and 0 <= report["answered"] <= 50 and report["dialogues"] > 1000
    asked = subprocess.run(
        [*COMMAND[:3], "generate", "quickstart/chat", "--chat", "--json", "--prompt", "Explain `join`."],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    assert "<|im_start|>assistant" in json.loads(asked.stdout)["prompt"]


@pytest.mark.full
def test_the_commands_can_be_run_again(told: tuple[Path, str]) -> None:
    """The training is complete: run again, the script resumes at its end and only generates."""
    folder, _ = told
    megalith = folder / "bin" / "megalith"
    megalith.parent.mkdir()
    megalith.write_text(f'#!/bin/sh\nexec {sys.executable} -m megalith "$@"\n', encoding="utf-8")
    megalith.chmod(0o755)
    ended = subprocess.run(
        ["bash", str(folder / "quickstart" / "commands.sh")],
        capture_output=True,
        text=True,
        timeout=200,
        env={**ENVIRONMENT, "PATH": f"{megalith.parent}:{os.environ['PATH']}"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "def " in ended.stdout


@pytest.mark.full
def test_own_texts_in_the_folder_of_an_earlier_run(told: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(told[0] / "quickstart", tmp_path / "mine")
    files = write_texts(tmp_path)
    arguments = ("--data", *files, "--json-key", "body", "--minutes", "0.01", "--out", "mine", "--prompt", "import ")
    ended = quickstart(*arguments, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 files" in ended.stdout
    assert "  import " in ended.stdout
    assert "--prompt 'import ' --max-new-tokens 200" in ended.stdout, "what to try next is of these texts too"
    assert json.loads((tmp_path / "mine" / "report.json").read_text(encoding="utf-8"))["resume"]["num_repeated"] > 0


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    files = write_texts(tmp_path)
    arguments = ("--data", *files, "--json-key", "body", "--minutes", "0.5", "--out", "mine")
    metrics = tmp_path / "mine" / "checkpoints" / "run" / "metrics.jsonl"
    with subprocess.Popen(
        [*COMMAND, *arguments], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 200
        while not (metrics.exists() and '"step"' in metrics.read_text(encoding="utf-8")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)  # to it alone, not to its group
        assert process.wait(timeout=60) == 128 + number
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
