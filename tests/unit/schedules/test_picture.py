"""`megalith schedule`: the draw, the numbers below it, and its refusals; without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from fractions import Fraction

import pytest

from megalith.cli.main import main
from megalith.schedules.pipeline import make_schedule
from megalith.schedules.simulator import Costs, draw, simulate, summary

TWO_STAGES = """\
time    0              5              10
stage 0 F0|F1|......B0   |F2|B1   |...B2   |
stage 1 ...F0|B0   |F1|B1   |F2|B2   |......
"""

SUMMARY = """\
1f1b: 2 stages, 3 micro-batches; one micro-batch takes a stage forward 1, backward 2
time 12, bubble 25.0%

stage   computes      waits   bubble  live activations at most
    0          9          3    25.0%  2 micro-batches
    1          9          3    25.0%  1 micro-batch"""


def test_the_picture_of_1f1b() -> None:
    simulation = simulate(make_schedule("1f1b", 2, 1, 3))
    assert draw(simulation) == TWO_STAGES
    assert summary(simulation, Costs()) == SUMMARY


@pytest.mark.parametrize("costs", [Costs(), Costs(Fraction("1.25"), Fraction("0.7"), Fraction("1.1"))])
@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("zb-h1", 1)])
def test_every_operation_is_legible(name: str, chunks: int, costs: Costs) -> None:
    """Each row reads as the operations of its stage in order; all rows are equally long."""
    schedule = make_schedule(name, 4, chunks, 12)
    rows = [line[8:] for line in draw(simulate(schedule, costs)).splitlines()[1:]]
    assert len({len(row) for row in rows}) == 1
    for row, ops in zip(rows, schedule.ops, strict=True):
        expected = [str(op) if chunks > 1 else f"{op.kind}{op.micro_batch}" for op in ops]
        assert re.findall(r"[FBW][\d.]*\d", row) == expected


def test_a_picture_is_broken_at_the_width_of_the_terminal() -> None:
    simulation = simulate(make_schedule("interleaved", 4, 2, 8))
    whole = [line[8:] for line in draw(simulation).splitlines()[1:5]]
    broken = draw(simulation, width=70).split("\n\n")
    assert all(len(line) <= 70 for panel in broken for line in panel.splitlines())
    panels = [[line[8:] for line in panel.splitlines()[1:]] for panel in broken]
    assert [len("".join(parts)) for parts in zip(*panels, strict=True)] == [len(row) for row in whole]


def test_colors_change_nothing_but_colors() -> None:
    simulation = simulate(make_schedule("zb-h1", 3, 1, 4))
    colored = draw(simulation, color=True)
    assert colored.count("\x1b[97;48;5;") == 3 * 4 * 3
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == draw(simulation).replace("|", " ")


def test_the_command_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    words = "schedule --pp 4 --vp 2 --microbatches 8 --width 0"
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    assert "stage 3 ...............F0.0|F0.1|" in text
    assert "interleaved: 4 stages x 2 chunks, 8 micro-batches;" in text and "bubble 15.8%" in text
    assert re.search(r"\b11 micro-batches\b.*\b5\.5\b", text)


@pytest.mark.parametrize("word", ["1f1b", "zb-h1", "forward"])
def test_the_command_takes_a_schedule_and_costs(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--schedule", word, "--pp", "2", "--costs", "1", "1.5", "0.5"]) == 0
    assert f"{word}: 2 stages, 8 micro-batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--vp 2 --microbatches 6",
            ["--microbatches 6 is not divisible by --pp 4, which the interleaved schedule needs; nearest: 4 or 8"],
        ),
        (
            "--pp 0 --vp x --costs 1 0 y --shedule zb",
            [
                "--shedule is not a flag; did you mean --schedule?",
                "zb is an argument of no flag",
                "--vp x is not an integer",
                "--costs: 0 for the input gradient is not above 0",
                "--costs: y for the weight gradient is not a number",
                "--pp 0 is below 1",
            ],
        ),
        ("--schedule zb-h1 --vp 2", ["the schedule zb-h1 has one chunk of layers per stage, --vp 2 asks for more"]),
        ("--schedule zbv", ["unknown schedule zbv; choose one of 1f1b, interleaved, zb-h1, forward"]),
        ("--width -1", ["--width -1 is below 0"]),
        ("--costs 1 2", ["argument --costs: expected 3 arguments; see megalith schedule --help"]),
    ],
)
def test_what_cannot_be_is_refused_with_every_reason(
    words: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", *words.split()]) == 2
    error = capsys.readouterr().err
    assert [text for text in expected if text not in error] == []
    assert len(error.splitlines()) == (1 if len(expected) == 1 else len(expected) + 1)


def test_the_command_needs_no_torch() -> None:
    code = (
        "import sys; from megalith.cli.main import main; main(['schedule']); "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
