"""The curve in the terminal and as a PNG."""

from __future__ import annotations

import builtins
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from megalith.cli.quickstart.chart import BRAILLE, Curve, draw, place_dots, save_png, smooth


def falling(count: int, killed_at: int | None = None) -> Curve:
    points = tuple((step, 8.0 * math.exp(-step / count) + 1.0) for step in range(1, count + 1))
    return Curve(points, points[:: max(1, count // 4)], killed_at)


def test_smoothing_keeps_the_start_and_averages_the_rest() -> None:
    points = [(1, 4.0), (2, 2.0), (3, 6.0), (4, 1.0)]
    assert smooth(points, 3) == [(1, 4.0), (2, 4.0), (3, 3.0), (4, 3.5)]
    assert smooth(points, 0) == points


@pytest.mark.parametrize("count", [2, 3, 24, 500, 20_000])
@pytest.mark.parametrize("braille", [True, False])
def test_every_line_fits(count: int, braille: bool) -> None:
    lines = draw(falling(count), 80, 10, braille=braille)
    assert len(lines) == 12
    assert all(len(line) <= 80 for line in lines)
    if not braille:
        assert all(line.isascii() for line in lines)


def test_a_falling_loss_goes_from_upper_left_to_lower_right() -> None:
    dots = place_dots(falling(100).training, 40, 20)
    by_column = {column: [row for c, row in dots if c == column] for column in range(40)}
    assert min(by_column[0]) == 0
    assert max(by_column[39]) == 19
    tops = [min(rows) for rows in by_column.values()]
    assert tops == sorted(tops)


def test_the_line_has_no_holes() -> None:
    jump = [(1, 5.0), (2, 5.0), (3, 1.0), (4, 1.0), (5, 4.0)]
    dots = place_dots(jump, 30, 24)
    for column in range(29):
        here = [row for c, row in dots if c == column]
        right = [row for c, row in dots if c == column + 1]
        assert min(abs(a - b) for a in here for b in right) <= 1


def test_a_flat_loss_is_a_flat_line() -> None:
    dots = place_dots([(1, 2.0), (2, 2.0), (3, 2.0)], 10, 8)
    assert {row for _, row in dots} == {0}


def test_axes_have_the_losses_and_the_iterations() -> None:
    lines = draw(falling(500, killed_at=260), 80, 8)
    assert lines[0].startswith(" ") and float(lines[0].split("\u2502")[0]) > 8
    assert "killed at 260" in lines[-1]
    assert lines[-1].rstrip().endswith("500")
    assert any(ord(character) > BRAILLE for character in "".join(lines[:8]))


def test_losses_that_are_not_finite_are_left_out() -> None:
    curve = Curve(((1, 5.0), (2, math.inf), (3, 4.0), (4, math.nan), (5, 3.0)), ())
    assert "nan" not in "\n".join(draw(curve, 60, 6))


def test_too_short_for_a_curve() -> None:
    assert draw(Curve(((1, 3.0),), ()), 60, 6) == ["(too few steps for a curve)"]


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    assert save_png(falling(300, killed_at=150), path, "title")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (960, 540)


def test_png_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert not save_png(falling(10), tmp_path / "loss.png", "title")
    assert not (tmp_path / "loss.png").exists()
