"""Conversions of the checkpoints that the real Megatron wrote, against other checkpoints that it wrote of the same run.

`gpt2_tp2_torch` and `gpt2_tp2_torch_dist` are one run, as are `llama_torch`, `llama_torch_dist` and the two
`llama_dp2_distopt` ones. The reference side reads with torch alone: per-rank files as dicts, torch_dist by DCP's own
reader.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint import DirectoryStore
from megalith.checkpoint.convert import ConversionOptions, convert
from megalith.checkpoint.diff import compared, tensor_differences
from megalith.checkpoint.files.safe_loading import load_tensors_and_plain_data
from megalith.checkpoint.sources.source import open_source
from megalith.checkpoint.store.store import locate
from megalith.cli.checkpoint import run

from .goldens import Goldens
from .test_torch_dist import equal, layout, plain_tensors, read_metadata

Unpack = Callable[[str], Path]

GOLDEN = (
    "gpt2_torch",
    "gpt2_torch_dist",
    "gpt2_tp2_torch",
    "gpt2_tp2_torch_dist",
    "gpt2_pp2_torch",
    "gpt2_distopt_torch",
    "llama_torch",
    "llama_torch_dist",
    "llama_tp2_torch_dist",
    "llama_pp2_torch_dist",
    "llama_dp2_distopt_torch_dist",
    "llama_dp2_distopt_fullyreshardable",
    "llama_bf16_torch_dist",
)


@pytest.fixture(scope="module")
def saved(golden: Goldens, tmp_path_factory: pytest.TempPathFactory) -> Unpack:
    """Case name -> its unpacked save folder."""
    unpacked: dict[str, Path] = {}

    def unpack(case: str) -> Path:
        if case not in unpacked:
            folder = tmp_path_factory.mktemp(case)
            with tarfile.open(golden.path(f"pretrain/{case}/ckpt.tar.xz")) as archive:
                archive.extractall(folder, filter="data")
            unpacked[case] = folder / "ckpt"
        return unpacked[case]

    return unpack


def per_rank(folder: Path, name: str) -> dict[str, Any]:
    body: dict[str, Any] = load_tensors_and_plain_data(folder / "iter_0000010" / name / "model_optim_rng.pt")
    return body


@pytest.mark.parametrize(
    ("source", "reference", "wanted"),
    [
        ("gpt2_tp2_torch", "gpt2_tp2_torch_dist", ConversionOptions()),
        ("llama_torch", "llama_torch_dist", ConversionOptions()),
        ("llama_dp2_distopt_torch_dist", "llama_torch_dist", ConversionOptions()),
        ("llama_dp2_distopt_fullyreshardable", "llama_torch_dist", ConversionOptions()),
    ],
)
def test_torch_dist_is_what_megatron_wrote_of_the_same_run(
    source: str, reference: str, wanted: ConversionOptions, saved: Unpack, tmp_path: Path
) -> None:
    """Every tensor, every chunk, every object, and the state of the optimizer that is no tensor."""
    made = convert(saved(source), tmp_path, wanted).path
    theirs = saved(reference) / "iter_0000010"
    assert layout(read_metadata(made / ".metadata")) == layout(read_metadata(theirs / ".metadata"))
    expected, found = plain_tensors(theirs), plain_tensors(made)
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    ours, megatrons = DirectoryStore(tmp_path).common(10), DirectoryStore(saved(reference)).common(10)
    assert equal(ours["optimizer"]["state"], megatrons["optimizer"]["state"])
    assert ours["opt_param_scheduler"] == megatrons["opt_param_scheduler"]
    assert set(megatrons) - set(ours) == set()


def test_a_tensor_parallel_torch_dist_becomes_one_per_rank_file(saved: Unpack, tmp_path: Path) -> None:
    """The gate and up halves, the columns of the projections and both moments, against DCP's reading of the source."""
    convert(saved("llama_tp2_torch_dist"), tmp_path, ConversionOptions(format="torch", tp=1))
    whole = plain_tensors(saved("llama_tp2_torch_dist") / "iter_0000010")
    body, like = per_rank(tmp_path, "mp_rank_00"), per_rank(saved("llama_torch"), "mp_rank_00")
    assert list(body["model"]) == list(like["model"])
    fused = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    shapes: dict[str, Tensor] = {}
    for name, value in body["model"].items():
        if isinstance(value, Tensor):
            expected = whole[name] if "layers" not in name else None
            if expected is None:
                _, _, layer, rest = name.split(".", 3)
                for module, stored in fused.items():
                    rest = rest.replace(module, stored)
                expected = whole[f"decoder.layers.{rest}"][int(layer)]
                name = f"decoder.layers.{rest}"
            assert torch.equal(value, expected), name
            shapes[name] = value
    assert len(shapes) == 9
    state = body["optimizer"]["state"]
    assert state.keys() == like["optimizer"]["state"].keys()
    assert all(state[key][kind].shape == like["optimizer"]["state"][key][kind].shape for key in state for kind in _ADAM)
    moments = sum(tensor.double().sum() for key, tensor in whole.items() if key.startswith("optimizer.state.exp_avg."))
    assert sum(entry["exp_avg"].double().sum() for entry in state.values()) == pytest.approx(float(moments), rel=1e-9)


