"""The doctor tells what works here, and by its exit code whether training can."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
import torch

from megalith.cli import doctor
from megalith.cli.main import main
from megalith.errors import install_command


def test_a_sound_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"torch {torch.__version__}" in out and "float32 (default)" in out
    assert "gloo" in out
    assert "WRONG" not in out


def test_what_is_missing_is_said_with_its_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = importlib.metadata.version

    def version(package: str) -> str:
        if package == "tiktoken":
            raise importlib.metadata.PackageNotFoundError(package)
        return versions(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "_EXTRAS", {"no_such_package": ("nothing at all", "track")})
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert re.search("WRONG +tiktoken .*pip install tiktoken", out)
    assert re.search(f"no_such_package .*{re.escape(install_command('track'))}", out) and out.count("WRONG") == 1


def test_a_device_that_computes_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_TOLERANCE", dict.fromkeys(doctor._TOLERANCE, -1.0))
    assert main(["doctor"]) == 1
    assert re.search("WRONG +float32", capsys.readouterr().out)


def test_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--all"]) == 2
    assert "--all" in capsys.readouterr().err
