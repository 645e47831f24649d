"""The layer: tokens to their experts, through them, and back; optionally beside experts that take every token."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalith.nn.feed_forward import Activation, FeedForward
from megalith.nn.moe.balance import Auxiliary, Peers
from megalith.nn.moe.permutation import from_experts, order_by_expert, to_experts
from megalith.nn.moe.router import Router, RouterSettings
from megalith.nn.moe.routing import within_capacity
from megalith.nn.placement import Placement, Replicated, Shard
from megalith.nn.region import Pending, Ready, Region, enter, leave


@dataclass(frozen=True)
class MoESettings:
    """The sizes of a mixture of experts.

    Attributes:
        router: how tokens choose.
        ffn_size: F, width of one expert.
        shared_size: width of the expert that takes every token; none if None.
        shared_gate: its output is weighed by a sigmoid of a linear function of the token (Qwen2-MoE).
    """

    router: RouterSettings
    ffn_size: int
    shared_size: int | None = None
    shared_gate: bool = False


class Inside:
    """A region whose movements are done around what is computed inside: layers are sharded, and nothing moves."""

    partial_gradients = False

    def __init__(self, region: Region) -> None:
        self._region = region
        self.size, self.index = region.size, region.index

    def shard(self, extent: int, *, even: bool = True, share: bool = False) -> Shard:
        return self._region.shard(extent, even=even, share=share)

    def spread(self, x: Tensor) -> Pending:
        return Ready(x)

    def collect(self, x: Tensor) -> Pending:
        return Ready(x)

    def largest(self, x: Tensor) -> Tensor:
        return self._region.largest(x)

    def total(self, x: Tensor) -> Tensor:
        return self._region.total(x)

    def own_sequence(self, x: Tensor, dim: int = 0) -> Tensor:
        return x

    def hidden_draws(self, dropout: float) -> AbstractContextManager[None]:
        return self._region.hidden_draws(dropout)

    def own_draws(self, dropout: float) -> AbstractContextManager[None]:
        return self._region.own_draws(dropout)

    def replay(self) -> AbstractContextManager[None]:
        return self._region.replay()


class Experts(nn.Module):
    """The experts that are here, [N, D] -> [N, D], rows in their order; each a feed-forward layer.

    Parameters are named `local_experts.K`, K counted from 0 on each rank, as in Megatron.

    Args:
        here: the numbers of these experts among all of the layer.
        total: how many the layer has on all ranks.

    Attributes:
        first: the number of expert `local_experts.0` among all.
        total: how many experts the layer has on all ranks.
    """

    def __init__(
        self,
        here: range,
        total: int,
        hidden_size: int,
        ffn_size: int,
        activation: Activation,
        region: Region,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.first, self.total = here.start, total
        self.local_experts = nn.ModuleList(
            FeedForward(hidden_size, ffn_size, activation, region, bias=bias, dtype=dtype, device=device) for _ in here
        )

    def forward(self, x_ND: Tensor, counts: list[int], weights_N: Tensor) -> Tensor:
        """Expert k computes its `counts[k]` rows; the inner state of each row is multiplied by its weight."""
        parts = zip(self.local_experts, x_ND.split(counts), weights_N.split(counts), strict=True)
        return torch.cat([expert(part, weights_SB=weights) for expert, part, weights in parts])


class MoE(nn.Module):
    """A mixture of experts in place of a feed-forward layer, [S, B, D] -> [S, B, D].

    Args:
        settings: sizes and router.
        layer: number of the layer in the model.
        hidden_size: D.
        activation: of the experts.
        region: the ranks that share each expert.
        peers: the ranks that hold other tokens.
        auxiliary: where balancing losses join the backward pass.
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
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.settings, self.region = settings, region
        self.router = Router(settings.router, layer, hidden_size, region, peers, auxiliary, dtype=dtype, device=device)
        inside = region if region.size == 1 else Inside(region)
        total = settings.router.rule.experts
        self.experts = Experts(
            range(total),
            total,
            hidden_size,
            settings.ffn_size,
            activation,
            inside,
            bias=bias,
            dtype=dtype,
            device=device,
        )
        self.shared_experts = (
            None
            if settings.shared_size is None
            else SharedExpert(
                hidden_size,
                settings.shared_size,
                activation,
                region,
                gated=settings.shared_gate,
                bias=bias,
                dtype=dtype,
                device=device,
            )
        )

    def forward(self, x_SBD: Tensor) -> Tensor:
        choice, rule = self.router(x_SBD), self.settings.router.rule
        kept_TK = None if rule.capacity_factor is None else within_capacity(choice, rule)
        experts_TK = choice.experts_TK if kept_TK is None else choice.experts_TK.where(kept_TK, rule.experts)
        whole_SBD = enter(x_SBD, self.region)
        weights_TK = enter(choice.weights_TK, self.region)
        experts_TK = self.region.spread(experts_TK).wait()
        order = order_by_expert(experts_TK, rule.experts)
        rows_ND = to_experts(whole_SBD.reshape(-1, whole_SBD.shape[-1]), order)
        rows_ND = self.experts(rows_ND, order.counts_E, order.rows_of(weights_TK))
        y_SBD = leave(from_experts(rows_ND, order).view_as(whole_SBD), self.region)
        return y_SBD if self.shared_experts is None else y_SBD + self.shared_experts(x_SBD)


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
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(hidden_size, ffn_size, activation, region, bias=bias, dtype=dtype, device=device)
        self.gate_weight = nn.Parameter(torch.empty(1, hidden_size, dtype=dtype, device=device)) if gated else None

    def placements(self) -> dict[str, Placement]:
        """The gate is whole on every rank."""
        return {} if self.gate_weight is None else {"gate_weight": Replicated()}

    def forward(self, x_SBD: Tensor, weights_SB: Tensor | None = None) -> Tensor:
        y_SBD = super().forward(x_SBD, weights_SB)
        if self.gate_weight is None:
            return y_SBD
        return y_SBD * torch.sigmoid(torch.nn.functional.linear(x_SBD, self.gate_weight))
