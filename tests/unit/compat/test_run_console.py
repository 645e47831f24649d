"""What a user sees: everything said, and warnings that the program logs, once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megalith.compat.megatron.run_console import MegatronConsole, RunConsole
from megalith.layout import Layout
from megalith.train.results import SavedCheckpoint


def test_a_logged_warning_is_seen_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = RunConsole(tmp_path / "log.txt")
    logging.getLogger("megalith.data").warning("the split has %d tokens", 3)
    logging.getLogger("megalith.data").info("built")
    console.warn("WARNING: twice is too often")
    console.close()
    assert capsys.readouterr().err == "WARNING: the split has 3 tokens\nWARNING: twice is too often\n"
    assert (tmp_path / "log.txt").read_text() == "the split has 3 tokens\nbuilt\nWARNING: twice is too often\n"


def test_a_silent_screen_keeps_warnings_off_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (None, "megalith"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    logging.getLogger("megalith.data").warning("Python says it")
    RunConsole(None, shows=False)
    logging.getLogger("megalith.data").warning("the first rank says it")
    assert capsys.readouterr().err == "Python says it\n"


def test_a_save_names_the_folder_as_it_was_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = MegatronConsole(RunConsole(tmp_path / "log.txt"), "./C", Layout())
    console.before_save(5)
    console.after_save(SavedCheckpoint(5, "C/iter_0000005", 1.0, 10))
    saving, saved = capsys.readouterr().out.splitlines()
    assert saving.endswith(" to ./C in torch_dist format")
    assert saved.endswith(" to ./C [ t 1/1, p 1/1 ]")
