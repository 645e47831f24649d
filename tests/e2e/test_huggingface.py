"""Hugging Face folders where a checkpoint is asked for: a training run begins from one, `generate` reads one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalith.assemble.trained import load_trained
from megalith.checkpoint.convert import ConversionOptions, convert
from megalith.checkpoint.writers.huggingface import ExportOptions, export
from megalith.cli.main import main
from megalith.config import ModelConfig

from ..unit.checkpoint.huggingface_folders import random_weights, write_folder, write_tokenizer
from .warm import WarmProcess

QWEN3 = ModelConfig(
    2,
    16,
    4,
    32,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    group_query_attention=True,
    num_query_groups=2,
    kv_channels=8,
    ffn_hidden_size=24,
    qk_layernorm=True,
)
FLAGS = [
    *("--num-layers", 2, "--hidden-size", 16, "--num-attention-heads", 4, "--max-position-embeddings", 32),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--group-query-attention", "--num-query-groups", 2, "--kv-channels", 8, "--ffn-hidden-size", 24),
    "--qk-layernorm",
]
RUN = [
    *("--seq-length", 16, "--micro-batch-size", 2, "--global-batch-size", 4, "--train-iters", 2, "--save-interval", 2),
    *("--mock-data", "--log-interval", 1, "--eval-iters", 0, "--num-workers", 0, "--seed", 5),
    *("--hidden-dropout", 0, "--attention-dropout", 0),
]
STILL = ["--lr", 1e-30, "--weight-decay", 0]
"""A learning rate that moves no weight."""
VOCAB = 257


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Qwen3 with its tokenizer, as the hub's cache holds it: by links."""
    real, snapshot = tmp_path / "blobs", tmp_path / "models--a--b/snapshots/0a1b"
    write_folder(real, "qwen3", QWEN3, weights=small_weights(), vocab_size=VOCAB)
    write_tokenizer(real)
    snapshot.mkdir(parents=True)
    for path in real.iterdir():
        (snapshot / path.name).symlink_to(path)
    return snapshot


def small_weights() -> dict[str, Tensor]:
    weights = {name: tensor * 0.3 for name, tensor in random_weights("qwen3", QWEN3).items()}
    words = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(2)) * 0.3
    return {**weights, "model.embed_tokens.weight": words}


def _losses(text: str) -> list[str]:
    return re.findall(r"lm loss: (\S+)", text)


@pytest.mark.parametrize("flags", [["--use-checkpoint-args", *FLAGS[:8]], FLAGS], ids=["its-args", "flags"])
def test_training_begins_with_its_weights(warm: WarmProcess, folder: Path, tmp_path: Path, flags: list[object]) -> None:
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder] if flags is FLAGS else []
    done = warm.run([*flags, *tokenizer, *RUN, *STILL, "--load", folder, "--save", tmp_path / "save"], tmp_path)
    assert done.code == 0, done.text
    assert f"loading distributed checkpoint from {folder} at iteration 0" in done.text
    assert "WARNING" not in done.text
    export(tmp_path / "save", tmp_path / "out", ExportOptions())
    wanted, found = small_weights(), load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_in_any_layout_and_out_of_an_imported_checkpoint(warm: WarmProcess, folder: Path, tmp_path: Path) -> None:
    """The folder itself on one rank and on two, and the checkpoint that is made of it: the same losses."""
    convert(folder, tmp_path / "imported", ConversionOptions(release=True))
    command = [*FLAGS, *RUN, "--lr", 1e-3, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]
    alone = warm.run([*command, "--load", folder], tmp_path)
    assert alone.code == 0, alone.text
    imported = warm.run([*command, "--load", tmp_path / "imported"], tmp_path)
    assert imported.code == 0, imported.text
    two = warm.run_ranks(2, [*command, "--tensor-model-parallel-size", 2, "--load", folder], tmp_path)
    assert [rank.code for rank in two] == [0, 0], two[0].text
    assert len(_losses(alone.text)) == 2
    assert _losses(imported.text) == _losses(alone.text)
    for one, other in zip(_losses(alone.text), _losses(two[0].text), strict=True):
        assert float(other) == pytest.approx(float(one), rel=1e-5)


def test_a_run_does_not_save_into_the_folder_of_the_model(warm: WarmProcess, folder: Path, tmp_path: Path) -> None:
    command = [*FLAGS, *RUN, "--lr", 1e-3, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]
    before = sorted(folder.iterdir())
    done = warm.run([*command, "--load", folder, "--save", folder], tmp_path)
    assert done.code == 2 and f"--save {folder}" in done.text
    assert sorted(folder.iterdir()) == before


def test_another_architecture_is_refused_with_every_flag(warm: WarmProcess, folder: Path, tmp_path: Path) -> None:
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]
    done = warm.run([*FLAGS[:-3], "--ffn-hidden-size", 32, *tokenizer, *RUN, *STILL, "--load", folder], tmp_path)
    assert done.code == 4
    assert re.search("--qk-layernorm: .*checkpoint.* not .*here", done.text)
    assert re.search("--ffn-hidden-size: 24 .*32 ", done.text)


def test_a_tokenizer_with_more_ids_than_rows_is_refused(
    warm: WarmProcess, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB]  # one id more
    done = warm.run([*FLAGS, *tokenizer, *RUN, *STILL, "--load", folder], tmp_path)
    assert done.code == 4
    assert re.search("258 ids.* 257 rows", done.text)
    cut = {**small_weights(), "model.embed_tokens.weight": torch.zeros(200, 16)}
    write_folder(tmp_path / "cut", "qwen3", QWEN3, weights=cut, vocab_size=200)
    write_tokenizer(tmp_path / "cut")
    assert main(["generate", str(tmp_path / "cut"), "--prompt", "x"]) == 4
    assert re.search("257 ids.* 200 rows", capsys.readouterr().err)


def test_generate(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "ab", "--greedy", "--max-new-tokens", "4", "--device", "cpu"]
    assert main(["generate", str(folder), *words]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("ab") and printed.err == ""
    # A checkpoint that was made of it is enough by itself.
    convert(folder, tmp_path / "imported", ConversionOptions(release=True))
    for path in folder.iterdir():
        path.unlink()
    assert main(["generate", str(tmp_path / "imported"), *words]) == 0
    assert capsys.readouterr().out == printed.out


def test_without_a_tokenizer_it_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tokenizer.json").unlink()
    assert main(["generate", str(folder), "--prompt", "x"]) == 3
    assert "tokenizer.json" in capsys.readouterr().err


def test_trained_model_of_a_folder(folder: Path) -> None:
    trained = load_trained(folder, torch.device("cpu"))
    assert trained.model.config.qk_layernorm and trained.tokenizer.vocab_size == VOCAB and trained.notes == ()
