"""Rules of mixtures of experts: which layers are some, how tokens choose, how the load is balanced."""

from __future__ import annotations

from megalith.config.rules.rule import Draft, divisors, excluded, forbid, idle, idle_without, note, notice, rule, show

_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


tokens_find_enough_experts = forbid(
    lambda run: run.model.num_experts and run.model.moe_router_topk > run.model.num_experts,
    "{moe_router_topk} is more than {num_experts}, and a token goes to different experts; use "
    "--moe-router-topk {fitting}",
    fitting=lambda run: _up_to(run.model.num_experts or 1),
)


def _up_to(number: int) -> str:
    return "1" if number == 1 else f"1 to {number}"


own_router_is_without = excluded(
    "own_router",
    lambda run: run.model.moe_router,
    dict.fromkeys(
        (
            *("moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk"),
            *("moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"),
        ),
        "the registered function chooses and weights the experts; leave one of them out",
    ),
    switch="moe_router",
)
own_router_is_the_choice = forbid(
    lambda run: run.model.moe_router and run.model.chooses_by,
    "{moe_router} with {moe_router_load_balancing_type}: each chooses the experts; leave one of them out",
)


@rule
def one_expert_keeps_a_gradient(draft: Draft) -> str:
    model = draft.run.model
    learns = model.moe_router or model.moe_router_pre_softmax or model.moe_router_score_function != "softmax"
    routed = "sinkhorn" in model.moe_router_load_balancing_type
    trains = draft.run.schedule.lr > 0  # a model that is only read need not learn
    if not model.num_experts or model.moe_router_topk > 1 or learns or routed or not trains:
        return ""
    return (
        "--moe-router-topk 1: the softmax over one chosen expert is always 1, and the router learns nothing; add "
        "--moe-router-pre-softmax"
    )


@rule
def groups_and_their_number_go_together(draft: Draft) -> str:
    model = draft.run.model
    given = {
        name: getattr(model, name)
        for name in ("moe_router_num_groups", "moe_router_group_topk")
        if getattr(model, name) is not None
    }
    if len(given) != 1:
        return ""
    (name,) = given
    other = {"moe_router_num_groups": "--moe-router-group-topk", "moe_router_group_topk": "--moe-router-num-groups"}
    return f"{show(draft, name)} needs {other[name]}: in how many of how many groups a token looks for experts"


