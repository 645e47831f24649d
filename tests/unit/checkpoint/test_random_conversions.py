"""Models of options drawn at random go through chains of formats and layouts drawn at random, and nothing changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from megalith.checkpoint.convert import ConversionOptions, convert
from megalith.checkpoint.diff import compared, tensor_differences
from megalith.checkpoint.sources.source import open_source
from megalith.checkpoint.store.store import locate
from megalith.errors import CheckpointError

from .memory_source import ARGS, MemorySource, model_source
from .test_convert import written

HOPS = 4


def draw_model(random: random.Random) -> dict[str, Any]:
    """Megatron's arguments of a small model whose parts divide by two and four."""
    args = {
        **ARGS,
        "num_layers": random.choice((4, 4, 8)),
        "normalization": random.choice(("LayerNorm", "RMSNorm")),
        "swiglu": random.random() < 0.5,
        "add_bias_linear": random.random() < 0.5,
        "add_qkv_bias": random.random() < 0.5,
        "qk_layernorm": random.random() < 0.4,
        "position_embedding_type": random.choice(("rope", "learned_absolute", "none")),
        "untie_embeddings_and_output_weights": random.random() < 0.5,
        "group_query_attention": random.random() < 0.5,
        "params_dtype": random.choice(("float32", "bfloat16", "float16")),
        "transformer_impl": random.choice(("local", "transformer_engine")),
        "use_distributed_optimizer": random.random() < 0.5,
        "padded_vocab_size": random.choice((48, 64)),
    }
    args["num_query_groups"] = random.choice((1, 2, 4)) if args["group_query_attention"] else 4
    if random.random() < 0.35:
        args |= {"multi_latent_attention": True, "position_embedding_type": "rope", "group_query_attention": False}
        args |= {"q_lora_rank": random.choice((None, 8)), "kv_lora_rank": 8, "qk_head_dim": 8, "num_query_groups": 4}
        args |= {"qk_pos_emb_head_dim": 4, "v_head_dim": 8}
    if random.random() < 0.5:
        args |= {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
        args["moe_layer_freq"] = random.choice((1, [0, 1] * (args["num_layers"] // 2)))
        args["moe_router_enable_expert_bias"] = random.random() < 0.4
        args |= {"moe_router_score_function": "sigmoid"} if args["moe_router_enable_expert_bias"] else {}
        args |= {"moe_latent_size": 6} if random.random() < 0.3 else {}
        if not args["moe_router_enable_expert_bias"] and random.random() < 0.3:
            args["moe_router_load_balancing_type"] = "quantile_balancing"
        if not args["add_bias_linear"] and random.random() < 0.5:
            args |= {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": random.random() < 0.5}
    if random.random() < 0.3:
        args["mtp_num_layers"] = random.choice((1, 2))
        args["position_embedding_type"] = "rope"  # positions that are learned have no stages beside it
    return args


def draw_form(random: random.Random, args: dict[str, Any]) -> ConversionOptions:
    """A format and a layout."""
    pp = random.choice((1, 2, 4))
    most = 2 if args["num_query_groups"] == 1 else 4
    ep = random.choice((1, 2, 4)) if args.get("num_experts") else 1
    run_args: dict[str, Any] = dict.fromkeys(
        (
            *("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size"),
            *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
            "pipeline_model_parallel_layout",
        )
    )
    if pp == 2 and random.random() < 0.5:
        run_args |= {"num_virtual_stages_per_pipeline_rank": 2, "virtual_pipeline_model_parallel_size": 2}
    elif pp == 2 and random.random() < 0.5:
        run_args |= {"decoder_first_pipeline_num_layers": 1}
    elif pp == 2 and random.random() < 0.5:
        layout = f"E|t*{args['num_layers'] - 1}|t|{'m' * args.get('mtp_num_layers', 0)}L"
        run_args |= {"pipeline_model_parallel_layout": layout, "virtual_pipeline_model_parallel_size": 2}
    elif pp == 4 and args["num_layers"] == 8 and random.random() < 0.5:
        run_args |= {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}
    kind = random.choice(("torch_dist", "torch"))
    return ConversionOptions(format=kind, tp=random.choice((1, 2, most)), pp=pp, ep=ep, run_args=run_args)


def drawn_source(args: dict[str, Any], seed: int) -> MemorySource:
    """A model whose bias or offset for the choice of experts, which no optimizer moves, has fp32 and no moments."""
    source = model_source(args, seed=seed)
    for key in [key for key in source.tensors if key.endswith((".router.expert_bias", ".router.qb_beta"))]:
        tensor = source.tensors.pop(key)
        if not key.startswith("optimizer."):
            source.tensors[key] = tensor.float()
    return source


def differences(one: Path, other: Path) -> list[str]:
    sources = [compared(open_source(locate(path)), weights=False) for path in (one, other)]
    return [str(item) for item in tensor_differences(*sources) if not item.is_none]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 60))])
def test_nothing_is_lost_on_the_way(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(f"conversions {seed}")
    args = draw_model(drawn)
    first = here = written(drawn_source(args, seed), tmp_path / "first")
    for hop in range(HOPS):
        form = draw_form(drawn, args)
        there = tmp_path / str(hop)
        convert(here, there, form)
        assert differences(first, there) == [], f"hop {hop} to {form}: {args}"
        here = there


def test_learned_positions_beside_prediction_have_no_stages(tmp_path: Path) -> None:
    """As in training: the last stage would have a second table of positions."""
    args = {**ARGS, "mtp_num_layers": 1, "position_embedding_type": "learned_absolute"}
    here = written(drawn_source(args, 0), tmp_path / "first")
    with pytest.raises(CheckpointError, match=r"--mtp-num-layers.*learned_absolute.*--pp 2"):
        convert(here, tmp_path / "second", ConversionOptions(pp=2))
