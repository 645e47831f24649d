"""Which flags of a request fit its task, without a model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from megalith.cli.main import main
from megalith.cli.report import write_page
from megalith.compat.megatron.tasks import read_flags
from megalith.errors import ConfigError
from megalith.evaluate.request import Request


def request(task: str, **fields: Any) -> Request:
    return Request(Path("C"), task, Path("file"), **fields)


@pytest.mark.parametrize(
    ("task", "words", "tasks"),
    [
        ("text", "--strict-lambada", ["lambada"]),
        ("text", "--detokenizer wiki", ["wikitext103"]),
        ("text", "--detokenizer auto", ["wikitext103"]),
        ("cloze", "--seq-length 16", ["wikitext103", "text", "masked", "spans"]),
        ("cloze", "--overlapping-eval 3", ["wikitext103", "text"]),
        ("masked", "--overlapping-eval 7", ["wikitext103", "text"]),
        ("lambada", "--seq-length 8", ["wikitext103", "text", "masked", "spans"]),
        ("mmlu", "--seq-length 8", ["wikitext103", "text", "masked", "spans"]),
        ("wikitext103", "--strict-lambada", ["lambada"]),
        ("text", "--samples 5", ["masked", "spans", "mmlu"]),
        ("text", "--others a b", ["mmlu"]),
    ],
)
def test_a_flag_of_other_tasks_is_refused(
    task: str, words: str, tasks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(tmp_path), "--task", task, *words.split()]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if f"{words} " in line]
    assert all(re.search(rf"\b{one}\b", line.partition(f"{words} ")[2]) for one in tasks)


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        ("cloze", {"strict": True}),
        ("lambada", {"strict": True}),
        ("wikitext103", {"detokenizer": "none", "overlap": 4, "seq_length": 8}),
        ("text", {"overlap": 4, "seq_length": 8}),
        ("masked", {"seq_length": 8, "samples": 2}),
        ("spans", {"seq_length": 8, "decoder_seq_length": 4}),
    ],
)
def test_flags_of_the_task_are_read(task: str, fields: dict[str, Any]) -> None:
    assert request(task, **fields).violations(files=False) == []


@pytest.mark.parametrize(
    ("task", "words", "idle"),
    [
        (
            "LAMBADA",
            "--strict-lambada --overlapping-eval 32 --seq-length 64",
            ["--overlapping-eval 32", "--seq-length 64"],
        ),
        ("WIKITEXT103", "--strict-lambada --overlapping-eval 32 --seq-length 64", ["--strict-lambada"]),
    ],
)
def test_flags_of_megatrons_other_task_are_notes(task: str, words: str, idle: list[str]) -> None:
    line = ["--task", task, "--load", "C", "--valid-data", "file", *words.split()]
    found, _, notes = read_flags(line, files=False)
    assert [note for note in notes if note.startswith(tuple(idle))] == notes and len(notes) == len(idle)
    assert found.unread() == []
    with pytest.raises(ConfigError, match="--num-layer"):
        read_flags([*line, "--num-layer", "2"], files=False)


@pytest.mark.parametrize("program", [["C", "--task", "text"], ["tasks/main.py", "--task", "LAMBADA", "--load", "C"]])
@pytest.mark.parametrize("place", ["absent/result.json", "folder", "file/result.json"])
def test_a_result_that_cannot_be_written_is_refused_with_the_other_errors(
    program: list[str], place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert main(["evaluate", *program, "--json", str(tmp_path / place)]) == 2
    shown = capsys.readouterr().err
    assert f"--json {tmp_path / place}" in shown and "--data" in shown


def test_only_the_first_rank_needs_the_folder_of_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request("text", result=tmp_path / "absent" / "result.json")
    (tmp_path / "file").touch()
    for rank, count in (("0", 1), ("1", 0)):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        assert sum("--json" in line for line in asked.violations()) == count


def test_a_result_replaces_files_and_is_written_through_links_and_pipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, link = tmp_path / "result.json", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    write_page(link, "by the link", "--json")
    assert link.is_symlink() and file.read_text() == "by the link"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_page(pipe, "by the pipe", "--json")
    assert os.read(reader, 100) == b"by the pipe"
    os.close(reader)
    pipe.unlink()

    def fails(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fails)
        with pytest.raises(ConfigError, match="--json"):
            write_page(file, "new", "--json")
    assert file.read_text() == "by the link" and sorted(tmp_path.iterdir()) == [link, file]


@pytest.mark.parametrize("task", ["masked", "spans", "text", "lambada"])
def test_a_file_of_a_dataset_and_a_folder_are_no_text(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.b.bin", "a.b.idx"):
        (tmp_path / name).write_bytes(b"\x01\xff")
        (tmp_path / "a.b.idx").touch()
        assert main(["evaluate", "C", "--task", task, "--data", str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert f"--data {tmp_path / name} " in said and "iconv" not in said
        assert (f"--data {tmp_path / 'a.b'}\n" in said) == (task in ("masked", "spans"))
    assert main(["evaluate", "C", "--task", task, "--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"folder, not a file: {tmp_path} " in said
