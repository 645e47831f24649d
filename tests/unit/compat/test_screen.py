"""What a user sees: everything said, and warnings that the program logs, once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megalith.compat.megatron.screen import Screen, SilentScreen


def test_a_logged_warning_is_seen_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(tmp_path / "log.txt")
    logging.getLogger("megalith.data").warning("the split has %d tokens", 3)
    logging.getLogger("megalith.data").info("built")
    screen.warn("WARNING: twice is too often")
    screen.close()
    assert capsys.readouterr().err == "WARNING: the split has 3 tokens\nWARNING: twice is too often\n"
    assert (tmp_path / "log.txt").read_text() == "the split has 3 tokens\nbuilt\nWARNING: twice is too often\n"


def test_a_silent_screen_keeps_warnings_off_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (None, "megalith"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    logging.getLogger("megalith.data").warning("Python says it")
    SilentScreen()
    logging.getLogger("megalith.data").warning("the first rank says it")
    assert capsys.readouterr().err == "Python says it\n"
