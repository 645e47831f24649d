"""Patterns of layers are read without running what is written."""

from __future__ import annotations

import pytest

from megalith.config.values import marked_layers, read_pattern, read_window


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("4", 4),
        ("[0,1,1,0]", (0, 1, 1, 0)),
        ("[0]*3+[1]", (0, 0, 0, 1)),
        ("([1]*3+[0])*2", (1, 1, 1, 0, 1, 1, 1, 0)),
        ("2*([0]+[1])", (0, 1, 0, 1)),
        (" (0, 1) ", (0, 1)),
    ],
)
def test_patterns(text: str, wanted: object) -> None:
    assert read_pattern(text) == wanted


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "four", "[2]", "[0.5]", "[True]", "__import__('os')", "[0]*10**9", "[0]-[1]", "[[0]]", "(" * 500],
)
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(ValueError):
        read_pattern(text)


def test_layers_by_frequency_and_by_list() -> None:
    assert marked_layers("2", 5) == (False, True, False, True, False)
    assert marked_layers("[1]+[0]*2", 3) == (True, False, False)
    assert marked_layers(None, 2) == (False, False)


def test_windows() -> None:
    assert read_window("128,0") == read_window("(128, 0)") == (128, 0)
    assert read_window("-1,-1") == (-1, -1)
    for text in ("128", "a,b", "1,2,3", "-2,0"):
        with pytest.raises(ValueError):
            read_window(text)
