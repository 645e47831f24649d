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


@rule("expert_tensor_parallel_size", "world_size", "num_experts", *MODEL_PARALLEL)
def expert_tensor_ranks_divide_a_stage(draft: Draft) -> str:
    run = draft.run
    layout = run.layout
    ranks = layout.tp * layout.cp * layout.dp
    if not run.model.mixture or ranks == 0 or ranks % layout.expert_tp == 0:
        return ""
    return (
        f"{show(draft, 'expert_tensor_parallel_size')}: each expert is shared by so many of the {ranks} processes of a "
        f"pipeline stage; use --expert-tensor-parallel-size {divisors(ranks, layout.expert_tp)}"
    )


@rule("expert_model_parallel_size", "num_experts", "world_size", "expert_tensor_parallel_size", *MODEL_PARALLEL)
def expert_ranks_are_those_of_data_and_context(draft: Draft) -> str:
    run, size = draft.run, draft.run.parallel.expert_model_parallel_size
    layout = run.layout
    if layout.expert_tp != layout.tp:
        return _experts_divide_what_is_left(draft)
    ranks = layout.dp * layout.cp
    if not run.model.mixture or ranks == 0 or ranks % size == 0:
        return ""
    return (
        f"{show(draft, 'expert_model_parallel_size')} divides experts over the processes of data and context "
        f"parallelism, and of those {run.launch.world_size} processes make {ranks}: use "
        f"--expert-model-parallel-size {divisors(ranks, size)}, or start more processes"
    )


def _experts_divide_what_is_left(draft: Draft) -> str:
    run = draft.run
    layout, size = run.layout, run.parallel.expert_model_parallel_size
    ranks, rest = divmod(layout.tp * layout.cp * layout.dp, layout.expert_tp)
    if not run.model.mixture or rest or ranks == 0 or ranks % size == 0:
        return ""
    return (
        f"{show(draft, 'expert_model_parallel_size')} divides experts over the processes of a pipeline stage, and of "
        f"those {show(draft, 'expert_tensor_parallel_size')} leaves {ranks}: use --expert-model-parallel-size "
        f"{divisors(ranks, size)}, or start more processes"
    )


_APART = ("expert_tensor_parallel_size", "tensor_model_parallel_size", "num_experts")


def _apart(draft: Draft) -> bool:
    """Whether experts are shared by other processes than the layers are."""
    parallel = draft.run.parallel
    same = parallel.expert_tensor_parallel_size in (None, parallel.tensor_model_parallel_size)
    return draft.run.model.mixture and not same


@rule(*_APART, "sequence_parallel")
def processes_of_an_expert_have_their_own_tokens(draft: Draft) -> str:
    parallel = draft.run.parallel
    if not _apart(draft) or parallel.tensor_model_parallel_size == 1 or parallel.sequence_parallel:
        return ""
    return (
        f"{show(draft, 'expert_tensor_parallel_size')} differs from {show(draft, 'tensor_model_parallel_size')}, whose "
        "processes all have the same tokens then; give --sequence-parallel too (as Megatron needs it for experts under "
        "tensor parallelism), or leave --expert-tensor-parallel-size out"
    )


@rule(*_APART, "ckpt_format", "save")
def places_of_experts_are_no_folders(draft: Draft) -> str:
    checkpoint = draft.run.checkpoint
    if not _apart(draft) or checkpoint.ckpt_format != "torch" or not checkpoint.save:
        return ""
    return (
        f"{show(draft, 'expert_tensor_parallel_size')} with --ckpt-format torch: that has a folder for each tensor-, "
        "pipeline- and expert-parallel place of layers and experts together; use --ckpt-format torch_dist"
    )


@rule(*_APART, "optimizer")
def matrices_of_experts_are_orthogonalised_where_layers_are(draft: Draft) -> str:
    by_matrix = draft.run.optimizer.orthogonalises or draft.run.optimizer.optimizer == "soap"
    if not _apart(draft) or not by_matrix:
        return ""
    return (
        f"{show(draft, 'expert_tensor_parallel_size')} with {show(draft, 'optimizer')}: its matrices are put together "
        "over the tensor-parallel processes of the layers; use --optimizer adam, or leave it out"
    )


@rule("expert_model_parallel_size", *_APART, *SHARDING)
def divided_experts_are_not_fully_sharded(draft: Draft) -> str:
    parallel = draft.run.parallel
    divided = parallel.expert_model_parallel_size > 1
    if not draft.run.model.mixture or not parallel.divides_weights or not (divided or _apart(draft)):
        return ""
    name = "expert_model_parallel_size" if divided else "expert_tensor_parallel_size"
    return (
        f"{show(draft, parallel.dividing_setting)} cuts all weights over the same processes, and "
        f"{show(draft, name)} gives them different experts; use --use-distributed-optimizer, "
        "or leave expert parallelism out"
    )


@rule(
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "tensor_model_parallel_size",
    "expert_tensor_parallel_size",
)
def experts_divide_over_tensor_ranks(draft: Draft) -> str:
    model, parallel = draft.run.model, draft.run.parallel
    shared = "tensor_model_parallel_size"
    own = shared if parallel.expert_tensor_parallel_size is None else "expert_tensor_parallel_size"
    over = {"moe_ffn_hidden_size": own, "moe_shared_expert_intermediate_size": shared}
    wrong = [name for name, by in over.items() if (getattr(model, name) or 0) % getattr(parallel, by)]
    if not model.mixture or not wrong:
        return ""
    size, flag, by = getattr(model, wrong[0]), f"--{wrong[0].replace('_', '-')}", over[wrong[0]]
    return (
        f"{show(draft, wrong[0])} is not divisible by {show(draft, by)}; nearest: {flag} "
        f"{multiples(size, getattr(parallel, by))}"
    )


@rule("moe_token_dispatcher_type", "expert_model_parallel_size")
def nothing_to_dispatch(draft: Draft) -> str:
    if "moe_token_dispatcher_type" not in draft.given or draft.run.parallel.expert_model_parallel_size > 1:
        return ""
    return (
        f"{show(draft, 'moe_token_dispatcher_type')} has no effect without --expert-model-parallel-size: all "
        "experts are on every process"
    )


_ALL_TO_ALL = {
    "flex": "the kernels that Megatron has for some machines (DeepEP, HybridEP) change no number",
    "alltoall_seq": "that Megatron gathered sequences in another order changed no number",
}


@rule("moe_token_dispatcher_type", "expert_model_parallel_size")
def other_dispatchers_are_all_to_all(draft: Draft) -> str:
    run = draft.run
    named = run.model.moe_token_dispatcher_type
    if named not in _ALL_TO_ALL or run.parallel.expert_model_parallel_size == 1:
        return ""
    return (
        f"{show(draft, 'moe_token_dispatcher_type')}: tokens travel by torch's all-to-all, as with alltoall; "
        f"{_ALL_TO_ALL[named]}"
    )


EXPERT_LAYOUT_RULES: tuple[Rule, ...] = (
    experts_are_there_to_be_divided,
    experts_divide_over_their_ranks,
    expert_tensor_ranks_divide_a_stage,
    expert_ranks_are_those_of_data_and_context,
    processes_of_an_expert_have_their_own_tokens,
    places_of_experts_are_no_folders,
    matrices_of_experts_are_orthogonalised_where_layers_are,
    divided_experts_are_not_fully_sharded,
    experts_divide_over_tensor_ranks,
)

EXPERT_LAYOUT_NOTICES: tuple[Rule, ...] = (nothing_to_dispatch, other_dispatchers_are_all_to_all)
