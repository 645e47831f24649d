"""`megalith train --prove first`: what the verdict of the proof means for the training, and that it is remembered."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalith import api
from megalith.checkpoint import DirectoryStore
from megalith.cli import main, prove
from megalith.config import RunConfig, load
from megalith.errors import ConfigError, MegalithError

WORDS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 2 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 30 --eval-iters 0 --device cpu --prove first"
)
FLAGS = WORDS.split()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return load(FLAGS, {}, files=False)


def ends_with(code: int, monkeypatch: pytest.MonkeyPatch, *, verdict: bool = True) -> list[list[str]]:
    """Let the proof end so, with a certificate or without; the commands are appended to the list."""
    commands: list[list[str]] = []

    def run(words: list[str], **_: Any) -> SimpleNamespace:
        commands.append(words)
        if verdict:
            Path(words[words.index("--json") + 1]).write_text(json.dumps({"sha256": "abc"}))
        return SimpleNamespace(returncode=code, stdout="", stderr="--bad-flag\n")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_proven(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (commands,) = (ends_with(0, monkeypatch),)
    assert prove.prove_first(config, FLAGS, tmp_path, print) == "abc"
    (words,) = commands
    assert words[words.index("--gpus") + 1] == "1"
    assert set(FLAGS) <= set(words)


@pytest.mark.parametrize(("code", "verdict", "exit_code"), [(1, True, 1), (2, False, 2), (1, False, 2), (-9, False, 2)])
def test_not_proven(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, verdict: bool, exit_code: int
) -> None:
    ends_with(code, monkeypatch, verdict=verdict)
    (tmp_path / "certificate.json").write_text("{}")  # of an earlier start
    with pytest.raises(MegalithError, match="certificate.json" if verdict else "--bad-flag") as caught:
        prove.prove_first(config, FLAGS, tmp_path, print)
    assert caught.value.exit_code == exit_code


def test_too_slow(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, timeout: float, **__: Any) -> None:
        assert timeout < 60.0 * config.parallel.distributed_timeout_minutes
        raise subprocess.TimeoutExpired("prove", timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ConfigError, match="--distributed-timeout-minutes"):
        prove.prove_first(config, FLAGS, tmp_path, print)


def test_a_structure_is_proven_once(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = prove._remembered(config)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"sha256": "remembered"}))
    commands = ends_with(0, monkeypatch)
    larger = load([*FLAGS, "--hidden-size", "32", "--save", "elsewhere", "--save-interval", "1"], {}, files=False)
    assert prove.prove_first(larger, FLAGS, tmp_path, print) == "remembered"
    assert not commands
    other = load([*FLAGS, "--normalization", "RMSNorm"], {}, files=False)
    assert prove.prove_first(other, FLAGS, tmp_path, print) == "abc"
    assert len(commands) == 1


def test_programs_prove_themselves(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="--prove"), api.training(config):
        pass


@pytest.mark.full
def test_checkpoints_name_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save = tmp_path / "save"
    words = [*FLAGS, "--save", str(save), "--save-interval", "2"]
    assert main.main(["train", *words]) == 0
    certificate = json.loads((save / "run/certificate.json").read_text())
    manifest = DirectoryStore(save).manifest(2)
    assert manifest is not None
    assert certificate["verdict"] == "proven"
    assert manifest["certificate"] == certificate["sha256"]
    capsys.readouterr()
    assert main.main(["checkpoint", "inspect", str(save)]) == 0
    assert certificate["sha256"][:16] in capsys.readouterr().out
    monkeypatch.setattr(subprocess, "run", None)
    assert main.main(["train", *words, "--load", str(save), "--train-iters", "2"]) == 0
