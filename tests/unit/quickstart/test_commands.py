"""Commands that the configuration accepts, a training that is killed, and the proof of the resume."""

from __future__ import annotations

import json
import os
import shlex
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megalith.cli.main import main
from megalith.cli.quickstart import Quickstart, compare_repeated_steps, make_parser, program, words_of
from megalith.cli.quickstart.model import MODEL_SIZES, Machine, ModelSize, Plan
from megalith.config import load
from megalith.errors import ConfigError, DataError, MegalithError, install_command
from megalith.report.history import History

Record = dict[str, Any]


def quickstart(out: Path, *words: str) -> Quickstart:
    made = Quickstart(make_parser().parse_args(["--out", str(out), "--device", "cpu", *words]))
    made.clear_folder()
    return made


def steps(numbers: Sequence[int], grad_norm: float = 1.0, loss: float | None = None) -> list[Record]:
    rest = {"event": "step", "grad_norm": grad_norm, "learning_rate": 0.1}
    return [{**rest, "iteration": number, "loss": 1 / number if loss is None else loss} for number in numbers]


def history_of(records: Sequence[Record]) -> History:
    history = History()
    for record in records:
        history.take(record)
    return history


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("size", MODEL_SIZES, ids=lambda size: f"{size.num_layers}x{size.hidden_size}")
def test_the_configuration_accepts_the_training(tmp_path: Path, size: ModelSize, precision: str) -> None:
    out = tmp_path / "my out"
    commands = quickstart(out).commands(Plan(Machine("x", precision, 1e9), size, 1000), out, "")
    command, *flags = words_of(commands[2])
    run = load(flags, {}, files=False)
    assert command == "train"
    assert run.model.ffn_size == size.ffn_hidden_size
    assert run.train.global_batch_size == size.batch_size
    assert run.precision.bf16 == (precision == "bf16")
    assert run.precision.fp16 == (precision == "fp16")
    assert run.checkpoint.save == run.checkpoint.load == f"{out}/checkpoints"
    assert not run.notes


def test_the_configuration_accepts_the_fine_tuning(tmp_path: Path) -> None:
    out = tmp_path / "my out"
    commands = quickstart(out, "--chat").commands(Plan(Machine("x", "bf16", 1e9), MODEL_SIZES[2], 1000), out, "")
    _, _, base, _, *preprocess, tune, generate = map(words_of, commands)
    run = load([word for word in tune[1:] if word != "--use-checkpoint-args"] + base[1:13], {}, files=False)
    assert run.data.sft and run.checkpoint.pretrained_checkpoint == f"{out}/checkpoints"
    assert run.tokenizer.tokenizer_model == f"{out}/tokenizer" and run.precision.bf16
    assert [words[0] for words in preprocess] == ["preprocess"] * 2 and "--loss-mask" in preprocess[0]
    assert generate[:3] == ["generate", f"{out}/chat", "--chat"]


@pytest.mark.parametrize("prompt", ['it\'s a {} $PROMPT\n"here"', "", "\\\n"])
def test_what_runs_is_what_the_script_says(tmp_path: Path, prompt: str) -> None:
    plan = Plan(Machine("x", "bf16", 1e9), MODEL_SIZES[0], 100)
    head, *commands = quickstart(tmp_path / "my out").commands(plan, tmp_path / "my out", prompt)
    assert "generate" in commands[2] and prompt in words_of(commands[2])
    # The program is replaced by one that prints its words, so that the shell's reading of the script shows.
    printing = shlex.join([sys.executable, "-c", "import sys; print(sys.argv[1:])"])
    script = "\n\n".join([head, *(text.replace(program(), printing, 1) for text in commands)])
    printed = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [repr(words_of(command)) for command in commands]


