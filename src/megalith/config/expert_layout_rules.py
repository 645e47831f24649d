"""Rules of experts over ranks: what divides by what, and which combinations run."""

from __future__ import annotations

from megalith.config.layout_choices import MODEL_PARALLEL, SHARDING
from megalith.config.rule import Draft, Rule, divisors, multiples, rule, show


@rule("expert_model_parallel_size", "num_experts")
def experts_are_there_to_be_divided(draft: Draft) -> str:
    if draft.run.parallel.expert_model_parallel_size == 1 or draft.run.model.mixture:
        return ""
    return (
        f"{show(draft, 'expert_model_parallel_size')} divides the experts of the layers, and there are none: give "
        "--num-experts, or leave it out"
    )


@rule("expert_model_parallel_size", "num_experts")
def experts_divide_over_their_ranks(draft: Draft) -> str:
    experts, size = draft.run.model.num_experts, draft.run.parallel.expert_model_parallel_size
    if not experts or experts % size == 0:
        return ""
    return (
        f"{show(draft, 'num_experts')} is not divisible by {show(draft, 'expert_model_parallel_size')}; use "
        f"--expert-model-parallel-size {divisors(experts, size)}, or --num-experts {multiples(experts, size)}"
    )


@rule("expert_model_parallel_size", "num_experts", "world_size", *MODEL_PARALLEL)
def expert_ranks_are_those_of_data_and_context(draft: Draft) -> str:
    run, size = draft.run, draft.run.parallel.expert_model_parallel_size
    ranks = run.layout.dp * run.layout.cp
    if not run.model.mixture or ranks == 0 or ranks % size == 0:
        return ""
    return (
        f"{show(draft, 'expert_model_parallel_size')} divides experts over the processes of data and context "
        f"parallelism, and of those {run.launch.world_size} processes make {ranks}: use "
        f"--expert-model-parallel-size {divisors(ranks, size)}, or start more processes"
    )


@rule("expert_tensor_parallel_size", "tensor_model_parallel_size")
def experts_are_cut_as_dense_layers_are(draft: Draft) -> str:
    parallel = draft.run.parallel
    if parallel.expert_tensor_parallel_size in (None, parallel.tensor_model_parallel_size):
        return ""
    return (
        f"{show(draft, 'expert_tensor_parallel_size')} differs from {show(draft, 'tensor_model_parallel_size')}: "
        "experts are cut over the same processes as the dense layers here; leave it out, or give both the same size"
    )


@rule("expert_model_parallel_size", "num_experts", *SHARDING)
def divided_experts_are_not_fully_sharded(draft: Draft) -> str:
    parallel = draft.run.parallel
    if not draft.run.model.mixture or parallel.expert_model_parallel_size == 1 or not parallel.divides_weights:
        return ""
    return (
        f"{show(draft, parallel.dividing_setting)} cuts all weights over the same processes, and "
        f"{show(draft, 'expert_model_parallel_size')} gives them different experts; use --use-distributed-optimizer, "
        "or leave expert parallelism out"
    )


@rule(
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "tensor_model_parallel_size",
)
def experts_divide_over_tensor_ranks(draft: Draft) -> str:
    model, tp = draft.run.model, draft.run.parallel.tensor_model_parallel_size
    names = ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    wrong = [name for name in names if (getattr(model, name) or 0) % tp]
    if not model.mixture or not wrong:
        return ""
    size, flag = getattr(model, wrong[0]), f"--{wrong[0].replace('_', '-')}"
    return (
        f"{show(draft, wrong[0])} is not divisible by {show(draft, 'tensor_model_parallel_size')}; nearest: {flag} "
        f"{multiples(size, tp)}"
    )


@rule("moe_token_dispatcher_type", "expert_model_parallel_size")
def nothing_to_dispatch(draft: Draft) -> str:
    if "moe_token_dispatcher_type" not in draft.given or draft.run.parallel.expert_model_parallel_size > 1:
        return ""
    return (
        f"{show(draft, 'moe_token_dispatcher_type')} has no effect without --expert-model-parallel-size: all "
        "experts are on every process"
    )


EXPERT_LAYOUT_RULES: tuple[Rule, ...] = (
    experts_are_there_to_be_divided,
    experts_divide_over_their_ranks,
    expert_ranks_are_those_of_data_and_context,
    experts_are_cut_as_dense_layers_are,
    divided_experts_are_not_fully_sharded,
    experts_divide_over_tensor_ranks,
)

EXPERT_LAYOUT_NOTICES: tuple[Rule, ...] = (nothing_to_dispatch,)
