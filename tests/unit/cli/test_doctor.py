"""The doctor tells what works here, and by its exit code whether training can."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
import torch

from megalith.cli import doctor
from megalith.cli.main import main
from megalith.config.run import all_settings
from megalith.errors import install_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]


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


def test_rates_that_cannot_be_saved_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("megalith.distributed.forked.run_forked", None)
    assert main(["doctor", "--measure"]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "file") in error and "XDG_CACHE_HOME" in error


def test_measuring_says_nothing_of_what_it_does_not_test(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megalith.plan.rates.measure_here", lambda device: iter(["a rate"]))
    assert main(["doctor", "--measure"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  ok      a rate"]


def test_all_packages_of_extras_are_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {
        re.split(r"[\[><=]", package)[0].lower().replace("-", "_"): extra
        for extra, packages in project["optional-dependencies"].items()
        for package in packages
        if extra not in ("dev", "docs") and not package.startswith("megalith[")
    }
    named["llama_cpp"] = named.pop("llama_cpp_python")
    assert {package: extra for package, (_, extra) in doctor._EXTRAS.items() if extra} == named
    trackers = next(one for one in all_settings().values() if one.name == "trackers").about.choices
    assert set(trackers) <= set(doctor._EXTRAS) and len(trackers) > 3


def test_a_report_is_one_block_without_what_is_private(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "alice/secret-project").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "alice/secret-project")
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    monkeypatch.setattr(doctor.platform, "node", lambda: "node17")
    said = f"torch: {tmp_path}/alice/libtorch.so: cannot open (/opt/alice/x.so) on node17, 3 GB/s, /dev/shm has 64 MB"
    monkeypatch.setattr(doctor, "_devices", lambda: iter([doctor.Finding("bad", said)]))
    for name, value in {
        **{"MEGALITH_API_KEY": "sk-12345", "HF_TOKEN": "hf_12345", "NCCL_COMM_ID": "10.0.0.7:90", "NCCL_DEBUG": "WARN"},
        **{"TORCH_HOME": "/home/alice/t", "HF_ENDPOINT": "https://alice:pw@mirror", "ALICE": "alice"},
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--report"]) == 1
    out = capsys.readouterr().out
    first, *lines, last = out.splitlines()
    assert first == "```text" and last == "```" and not any("```" in line or "\x1b" in line for line in lines)
    assert "libtorch.so" in out and "3 GB/s" in out and "/dev/shm has 64 MB" in out and "NCCL_DEBUG=WARN" in out
    assert "TORCH_HOME is set" in out and "MEGALITH_API_KEY is set" in out and f"torch {torch.__version__}" in out
    for private in ("alice", "secret-project", "node17", "12345", "10.0.0.7", "pw@", str(tmp_path), str(ROOT)):
        assert private not in out.lower(), private


@pytest.mark.parametrize(("environ", "colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_are_those_of_a_terminal(
    environ: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    doctor._printer()("  WRONG   ", "bold red", "[this] is /broken/")
    out = capsys.readouterr().out
    assert ("\x1b[1;31m" in out) is colored and "[this] is /broken/" in out


def test_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--all"]) == 2
    assert "--all" in capsys.readouterr().err
