"""Which feed-forward layer a configuration means: a dense one, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Collection

import torch
from typing_extensions import Unpack

from megalith.config import ModelConfig
from megalith.models.layer_options import activation
from megalith.nn.feed_forward import FeedForward
from megalith.nn.moe.balance import Auxiliary, Peers
from megalith.nn.moe.layer import MoE, MoESettings
from megalith.nn.moe.router import RouterSettings
from megalith.nn.moe.routing import RoutingRule
from megalith.nn.precision import FactoryKwargs
from megalith.nn.region import Region

_ROUTER_DTYPES = {None: None, "fp32": torch.float32, "fp64": torch.float64}


def mixture(config: ModelConfig) -> MoESettings:
    """The mixture of experts that a configuration means."""
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
) -> FeedForward | MoE:
    """Build the feed-forward layer of a block; arguments as of `Block`."""
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
