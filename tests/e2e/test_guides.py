"""The commands of the guides, in the order of the site: one story of a small text in one folder.

A block of ```console is run as typed, with `--train-iters` and sizes shortened. What other blocks show is not run, and
says why where it looks like a command (`not run here`); its flags are checked all the same. The Chinese guides have the
commands of the English ones.
"""

from __future__ import annotations

import gzip
import importlib
import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from megalith.cli.arguments import options_of, subcommands_of
from megalith.cli.main import available_commands, module_of
from megalith.config.known import known_flags
from megalith.config.run import all_settings

from .typed import run_typed
from .warm import WarmProcess

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs/start.md", *sorted((ROOT / "docs/guides").glob("*.md"))]
MARKS = ("not run here", "测试中不运行")
SHORT = {"train": ("--train-iters", "12", "--lr-warmup-iters", "2", "--hidden-size", "32", "--eval-iters", "1")}


def _blocks(page: Path, kind: str) -> list[list[str]]:
    """Return the lines of the blocks of code of a kind; "" for those without."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    blocks = [re.sub(r"\\\n\s*", "", block) for name, block in found if name == kind]
    return [[line.removeprefix("$ ") for line in block.splitlines()] for block in blocks]


def _lines(page: Path, kind: str) -> list[str]:
    return [line for block in _blocks(page, kind) for line in block]


def _material(folder: Path) -> None:
    """Write what the reader has: a text, a table, more texts; and the files that the pages tell him to write."""
    paragraphs = [f"The {number} sheep said\nthat {number * 7} is not a prime.\n" for number in range(300)]
    (folder / "text.txt").write_text("\n".join([*paragraphs, "".join(map(chr, range(32, 127)))]))
    (folder / "table.csv").write_text("id,content\n" + "".join(f"{n},The {n} is here\n" for n in range(20)))
    (folder / "corpus").mkdir()
    (folder / "corpus/a.jsonl").write_text("".join(json.dumps({"text": f"The {n}"}) + "\n" for n in range(20)))
    with gzip.open(folder / "more.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "The end"}) + "\n")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    for page in PAGES:
        for name, source in re.findall(r"```(?:toml|python)\n# (\S+)\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            (folder / name).write_text(source)


def _run(lines: list[str], folder: Path, warm: WarmProcess) -> str:
    """Run each line once; return what all have printed."""
    printed = ""
    for line in dict.fromkeys(lines):
        done = run_typed(line, folder, warm, *SHORT.get(line.split()[1], ()))
        differs = line.startswith("megalith checkpoint diff") and done.code == 1
        assert done.code == 0 or differs, f"{line}\n{done.text[-3000:]}"
        printed += done.text
    return printed


def test_the_commands_of_the_first_page(tmp_path: Path, warm: WarmProcess) -> None:
    _material(tmp_path)
    _run(_lines(PAGES[0], "console"), tmp_path, warm)
    assert (tmp_path / "C/run/report.html").exists()


@pytest.mark.full
def test_the_commands_of_the_guides(tmp_path: Path, warm: WarmProcess) -> None:
    """Data and trainings before what uses them, as a reader of several pages has them."""
    _material(tmp_path)
    lines = [line for page in PAGES for line in _lines(page, "console")]
    first = [line for line in lines if line.startswith(("megalith preprocess", "megalith train"))]
    assert len(lines) > 25
    assert "my hook: step 10" in _run([*first, *lines], tmp_path, warm)
    assert (tmp_path / "all.idx").exists()


def test_what_is_not_run_says_so_and_has_flags_that_exist() -> None:
    chinese = sorted((ROOT / "docs/zh").rglob("*.md"))
    for page in [*PAGES, *chinese]:
        for block in _blocks(page, ""):
            if any(line.startswith(("megalith ", "torchrun ", "sbatch ")) for line in block):
                assert any(mark in line for line in block for mark in MARKS), f"{page}: {block}"
        inline = re.findall(r"`(megalith [^`]+)`", page.read_text("utf-8"))
        for line in [*_lines(page, ""), *inline]:
            words = shlex.split(re.split(r"\s+# | > ", line)[0].replace("...", "").replace("\\|", "|"))
            if words[:1] == ["megalith"] and len(words) > 2:
                _check(words[1:], f"{page.name}: {line}")
    assert len(chinese) > 15


def _check(words: list[str], where: str) -> None:
    command = words[0]
    assert command in (*available_commands(), "help", "version"), where
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert flags <= _flags_of(command) | _TRAINING, f"{where}: {flags - _flags_of(command) - _TRAINING}"


@cache
def _flags_of(command: str) -> set[str]:
    module = importlib.import_module(module_of(command)) if command in available_commands() else None
    if module is None or not hasattr(module, "make_parser"):
        return set()
    parser = module.make_parser()
    parsers = [parser, *(inner for _, _, inner in subcommands_of(parser))]
    return {word for one in parsers for option in options_of(one) for word in option.spellings}


_TRAINING = {
    *(word for each in all_settings().values() for word in (*each.spellings, *each.off_spellings)),
    *(*known_flags(), "--config", "--import"),
}
OF_OTHERS = {
    *("--nnodes", "--node_rank", "--nproc_per_node", "--master_addr", "--master_port", "--standalone"),  # torchrun
    *("--signal", "--ntasks", "--trusted-host"),  # sbatch, pip
}


def test_every_flag_on_the_pages_is_one_of_some_command() -> None:
    known = _TRAINING.union(OF_OTHERS, *map(_flags_of, available_commands()))
    for page in [*PAGES, *(ROOT / "docs/zh").rglob("*.md")]:
        flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w", page.read_text("utf-8")))
        assert flags <= known, f"{page.name}: {flags - known}"
