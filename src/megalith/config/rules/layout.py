"""Rules of layouts: what divides by what, which combinations run, and what the launcher starts."""

from __future__ import annotations

from itertools import product
from math import log, prod

from megalith.config.rules.rule import (
    Draft,
    UnusableError,
    divisors,
    exclusive,
    forbid,
    idle,
    idle_without,
    multiples,
    note,
    notice,
    rule,
    show,
    value_of,
)
from megalith.config.run import RunConfig, all_settings
from megalith.errors import LayoutError
from megalith.schedules.pipeline import fits_groups, nearest_fitting

SHARDING = (
    "use_distributed_optimizer",
    "use_torch_fsdp2",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
)
"""Settings that shard state over the data-parallel processes."""
MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")

_MAX_REMEDIES = 3  # in one message


def sizes_of(run: RunConfig) -> dict[str, int]:
    """Return the sizes of the kinds of parallelism that divide the model, by setting name."""
    return {name: getattr(run.parallel, name) for name in MODEL_PARALLEL}


def fitting_sizes(run: RunConfig, name: str) -> str:
    """Return sizes of one kind of parallelism near the given one that fit the model: `1 or 2 or 4`.

    They also fill the processes that were started, if the other sizes allow any that do.
    """
    world, sizes = run.launch.world_size, sizes_of(run)
    others, given = prod(sizes.values()) // sizes[name], sizes[name]
    allowed = [size for size in range(1, 4 * given + 1) if _model_allows(run, name, size)]
    filling = [size for size in allowed if world % (size * others) == 0]
    nearest = sorted(filling or allowed, key=lambda size: abs(size - given))[:_MAX_REMEDIES]
    return " or ".join(map(str, sorted(nearest)))


def fitting_layouts(run: RunConfig) -> str:
    """Return layouts near the given one that fit processes and model, as flags; "" if none does.

    Those that keep most processes at work on one copy of the model come first.
    """
    world, given = run.launch.world_size, sizes_of(run)
    names = [name for name, size in given.items() if size > 1]
    choices = [
        [size for size in range(1, min(given[name], world) + 1) if world % size == 0 and _model_allows(run, name, size)]
        for name in names
    ]
    fitting = [sizes for sizes in product(*choices) if world % prod(sizes) == 0 and prod(sizes) > 1]

    def preference(sizes: tuple[int, ...]) -> tuple[int, float]:
        """Return a key that sorts by most processes, then by the least change of any size."""
        return -prod(sizes), max(abs(log(size / given[name])) for name, size in zip(names, sizes, strict=True))

    nearest = sorted(fitting, key=preference)[:_MAX_REMEDIES]
    return ", or ".join(
        " ".join(f"--{name.replace('_', '-')} {size}" for name, size in zip(names, sizes, strict=True) if size > 1)
        for sizes in nearest
    )


def _model_allows(run: RunConfig, name: str, size: int) -> bool:
    """Return whether the model divides by this size; settings that are missing or unreadable do not count."""
    model, parallel = run.model, run.parallel
    try:
        if name == "pipeline_model_parallel_size":
            if parallel.pipeline_model_parallel_layout is not None:
                return parallel.parts_of_layout % size == 0
            own_split = parallel.decoder_first_pipeline_num_layers or parallel.decoder_last_pipeline_num_layers
            # With explicit stage lengths the number of stages need not divide the layers.
            return bool(own_split) or model.num_layers % size == 0
        if name == "context_parallel_size":
            return size == 1 or run.data.seq_length % (2 * size) == 0
        groups = model.query_groups
        divide = model.num_attention_heads % size == 0 and model.ffn_size % size == 0
        # With fewer query groups than ranks Megatron replicates them: docs/reference/checkpoints.md.
        return divide and (groups % size == 0 or size % groups == 0)
    except UnusableError:
        return True


_SPLIT = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)

_HOW_TO_START = {
    "torchrun": "torchrun --nproc_per_node",
    "srun": "srun --ntasks",
    "mpirun": "mpirun -n",
    "hand": "WORLD_SIZE",
}


@rule
def processes_fill_the_layout(draft: Draft) -> str:
    world, sizes = draft.run.launch.world_size, sizes_of(draft.run)
    unit = prod(sizes.values())
    if world % unit == 0:
        return ""
    shown = " x ".join(show(draft, name) for name, size in sizes.items() if size > 1)
    layouts = fitting_layouts(draft.run)
    use = f"use {layouts}" if layouts else f"leave {'them' if ' x ' in shown else 'it'} out"
    started = "1 process was started" if world == 1 else f"{world} processes were started"
    launch = draft.run.launch
    how = "--nproc" if launch.nproc else _HOW_TO_START.get(launch.launcher, "--nproc, or torchrun --nproc_per_node")
    return (
        f"{shown} needs a multiple of {unit} processes and {started} (world size ({world}) is not divisible by "
        f"{unit}); start {multiples(world, unit)} ({how}), or with {world} {use}"
    )


