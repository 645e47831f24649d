"""The settings of mixtures of experts, a part of the architecture."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting
from megalith.config.values import read_pattern

_BY_CHOICE = ("sinkhorn", "quantile_balancing")
_KERNELS = "which kernels move and multiply tokens is decided here, and the numbers do not change"


@dataclass(frozen=True, kw_only=True)
class ExpertSettings:
    """Which layers are mixtures of experts, how tokens choose their experts, and how the load is balanced."""

    num_experts: int | None = setting(
        None, help="experts of each layer that is a mixture; a dense model unless given, or with 0", at_least=0
    )
    moe_layer_freq: str = setting(
        "1",
        help="layers that are mixtures of experts: every N-th from the first, or a list with 1 for each such as "
        "([0]+[1]*3)*2",
    )
    moe_ffn_hidden_size: int | None = setting(
        None, help="width of one expert; that of a dense feed-forward layer unless given", at_least=1
    )
    moe_shared_expert_intermediate_size: int | None = setting(
        None, help="width of the shared experts together, which take every token; none unless given", at_least=1
    )
    moe_shared_expert_gate: bool = setting(False, help="a gate for each token before the shared experts' output")
    moe_latent_size: int | None = setting(
        None,
        help="tokens are projected to this size before they go to experts, and what these give is projected back; "
        "experts take hidden states as they are unless given",
        at_least=1,
    )
    moe_apply_probs_on_input: bool = setting(
        False, help="weigh what an expert takes and not what it computes (with --moe-router-topk 1)"
    )
    moe_router: str | None = setting(
        None,
        help="registered function that chooses the experts by the router's logits, in place of the built-in choice",
        registers="router",
        ours=True,
    )
    moe_router_force_load_balancing: bool = setting(
        False,
        help="for benchmarks: experts are chosen by random numbers in place of the router's logits",
    )
    moe_router_topk: int = setting(2, help="experts that each token goes to", at_least=1)
    moe_router_score_function: str = setting(
        "softmax",
        help="how router logits become weights",
        choices=("softmax", "sigmoid", "sqrtsoftplus"),
    )
    moe_router_pre_softmax: bool = setting(
        False, help="take the softmax over all experts before the choice, not over the chosen ones"
    )
    moe_router_num_groups: int | None = setting(
        None, help="groups that the experts stand in, with --moe-router-group-topk", at_least=1
    )
    moe_router_group_topk: int | None = setting(None, help="groups that a token may choose from", at_least=1)
    moe_router_topk_scaling_factor: float | None = setting(None, help="multiplies the weights of the chosen experts")
    moe_router_dtype: str | None = setting(
        None,
        help="dtype of router logits and weights; that of the hidden states unless given",
        choices=("fp32", "fp64"),
    )
    moe_router_load_balancing_type: tuple[str, ...] = setting(
        ("aux_loss",),
        help="what balances the load of the experts",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"),
    )
    moe_router_quantile_balancing_ema: float = setting(
        0.0,
        help="with quantile_balancing, the share of the offsets of the steps before in those of the next",
        at_least=0,
        below=1,
    )
    moe_aux_loss_coeff: tuple[float, ...] = setting((0.0,), help="coefficient of each balancing loss", at_least=0)
    moe_z_loss_coeff: float | None = setting(
        None, help="coefficient of a loss that keeps router logits small", at_least=0
    )
    moe_router_enable_expert_bias: bool = setting(
        False, help="balance the load by a bias of each expert that counts in the choice only (not with softmax)"
    )
    moe_router_bias_update_rate: float = setting(0.001, help="how far that bias moves with each step", at_least=0)
    moe_input_jitter_eps: float | None = setting(
        None, help="router inputs are multiplied in training by random numbers this close to 1", at_least=0, below=1
    )
    moe_expert_capacity_factor: float | None = setting(
        None,
        help="an expert takes at most this many times its equal share of the tokens; no limit unless given",
        above=0,
    )
    moe_token_drop_policy: str = setting(
        "probs", help="which tokens an expert beyond its capacity keeps", choices=("probs", "position")
    )
    moe_pad_expert_input_to_capacity: bool = setting(
        False,
        help="fill experts up to their capacity",
        nothing="rows of padding have the weight 0, and the numbers do not change",
    )
    moe_token_dispatcher_type: str = setting(
        "allgather",
        help="how tokens reach experts of other processes: all tokens to all, or each to its experts; flex and "
        "alltoall_seq (Megatron until 2025) are alltoall here",
        choices=("allgather", "alltoall", "flex", "alltoall_seq"),
    )
    moe_grouped_gemm: bool = setting(False, help="one kernel for all experts", nothing=_KERNELS)
    moe_permute_fusion: bool = setting(False, help="one kernel to sort tokens", nothing=_KERNELS)
    moe_router_fusion: bool = setting(False, help="one kernel for the router", nothing=_KERNELS)

    @property
    def mixture(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return bool(self.num_experts)

    @property
    def balancing(self) -> dict[str, float]:
        """Each balancing loss that counts, with its coefficient."""
        kinds, coefficients = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if len(kinds) == 1:
            coefficients = coefficients[:1]
        pairs = zip(kinds, coefficients, strict=len(kinds) > 1)
        return {kind: value for kind, value in pairs if value > 0 and kind not in ("none", *_BY_CHOICE)}

    @property
    def chooses_by(self) -> str:
        """What balances the load by the choice itself: sinkhorn, quantile_balancing or nothing."""
        return next((kind for kind in _BY_CHOICE if kind in self.moe_router_load_balancing_type), "")

    def experts_of(self, num_layers: int) -> tuple[int, ...]:
        """Experts of each layer, 0 where it is dense. A frequency counts from the first layer."""
        if not self.num_experts:
            return (0,) * num_layers
        pattern = read_pattern(self.moe_layer_freq)
        if isinstance(pattern, int):
            return tuple(self.num_experts * (layer % pattern == 0) for layer in range(num_layers))
        return tuple(self.num_experts * mark for mark in pattern[:num_layers])
