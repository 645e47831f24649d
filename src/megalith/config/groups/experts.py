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
        None, help="number of experts in each MoE layer; a dense model by default, or with 0", at_least=0
    )
    moe_layer_freq: str = setting(
        "1",
        help="MoE layers: every N-th from the first, or a list with 1 for each, such as ([0]+[1]*3)*2",
    )
    moe_ffn_hidden_size: int | None = setting(
        None, help="width of one expert; that of a dense MLP by default", at_least=1
    )
    moe_shared_expert_intermediate_size: int | None = setting(
        None, help="total width of shared experts, which receive every token; none by default", at_least=1
    )
    moe_shared_expert_gate: bool = setting(False, help="gate the output of the shared experts per token")
    moe_latent_size: int | None = setting(
        None,
        help="project tokens to this size before the experts and back after them; not projected by default",
        at_least=1,
    )
    moe_apply_probs_on_input: bool = setting(
        False, help="apply routing weights to the input of experts instead of their output (with --moe-router-topk 1)"
    )
    moe_router: str | None = setting(
        None,
        help="registered function that selects experts from router logits, instead of the built-in one",
        registers="router",
        ours=True,
    )
    moe_router_force_load_balancing: bool = setting(
        False,
        help="for benchmarks: select experts by random numbers instead of router logits",
    )
    moe_router_topk: int = setting(2, help="experts per token", at_least=1)
    moe_router_score_function: str = setting(
        "softmax",
        help="function from router logits to routing weights",
        choices=("softmax", "sigmoid", "sqrtsoftplus"),
    )
    moe_router_pre_softmax: bool = setting(
        False, help="apply the softmax to all experts before top-k instead of to the selected ones"
    )
    moe_router_num_groups: int | None = setting(
        None, help="number of expert groups, with --moe-router-group-topk", at_least=1
    )
    moe_router_group_topk: int | None = setting(
        None, help="number of groups from which a token may select experts", at_least=1
    )
    moe_router_topk_scaling_factor: float | None = setting(None, help="factor of the weights of the selected experts")
    moe_router_dtype: str | None = setting(
        None,
        help="dtype of router logits and weights; that of the hidden states by default",
        choices=("fp32", "fp64"),
    )
    moe_router_load_balancing_type: tuple[str, ...] = setting(
        ("aux_loss",),
        help="load balancing of experts",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"),
    )
    moe_router_quantile_balancing_ema: float = setting(
        0.0,
        help="with quantile_balancing: decay of the moving average of the offsets",
        at_least=0,
        below=1,
    )
    moe_aux_loss_coeff: tuple[float, ...] = setting((0.0,), help="coefficient of each load-balancing loss", at_least=0)
    moe_z_loss_coeff: float | None = setting(None, help="coefficient of the router z-loss; none by default", at_least=0)
    moe_router_enable_expert_bias: bool = setting(
        False, help="auxiliary-loss-free balancing: a bias per expert that only affects selection (not with softmax)"
    )
    moe_router_bias_update_rate: float = setting(0.001, help="change of that bias per step", at_least=0)
    moe_input_jitter_eps: float | None = setting(
        None, help="multiply router inputs in training by random numbers within this distance of 1", at_least=0, below=1
    )
    moe_expert_capacity_factor: float | None = setting(
        None,
        help="maximum tokens of an expert as a multiple of its equal share; no limit by default",
        above=0,
    )
    moe_token_drop_policy: str = setting(
        "probs", help="which tokens an expert over capacity keeps", choices=("probs", "position")
    )
    moe_pad_expert_input_to_capacity: bool = setting(
        False,
        help="pad the input of experts to their capacity",
        nothing="rows of padding have the weight 0, and the numbers do not change",
    )
    moe_token_dispatcher_type: str = setting(
        "allgather",
        help="token dispatcher: all-gather of all tokens, or all-to-all; flex and alltoall_seq (Megatron until 2025) "
        "are alltoall here",
        choices=("allgather", "alltoall", "flex", "alltoall_seq"),
    )
    moe_grouped_gemm: bool = setting(False, help="one kernel for all experts", nothing=_KERNELS)
    moe_permute_fusion: bool = setting(False, help="one kernel to sort tokens", nothing=_KERNELS)
    moe_router_fusion: bool = setting(False, help="one kernel for the router", nothing=_KERNELS)

    @property
    def mixture(self) -> bool:
        """Return whether any layer is an MoE layer."""
        return bool(self.num_experts)

    @property
    def balancing(self) -> dict[str, float]:
        """Return each load-balancing loss with its non-zero coefficient."""
        kinds, coefficients = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if len(kinds) == 1:
            coefficients = coefficients[:1]
        pairs = zip(kinds, coefficients, strict=len(kinds) > 1)
        return {kind: value for kind, value in pairs if value > 0 and kind not in ("none", *_BY_CHOICE)}

    @property
    def chooses_by(self) -> str:
        """Return the balancing method that is part of the routing: "sinkhorn", "quantile_balancing" or ""."""
        return next((kind for kind in _BY_CHOICE if kind in self.moe_router_load_balancing_type), "")

    def experts_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the number of experts of each layer, 0 for dense ones. A frequency counts from the first layer."""
        if not self.num_experts:
            return (0,) * num_layers
        pattern = read_pattern(self.moe_layer_freq)
        if isinstance(pattern, int):
            return tuple(self.num_experts * (layer % pattern == 0) for layer in range(num_layers))
        return tuple(self.num_experts * mark for mark in pattern[:num_layers])