heads_divide_over_tensor_ranks = forbid(
    lambda run: run.model.num_attention_heads % run.parallel.tensor_model_parallel_size != 0,
    "{num_attention_heads} is not divisible by {tensor_model_parallel_size}; nearest: --tensor-model-parallel-size "
    "{nearest}",
    nearest=lambda run: fitting_sizes(run, "tensor_model_parallel_size"),
)
query_groups_divide_over_tensor_ranks = forbid(
    lambda run: (
        run.model.query_groups % run.parallel.tensor_model_parallel_size != 0
        and run.parallel.tensor_model_parallel_size % run.model.query_groups != 0
        and run.model.group_query_attention
    ),
    "{num_query_groups} neither divides by {tensor_model_parallel_size} nor divides it; nearest: "
    "--tensor-model-parallel-size {nearest}",
    nearest=lambda run: fitting_sizes(run, "tensor_model_parallel_size"),
)


@rule
def feed_forward_divides_over_tensor_ranks(draft: Draft) -> str:
    size, tp = draft.run.model.ffn_size, draft.run.parallel.tensor_model_parallel_size
    if size % tp == 0:
        return ""
    return (
        f"feed-forward layers of {size} (--ffn-hidden-size) are not divisible by "
        f"{show(draft, 'tensor_model_parallel_size')}; nearest: --tensor-model-parallel-size "
        f"{fitting_sizes(draft.run, 'tensor_model_parallel_size')}, or --ffn-hidden-size {multiples(size, tp)}"
    )


@rule
def sequence_divides_over_its_ranks(draft: Draft) -> str:
    parallel, length = draft.run.parallel, draft.run.data.seq_length
    names, unit = [], 1
    if parallel.context_parallel_size > 1:
        names.append("context_parallel_size")
        unit *= 2 * parallel.context_parallel_size  # two chunks for each rank, which balances the causal work
    if parallel.sequence_parallel_here:
        names += ["sequence_parallel", "tensor_model_parallel_size"]
        unit *= parallel.tensor_model_parallel_size
    if length % unit == 0:
        return ""
    return (
        f"{show(draft, 'seq_length')} is not divisible by {unit}, which {' and '.join(show(draft, n) for n in names)} "
        f"need{'s' if len(names) == 1 else ''}; nearest: {multiples(length, unit)}"
    )


@rule
def heads_divide_over_exchanging_ranks(draft: Draft) -> str:
    parallel, heads = draft.run.parallel, draft.run.model.num_attention_heads
    # All-to-all over context ranks divides the heads that tensor parallelism has left on each rank (Ulysses).
    unit = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    if parallel.cp_comm_type != "a2a" or parallel.context_parallel_size == 1 or heads % unit == 0:
        return ""
    return (
        f"--cp-comm-type a2a exchanges heads: {show(draft, 'num_attention_heads')} is not divisible by "
        f"{show(draft, 'tensor_model_parallel_size')} x {show(draft, 'context_parallel_size')}; use --cp-comm-type p2p"
    )


@rule
def layers_divide_over_the_pipeline(draft: Draft) -> str:
    try:
        draft.run.stages  # noqa: B018 - for its error
    except LayoutError as error:
        if draft.run.parallel.pipeline_model_parallel_layout is not None:
            return f"{show(draft, 'pipeline_model_parallel_layout')}: {error}"
        given = [show(draft, name) for name in _SPLIT if name in draft.given]
        if given and draft.run.parallel.pipeline_model_parallel_size == 1:
            return f"{' and '.join(given)}: there is one stage; leave it out, or give --pipeline-model-parallel-size"
        flags = ", ".join([show(draft, "num_layers"), show(draft, "pipeline_model_parallel_size"), *given])
        fitting = fitting_sizes(draft.run, "pipeline_model_parallel_size")
        return f"{flags}: {error}; use --pipeline-model-parallel-size {fitting}{'' if given else _uneven(draft)}"
    return ""


