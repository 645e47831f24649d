"""What the settings of an architecture mean for the parts of a layer: sizes, rules, functions and norms."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from megalith.config import ModelConfig
from megalith.config.groups.lora import PROJECTIONS
from megalith.errors import ConfigError
from megalith.nn.attend import AttentionRule
from megalith.nn.attention import AttentionShape
from megalith.nn.feed_forward import Activation, FeedForward
from megalith.nn.latent_attention import LatentShape
from megalith.nn.lora import Lora
from megalith.nn.moe.balance import Auxiliary, Peers
from megalith.nn.moe.layer import MoE, MoESettings
from megalith.nn.moe.router import RouterSettings
from megalith.nn.moe.routing import RoutingRule
from megalith.nn.norm import build_norm
from megalith.nn.precision import FactoryKwargs
from megalith.nn.region import Region
from megalith.nn.rope import Interpolation, LongContext, RotationTable, Scaling, Yarn
from megalith.registry import Registered


def attention_shape(config: ModelConfig) -> AttentionShape:
    """Return the attention sizes of a configuration."""
    return AttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_groups=config.query_groups,
        head_size=config.head_size,
        dropout=config.attention_dropout,
        rotary_interleaved=config.rotary_interleaved,
        qk_norm=config.qk_norm,
        norm_epsilon=config.norm_epsilon,
        norm_around_one=config.apply_layernorm_1p,
        output_gate=config.attention_output_gate,
        softmax_type=config.softmax_type,
    )


def latent_shape(config: ModelConfig) -> LatentShape:
    """Return the sizes of multi-latent attention of a configuration."""
    return LatentShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        query_rank=config.q_lora_rank,
        rank=config.kv_lora_rank,
        nope_dim=config.qk_head_dim,
        rope_dim=config.qk_pos_emb_head_dim,
        value_size=config.v_head_dim,
        dropout=config.attention_dropout,
        latent_norm=config.normalization if config.qk_layernorm else "",
        norm_epsilon=config.norm_epsilon,
        norm_around_one=config.apply_layernorm_1p,
    )


def attention_rule(config: ModelConfig, layer: int, *, causal: bool = True) -> AttentionRule:
    """Return which keys a layer attends to and how; layers count from 0, and Megatron's scaling by layers from 1.

    The layers of multi-token prediction follow the rule of the last layer.
    """
    return AttentionRule(
        scale=_latent_scale(config) if config.multi_latent_attention else config.attention_scale,
        window=config.windows[min(layer, config.num_layers - 1)],
        layer_scaling=layer + 1 if config.apply_query_key_layer_scaling else 1,
        causal=causal,
    )


def _latent_scale(config: ModelConfig) -> float | None:
    """Return Megatron's scale of the scores: YaRN multiplies it by the square of the factor of `mscale_all_dim`."""
    if config.softmax_scale is not None or config.rotary_kind != "yarn" or config.rotary_scaling_factor <= 1.0:
        return config.softmax_scale
    growth = 0.1 * config.mscale_all_dim * math.log(config.rotary_scaling_factor) + 1.0
    return growth**2 / math.sqrt(config.latent_query_size)


def activation(config: ModelConfig) -> Activation:
    """Return the activation of the feed-forward layers of a configuration."""
    return Activation(config.activation, config.gated, config.glu_linear_offset, config.activation_func_clamp_value)


def length_before_yarn(config: ModelConfig) -> int:
    """Return the original context length; if it is not given, Megatron's multi-latent attention assumes DeepSeek's."""
    return config.yarn_original_max_position_embeddings or (
        4096 if config.multi_latent_attention else config.max_position_embeddings
    )


def for_any_batch(config: ModelConfig) -> tuple[ModelConfig, list[str]]:
    """Return the architecture without expert capacity and random routing, and notes about the changes.

    With a capacity, dropped tokens depend on the rest of the batch, and random routing (for benchmarks) differs from
    call to call: the output for a text would depend on other texts and on its division into steps.
    """
    notes, factor = [], config.moe_expert_capacity_factor
    if factor is not None:
        notes.append(f"--moe-expert-capacity-factor {factor:g} applies to training only: no token is dropped")
    if config.moe_router_force_load_balancing:
        notes.append(
            "--moe-router-force-load-balancing applies to training only: experts are selected by the router, which is "
            "untrained"
        )
    without = replace(
        config,
        moe_expert_capacity_factor=None,
        moe_pad_expert_input_to_capacity=False,
        moe_router_force_load_balancing=False,
    )
    return without, notes


