"""Commands in a terminal of 80 columns: bars that never wrap, and above them the lines that a pipe gets."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

import pytest

from megalith.tokenizers import train_byte_level_bpe

WORDS = "First Citizen: Before we proceed any further, hear me speak."
DRAWN = re.compile(r"\r([^\r\n]*)\x1b\[K")
STYLE = re.compile(r"\x1b\[[0-9;]*m")
SHAPE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --train-iters 12 --save-interval 8 --log-interval 4 "
    "--eval-interval 6 --eval-iters 2 --num-workers 0 --device cpu --make-vocab-size-divisible-by 8 --split 80,10,10"
)

PROGRAM = """
import json, sys
from megalith import progress
progress.SECONDS_BEFORE_A_BAR, progress._SECONDS_BETWEEN_BARS = float(sys.argv[1]), 0.001
commands = json.load(open("commands.json"))
if float(sys.argv[1]) == 0.0:  # each task is drawn at least once, however short it is
    follow = progress._Console.follow
    class Late:
        def __init__(self, ended):
            self.ended, self.asked = ended, False
        def wait(self, seconds):
            first, self.asked = not self.asked, True
            return False if first else self.ended.wait(seconds)
    if progress.in_terminal():
        progress._Console.follow = lambda console, task, ended: follow(console, task, Late(ended))
if any(words[0] == "train" for words in commands):
    import megalith.train.status as status
    status._SECONDS_BETWEEN, status.StatusLine.__init__.__defaults__ = 0.0, (float(sys.argv[1]),)
from megalith.cli.main import main
for words in commands:
    print("==", words[0], *words[1:2], flush=True)
    sys.argv[1:] = words
    code = main(words)
    sys.stdout.flush(), sys.stderr.flush()
    if code:
        print("exit code", code)
print("== rich", "rich" in sys.modules, flush=True)
"""


@dataclass(frozen=True)
class Screen:
    """What commands wrote: the lines of each, and the texts of the last line of the terminal."""

    text: str

    @property
    def drawn(self) -> list[str]:
        return [STYLE.sub("", text) for text in DRAWN.findall(self.text) if text]

    def lines(self, command: str) -> list[str]:
        """The lines of a command, without numbers, which differ from run to run."""
        plain = STYLE.sub("", DRAWN.sub("", self.text)).replace("\r\n", "\n")  # some lines have colours
        (body,) = re.findall(rf"^== {command}\n(.*?)(?=^== )", plain, re.MULTILINE | re.DOTALL)
        return [re.sub(r"[0-9][0-9.,:E+e-]*", "N", line) for line in body.splitlines()]


def in_pipe(folder: Path, seconds: float) -> Screen:
    words = [sys.executable, "-c", PROGRAM, str(seconds)]
    done = subprocess.run(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, env=environ()
    )
    return Screen(done.stdout)


def in_terminal(folder: Path, seconds: float, **more: str) -> Screen:
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    words = [sys.executable, "-c", PROGRAM, str(seconds)]
    process = subprocess.Popen(words, cwd=folder, stdin=child, stdout=child, stderr=child, env=environ() | more)
    os.close(child)
    found = bytearray()
    try:
        while block := os.read(parent, 1 << 16):
            found += block
    except OSError:  # Linux tells the end of a terminal so
        pass
    os.close(parent)
    assert process.wait() == 0
    return Screen(found.decode())


def environ() -> dict[str, str]:
    left = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "RANK")}
    return left | {"TERM": "xterm-256color", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run, with their inputs; it is the same for all, and their outputs are removed before each."""
    folder = tmp_path_factory.mktemp("terminal")
    train_byte_level_bpe([WORDS] * 3, 280, folder)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{n} {WORDS}"}) + "\n" for n in range(200)))
    return folder


def commands(name: str) -> list[list[str]]:
    tokenizer = "--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt"
    data = f"{name}_text_document"
    return [
        line.split()
        for line in (
            f"preprocess --input text.jsonl --output-prefix {name} --append-eod --workers 1 {tokenizer}",
            f"train {SHAPE} --data-path {data} {tokenizer} --save {name}",
            f"evaluate {name} --task text --data text.jsonl --log-interval 4",
            f"data verify {data}",
            f"checkpoint convert {name} {name}-torch --format torch",
            f"checkpoint export {name} {name}-hf --no-compare",
            f"checkpoint verify {name}",
        )
    ]


@pytest.fixture(scope="module")
def screens(folder: Path) -> dict[str, Screen]:
    """The same commands in a terminal whose bars appear at once, and in a pipe."""
    found = {}
    for name, run in (("terminal", in_terminal), ("pipe", in_pipe)):
        output = f"a-{name}"  # a name that nothing else on the screen has
        (folder / "commands.json").write_text(json.dumps(commands(output)))
        found[name] = Screen(run(folder, 0.0).text.replace(output, "NAME"))
    return found


COMMANDS = ("preprocess --input", "train --num-layers", "evaluate NAME", "data verify", "checkpoint convert")


@pytest.mark.parametrize("command", [*COMMANDS, "checkpoint export", "checkpoint verify"])
def test_a_terminal_shows_the_lines_of_a_pipe(command: str, screens: dict[str, Screen]) -> None:
    lines = screens["terminal"].lines(command)
    assert lines and sorted(lines) == sorted(screens["pipe"].lines(command))


def test_nothing_wraps(screens: dict[str, Screen]) -> None:
    assert len(screens["terminal"].drawn) > 20
    assert all(len(text) <= 79 for text in screens["terminal"].drawn)


@pytest.mark.parametrize(
    "what",
    [
        "encoding",
        "starting",
        "building the GPTDataset train indices",
        "step ",
        "evaluating 1/2",
        "saving the checkpoint",
    ]
    + [
        "loading the checkpoint",
        "evaluating",
        "verifying the checkpoint",
        "verifying tokens",
        "converting",
        "exporting",
    ],
)
def test_every_kind_of_work_has_its_line(what: str, screens: dict[str, Screen]) -> None:
    assert any(text.startswith(what) for text in screens["terminal"].drawn)


def test_a_pipe_gets_no_control_codes(screens: dict[str, Screen]) -> None:
    assert "\x1b" not in screens["pipe"].text and "\r" not in screens["pipe"].text


def test_short_work_imports_no_rich(folder: Path) -> None:
    (folder / "commands.json").write_text(json.dumps(commands("short")[:1]))
    assert "== rich False" in in_pipe(folder, 0.0).text
    assert "== rich False" in in_terminal(folder, 2.0).text
    assert "== rich True" in in_terminal(folder, 0.0).text


@pytest.mark.parametrize("variable", ["NO_COLOR=1", "TERM=dumb"])
def test_plain_terminals_get_no_control_codes(variable: str, folder: Path) -> None:
    (folder / "commands.json").write_text(json.dumps(commands("plain")[:1]))
    assert "\x1b" not in in_terminal(folder, 0.0, **dict([variable.split("=")])).text