def _uneven(draft: Draft) -> str:
    """Return the flag for a shorter first stage if the other stages then have equal numbers of layers."""
    layers, stages = draft.run.model.num_layers, draft.run.parallel.pipeline_model_parallel_size
    others = -(-layers // stages)
    first = layers - (stages - 1) * others
    return f", or --decoder-first-pipeline-num-layers {first} ({others} in the others)" if first > 0 else ""


@rule
def a_layout_is_the_only_split(draft: Draft) -> str:
    # A checkpoint's arguments give them with their defaults, too.
    others = [show(draft, name) for name in _SPLIT if value_of(draft, name) != all_settings()[name].default]
    if draft.run.parallel.pipeline_model_parallel_layout is None or not others:
        return ""
    layout = show(draft, "pipeline_model_parallel_layout")
    return f"{layout} says what each stage computes; leave out {' and '.join(others)}"


@rule
def adapters_are_in_each_stage(draft: Draft) -> str:
    if draft.run.model.lora_rank is None:
        return ""
    try:
        without = any(not layers for chunks in draft.run.stages for layers in chunks)
    except LayoutError:
        return ""
    names = [name for name in ("pipeline_model_parallel_layout", *_SPLIT) if name in draft.given]
    what = " with ".join(show(draft, name) for name in ("lora_rank", *names))
    return f"{what}: adapters are in layers, and a stage without any trains nothing; give each one" if without else ""


predictions_beside_the_loss = note(
    lambda run: "m" in (run.parallel.pipeline_model_parallel_layout or "").replace(",", "").rpartition("|")[0],
    "{pipeline_model_parallel_layout}: layers of multi-token prediction are computed in the stage of the loss here",
)


@rule
def virtual_stages_need_a_pipeline(draft: Draft) -> str:
    parallel, layers = draft.run.parallel, draft.run.model.num_layers
    names = [name for name in _SPLIT[:2] if getattr(parallel, name) is not None]
    if not names:
        return ""
    shown = " and ".join(show(draft, name) for name in names)
    if len(names) == 2:
        return f"{shown} exclude each other; use one of them"
    per_stage, rest = divmod(layers, parallel.pipeline_model_parallel_size)
    chunk = parallel.num_layers_per_virtual_pipeline_stage
    if parallel.virtual_stages(layers) > 1 and parallel.pipeline_model_parallel_size == 1:
        return f"{shown} needs --pipeline-model-parallel-size of at least 2; leave it out"
    if chunk is not None and not rest and per_stage % chunk:
        fitting = divisors(per_stage, chunk)
        return f"{shown} does not divide the {per_stage} layers of a pipeline stage; use {fitting} layers"
    return ""


@rule
def interleaving_needs_rounds_of_micro_batches(draft: Draft) -> str:
    run = draft.run
    pp, sizes, group = run.layout.pp, run.batch_sizes, run.parallel.microbatch_group_size_per_vp_stage
    if run.parallel.virtual_stages(run.model.num_layers) == 1 or pp == 1:
        return ""
    if group is not None and group < pp:
        return (
            f"{show(draft, 'microbatch_group_size_per_vp_stage')} is below --pipeline-model-parallel-size {pp}: the "
            f"first stage would wait for the last one; use at least {pp}, or leave it out"
        )
    counts = {stage.size: stage.size // sizes.unit for stage in sizes.stages if stage.size >= sizes.unit}
    wrong = [size for size, count in counts.items() if not fits_groups(pp, group or pp, count)] if run.layout.dp else []
    if not wrong:
        return ""
    size = show(draft, "global_batch_size") if len(sizes.stages) == 1 else f"a global batch of {wrong[0]} samples"
    number = wrong[0] // sizes.unit
    rounds = f"rounds of {pp} micro-batches"
    if group is not None:
        rounds = f"groups of {group} micro-batches, the last one of {pp} or more"
    return (
        f"virtual pipeline stages work on {rounds}, and {size} makes {number}; "
        f"nearest: {nearest_fitting(pp, group or pp, number, sizes.unit)}"
    )


groups_of_micro_batches = note(
    lambda run: run.parallel.virtual_stages(run.model.num_layers) == 1,
    "{microbatch_group_size_per_vp_stage} has no effect: there are no virtual pipeline stages",
    given="microbatch_group_size_per_vp_stage",
)


@rule
def schedule_fits_the_stages(draft: Draft) -> str:
    parallel = draft.run.parallel
    virtual = parallel.virtual_stages(draft.run.model.num_layers) > 1
    if parallel.pipeline_schedule in ("1f1b", "zb-h1") and virtual:
        return (
            f"{show(draft, 'pipeline_schedule')} has no virtual stages; leave them out, or use "
            "--pipeline-schedule interleaved"
        )
    if parallel.pipeline_schedule == "interleaved" and not virtual:
        return (
            "--pipeline-schedule interleaved needs virtual stages: give --num-layers-per-virtual-pipeline-stage N, or "
            "use --pipeline-schedule 1f1b"
        )
    return ""


optimizer_state_is_sharded_once = exclusive(
    "use_torch_fsdp2",
    "use_distributed_optimizer",
    "exclude each other: the former shards the optimizer state too; use one of them",
)
one_way_to_shard = exclusive(
    "use_torch_fsdp2", "use_megatron_fsdp", "exclude each other, and do the same here; use one of them"
)


@rule
def weight_gradients_of_sharded_weights_are_not_put_off(draft: Draft) -> str:
    run = draft.run
    if not run.fully_sharded or run.pipeline_schedule != "zb-h1":
        return ""
    return (
        "--pipeline-schedule zb-h1 computes weight gradients after the backward pass, when "
        f"{show(draft, run.parallel.sharding_setting)} has reduced them; use --pipeline-schedule 1f1b, or "
        "--use-distributed-optimizer"
    )


sequence_parallel_alone = note(
    lambda run: run.parallel.sequence_parallel and run.parallel.tensor_model_parallel_size <= 1,
    "--sequence-parallel is off: it divides the work of tensor-parallel processes, and there is one",
)
distributed_optimizer_alone = note(
    lambda run: run.parallel.sharding_setting == "use_distributed_optimizer" and run.layout.dp * run.layout.cp <= 1,
    "--use-distributed-optimizer has no effect: with one data-parallel process there is nothing to split",
)
ring_has_its_own_attention = note(
    lambda run: (
        run.parallel.context_parallel_size != 1 and run.parallel.cp_comm_type == "p2p" and not run.model.fused_attention
    ),
    "{attention_backend}, {transformer_impl}: no effect on attention under --cp-comm-type p2p, which merges parts of "
    "its own; --cp-comm-type a2a uses that kernel",
)


@notice
def full_sharding_alone(draft: Draft) -> str:
    run, name = draft.run, draft.run.parallel.sharding_setting
    if not run.parallel.torch_fsdp2_reshard_after_forward and not run.parallel.use_torch_fsdp2:
        return "--torch-fsdp2-no-reshard-after-forward has no effect without --use-torch-fsdp2"
    if name in ("", "use_distributed_optimizer") or run.layout.dp * run.layout.cp > 1:
        return ""
    return f"{show(draft, name)} has no effect: with one data-parallel process there is nothing to split"


@notice
def weights_are_there_before_registered_layers(draft: Draft) -> str:
    run = draft.run
    if not run.parallel.shards_optimizer_only or run.layout.dp * run.layout.cp == 1 or not run.model.registered_layers:
        return ""
    layers = ", ".join(show(draft, name) for name in run.model.registered_layers)
    return (
        f"{show(draft, 'use_distributed_optimizer')} with {layers}: updated weights are gathered before the forward "
        "pass, not during it, as registered layers may read any weight"
    )


strategy_says_what_is_divided = note(
    lambda run: run.parallel.use_megatron_fsdp and run.parallel.data_parallel_sharding_strategy == "no_shard",
    "{use_megatron_fsdp} divides nothing: {data_parallel_sharding_strategy}",
)


stages_are_there_to_be_balanced = idle(
    ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    lambda run: run.parallel.pipeline_model_parallel_size > 1,
    lambda draft: " with one pipeline stage",
)
the_strategy_is_read = idle_without("use_megatron_fsdp", "data_parallel_sharding_strategy")
experts_are_there_to_be_divided = forbid(
    lambda run: run.parallel.expert_model_parallel_size != 1 and not run.model.mixture,
    "{expert_model_parallel_size} divides the experts of the layers, and there are none: give --num-experts, or leave "
    "it out",
)
experts_divide_over_their_ranks = forbid(
    lambda run: run.model.num_experts and run.model.num_experts % run.parallel.expert_model_parallel_size != 0,
    "{num_experts} is not divisible by {expert_model_parallel_size}; use --expert-model-parallel-size {fitting}, or "
    "--num-experts {nearest}",
    fitting=lambda run: divisors(run.model.num_experts or 0, run.parallel.expert_model_parallel_size),
    nearest=lambda run: multiples(run.model.num_experts or 0, run.parallel.expert_model_parallel_size),
)


@rule
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


@rule
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


def _apart(run: RunConfig) -> bool:
    """Return whether experts are sharded over other ranks than dense layers."""
    parallel = run.parallel
    same = parallel.expert_tensor_parallel_size in (None, parallel.tensor_model_parallel_size)
    return run.model.mixture and not same


processes_of_an_expert_have_their_own_tokens = forbid(
    lambda run: _apart(run) and run.parallel.tensor_model_parallel_size != 1 and not run.parallel.sequence_parallel,
    "{expert_tensor_parallel_size} differs from {tensor_model_parallel_size}, whose processes all have the same "
    "tokens then; give --sequence-parallel too (as Megatron needs it for experts under tensor parallelism), or leave "
    "--expert-tensor-parallel-size out",
)
places_of_experts_are_no_folders = forbid(
    lambda run: _apart(run) and run.checkpoint.ckpt_format == "torch" and run.checkpoint.save,
    "{expert_tensor_parallel_size} with --ckpt-format torch: that has a folder for each tensor-, pipeline- and "
    "expert-parallel place of layers and experts together; use --ckpt-format torch_dist",
)
matrices_of_experts_are_orthogonalised_where_layers_are = forbid(
    lambda run: _apart(run) and run.optimizer.updates_matrices,
    "{expert_tensor_parallel_size} with {optimizer}: its matrices are put together over the tensor-parallel processes "
    "of the layers; use --optimizer adam, or leave it out",
)


@rule
def divided_experts_are_not_fully_sharded(draft: Draft) -> str:
    parallel = draft.run.parallel
    divided = parallel.expert_model_parallel_size > 1
    if not draft.run.model.mixture or not parallel.fully_shards or not (divided or _apart(draft.run)):
        return ""
    name = "expert_model_parallel_size" if divided else "expert_tensor_parallel_size"
    return (
        f"{show(draft, parallel.sharding_setting)} cuts all weights over the same processes, and "
        f"{show(draft, name)} gives them different experts; use --use-distributed-optimizer, "
        "or leave expert parallelism out"
    )


@rule
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


nothing_to_dispatch = note(
    lambda run: run.parallel.expert_model_parallel_size <= 1,
    "{moe_token_dispatcher_type} has no effect without --expert-model-parallel-size: all experts are on every process",
    given="moe_token_dispatcher_type",
)


_ALL_TO_ALL = {
    "flex": "the kernels that Megatron has for some machines (DeepEP, HybridEP) change no number",
    "alltoall_seq": "that Megatron gathered sequences in another order changed no number",
}


other_dispatchers_are_all_to_all = note(
    lambda run: run.model.moe_token_dispatcher_type in _ALL_TO_ALL and run.parallel.expert_model_parallel_size != 1,
    "{moe_token_dispatcher_type}: tokens travel by torch's all-to-all, as with alltoall; {reason}",
    reason=lambda run: _ALL_TO_ALL[run.model.moe_token_dispatcher_type],
)
rank_is_in_the_world = forbid(
    lambda run: run.launch.rank >= run.launch.world_size,
    "environment variable RANK={run.launch.rank} with WORLD_SIZE={run.launch.world_size}: ranks count from 0 to {last}",
    last=lambda run: run.launch.world_size - 1,
)
local_rank_is_on_the_machine = forbid(
    lambda run: run.launch.local_world_size is not None and run.launch.local_rank >= run.launch.local_world_size,
    "environment variable LOCAL_RANK={run.launch.local_rank} with LOCAL_WORLD_SIZE={run.launch.local_world_size}: "
    "ranks of a machine count from 0 to {last}",
    last=lambda run: (run.launch.local_world_size or 0) - 1,
)
machine_is_in_the_world = forbid(
    lambda run: (run.launch.local_world_size or 0) > run.launch.world_size,
    "environment variable LOCAL_WORLD_SIZE={run.launch.local_world_size} with WORLD_SIZE={run.launch.world_size}: a "
    "machine has at most all processes; set LOCAL_WORLD_SIZE to those of this machine, or unset it",
)


@rule
def one_launcher(draft: Draft) -> str:
    launch = draft.run.launch
    if launch.nproc is None or launch.nproc == launch.world_size:
        return ""
    by = "RANK and WORLD_SIZE show that a launcher has" if launch.launcher == "hand" else f"{launch.launcher} has"
    return (
        f"--nproc {launch.nproc} starts {launch.nproc} processes itself, and {by} already "
        f"started {launch.world_size}; leave out one of the two"
    )


restarts_need_a_supervisor = forbid(
    lambda run: run.launch.max_restarts != 0 and run.launch.nproc is None,
    "--max-restarts {run.launch.max_restarts} requires --nproc N, which starts the processes; to use torchrun's, type "
    "it before the name of the script",
)
restarts_without_checkpoints = note(
    lambda run: run.launch.max_restarts != 0 and not run.checkpoint.save,
    "--max-restarts without --save restarts from iteration 0: give --save FOLDER --save-interval N to resume",
)
