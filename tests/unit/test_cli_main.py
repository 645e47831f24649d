"""The `megalith` command: help, unknown commands, messages and exit codes, without torch and at once."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from megalith import errors
from megalith.cli import main as cli
from megalith.cli.arguments import CommandParser

BAD = (
    "--num-layers 2 --hidden-size 1000 --num-attention-heads 12 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --min-lr 1 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100 --hiden-dropout 0.1"
)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A command `paint` whose outcome the test sets."""
    module = types.SimpleNamespace(outcome=0, argv=None)

    def run(argv: list[str]) -> int:
        module.argv = argv
        if isinstance(module.outcome, BaseException):
            raise module.outcome
        return module.outcome

    module.run = run
    monkeypatch.setattr(cli, "available_commands", lambda: {"paint": "paint a wall", "config": "show"})
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: module)
    return module


def test_a_command_gets_its_words_and_gives_the_exit_code(command: types.SimpleNamespace) -> None:
    command.outcome = 75
    assert cli.main(["paint", "--red", "--help"]) == 75
    assert command.argv == ["--red", "--help"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.MegalithError("oops"), 1),
        (errors.ConfigError("oops"), 2),
        (errors.DataError("oops"), 3),
        (errors.CheckpointError("oops"), 4),
        (errors.LayoutError("oops"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_messages_and_exit_codes(
    error: BaseException, code: int, command: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    command.outcome = error
    assert cli.main(["paint"]) == code
    printed = capsys.readouterr()
    expected = "megalith: interrupted\n" if code == 130 else "megalith paint: oops\n"
    assert (printed.out, printed.err) == ("", expected)


@pytest.mark.parametrize(
    "words", [["train", *BAD.split(), "--save"], ["train", *BAD.split(), "--data-path"], ["report"], ["data", "verify"]]
)
def test_a_name_that_no_file_can_have_is_a_bad_argument(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, "x" * 300]) == 2
    assert "x" * 300 in capsys.readouterr().err


def test_an_unexpected_error_keeps_its_traceback(command: types.SimpleNamespace) -> None:
    command.outcome = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["paint"])


@pytest.mark.parametrize(
    ("environ", "waits", "prints"),
    [
        ({"LOCAL_RANK": "0"}, False, True),
        # Its launcher would have killed it meanwhile if the first rank had failed: the error is its own.
        ({"LOCAL_RANK": "1"}, True, True),
        ({"SLURM_LOCALID": "1"}, True, False),  # srun kills no rank
        ({"LOCAL_RANK": "1", "MEGALITH_LAUNCHER": "megalith"}, True, False),
    ],
)
def test_the_first_rank_of_a_machine_prints_a_bad_configuration(
    environ: dict[str, str],
    waits: bool,
    prints: bool,
    command: types.SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    monkeypatch.setattr(cli.os, "environ", environ)
    command.outcome = errors.ConfigError(["one", "two"])
    assert cli.main(["paint"]) == 2
    head, *lines = capsys.readouterr().err.splitlines() or [""]
    assert head.startswith("megalith paint: 2 ") is prints and lines == ["  1. one", "  2. two"] * prints
    assert waited == [5.0] * waits, "torchrun would end the first rank before it has printed"


def test_an_unknown_command_is_answered_with_the_nearest(
    command: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pant"]) == 2
    assert "megalith paint" in capsys.readouterr().err
    assert cli.main(["xyz"]) == 2
    said = capsys.readouterr().err
    assert "paint" in said and "config" in said


def test_help_lists_the_commands_that_are_there(
    command: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert "  paint          paint a wall\n" in text and "quickstart" not in text


@pytest.mark.parametrize("words", [["version"], ["-V"], ["--version"]])
def test_the_version(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"megalith {cli.__version__}\n"


def test_help_of_a_command_is_its_own(command: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "paint"]) == 0
    assert command.argv == ["--help"]
    assert cli.main(["help"]) == 0 == cli.main(["--help"])
    assert cli.main(["help", "pant"]) == 2
    assert "megalith paint" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train", "--help"], ["train", "-h"], ["help", "train"]], ids=" ".join)
def test_help_of_training_shows_common_flags(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert "--num-layers" in shown.out and "--moe-router-topk" not in shown.out and not shown.err
    assert "--help-all" in shown.out.splitlines()[-1]


def test_help_of_training_shows_all_flags_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = """
from dataclasses import dataclass
from megalith.registry import mark

@dataclass(frozen=True)
class PaintSettings:
    paint_layers: int = 3

@mark("norm", "paint", settings=PaintSettings)
class Paint: ...
"""
    (tmp_path / "help_paint.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["train", "--help-all"]) == 0
    shown = capsys.readouterr().out
    assert "--moe-router-topk" in shown and "--paint-layers" not in shown
    assert cli.main(["train", "--import", "help_paint", "--help-all"]) == 0
    assert "--paint-layers" in capsys.readouterr().out


@pytest.fixture(scope="module")
def completions() -> dict[str, str]:
    """What `megalith completion` prints for each shell, and as the man page."""
    made = {}
    for kind in ("bash", "zsh", "fish", "man"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert cli.main(["completion", kind]) == 0
        made[kind] = out.getvalue()
    return made


ASK = {  # offers of the script for words, one a line
    "bash": "COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _megalith; "
    "printf '%s\\n' ${{COMPREPLY[@]}}",
    "zsh": "_describe() {{ print -l -- ${{(P)2}} }}; _files() {{ }}; compdef() {{ }}; . ./script; "
    "words=({words}); CURRENT=$#words; PREFIX=$words[-1]; _megalith",
    "fish": "complete -C '{words}'",
}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tra", {"train"}),
        ("help tra", {"train"}),
        ("train --num-layers-per", {"--num-layers-per-virtual-pipeline-stage"}),
        ("train --disable-bias", {"--disable-bias-linear"}),
        ("train --hel", {"--help", "--help-all"}),
        ("train --num-layers 2 --lr-decay-style c", {"constant", "cosine"}),
        ("checkpoint ve", {"verify"}),
        ("checkpoint convert --no-v", {"--no-verify"}),
        ("serve --he", {"--help"}),
        ("completion b", {"bash"}),
        ("train some", set()),
    ],
)
def test_tab_completes_commands_flags_and_choices(
    shell: str, typed: str, offered: set[str], completions: dict[str, str], tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (tmp_path / "script").write_text(completions[shell])
    ask = ASK[shell].format(words=f"megalith {typed}")
    ask = ask if shell == "zsh" else f". ./script; {ask}"
    done = subprocess.run([shell, "-c", ask], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert not done.stderr
    between = {"bash": "\n", "zsh": ":", "fish": "\t"}[shell]
    assert {line.partition(between)[0] for line in done.stdout.splitlines()} - {"", "script"} == offered


def test_completion_is_for_a_shell_that_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "tcsh"]) == 2
    assert "bash" in capsys.readouterr().err


def test_the_man_page_has_what_help_has(completions: dict[str, str], tmp_path: Path) -> None:
    page = completions["man"]
    plain = page.replace("\\-", "-").replace("\\fB", "").replace("\\fR", "")
    for command in cli.available_commands():
        assert f".SS {command}\n" in plain, command
    for flag in ("--num-layers", "--max-new-tokens", "--sentence-splitter", "--no-verify"):
        assert f"\n{flag}" in plain, flag
    assert not re.search(r"%\(|\n'", page), "unexpanded defaults, or requests of roff by accident"
    (tmp_path / "megalith.1").write_text(page)
    for words in (["mandoc", "-Tlint", "-Werror"], ["man", "--warnings", "-l"]):
        if shutil.which(words[0]):
            done = subprocess.run([*words, "megalith.1"], capture_output=True, text=True, cwd=tmp_path)
            assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr


def test_exit_codes_are_in_one_table(repository: Path) -> None:
    page = (repository / "docs/launch.md").read_text(encoding="utf-8").partition("## Exit codes\n")[2]
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", page.partition("\n## ")[0], re.MULTILINE)
    assert {int(code): about.replace("`", "") for code, about in rows} == errors.EXIT_CODES
    raised = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.MegalithError)]
    assert {one.exit_code for one in raised} <= set(errors.EXIT_CODES) and len(raised) > 8
    contract = (repository / "tests/contract/exit_codes.txt").read_text(encoding="utf-8")
    seen = {int(code) for code in re.findall(r"megalith .*\| (\d+)$", contract, re.MULTILINE)} - {128 + 15}
    assert len(seen) > 5 and seen <= set(errors.EXIT_CODES)


@pytest.mark.parametrize(("term", "colored"), [("dumb", False), ("xterm-256color", True)])
def test_a_dumb_terminal_gets_no_colours(
    term: str, colored: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli.main(["schedule", "--pp", "2", "--microbatches", "2"]) == 0
    assert ("\x1b[" in capsys.readouterr().out) is colored


def test_config_prints_a_recipe_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    good = [word for word in BAD.split() if word not in ("--hiden-dropout", "0.1", "--min-lr", "1")]
    good[good.index("1000")] = "1008"
    assert cli.main(["config", *good, "--no-rope-fusion"]) == 0
    printed = capsys.readouterr()
    assert "[model]\n" in printed.out and "\nnum_layers = 2\nhidden_size = 1008\n" in printed.out
    assert printed.err.startswith("note: ") and "--no-rope-fusion" in printed.err
    assert cli.main(["config", "--flags"]) == 0
    assert "--lr-decay-style constant|linear|cosine" in capsys.readouterr().out


@pytest.mark.parametrize("beside", ["--markdown", "--flags --num-layers 2", "--flags --flags"])
def test_the_reference_of_flags_takes_no_flags_of_a_run(beside: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", *beside.split()]) == 2
    said = capsys.readouterr().err
    assert "--markdown" in said and "--hidden-size" not in said and "not a flag" not in said


def run_in_a_process(code: str, *argv: str) -> tuple[int, str, list[str]]:
    """Exit code, standard error and the top-level modules loaded of a program that ends with an exit code."""
    program = f"import json, sys\n{code}\nprint(json.dumps([rc, sorted({{m.split('.')[0] for m in sys.modules}})]))"
    done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, check=True)
    rc, modules = json.loads(done.stdout.splitlines()[-1])
    return rc, done.stderr, modules


def test_a_bad_configuration_ends_at_once_without_torch() -> None:
    code = "from megalith.cli.main import main\nrc = main(['config', *sys.argv[1:]])"
    rc, err, modules = run_in_a_process(code, *BAD.split())
    assert rc == 2
    assert not {"torch", "transformers", "numpy", "rich"} & set(modules)
    head, unknown, heads, rate = err.splitlines()
    assert head.startswith("megalith config: 3 ")
    assert unknown.startswith("  1. --hiden-dropout ") and "--hidden-dropout?" in unknown
    assert heads.startswith("  2. --hidden-size 1000 ") and "--num-attention-heads 12" in heads
    assert "996" in heads and "1008" in heads
    assert rate.startswith("  3. --min-lr 1 ") and "--lr 0.001" in rate


def test_help_is_immediate() -> None:
    code = "from megalith.cli.main import main\nrc = main(['--help'])"
    rc, _, modules = run_in_a_process(code)
    assert rc == 0
    assert not {"torch", "transformers", "numpy", "rich", "argparse"} & set(modules)


def test_pretrain_gpt_runs_by_path_from_any_folder(repository: Path, tmp_path: Path) -> None:
    """In an interpreter that does not see an installed megalith (-S leaves out site-packages)."""
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(repository / "pretrain_gpt.py"), "--hiden-size", "8"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("megalith train: ") and "Traceback" not in done.stderr


def test_scripts_that_name_an_interpreter_can_be_executed(repository: Path) -> None:
    scripts = [*repository.glob("*.py"), *repository.glob("tools/**/*.py"), *repository.glob("tasks/*.py")]
    scripts += [*repository.glob("examples/**/*.sh"), *repository.glob("examples/**/*.sbatch")]
    named = [path for path in scripts if path.read_bytes().startswith(b"#!")]
    assert len(named) > 20
    assert [path.name for path in named if not os.access(path, os.X_OK)] == []


def test_a_reader_that_leaves_is_an_end_of_printing_but_not_of_work(
    command: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "drop", lambda stream: None)
    command.outcome = BrokenPipeError()
    assert cli.main(["config"]) == 0
    assert cli.main(["paint", "--help"]) == 0
    assert cli.main(["paint"]) == 141


def test_a_repeated_flag_is_noted_unless_it_may_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser(prog="megalith paint")
    parser.add_argument("--colour", "-c")
    parser.add_argument("--layer", action="append")
    parser.add_argument("walls", nargs="*")
    options = parser.parse_args(["--layer", "1", "-c", "red", "--colour=blue", "--layer", "2", "--", "--colour", "-c"])
    assert (options.colour, options.layer, options.walls) == ("blue", ["1", "2"], ["--colour", "-c"])
    assert re.findall(r"(--[a-z]+) is given more than once", capsys.readouterr().err) == ["--colour"]
    parser.parse_args(["--colour", "red", "--", "--colour", "-c"])
    assert not capsys.readouterr().err
