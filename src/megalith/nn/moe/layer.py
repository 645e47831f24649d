"""The layer: tokens to their experts, through them, and back; optionally beside experts that take every token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from megalith.nn.feed_forward import Activation, FeedForward
from megalith.nn.linear import Linear
from megalith.nn.moe.balance import Auxiliary, Peers
from megalith.nn.moe.experts import Experts
from megalith.nn.moe.router import Router, RouterSettings
from megalith.nn.moe.routing import within_capacity
from megalith.nn.placement import Placement, Replicated
from megalith.nn.precision import FactoryKwargs, product_dtype
from megalith.nn.recompute import recomputed
from megalith.nn.region import Region, enter, leave


@dataclass(frozen=True)
class MoESettings:
    """The sizes of a mixture of experts.

    Attributes:
        ffn_size: F, width of one expert.
        shared_size: width of the expert that takes every token; none if None.
        shared_gate: its output is weighed by a sigmoid of a linear function of the token (Qwen2-MoE).
        latent_size: of the vectors that the experts take and give, which linear layers make of hidden states and turn
            back into some; hidden states themselves if None. Router and shared expert take those in any case.
        weigh_inputs: what an expert takes is multiplied by the weight of the choice, not what it computes.
    """

    router: RouterSettings
    ffn_size: int
    shared_size: int | None = None
    shared_gate: bool = False
    latent_size: int | None = None
    weigh_inputs: bool = False


class MoE(nn.Module):
    """A mixture of experts in place of a feed-forward layer, [S, B, D] -> [S, B, D].

    Args:
        region: the ranks that share the layer, and each expert unless `peers` knows others that do.
        peers: the ranks that hold other tokens, and perhaps other experts.
        recompute: parts that are computed again in the backward pass: moe_act, shared_experts.
    """

    def __init__(
        self,
        settings: MoESettings,
        layer: int,
        hidden_size: int,
        activation: Activation,
        region: Region,
        peers: Peers,
        auxiliary: Auxiliary,
        recompute: Collection[str] = (),
        *,
        bias: bool,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.settings, self.dispatcher = settings, peers.dispatcher
        self.region, self.recompute_shared = peers.region_of_experts or region, "shared_experts" in recompute
        self.router = Router(settings.router, layer, hidden_size, region, peers, auxiliary, **factory)
        self.fc1_latent_proj: Linear | None = None
        self.fc2_latent_proj: Linear | None = None
        expert_input = hidden_size if settings.latent_size is None else settings.latent_size
        if settings.latent_size is not None:
            projection = partial(Linear, placement=Replicated(), bias=bias, **factory)
            self.fc1_latent_proj = projection(hidden_size, expert_input)
            self.fc2_latent_proj = projection(expert_input, hidden_size)
        total = settings.router.rule.experts
        self.experts = Experts(
            self.dispatcher.local_experts(total),
            total,
            expert_input,
            settings.ffn_size,
            activation,
            self.region,
            bias=bias,
            inner_again="moe_act" in recompute,
            weigh_inputs=settings.weigh_inputs,
            **factory,
        )
        self.shared_experts = (
            None
            if settings.shared_size is None
            else SharedExpert(
                hidden_size, settings.shared_size, activation, region, gated=settings.shared_gate, bias=bias, **factory
            )
        )

    def forward(self, x_SBD: Tensor) -> Tensor:
        choice, rule = self.router(x_SBD), self.settings.router.rule
        kept_TK = None if rule.capacity_factor is None else within_capacity(choice, rule)
        experts_TK = choice.experts_TK if kept_TK is None else choice.experts_TK.where(kept_TK, rule.experts)
        whole_SBD = enter(x_SBD if self.fc1_latent_proj is None else self.fc1_latent_proj(x_SBD), self.region)
        weights_TK = enter(choice.weights_TK, self.region)
        experts_TK = self.region.gather(experts_TK).wait()
        whole_TD = whole_SBD.reshape(-1, whole_SBD.shape[-1])
        dispatched = self.dispatcher.dispatch(whole_TD, experts_TK, weights_TK, rule.experts)
        rows_ND = self.experts(dispatched.rows_ND, dispatched.counts, dispatched.weights_N)
        y_SBD = leave(dispatched.combine(rows_ND).view_as(whole_SBD), self.region)
        y_SBD = y_SBD if self.fc2_latent_proj is None else self.fc2_latent_proj(y_SBD)
        return y_SBD if self.shared_experts is None else y_SBD + self._shared(self.shared_experts, x_SBD)

    def _shared(self, experts: SharedExpert, x_SBD: Tensor) -> Tensor:
        if self.recompute_shared and self.training and torch.is_grad_enabled():
            return recomputed(experts, x_SBD, region=experts.region)
        found: Tensor = experts(x_SBD)
        return found


class SharedExpert(FeedForward):
    """A feed-forward layer for every token, weighed by a gate where there is one."""

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        activation: Activation,
        region: Region,
        *,
        gated: bool,
        bias: bool,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__(hidden_size, ffn_size, activation, region, bias=bias, **factory)
        self.gate_weight = nn.Parameter(torch.empty(1, hidden_size, **factory)) if gated else None

    def placements(self) -> dict[str, Placement]:
        """Return the placement of the gate: whole on every rank."""
        return {} if self.gate_weight is None else {"gate_weight": Replicated()}

    def forward(self, x_SBD: Tensor) -> Tensor:
        y_SBD = super().forward(x_SBD)
        if self.gate_weight is None:
            return y_SBD
        dtype = product_dtype(x_SBD)
        gate_SB1 = torch.nn.functional.linear(x_SBD.to(dtype), self.gate_weight.to(dtype)).to(x_SBD.dtype)
        return y_SBD * torch.sigmoid(gate_SB1)
