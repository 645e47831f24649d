"""The code that measures growth: exponents, the verdict, the page and the picture. The page shows the result files."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalith.data.indexed import IndexedDataset

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"processor": "P", "features": ["avx2"], "cores": 2, "python": "3.11", "versions": {"torch": "2.13"}}


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("scaling")


def test_the_page_is_that_of_the_results(scaling: Any) -> None:
    assert scaling.PAGE.read_text(encoding="utf-8") == scaling.page(scaling.read_results("scaling")), (
        "run scaling.py --pages"
    )
    for machine in scaling.read_results("scaling"):
        assert scaling.PAGE.with_name(f"scaling-{machine}.png").exists()


def test_zeros_are_a_dataset(scaling: Any, tmp_path: Path) -> None:
    scaling.write_zeros(tmp_path / "zeros", 3000)
    dataset = IndexedDataset(str(tmp_path / "zeros"))
    assert list(dataset.lengths) == [1000] * 3
    assert not np.any(dataset.get(2))


def line(scaling: Any, values: list[float], peer: list[float] | None = None) -> dict[str, Any]:
    """Return what was measured of 1, 10, 100 tokens, whose law is their number."""
    made = scaling.Line("tokens", "s")
    for x, value in enumerate(values):
        others = {"peer": [peer[x]]} if peer else {}
        found = made.add(10.0**x, 10.0**x, {"ours": [value], **others})
    return {**found, "load_before": 0.1, "stolen": 0.0, "date": "2026-11-25", "commit": "abc"}


def test_exponents_are_slopes_of_the_logarithms(scaling: Any) -> None:
    assert scaling.exponent([1, 10, 100], [3, 300, 30000]) == pytest.approx(2)
    assert scaling.last_exponent(line(scaling, [5, 6, 60]), "ours") == pytest.approx(1)
    assert scaling.last_exponent(line(scaling, [5, 6, 60]), "law") == pytest.approx(1)


@pytest.mark.parametrize(("values", "superlinear"), [([1, 10, 100], False), ([9, 10, 11], False), ([1, 10, 130], True)])
def test_superlinear_is_what_grows_faster_than_its_law_at_the_end(
    scaling: Any, values: list[float], superlinear: bool
) -> None:
    found = line(scaling, values)
    assert scaling.is_superlinear(found) is superlinear
    page = scaling.page({"m": {"machine": MACHINE, "found": {"step": found}}})
    assert ("**superlinear**" in page) is superlinear


def test_the_page_compares_with_the_peer_at_the_end(scaling: Any, tmp_path: Path) -> None:
    result = {
        "machine": MACHINE,
        "found": {"step": line(scaling, [1, 2, 4], [2, 4, 10]), "one point": line(scaling, [1])},
    }
    (shown,) = (text for text in scaling.page({"m": result}).splitlines() if text.startswith("| step"))
    assert "peer 0.40" in shown and "| 2.50 |" in shown
    scaling.draw(tmp_path / "m.png", "m", result)
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
