"""`megalith prove`: what it takes, and its exit codes where nothing is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalith.cli import main
from megalith.errors import PeerError
from megalith.prove import proof

SCRIPT = """GPUS=4
ARGS="--num-layers 4 --hidden-size 64 --num-attention-heads 5 --seq-length 64 --max-position-embeddings 64
  --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data
  --tokenizer-type NullTokenizer --vocab-size 100"
torchrun --nproc_per_node $GPUS pretrain_gpt.py $ARGS --tensor-model-parallel-size $1
"""


def said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main.main(["prove", *argv]) == 2
    return capsys.readouterr().err


def test_violations_of_a_script_are_those_of_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT, encoding="utf-8")
    error = said([str(path), "2"], capsys)
    assert "--num-attention-heads 5" in error
    assert "--tensor-model-parallel-size 2" in error


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "flags"),
        (["--gpus", "H100", "--num-layers", "2"], "--gpus H100"),
        (["--gpus", "0xH100", "--num-layers", "2"], "--gpus 0xH100"),
        (["missing.sh"], "missing.sh"),
        (["missing.toml"], "missing.toml"),
        (["--num-layers", "2"], "--hidden-size"),
    ],
)
def test_bad_input_is_named(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert named in said(argv, capsys)


@pytest.mark.parametrize(
    ("flags", "reference"),
    [
        ("--model-family bert --tokenizer-type BertWordPieceLowerCase --vocab-file v", "transformers"),
        ("--model-family bert --tokenizer-type BertWordPieceLowerCase --vocab-file v", "megatron"),
        ("--tokenizer-type NullTokenizer --vocab-size 100 --multi-latent-attention", "megatron"),
    ],
)
def test_a_reference_without_such_models_is_refused_before_anything_is_trained(
    flags: str, reference: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prove(*_: object, **__: object) -> None:
        pytest.fail("it trains")

    monkeypatch.setattr(proof, "prove", prove)
    shape = (
        SCRIPT.split('"')[1].replace("heads 5", "heads 4").partition("--tokenizer-type")[0].replace("--mock-data", "")
    )
    words = [*shape.split(), "--data-path", "d", *flags.split(), "--reference", reference]
    assert f"--reference {reference}" in said(words, capsys)


def test_a_certificate_that_cannot_be_written_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prove(*_: object, **__: object) -> None:
        pytest.fail("it trains")

    monkeypatch.setattr(proof, "prove", prove)
    words, file = SCRIPT.split('"')[1].split(), f"{tmp_path}/missing/certificate.json"
    error = said([*words, "--json", file], capsys)
    assert f"--json {file}" in error and "--num-attention-heads 5" in error
    assert f"--json {tmp_path}" in said([*words, "--json", str(tmp_path)], capsys)


def test_one_process_is_said_to_have_no_layout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prove(*_: object, **__: object) -> None:
        raise PeerError("stopped here")

    monkeypatch.setattr(proof, "prove", prove)
    words = SCRIPT.split('"')[1].replace("heads 5", "heads 4").split()
    assert "--gpus" in said(words, capsys)
    assert "--gpus" not in said([*words, "--gpus", "2xH100"], capsys)
