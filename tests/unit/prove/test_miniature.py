"""Miniatures keep what divides and what does not, cover every two axes, and fit eight ranks."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from megalith.config import RunConfig, load
from megalith.prove.compare import Comparison
from megalith.prove.miniature import MOST_RANKS, Miniature, miniatures, write_data
from megalith.prove.proof import Proof, Result

BASE = (
    "--num-layers 48 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 2 --global-batch-size 1024 --train-iters 1000 --lr 1e-3 --data-path d "
    "--tokenizer-type NullTokenizer --vocab-size 1000 "
)


def run_of(flags: str, gpus: int) -> RunConfig:
    return load((BASE + flags).split(), {"RANK": "0", "WORLD_SIZE": str(gpus)}, files=False)


def found(flags: str, gpus: int, folder: Path) -> list[Miniature]:
    run = run_of(flags, gpus)
    write_data(run, folder)
    return miniatures(run, folder)


def test_all_pairs_of_axes_are_covered(tmp_path: Path) -> None:
    flags = (
        "--tensor-model-parallel-size 8 --context-parallel-size 4 --pipeline-model-parallel-size 4 "
        "--sequence-parallel --num-experts 8 --expert-model-parallel-size 4"
    )
    chosen = found(flags, 1024, tmp_path)
    assert all(one.world_size <= MOST_RANKS for one in chosen)
    pairs = {frozenset(pair) for one in chosen for pair in combinations(one.axes, 2)}
    assert pairs == {frozenset(pair) for pair in combinations(("tp", "cp", "dp", "pp", "ep"), 2)}


@pytest.mark.parametrize(
    ("flags", "gpus", "axes", "model"),
    [
        ("", 1, {}, {"num_layers": 2}),
        ("--tensor-model-parallel-size 8", 8, {"tp": 2}, {"num_attention_heads": 4}),
        # more ranks than query groups: with two ranks each would have a group of its own
        (
            "--tensor-model-parallel-size 8 --group-query-attention --num-query-groups 4",
            8,
            {"tp": 4},
            {"num_query_groups": 2, "num_attention_heads": 4},
        ),
        # experts that several replicas hold
        ("--num-experts 8 --expert-model-parallel-size 4", 16, {"dp": 4, "ep": 2}, {"num_experts": 4}),
        ("--num-experts 8 --expert-model-parallel-size 4", 4, {"dp": 2, "ep": 2}, {"num_experts": 4}),
        # a short first stage, and virtual stages
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 9",
            4,
            {"pp": 2},
            {"num_layers": 3, "decoder_first_pipeline_num_layers": 1},
        ),
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3",
            4,
            {"pp": 2},
            {"num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1},
        ),
        (
            "--num-layers 61 --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout Et*3|(tt|)*29|L "
            "--microbatch-group-size-per-virtual-pipeline-stage 20 --global-batch-size 40",
            16,
            {"pp": 2},
            {
                "num_layers": 4,
                "pipeline_model_parallel_layout": "Ett|t|t|L",
                "microbatch_group_size_per_vp_stage": 3,
            },
        ),
        (
            "--num-layers 4 --mtp-num-layers 1 --position-embedding-type rope --pipeline-model-parallel-size 2 "
            "--pipeline-model-parallel-layout Ett|tt|m|L",
            2,
            {"pp": 2},
            {"num_layers": 2, "mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|t||mL"},
        ),
        # one part of a stage holds all of its layers
        (
            "--num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2",
            4,
            {"pp": 2},
            {"num_layers": 2, "num_layers_per_virtual_pipeline_stage": None},
        ),
        # a frequency that does not divide the miniature's layers
        (
            "--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 15 --position-embedding-type rope "
            "--no-rope-freq 4",
            4,
            {"pp": 2},
            {"num_layers": 3, "no_rope_freq": "[0,1,0]"},
        ),
        # both kinds of layers
        (
            "--num-experts 8 --moe-layer-freq ([0]*47+[1])",
            1,
            {},
            {"num_layers": 2, "moe_layer_freq": "[0,1]", "num_experts": 4},
        ),
    ],
)
def test_structure_is_kept(flags: str, gpus: int, axes: dict[str, int], model: dict[str, Any], tmp_path: Path) -> None:
    (one,) = found(flags, gpus, tmp_path)
    assert dict(one.axes) == axes
    config = one.config()
    values = {name: value for group in config.to_dict().values() for name, value in group.items()}
    assert {name: values[name] for name in model} == model
    assert config.model.position_embedding_type == run_of(flags, gpus).model.position_embedding_type
    alone = one.alone().config()
    assert alone.layout.world_size == 1
    assert alone.global_batch_size == config.global_batch_size
    assert alone.model == config.model


def test_what_was_changed_stands_beside_what_the_run_has(tmp_path: Path) -> None:
    (one,) = found("--bf16 --hidden-dropout 0.1 --qk-layernorm", 1, tmp_path)
    assert one.changed["num_layers"] == (48, 2)
    assert one.changed["bf16"] == (True, False)
    assert one.changed["attention_dropout"] == (0.1, 0.0)
    assert "qk_layernorm" not in one.changed
    assert one.config().model.qk_layernorm
    assert one.config().model.hidden_dropout == 0.1
    assert one.rounded().config().precision.bf16


def test_checkpoints_have_and_give_their_optimizer_states_whatever_the_first_start_left_out(tmp_path: Path) -> None:
    (one,) = found(
        "--load c --save c --save-interval 9 --no-load-optim --no-load-rng --no-save-optim --no-save-rng", 1, tmp_path
    )
    names = ("no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng")
    settings = one.config().checkpoint
    assert not any(getattr(settings, name) for name in names)
    assert {one.changed[name] for name in names} == {(True, False)}
    lines = Proof(one.config(), [], results=[Result(one, Comparison())]).uncovered
    assert all(any(flag in line for line in lines) for flag in ("--no-load-optim", "--no-save-optim"))


@pytest.mark.parametrize(
    "flags",
    [
        "--swiglu",
        "--bf16 --grad-reduce-in-bf16",
        "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --use-distributed-optimizer",
        "--sft --train-iters 10",
        "--moe-router-topk 1 --moe-router-load-balancing-type sinkhorn --context-parallel-size 2",
    ],
)
def test_what_miniatures_set_is_accepted(flags: str, tmp_path: Path) -> None:
    (one,) = found(f"{flags} --num-experts 8 --moe-router-dtype fp32", 2, tmp_path)
    assert one.config().model.moe_router_dtype is None  # else a logit of fp32 differs by 1e-8 where it is rounded
    assert one.rounded().config().model.moe_router_dtype == "fp32"