def rotary_scaling(config: ModelConfig) -> Scaling | None:
    """Return the scaling of rotary positions for long sequences."""
    scaling: Scaling | None = None
    if config.rotary_kind == "own":
        return OwnFrequencies(config)
    if config.rotary_kind == "yarn":
        return Yarn(
            config.rotary_scaling_factor,
            length_before_yarn(config),
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


@dataclass(frozen=True)
class OwnFrequencies:
    """Frequencies of a registered position embedding, which replace those of RoPE."""

    config: ModelConfig
    amplitude: ClassVar[float] = 1.0

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies (`nn.rope.Scaling`).

        Raises:
            ConfigError: The function returns something else.
        """
        own = self.config.position_embedding_type
        assert isinstance(own, Registered)
        found = own(self.config, 2 * len(frequencies))
        if not isinstance(found, Tensor) or found.shape != frequencies.shape:
            shown = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(
                f"--position-embedding-type {own} returns {shown}; return a frequency for each pair of channels, "
                f"{list(frequencies.shape)}, in radians per position"
            )
        return found.to(frequencies)


def rotations(config: ModelConfig, dtype: torch.dtype) -> RotationTable:
    """Return the function of positions to rotary cosines and sines of a configuration."""
    return RotationTable(
        config.rotary_size,
        config.rotary_base,
        interleaved=config.rotary_interleaved or config.multi_latent_attention,
        dtype=dtype,
        scaling=rotary_scaling(config),
    )


def layer_norm(config: ModelConfig, **factory: Unpack[FactoryKwargs]) -> nn.Module:
    """Return the norm of hidden states of a configuration."""
    return build_norm(
        config.normalization, config.hidden_size, config.norm_epsilon, around_one=config.apply_layernorm_1p, **factory
    )


def lora(config: ModelConfig) -> tuple[Lora, Callable[[str], Sequence[int]]] | None:
    """Return the options of LoRA, and the function of names of linear layers to the parts that have an adapter."""
    if config.lora_rank is None:
        return None
    parts: dict[str, list[int]] = {}
    for name in config.lora_projections:
        module, part = PROJECTIONS[name]
        parts.setdefault(module, []).append(part if config.gated or name != "up_proj" else 0)

    def parts_of(name: str) -> Sequence[int]:
        found = re.fullmatch(r"decoder\.layers\.\d+\.(.+)", name)
        return parts.get(found[1], ()) if found else ()

    return Lora(config.lora_rank, config.lora_scale, config.lora_dropout), parts_of


_ROUTER_DTYPES = {None: None, "fp32": torch.float32, "fp64": torch.float64}


def mixture(config: ModelConfig) -> MoESettings:
    """Return the MoE options of a configuration."""
    assert config.num_experts
    rule = RoutingRule(
        experts=config.num_experts,
        top_k=config.moe_router_topk,
        score=config.moe_router_score_function,
        pre_softmax=config.moe_router_pre_softmax,
        groups=config.moe_router_num_groups,
        top_groups=config.moe_router_group_topk,
        scaling=config.moe_router_topk_scaling_factor,
        sinkhorn=config.chooses_by == "sinkhorn",
        quantiles=config.chooses_by == "quantile_balancing",
        capacity_factor=config.moe_expert_capacity_factor,
        drop_by_position=config.moe_token_drop_policy == "position",
        own=config.moe_router if isinstance(config.moe_router, Registered) else None,
    )
    router = RouterSettings(
        rule,
        balancing=config.balancing,
        z_coefficient=config.moe_z_loss_coeff,
        biased=config.moe_router_enable_expert_bias,
        jitter=config.moe_input_jitter_eps,
        dtype=_ROUTER_DTYPES[config.moe_router_dtype],
        bias=config.add_bias_linear,
        random=config.moe_router_force_load_balancing,
    )
    return MoESettings(
        router,
        config.expert_size,
        shared_size=config.moe_shared_expert_intermediate_size,
        shared_gate=config.moe_shared_expert_gate,
        latent_size=config.moe_latent_size,
        weigh_inputs=config.moe_apply_probs_on_input,
    )


def build_feed_forward(
    config: ModelConfig,
    layer: int,
    region: Region,
    peers: Peers,
    auxiliary: Auxiliary,
    recompute: Collection[str] = (),
    **factory: Unpack[FactoryKwargs],
) -> nn.Module:
    """Build the feed-forward layer of a block, a registered one if --mlp names it; arguments as of `Block`."""
    if isinstance(config.mlp, Registered):
        own: nn.Module = config.mlp(config, layer, region=region, **factory)
        return own
    if config.experts[min(layer, config.num_layers - 1)]:
        return MoE(
            mixture(config),
            layer,
            config.hidden_size,
            activation(config),
            region,
            peers,
            auxiliary,
            recompute,
            bias=config.add_bias_linear,
            **factory,
        )
    return FeedForward(
        config.hidden_size, config.ffn_size, activation(config), region, bias=config.add_bias_linear, **factory
    )