def use(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Run this program instead of Megalith."""
    monkeypatch.setattr("megalith.cli.quickstart.COMMAND", (sys.executable, "-c", source))


@pytest.mark.parametrize("place", ["file/out", "/proc/out"])
def test_a_folder_that_cannot_be_written_to_is_named(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"--out .*{place}"):
        quickstart(tmp_path / place)


def test_a_command_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "import sys; print(sys.argv[1:])")
    made = quickstart(tmp_path / "out")
    assert made.call(["one", "two"]) == ["['one', 'two']\n"]
    made.call(["one", "more"])
    assert (made.out / "logs" / "one.log").read_text() == "['one', 'two']\n['one', 'more']\n"


def test_the_progress_of_a_training_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = " iteration       20/     600 | consumed samples: 160 | lm loss: 7.5E+00 | grad norm: 1.0 |"
    use(monkeypatch, f"print({line!r})")
    made = quickstart(tmp_path / "out")
    made.call(["train"])
    assert "20 of 600" in str(made.status.status) and "7.500" in str(made.status.status)


@pytest.mark.parametrize(
    ("source", "exit_code"),
    [
        ("import sys; print('first the cause'); sys.exit(3)", 3),
        ("import os, signal; print('first the cause', flush=True); os.kill(os.getpid(), 15)", 128 + signal.SIGTERM),
        ("import os, signal; print('first the cause', flush=True); os.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
    ],
    ids=["error", "signal", "killed by another"],
)
def test_a_failure_carries_the_exit_code_and_the_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, exit_code: int
) -> None:
    use(monkeypatch, source)
    with pytest.raises(MegalithError, match="first the cause") as caught:
        quickstart(tmp_path / "out").call(["train"])
    assert caught.value.exit_code == exit_code


def test_a_training_that_ends_before_its_kill_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "")
    with pytest.raises(MegalithError):
        quickstart(tmp_path / "out").call(["train"], 10)


STOPPABLE = """
import signal, sys, time
def stop(number, frame):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print(" iteration        1/      24 | lm loss: 7.5E+00 |", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_waits_for_the_command_to_save_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    use(monkeypatch, STOPPABLE)
    made = quickstart(tmp_path / "out")
    # The signal comes as soon as the progress of the training is shown.
    monkeypatch.setattr(made.status, "update", lambda text: os.kill(os.getpid(), number))
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
            made.call(["train"])
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert (made.out / "logs" / "train.log").read_text().endswith("saved\n")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--data", "missing.txt"], 3, "missing.txt"),
        (["--data", "little.txt"], 3, "too little to train on"),
        (["--minutes", "0"], 2, "--minutes 0"),
        (["--out", "taken"], 2, "--out taken"),
    ],
    ids=["missing file", "too little text", "no time", "folder of something else"],
)
def test_errors_name_the_cause(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    exit_code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # the handler would stay in this process
    (tmp_path / "little.txt").write_text("a few words", encoding="utf-8")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "precious").write_text("data", encoding="utf-8")
    assert main(["quickstart", *arguments]) == exit_code
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.out + shown.err
    assert (tmp_path / "taken" / "precious").read_text(encoding="utf-8") == "data"


def test_the_output_of_an_earlier_run_is_removed_and_nothing_else(tmp_path: Path) -> None:
    earlier = quickstart(tmp_path / "out").out
    for name in ("checkpoints/iter_0000001/a.distcp", "data/corpus_text_document.bin", "report.json", "notes.txt"):
        (earlier / name).parent.mkdir(parents=True, exist_ok=True)
        (earlier / name).write_text("old")
    quickstart(earlier)
    assert sorted(path.name for path in earlier.iterdir()) == ["commands.sh", "data", "logs", "notes.txt", "tokenizer"]
    assert (earlier / "notes.txt").read_text() == "old"
    assert not list((earlier / "data").iterdir())


@pytest.mark.full
def test_a_step_is_timed_on_the_real_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = quickstart(tmp_path / "out")
    assert 1e-4 < made.measure_step(Machine("x", "fp32", 1e9), MODEL_SIZES[0]) < 60.0
    assert not (made.out / "checkpoints").exists(), "the training begins anew"


def test_equal_repetitions_prove_the_resume() -> None:
    resumed = {"event": "resume", "iteration": 5}
    proof = compare_repeated_steps(history_of([*steps(range(1, 9)), resumed, *steps(range(6, 13))]))
    assert (proof["resumed_from"], proof["killed_at"]) == (5, 8)
    assert (proof["num_repeated"], proof["num_equal"], proof["largest_difference"]) == (3, 3, 0.0)


def test_the_smallest_difference_is_reported() -> None:
    again = [{"event": "resume", "iteration": 5}, *steps([6], loss=1.0 + 2**-52), *steps([7], 1.5, 1.0)]
    again += steps([8], loss=1.0)
    proof = compare_repeated_steps(history_of([*steps(range(1, 9), loss=1.0), *again]))
    assert (proof["num_repeated"], proof["num_equal"], proof["largest_difference"]) == (3, 1, 2**-52)


def test_texts_that_cannot_be_read_leave_the_output_of_an_earlier_run(tmp_path: Path) -> None:
    made = trained(tmp_path / "out")
    made.options.data = [tmp_path / "missing.txt"]
    with pytest.raises(DataError, match="missing.txt"):
        made.run()
    assert (made.training / "metrics.jsonl").is_file()


def trained(out: Path) -> Quickstart:
    """A quickstart whose training is recorded: the loss at step n is 1 / n."""
    made = quickstart(out)
    made.training.mkdir(parents=True)
    evaluation = {"event": "evaluation", "iteration": 100, "split": "validation", "loss": 0.5}
    (made.training / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*steps(range(1, 102)), evaluation])))
    return made


PLAN = Plan(Machine("x", "fp32", 1e9), MODEL_SIZES[0], 100)


def test_the_losses_are_shown_and_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    made = trained(tmp_path / "out")
    made.draw(PLAN)
    assert "1.00 -> 0.04 -> 0.02 -> 0.01 -> 0.01" in (shown := capsys.readouterr().out) and "loss.png" in shown
    content = (made.out / "loss.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (960, 540)


def test_the_losses_are_shown_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # an import of it fails
    made = trained(tmp_path / "out")
    made.draw(PLAN)
    assert "1.00 -> 0.04 -> 0.02 -> 0.01 -> 0.01" in (shown := capsys.readouterr().out)
    assert install_command("plot") in shown
    assert not (made.out / "loss.png").exists()