@rule
def groups_divide_the_experts(draft: Draft) -> str:
    model = draft.run.model
    groups, best = model.moe_router_num_groups, model.moe_router_group_topk
    if not model.num_experts or groups is None or best is None:
        return ""
    if model.num_experts % groups:
        return (
            f"{show(draft, 'num_experts')} does not divide into {show(draft, 'moe_router_num_groups')}; use "
            f"{divisors(model.num_experts, groups)} groups"
        )
    if best > groups:
        return f"{show(draft, 'moe_router_group_topk')} is more than {show(draft, 'moe_router_num_groups')}"
    if model.moe_router_topk % best or model.moe_router_topk > best * (model.num_experts // groups):
        return (
            f"{show(draft, 'moe_router_topk')} experts from {show(draft, 'moe_router_group_topk')} groups of "
            f"{model.num_experts // groups}: the number of experts must be a multiple of that of the groups, and the "
            "groups must hold as many"
        )
    return ""


the_bias_corrects_separate_scores = forbid(
    lambda run: (
        run.model.num_experts
        and run.model.moe_router_enable_expert_bias
        and run.model.moe_router_score_function == "softmax"
    ),
    "--moe-router-enable-expert-bias with {moe_router_score_function}: the bias corrects scores that do not depend on "
    "one another; use --moe-router-score-function sigmoid or sqrtsoftplus",
)


@rule
def each_balancing_loss_has_a_coefficient(draft: Draft) -> str:
    model = draft.run.model
    kinds, coefficients = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if not model.num_experts or len(kinds) == 1 or len(set(kinds)) == len(kinds) == len(coefficients):
        return ""
    if len(set(kinds)) < len(kinds):
        return f"{show(draft, 'moe_router_load_balancing_type')} has a kind twice; give each once, with one coefficient"
    return (
        f"{show(draft, 'moe_router_load_balancing_type')} and {show(draft, 'moe_aux_loss_coeff')}: {len(kinds)} and "
        f"{len(coefficients)} values; give one coefficient for each kind"
    )


@notice
def further_coefficients_have_no_kind(draft: Draft) -> str:
    model = draft.run.model
    kinds, coefficients = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if not model.num_experts or len(kinds) > 1 or len(coefficients) == 1:
        return ""
    kind, given = show(draft, "moe_router_load_balancing_type"), show(draft, "moe_aux_loss_coeff")
    return f"{given}: only the first has an effect: {kind} is one kind"


@rule
def choices_balance_alone(draft: Draft) -> str:
    model = draft.run.model
    kinds, by = model.moe_router_load_balancing_type, model.chooses_by
    if not model.num_experts or not by:
        return ""
    if len(kinds) > 1 or any(model.moe_aux_loss_coeff):
        return (
            f"{show(draft, 'moe_router_load_balancing_type')} with {show(draft, 'moe_aux_loss_coeff')}: {by} "
            "balances by the choice itself and takes no loss beside it; leave --moe-aux-loss-coeff out"
        )
    return ""


@rule
def quantiles_are_of_all_experts(draft: Draft) -> str:
    model = draft.run.model
    if not model.num_experts or model.chooses_by != "quantile_balancing":
        return ""
    beside = [name for name in ("moe_router_num_groups", "moe_router_enable_expert_bias") if getattr(model, name)]
    if not beside:
        return ""
    return (
        f"{' and '.join(show(draft, name) for name in beside)} with --moe-router-load-balancing-type "
        "quantile_balancing, which chooses among all experts by offsets of its own; leave it out"
    )


quantiles_need_an_expert_that_is_left = forbid(
    lambda run: run.model.chooses_by == "quantile_balancing" and run.model.moe_router_topk == run.model.num_experts,
    "{moe_router_topk} of {num_experts} with quantile_balancing: every token goes to all experts, whose load is the "
    "same; use --moe-router-load-balancing-type none",
)
inputs_are_weighed_for_one_expert = forbid(
    lambda run: run.model.num_experts and run.model.moe_apply_probs_on_input and run.model.moe_router_topk != 1,
    "--moe-apply-probs-on-input needs --moe-router-topk 1, and {moe_router_topk} is given",
)
capacity_is_for_weighed_choices = forbid(
    lambda run: (
        run.model.num_experts
        and run.model.moe_expert_capacity_factor is not None
        and "sinkhorn" in run.model.moe_router_load_balancing_type
    ),
    "{moe_expert_capacity_factor} with sinkhorn: its choices are balanced already; leave it out",
)
padding_needs_a_capacity = forbid(
    lambda run: run.model.moe_pad_expert_input_to_capacity and run.model.moe_expert_capacity_factor is None,
    "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor, which says how much that is",
)
a_coefficient_without_a_loss = note(
    lambda run: (
        run.model.num_experts
        and any(run.model.moe_aux_loss_coeff)
        and not any(kind in _LOSSES for kind in run.model.moe_router_load_balancing_type)
    ),
    "{moe_aux_loss_coeff} has no effect with {moe_router_load_balancing_type}: that is not a loss",
    given="moe_aux_loss_coeff",
)
offsets_without_quantiles = note(
    lambda run: run.model.chooses_by != "quantile_balancing",
    "{moe_router_quantile_balancing_ema} has no effect without --moe-router-load-balancing-type quantile_balancing",
    given="moe_router_quantile_balancing_ema",
)


@notice
def no_layer_has_experts(draft: Draft) -> str:
    model = draft.run.model
    try:
        dense = model.num_experts and not any(model.experts)
    except ValueError:  # reported by the rule of patterns
        return ""
    return f"{show(draft, 'moe_layer_freq')} leaves no layer with experts: the model is dense" if dense else ""


settings_of_experts_are_read = (
    *idle_without(
        "num_experts",
        *("moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size"),
        *("moe_apply_probs_on_input", "moe_router_force_load_balancing", "moe_router_topk", "moe_router"),
        *("moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk"),
        *("moe_router_topk_scaling_factor", "moe_router_dtype", "moe_router_load_balancing_type"),
        *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias", "moe_input_jitter_eps"),
        *("moe_expert_capacity_factor", "expert_tensor_parallel_size"),
        why="--num-experts is not given, no layer has experts",
    ),
    *idle_without("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", why="there is no shared expert"),
    *idle_without("moe_router_enable_expert_bias", "moe_router_bias_update_rate", why="no expert has a bias"),
    *idle(
        ("moe_router_pre_softmax",),
        lambda run: run.model.moe_router_score_function == "softmax",
        lambda draft: f" with {show(draft, 'moe_router_score_function')}",
    ),
    *idle(
        (
            *("moe_router_score_function", "moe_router_num_groups", "moe_router_group_topk"),
            *("moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"),
        ),
        lambda run: run.model.chooses_by != "sinkhorn",
        lambda draft: " with --moe-router-load-balancing-type sinkhorn, which has scores of its own",
    ),
    *idle_without("moe_expert_capacity_factor", "moe_token_drop_policy", why="experts take every token"),
    *idle_without("num_experts", "moe_routing_trace_path", why="--num-experts is not given, nothing is routed"),
    *idle_without(
        "moe_routing_trace_path",
        *("moe_routing_trace_max_training_iters", "moe_routing_trace_capture_hidden_states"),
        *("moe_routing_trace_capture_logits", "moe_routing_trace_dump_weights"),
        why="nothing is traced",
    ),
)
