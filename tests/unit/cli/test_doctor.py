"""The doctor tells what works here, and by its exit code whether training can."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from megalith.cli import doctor
from megalith.cli.main import main
from megalith.errors import install_command


def test_a_sound_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"torch {torch.__version__}" in out and "float32 (default)" in out
    assert "gloo (CPU): there" in out
    assert out.endswith("everything that training needs works here\n")


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
    assert "WRONG   tiktoken is missing: pip install tiktoken" in out
    assert f"no_such_package is missing: nothing at all ({install_command('track')})" in out
    assert out.endswith("1 things are wrong\n")


def test_a_device_that_computes_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_TOLERANCE", dict.fromkeys(doctor._TOLERANCE, -1.0))
    assert main(["doctor"]) == 1
    assert "WRONG       float32 (default): a product is off by" in capsys.readouterr().out


def test_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--all"]) == 2
    assert "takes no words: --all" in capsys.readouterr().err
