"""Checkpoints with experts: those of Megatron, and that a resume continues bit for bit in either format."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from megalith.checkpoint.content import CheckpointContent, Chunk
from megalith.checkpoint.files.folder import CheckpointFolder
from megalith.checkpoint.sources.adapters import WeightsOnly
from megalith.cli.checkpoint import run as checkpoint
from megalith.cli.main import main
from megalith.train.metrics import read_metrics

from .goldens import Goldens
from .test_pretrain import compare_validations, prepare_case

DEEPSEEK = [
    "--moe-layer-freq",
    "[0,1]",
    "--moe-shared-expert-intermediate-size",
    "16",
    "--moe-shared-expert-gate",
    "--moe-router-score-function",
    "sigmoid",
    "--moe-router-enable-expert-bias",
]


def _golden_save(golden: Goldens, tmp_path: Path) -> Path:
    archive = golden.path("pretrain/moe_ep2/ckpt.tar.xz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "golden", filter="data")
    return tmp_path / "golden" / "ckpt"


def test_megatrons_checkpoint_of_two_expert_ranks_goes_on_in_one_process(
    golden: Goldens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Golden `pretrain/moe_ep2` stands at its end: what is left is the evaluation, whose losses are the original's."""
    words = prepare_case("moe_ep1", golden, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words, "--load", str(_golden_save(golden, tmp_path))]) == 0
    log = json.loads(golden.path("pretrain/moe_ep2/log.json").read_text())
    last = [line for line in log["validation"] if line["where"]]
    compare_validations("moe_ep2", {"validation": last}, capsys.readouterr().out)


@pytest.mark.parametrize("options", ["torch_dist", "torch --bf16"])
def test_a_resume_continues_bit_for_bit(
    golden: Goldens,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
) -> None:
    """Of a dense layer before one with routed and shared experts, whose router has a bias that the load moves."""
    words = prepare_case("moe_ep1", golden, tmp_path)
    at = words.index("--ckpt-format")
    words[at : at + 2] = []
    words += [*DEEPSEEK, "--ckpt-format", *options.split(), "--save-interval", "5", "--eval-iters", "0"]
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 0
    straight = tmp_path / "c" / "iter_0000010"
    shutil.move(straight, tmp_path / "straight")
    (tmp_path / "c" / "latest_checkpointed_iteration.txt").write_text("5")
    assert main(["train", *words, "--load", str(tmp_path / "c")]) == 0
    capsys.readouterr()
    assert checkpoint(["diff", str(tmp_path / "straight"), str(straight)]) == 0, capsys.readouterr().out
    contents = WeightsOnly(CheckpointFolder(straight).source).contents().tensors
    bias = contents["decoder.layers.1.mlp.router.expert_bias"]
    assert (bias.shape, bias.dtype) == ((4,), torch.float32)
    assert contents["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].shape == (4, 96, 16)
    assert "decoder.layers.0.mlp.linear_fc1.weight" in contents
    moved = torch.empty(4)
    CheckpointFolder(straight).source.read(
        CheckpointContent([Chunk("decoder.layers.1.mlp.router.expert_bias", moved, (0,), (4,))])
    )
    assert moved.abs().max() > 0
    steps = [line for line in read_metrics(tmp_path / "c" / "run" / "metrics.jsonl") if line["event"] == "step"]
    assert list(steps[-1]["expert_load"]) == ["1"]
    assert sum(steps[-1]["expert_load"]["1"]) == 2 * steps[-1]["num_tokens"]  # each token goes to two experts


@pytest.mark.parametrize("grouped", ["one tensor", "by number"])
def test_experts_of_megatrons_grouped_layers_are_read(
    golden: Goldens, tmp_path: Path, capsys: pytest.CaptureFixture[str], grouped: str
) -> None:
    """GroupedMLP has all local experts in two tensors, each expert transposed; TEGroupedMLP numbers its weights."""
    save = _golden_save(golden, tmp_path)
    plain, other = tmp_path / "plain", tmp_path / "other"
    assert checkpoint(["convert", str(save), str(plain), "--format", "torch", "--ep", "1", "--no-optim"]) == 0
    shutil.copytree(plain, other)
    file = other / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt"
    body = torch.load(file, weights_only=False)
    _group(body["model"], apart=grouped == "by number")
    torch.save(body, file)
    (other / "iter_0000010" / "manifest.json").unlink()
    capsys.readouterr()
    assert checkpoint(["diff", str(plain), str(other)]) == 0, capsys.readouterr().out


def _group(model: dict[str, torch.Tensor], *, apart: bool) -> None:
    for layer in range(2):
        prefix = f"decoder.layers.{layer}.mlp.experts"
        for number, linear in ((1, "linear_fc1"), (2, "linear_fc2")):
            several = [model.pop(f"{prefix}.local_experts.{at}.{linear}.weight") for at in range(4)]
            if apart:
                model |= {f"{prefix}.{linear}.weight{at}": weight for at, weight in enumerate(several)}
            else:
                memory = torch.stack([weight.t().contiguous() for weight in several])
                shape = (16, -1) if number == 1 else (-1, 16)
                model[f"{prefix}.weight{number}"] = memory.reshape(shape)
