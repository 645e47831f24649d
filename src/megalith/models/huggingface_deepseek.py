"""DeepSeek-V3 of Hugging Face: multi-latent attention and experts that tokens choose by sigmoids, in groups.

Their config.json and the names of their tensors. Layers of multi-token prediction follow the
others, with the embedding and the output layer once more in each; the class of transformers passes over them. A folder
may lack what `num_nextn_predict_layers` says, as when that class has written it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from megalith.config import ModelConfig
from megalith.models import huggingface_tensors as tensors
from megalith.models.huggingface_experts import expert_tensors, our_layer
from megalith.models.huggingface_family import Family, Reading
from megalith.models.huggingface_positions import rope_scaling, rotary
from megalith.models.huggingface_tensors import LLAMA_ENDS, LLAMA_LAYER, TheirTensor
from megalith.models.language_model import WORD_EMBEDDINGS

NEXT = "num_nextn_predict_layers"
_KIND = "deepseek_v3"
_ABSENT: dict[str, Any] = {
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "n_shared_experts": 1,
}
"""What a key that is not in config.json means."""
_LATENT_EPSILON = 1e-6  # of the norms of latent vectors, whatever rms_norm_eps says
_BEST_OF_A_GROUP = 2  # number of scores that are summed for a group

_SETTINGS = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
}
"""Sizes: their key -> our setting."""

_PROJECTIONS = {
    "q_proj": "linear_q_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}
"""Modules of attention: their name -> ours, in the order of their `state_dict`."""


class _DeepSeek(Family):
    def read(self, reading: Reading) -> ModelConfig:
        for key in ("ep_size", "aux_loss_alpha", "seq_aux", "num_mtp_layers", "qk_head_dim"):
            reading.get(key)
        reading.get("head_dim")  # theirs is that of the channels that positions turn
        for key, value in (
            ("hidden_act", "silu"),
            ("scoring_func", "sigmoid"),
            ("topk_method", "noaux_tc"),
            ("moe_layer_freq", 1),
            ("rope_interleave", True),
            ("norm_topk_prob", True),
            ("attention_bias", False),
            ("rms_norm_eps", _LATENT_EPSILON),
        ):
            reading.only(key, value, default=value)
        sizes: dict[str, Any] = {
            ours: reading.size(key)
            for key, ours in _SETTINGS.items()
            if key != "q_lora_rank" or reading.get(key) is not None
        }
        heads, layers = sizes["num_attention_heads"], sizes["num_layers"]
        if reading.size("num_key_value_heads", heads) != heads:
            reading.problems.append(
                f"num_key_value_heads is not num_attention_heads ({heads}), which latent vectors make"
            )
        ahead = reading.get(NEXT) or 0
        if not isinstance(ahead, int) or ahead < 0:
            reading.problems.append(f"{NEXT} is {ahead!r}; it must be a number of layers")
            ahead = 0
        shared, scale = reading.size("n_shared_experts"), reading.number("routed_scaling_factor")
        return ModelConfig(
            **sizes,
            **_positions(reading, sizes["max_position_embeddings"]),
            **_choice(reading, sizes["moe_router_topk"]),
            mtp_num_layers=ahead or None,
            num_experts=reading.size("num_local_experts", reading.size("n_routed_experts")),
            moe_layer_freq=_frequency(reading, layers),
            moe_shared_expert_intermediate_size=shared * sizes["moe_ffn_hidden_size"],
            moe_router_topk_scaling_factor=scale,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_dtype="fp32",
            multi_latent_attention=True,
            qk_layernorm=True,
            normalization="RMSNorm",
            norm_epsilon=_LATENT_EPSILON,
            swiglu=True,
            add_bias_linear=False,
            untie_embeddings_and_output_weights=not reading.flag("tie_word_embeddings"),
            hidden_dropout=0.0,
            attention_dropout=reading.probability("attention_dropout", 0.0),
            init_method_std=reading.probability("initializer_range", 0.02),
        )

    def unlike(self, model: ModelConfig) -> tuple[dict[str, Any], dict[str, bool]]:
        wanted = {
            "mixture": True,
            "predictions": model.predictions,
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "normalization": "RMSNorm",
            "norm_epsilon": _LATENT_EPSILON,
            "activation": "silu",
            "gated": True,
            "add_bias_linear": False,
            "position_embedding_type": "rope",
            "rotary_percent": 1.0,
            "window_size": None,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_shared_expert_gate": False,
            "moe_expert_capacity_factor": None,
        }
        if not model.mixture:
            return wanted, {}
        dense = model.experts.count(0)
        shared = model.moe_shared_expert_intermediate_size or 0
        groups = model.moe_router_group_topk
        fits = {
            "experts in all layers after the first dense ones": not any(model.experts[:dense]),
            "experts that take every token": shared > 0 and shared % model.expert_size == 0,
            "experts of hidden states": model.moe_latent_size is None,
            "a choice by scores and biases alone": not model.chooses_by,
            "several experts for a token": model.moe_router_topk > 1,
            "groups chosen by two scores": groups is None or model.moe_router_topk // groups == _BEST_OF_A_GROUP,
        }
        return wanted, fits

    def config_of(self, model: ModelConfig, eod: int | None, special: Mapping[str, int]) -> dict[str, Any]:
        sizes = {key: getattr(model, ours) for key, ours in _SETTINGS.items()}
        return {
            **sizes,
            "attention_bias": False,
            "attention_dropout": model.attention_dropout,
            "first_k_dense_replace": model.experts.count(0),
            "hidden_act": "silu",
            "intermediate_size": model.ffn_size,
            "moe_intermediate_size": model.expert_size,
            "n_group": model.moe_router_num_groups or 1,
            "n_routed_experts": model.num_experts,
            "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // model.expert_size,
            "norm_topk_prob": True,
            "num_key_value_heads": model.num_attention_heads,
            NEXT: model.predictions,
            "rms_norm_eps": model.norm_epsilon,
            "rope_interleave": True,
            "rope_scaling": rope_scaling(model),
            "rope_theta": float(model.rotary_base),
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
            "scoring_func": "sigmoid",
            "topk_group": model.moe_router_group_topk or 1,
            "topk_method": "noaux_tc",
        }

    def tensors(self, model: ModelConfig, vocab_size: int) -> Iterator[TheirTensor]:
        ahead = (_prediction(model, depth, vocab_size) for depth in range(model.predictions))
        return tensors.of_decoder(model, vocab_size, LLAMA_ENDS, _layer, chain.from_iterable(ahead))

    def settled(self, model: ModelConfig, names: Collection[str]) -> ModelConfig:
        """Drop the layers of multi-token prediction if the files lack them: transformers writes none."""
        behind = f"{LLAMA_LAYER}{model.num_layers}."
        if not model.predictions or any(name.startswith(behind) for name in names):
            return model
        return replace(model, mtp_num_layers=None)


def _positions(reading: Reading, positions: int) -> dict[str, Any]:
    found = rotary(reading, positions)
    if found.get("use_rope_scaling") or found.get("rotary_seq_len_interpolation_factor"):
        reading.problems.append("the rope of DeepSeek is read without scaling or with that of yarn")
    yarn = found.get("position_embedding_type") == "yarn"
    return {**found, "position_embedding_type": "rope", "rope_type": "yarn" if yarn else "rope"}


def _choice(reading: Reading, top_k: int) -> dict[str, Any]:
    """Return the settings of group-limited routing, where each group counts with its two best scores."""
    groups, best = reading.size("n_group", 1), reading.size("topk_group", 1)
    if top_k < 2:
        reading.problems.append("num_experts_per_tok is 1; the weight of a single expert is not read")
    if groups == 1:
        return {}
    if top_k // best != _BEST_OF_A_GROUP:
        reading.problems.append(
            f"num_experts_per_tok {top_k} with topk_group {best}; this version has {_BEST_OF_A_GROUP} experts a group"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": best}


def _frequency(reading: Reading, layers: int) -> str:
    dense = reading.get("first_k_dense_replace") or 0
    if not isinstance(dense, int) or not 0 <= dense < layers:
        reading.problems.append(f"first_k_dense_replace is {dense!r}; it must be from 0 to {layers - 1}")
        return "1"
    return str([0] * dense + [1] * (layers - dense)) if dense else "1"


def _prediction(model: ModelConfig, depth: int, vocab_size: int) -> Iterator[TheirTensor]:
    number, hidden = model.num_layers + depth, model.hidden_size
    theirs, ours, table = f"{LLAMA_LAYER}{number}.", f"mtp.layers.{depth}.", (vocab_size, hidden)
    output = "output_layer.weight" if model.untie_embeddings_and_output_weights else WORD_EMBEDDINGS
    yield replace(tensors.whole(f"{theirs}embed_tokens.weight", table, WORD_EMBEDDINGS), again=True)
    for name in ("enorm", "hnorm"):
        yield from tensors.norm(f"{theirs}{name}", (hidden,), f"{ours}{name}", bias=False)
    yield tensors.whole(f"{theirs}eh_proj.weight", (hidden, 2 * hidden), f"{ours}eh_proj.weight")
    yield from _layer(model, number)
    yield from tensors.norm(f"{theirs}shared_head.norm", (hidden,), f"{ours}final_layernorm", bias=False)
    yield replace(tensors.whole(f"{theirs}shared_head.head.weight", table, output), again=True)


def _layer(model: ModelConfig, layer: int) -> Iterator[TheirTensor]:
    theirs, hidden = f"{LLAMA_LAYER}{layer}.", model.hidden_size
    ours, experts = our_layer(model, layer)
    heads, queries = model.num_attention_heads, model.num_attention_heads * model.latent_query_size
    rank, turned = model.kv_lora_rank, model.qk_pos_emb_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (rank + turned, hidden),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (model.qk_head_dim + model.v_head_dim), rank),
        "o_proj": (hidden, heads * model.v_head_dim),
    }
    if model.q_lora_rank is None:
        shapes["q_proj"] = (queries, hidden)
    else:
        of_queries = {"q_a_proj": (model.q_lora_rank, hidden), "q_b_proj": (queries, model.q_lora_rank)}
        shapes |= {**of_queries, "q_a_layernorm": (model.q_lora_rank,)}
    for name, parameter in _PROJECTIONS.items():
        if name in shapes:
            yield tensors.whole(
                f"{theirs}self_attn.{name}.weight", shapes[name], f"{ours}self_attention.{parameter}.weight"
            )
    if experts:
        yield from expert_tensors(_KIND, model, layer)
        bias = (experts,)
        yield tensors.whole(f"{theirs}mlp.gate.e_score_correction_bias", bias, f"{ours}mlp.router.expert_bias")
        size = model.moe_shared_expert_intermediate_size
        assert size is not None, "a rule of the family"
        yield from tensors.gated(f"{theirs}mlp.shared_experts.", f"{ours}mlp.shared_experts.", model, size)
    else:
        yield from tensors.gated(f"{theirs}mlp.", f"{ours}mlp.", model, model.ffn_size)
    yield from tensors.norm(f"{theirs}input_layernorm", (hidden,), f"{ours}input_layernorm", bias=False)
    yield from tensors.norm(f"{theirs}post_attention_layernorm", (hidden,), f"{ours}pre_mlp_layernorm", bias=False)


FAMILIES = (_DeepSeek(_KIND, "DeepseekV3ForCausalLM", _ABSENT),)
