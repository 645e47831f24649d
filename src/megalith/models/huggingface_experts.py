"""Mixtures of experts of Hugging Face: Mixtral and Qwen3-MoE, their configuration and the names of their tensors.

The weights of a token's experts are a softmax over those that it chose (Mixtral, and Qwen3-MoE with `norm_topk_prob`),
or over all. Files hold each expert separately, as on the hub; transformers 5 stacks them while loading.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megalith.config import ModelConfig
from megalith.models import huggingface_tensors as tensors
from megalith.models.huggingface_family import Reading, short
from megalith.models.huggingface_tensors import LLAMA_LAYER, OUR_LAYER, Part, TheirTensor

_PROJECTIONS = (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down"))
_NAMES = {
    "mixtral": ("block_sparse_moe", (("w1", "gate"), ("w2", "down"), ("w3", "up"))),
    "qwen3_moe": ("mlp", _PROJECTIONS),
    "deepseek_v3": ("mlp", _PROJECTIONS),
}
"""By `model_type` the mixture in its layer, and the projections of an expert in the order of the `state_dict`."""

ABSENT: dict[str, dict[str, Any]] = {
    "mixtral": {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "router_aux_loss_coef": 0.001,
    },
}
"""What a key that is not in config.json means."""


def read(reading: Reading, kind: str, layers: int) -> dict[str, Any]:
    """Read the MoE settings."""
    reading.get("output_router_logits")
    former = reading.size("num_experts") if kind == "qwen3_moe" else None  # its name before transformers 5
    coefficient = reading.get("router_aux_loss_coef")
    usable = isinstance(coefficient, int | float) and not isinstance(coefficient, bool) and coefficient >= 0
    settings: dict[str, Any] = {
        "num_experts": reading.size("num_local_experts", former),
        "moe_router_topk": reading.size("num_experts_per_tok"),
        "moe_aux_loss_coeff": (float(coefficient) if usable else 0.0,),
    }
    if kind == "mixtral":
        jitter = reading.get("router_jitter_noise")
        usable = isinstance(jitter, float) and 0 < jitter < 1
        return settings | ({"moe_input_jitter_eps": jitter} if usable else {})
    reading.only("use_sliding_window", False, default=False)
    for idle in ("sliding_window", "max_window_layers"):
        reading.get(idle)
    return settings | {
        "moe_ffn_hidden_size": reading.size("moe_intermediate_size"),
        "moe_router_pre_softmax": not reading.flag("norm_topk_prob"),
        "moe_layer_freq": _frequency(reading, layers),
    }


def _frequency(reading: Reading, layers: int) -> str:
    step, dense = reading.size("decoder_sparse_step", 1), reading.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        reading.problems.append(f"mlp_only_layers is {short(dense)}; it must be a list of numbers of layers")
        dense = []
    marks = [int((layer + 1) % step == 0 and layer not in dense) for layer in range(layers)]
    if not any(marks):
        reading.problems.append(f"mlp_only_layers and decoder_sparse_step {step} leave no layer with experts")
    return "1" if all(marks) else str(marks)


def unlike(model: ModelConfig, kind: str) -> dict[str, bool]:
    """Return the features of a family, in words -> whether a model has them too."""
    fits = {
        "weights that are a softmax": model.moe_router_score_function == "softmax"
        and model.moe_router_topk_scaling_factor is None
        and model.moe_router_group_topk is None
        and not model.chooses_by,
        "experts of hidden states": model.moe_latent_size is None and not model.moe_apply_probs_on_input,
        "experts without a capacity": model.moe_expert_capacity_factor is None,
        "no expert that takes every token": model.moe_shared_expert_intermediate_size is None,
    }
    if kind == "mixtral":
        return fits | {
            "experts in every layer": all(model.experts),
            "experts as wide as --ffn-hidden-size": model.expert_size == model.ffn_size,
            "a softmax over the chosen experts": not model.moe_router_pre_softmax,
        }
    return fits


def config_of(model: ModelConfig, kind: str) -> dict[str, Any]:
    """Return the MoE keys of config.json."""
    common = {
        "num_experts_per_tok": model.moe_router_topk,
        "output_router_logits": False,
        "router_aux_loss_coef": model.balancing.get("aux_loss", 0.0),
    }
    if kind == "mixtral":
        return {**common, "num_local_experts": model.num_experts}
    return {
        **common,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, experts in enumerate(model.experts) if not experts],
        "moe_intermediate_size": model.expert_size,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "num_experts": model.num_experts,
        "use_sliding_window": False,
    }


def our_layer(model: ModelConfig, layer: int) -> tuple[str, int]:
    """Return the prefix of our names of a layer, and its experts; those of prediction are like the last one."""
    ahead = layer - model.num_layers
    prefix = f"{OUR_LAYER}{layer}." if ahead < 0 else f"mtp.layers.{ahead}.transformer_layer."
    return prefix, model.experts[min(layer, model.num_layers - 1)]


def expert_tensors(kind: str, model: ModelConfig, layer: int) -> Iterator[TheirTensor]:
    theirs, (prefix, experts) = f"{LLAMA_LAYER}{layer}.", our_layer(model, layer)
    ours, hidden, size = f"{prefix}mlp.", model.hidden_size, model.expert_size
    module, projections = _NAMES[kind]
    yield tensors.whole(f"{theirs}{module}.gate.weight", (experts, hidden), f"{ours}router.weight")
    for expert in range(experts):
        local = f"{ours}experts.local_experts.{expert}."
        for projection, part in projections:
            name = f"{theirs}{module}.experts.{expert}.{projection}.weight"
            if part == "down":
                yield tensors.whole(name, (hidden, size), f"{local}linear_fc2.weight")
            else:
                start = size if part == "up" else 0
                yield TheirTensor(name, (size, hidden), (Part(f"{local}linear_fc1.weight", 0, start, size),))