_ADAM = ("exp_avg", "exp_avg_sq", "step")


def test_a_tied_embedding_goes_to_both_ends_of_a_pipeline(saved: Unpack, tmp_path: Path) -> None:
    """The copy of the last stage, and the same keys in the same order as Megatron's own two stages."""
    convert(saved("gpt2_tp2_torch"), tmp_path, ConversionOptions(format="torch", tp=1, pp=2))
    parts = [per_rank(saved("gpt2_tp2_torch"), f"mp_rank_0{rank}")["model"] for rank in range(2)]
    name = "embedding.word_embeddings.weight"
    embedding = torch.cat([part[name] for part in parts])
    for stage in range(2):
        body = per_rank(tmp_path, f"mp_rank_00_00{stage}")
        like = per_rank(saved("gpt2_pp2_torch"), f"mp_rank_00_00{stage}")
        assert list(body["model"]) == list(like["model"])
        assert body["optimizer"]["state"].keys() == like["optimizer"]["state"].keys()
        assert torch.equal(body["model"]["output_layer.weight" if stage else name], embedding)
    qkv = "self_attention.linear_qkv.weight"
    expected = torch.cat([part[f"decoder.layers.1.{qkv}"] for part in parts])
    assert torch.equal(per_rank(tmp_path, "mp_rank_00_001")["model"][f"decoder.layers.0.{qkv}"], expected)


@pytest.mark.parametrize("case", GOLDEN)
def test_there_and_back_over_another_format_and_layout(case: str, saved: Unpack, tmp_path: Path) -> None:
    """Of every golden: nothing is lost or changed by a conversion to TP2 x PP2 per-rank files and back."""
    convert(saved(case), tmp_path / "there", ConversionOptions(format="torch", tp=2, pp=2))
    convert(tmp_path / "there", tmp_path / "back", ConversionOptions(format="torch_dist", tp=1, pp=1))
    one, other = (compared(open_source(locate(path)), weights=False) for path in (saved(case), tmp_path / "back"))
    differences = list(tensor_differences(one, other))
    assert differences and [str(item) for item in differences if not item.is_none] == []


def test_diff_says_which_runs_are_one(saved: Unpack, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", str(saved("llama_torch")), str(saved("llama_dp2_distopt_torch_dist"))]) == 0
    assert "equal: 45 of 45 tensors" in capsys.readouterr().out
    assert run(["diff", str(saved("gpt2_torch")), str(saved("gpt2_torch_dist"))]) == 1
    out = capsys.readouterr().out
    assert "different: 0 of 84 tensors" in out and "embedding.word_embeddings.weight: 8192 of 8192 elements" in out


@pytest.mark.parametrize("case", ["gpt2_pp2_torch", "llama_dp2_distopt_torch_dist"])
def test_inspect_and_verify_of_megatrons_own(case: str, saved: Unpack, capsys: pytest.CaptureFixture[str]) -> None:
    """The folders as `tree -h` shows them."""
    assert run(["verify", str(saved(case))]) == 0
    assert "readable" in capsys.readouterr().out
    assert run(["inspect", str(saved(case))]) == 0
    out = capsys.readouterr().out
    pairs = [line.strip().split("  ", 1) for line in out.splitlines() if line.startswith(" ")]
    facts = {pair[0]: pair[-1].strip() for pair in pairs}
    assert facts["written by"] == "another program" and facts["random states"] == "yes"
    if case == "gpt2_pp2_torch":
        assert "├── mp_rank_00_000\n│   └── [" in out and "model_optim_rng.pt" in out
        assert (facts["format"], facts["layout"]) == ("torch", "TP 1, PP 2")


def test_experts_of_several_ranks_convert_to_every_layout(
    saved: Unpack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Golden `pretrain/moe_ep2`: two expert-parallel ranks, with the states of both optimizers."""
    save = str(saved("moe_ep2"))
    assert run(["diff", save, save]) == 0
    assert "equal: 87 of 87 tensors" in capsys.readouterr().out
    for name, options in {"tp2": "--tp 2 --format torch", "pp2": "--pp 2 --format torch", "dist": "--tp 2"}.items():
        assert run(["convert", save, str(tmp_path / name), *options.split()]) == 0
        assert run(["verify", str(tmp_path / name)]) == 0
        capsys.readouterr()
        assert run(["diff", save, str(tmp_path / name)]) == 0, capsys.readouterr().out
