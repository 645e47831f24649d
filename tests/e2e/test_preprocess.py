"""Preparing data as a user does: command lines, exit codes, the screen, several processes, Ctrl-C and kill."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalith.data.indexed import IndexedDataset
from megalith.tokenizers import train_byte_level_bpe
from megalith.tokenizers.gpt2_bpe import GPT2BPETokenizer

WORDS = "First Citizen: Before we proceed any further, hear me speak."


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`--vocab-file V --merge-file M` of a small tokenizer."""
    vocab_file, merge_file = train_byte_level_bpe([WORDS] * 3, 280, tmp_path_factory.mktemp("tokenizer"))
    return ["--vocab-file", str(vocab_file), "--merge-file", str(merge_file)]


@pytest.fixture(scope="module")
def command(repository: Path) -> list[str]:
    return [sys.executable, str(repository / "tools" / "preprocess_data.py")]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def write_jsonl(file: Path, documents: int) -> None:
    with file.open("w") as out:
        for number in range(documents):
            out.write(json.dumps({"id": number, "text": f"{number} {WORDS} " * (number % 5)}) + "\n")


def test_the_first_users_command_line(command: list[str], files: list[str], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "oscar.jsonl", 100)
    line = "--input oscar.jsonl --output-prefix my-gpt2 --dataset-impl mmap --tokenizer-type GPT2BPETokenizer "
    line += "--append-eod --workers 20 --chunk-size 25"
    done = run([*command, *line.split(), *files], tmp_path)
    assert done.returncode == 0, done.stderr
    screen = done.stdout.splitlines()
    assert screen[0] == "Opening oscar.jsonl"
    assert screen[1] == "  jsonl, UTF-8"
    assert screen[2].startswith("Time to startup: ")
    assert screen[3].startswith("Wrote my-gpt2_text_document.bin and .idx: 100 documents, ")
    notes = done.stderr.splitlines()
    assert [note.split()[1] for note in notes[:2]] == ["--dataset-impl:", "--chunk-size:"]
    assert notes[2].startswith("Processed 100 documents (") and notes[2].endswith(" MB/s).")
    dataset, tokenizer = IndexedDataset(str(tmp_path / "my-gpt2_text_document")), GPT2BPETokenizer(files[1], files[3])
    assert dataset.num_documents == 100
    assert dataset.document_index[:4].tolist() == [0, 0, 1, 2], "document 0 is empty"
    assert tokenizer.decode(dataset.get(0).tolist()) == f"1 {WORDS} <|endoftext|>"


