"""What the settings of an architecture mean for the parts of a layer: sizes, rules, functions and norms."""

from __future__ import annotations

import math

import torch
from torch import nn
from typing_extensions import Unpack

from megalith.config import ModelConfig
from megalith.nn.attend import AttentionRule
from megalith.nn.attention import AttentionShape
from megalith.nn.feed_forward import Activation
from megalith.nn.latent_attention import LatentShape
from megalith.nn.norm import build_norm
from megalith.nn.precision import FactoryKwargs
from megalith.nn.rope import Interpolation, LongContext, RotationTable, Scaling, Yarn


def attention_shape(config: ModelConfig) -> AttentionShape:
    """The attention sizes that a configuration means."""
    return AttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_groups=config.query_groups,
        head_size=config.head_size,
        dropout=config.attention_dropout,
        rotary_interleaved=config.rotary_interleaved,
        head_norm=config.head_norm,
        norm_epsilon=config.norm_epsilon,
        norm_around_one=config.apply_layernorm_1p,
        output_gate=config.attention_output_gate,
        softmax_type=config.softmax_type,
    )


def latent_shape(config: ModelConfig) -> LatentShape:
    """The sizes of multi-latent attention that a configuration means."""
    return LatentShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        query_rank=config.q_lora_rank,
        rank=config.kv_lora_rank,
        still_size=config.qk_head_dim,
        turned_size=config.qk_pos_emb_head_dim,
        value_size=config.v_head_dim,
        dropout=config.attention_dropout,
        latent_norm=config.normalization if config.qk_layernorm else "",
        norm_epsilon=config.norm_epsilon,
        norm_around_one=config.apply_layernorm_1p,
    )


def attention_rule(config: ModelConfig, layer: int, *, causal: bool = True) -> AttentionRule:
    """Which keys a layer attends to and how; layers count from 0, and Megatron's scaling by layers from 1.

    Those behind the last one, of multi-token prediction, are like it.
    """
    return AttentionRule(
        scale=_latent_scale(config) if config.multi_latent_attention else config.attention_scale,
        window=config.windows[min(layer, config.num_layers - 1)],
        layer_scaling=layer + 1 if config.apply_query_key_layer_scaling else 1,
        causal=causal,
    )


def _latent_scale(config: ModelConfig) -> float | None:
    """Megatron's: YaRN makes the scores of all channels greater by the square of what `mscale_all_dim` says."""
    if config.softmax_scale is not None or config.rotary_kind != "yarn" or config.rotary_scaling_factor <= 1.0:
        return config.softmax_scale
    growth = 0.1 * config.mscale_all_dim * math.log(config.rotary_scaling_factor) + 1.0
    return growth**2 / math.sqrt(config.latent_query_size)


def activation(config: ModelConfig) -> Activation:
    """What lies between the projections of the feed-forward layers."""
    return Activation(config.activation, config.gated, config.glu_linear_offset, config.activation_func_clamp_value)


def _length_before(config: ModelConfig) -> int:
    """Where it is not given; Megatron's multi-latent attention supposes the one of DeepSeek."""
    return 4096 if config.multi_latent_attention else config.max_position_embeddings


def rotary_scaling(config: ModelConfig) -> Scaling | None:
    """How a configuration stretches positions for long sequences."""
    scaling: Scaling | None = None
    if config.rotary_kind == "yarn":
        return Yarn(
            config.rotary_scaling_factor,
            config.yarn_original_max_position_embeddings or _length_before(config),
            config.rotary_base,
            beta_fast=config.yarn_beta_fast or 32.0,
            beta_slow=config.yarn_beta_slow or 1.0,
            mscale=config.mscale,
            mscale_all_dim=config.mscale_all_dim,
            rounded=config.yarn_correction_range_round_to_int,
        )
    if config.use_rope_scaling:
        scaling = LongContext(config.rope_scaling_factor)
    if config.rotary_seq_len_interpolation_factor is not None:
        scaling = Interpolation(config.rotary_seq_len_interpolation_factor, scaling)
    return scaling


def rotations(config: ModelConfig, dtype: torch.dtype) -> RotationTable:
    """How a configuration turns the heads of each position."""
    return RotationTable(
        config.rotary_size,
        config.rotary_base,
        interleaved=config.rotary_interleaved or config.multi_latent_attention,
        dtype=dtype,
        scaling=rotary_scaling(config),
    )


def layer_norm(config: ModelConfig, **factory: Unpack[FactoryKwargs]) -> nn.Module:
    """The norm of hidden states that a configuration means."""
    return build_norm(
        config.normalization, config.hidden_size, config.norm_epsilon, around_one=config.apply_layernorm_1p, **factory
    )