def test_a_text_file_with_separators(repository: Path, files: list[str], tmp_path: Path) -> None:
    (tmp_path / "stories.txt").write_text(f"{WORDS}\n<|endoftext|>\nOnce.\n<|endoftext|>\n")
    command = [sys.executable, "-c", "import sys; from megalith.cli.main import main; sys.exit(main(sys.argv[1:]))"]
    arguments = ["preprocess", "--input", "stories.txt", "--output_prefix=new/folder/stories", "--append-eod"]
    done = run([*command, *arguments, *files], tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\btxt\b.*'<\|endoftext\|>'.*UTF-8", done.stdout)
    dataset = IndexedDataset(str(tmp_path / "new/folder/stories_text_document"))
    assert dataset.num_documents == 2


def test_everything_wrong_is_said_at_once(command: list[str], tmp_path: Path) -> None:
    line = "--inptu a.jsonl --workers two --partitions 0 --split-sentences --vocab-file none.json --log-interval 0 "
    line += "--lang klingon --bad-lines ignore --share 3/2"
    done = run([*command, *line.split()], tmp_path)
    assert done.returncode == 2
    for message in (
        "11 errors",
        "unknown flag --inptu; did you mean --input?",
        "--workers two is not an integer",
        "--partitions 0 is below 1",
        "--split-sentences needs nltk's punkt_tab data for klingon",
        "--bad-lines ignore",
        "--share 3/2: give K/N with K from 1 to N",
        "--log-interval 0 is below 1",
        "--input is missing",
        "--output-prefix is missing",
        "--merge-file is missing",
        "--vocab-file none.json: no such file",
    ):
        assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_bad_line_ends_with_its_place_and_the_code_of_data(
    command: list[str], files: list[str], tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "good"}\n{"text": bad}\n')
    done = run([*command, "--input", "in.jsonl", "--output-prefix", "out", "--workers", "1", *files], tmp_path)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("megalith preprocess: in.jsonl, line 2: ")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_full_disk_is_said_and_nothing_is_left(command: list[str], files: list[str], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", 1000)
    shell = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh"]  # no file grows beyond 4 KiB
    done = run([*shell, *command, "--input", "in.jsonl", "--output-prefix", "out", *files], tmp_path)
    assert done.returncode == 3
    assert "out_text_document.bin" in done.stderr.splitlines()[-1]
    assert os.strerror(errno.EFBIG) in done.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_help_needs_nothing(command: list[str], tmp_path: Path) -> None:
    for arguments in ([], ["--help"]):
        done = run([*command, *arguments], tmp_path)
        assert done.returncode == 0
        assert "--output-prefix" in done.stdout


SCRIPT = """
import os, sys, threading
from megalith.config import TokenizerConfig
from megalith.data.preprocess import PreprocessOptions, preprocess
from megalith.data.preprocess_options import ProgressListener
from megalith.data.sources import Limits, SourceOptions

class Watcher(ProgressListener):
    def advanced(self, standing):
        print("advanced", standing.documents, flush=True)

    def note(self, text):
        print("note", text, flush=True)

if __name__ == "__main__":
    os.sched_getaffinity = lambda _: range(8)  # more workers than cores, which the command would not start
    source, prefix, vocab_file, merge_file, workers, chunk_bytes, start = sys.argv[1:]
    if start == "spawn":  # a process with several threads is not forked
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    tokenizer = TokenizerConfig(vocab_file=vocab_file, merge_file=merge_file)
    reading = SourceOptions(limits=Limits(chunk_bytes=int(chunk_bytes)))
    options = PreprocessOptions(
        (source,), prefix, tokenizer, reading, workers=int(workers), journal_interval=0.0
    )
    print("workers", preprocess(options, Watcher()).workers)
    assert "torch" not in sys.modules
"""


def script(
    folder: Path, files: list[str], prefix: str, workers: int, chunk_bytes: int, start: str = "fork"
) -> list[str]:
    """A command that uses the library and reports each chunk."""
    (folder / "script.py").write_text(SCRIPT)
    return [sys.executable, "script.py", "in.jsonl", prefix, files[1], files[3], str(workers), str(chunk_bytes), start]


@pytest.mark.parametrize(
    ("other", "chunk", "start"),
    [(2, 300, "spawn"), (3, 300, "fork"), pytest.param(8, 75, "fork", marks=pytest.mark.full)],
)
def test_any_number_of_processes_writes_the_same(
    other: int, chunk: int, start: str, files: list[str], tmp_path: Path
) -> None:
    """F15: workers."""
    write_jsonl(tmp_path / "in.jsonl", 400)
    for prefix, workers, chunk_bytes in (("one", 1, 1 << 19), ("other", other, chunk)):
        done = run(script(tmp_path, files, prefix, workers, chunk_bytes, start), tmp_path)
        assert done.stdout.endswith(f"workers {workers}\n"), done.stderr
    for ending in (".bin", ".idx"):
        files_of_both = [tmp_path / f"{name}_text_document{ending}" for name in ("one", "other")]
        assert files_of_both[0].read_bytes() == files_of_both[1].read_bytes()


def test_a_bad_line_is_named_from_another_process(files: list[str], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", 400)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("oops\n" + '{"text": ""}\n' * 100)
    done = run(script(tmp_path, files, "out", 2, 300), tmp_path)
    assert done.returncode == 1
    assert "in.jsonl, line 401: invalid JSON" in done.stderr
    assert {path.suffix for path in tmp_path.glob("out*")} <= {".partial", ".unfinished"}


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pids: list[int], seconds: float) -> bool:
    """Whether all processes end within this time."""
    deadline = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{pid}/exe") for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def clean(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with in.jsonl and what one process made of it without interruption."""
    folder = tmp_path_factory.mktemp("clean")
    write_jsonl(folder / "in.jsonl", 10_000)
    done = run(script(folder, files, "clean", 1, 5_000), folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("end", "start"),
    [(signal.SIGKILL, "fork"), (signal.SIGKILL, "spawn"), (signal.SIGINT, "fork"), (signal.SIGTERM, "fork")],
)
def test_an_interrupted_run_leaves_no_process_and_is_gone_on_with(
    end: int, start: str, files: list[str], clean: Path, tmp_path: Path
) -> None:
    """F15: ended at any moment, and the same command again."""
    shutil.copyfile(clean / "in.jsonl", tmp_path / "in.jsonl")
    command = script(tmp_path, files, "out", 2, 5_000, start)
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        for _ in range(3):  # what is noted after the first is on the disk when the second has been noted
            assert process.stdout.readline().startswith(b"advanced")
        children = children_of(process.pid)
        assert len(children) >= 2
        process.send_signal(end)
        process.communicate(timeout=20)
    assert process.returncode != 0
    assert gone(children, seconds=10), "workers outlived their parent"
    assert {path.suffix for path in tmp_path.glob("out*")} == {".partial", ".unfinished"}
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.match(r"note .*\bout: \d+ documents ", done.stdout)
    assert {path.suffix for path in tmp_path.glob("out*")} == {".bin", ".idx", ".card"}
    for ending in (".bin", ".idx"):
        made, expected = tmp_path / f"out_text_document{ending}", clean / f"clean_text_document{ending}"
        assert made.read_bytes() == expected.read_bytes()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_killed_worker_is_an_error_not_a_hang(start: str, files: list[str], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", 10_000)
    command = script(tmp_path, files, "out", 2, 5_000, start)
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"advanced")
        children = children_of(process.pid)
        programs = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        worker = next(pid for pid in children if b"resource_tracker" not in programs[pid])
        assert (b"spawn_main" in programs[worker]) == (start == "spawn")
        os.kill(worker, signal.SIGKILL)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert b"MegalithError: " in errors and b"--workers 1" in errors.splitlines()[-1]
    assert gone(children, seconds=10)
    assert {path.suffix for path in tmp_path.glob("out*")} <= {".partial", ".unfinished"}
