"""Rules of layouts: what divides by what, and which combinations run."""

from __future__ import annotations

from math import prod

from megalith.config.idle import idle_without
from megalith.config.layout_choices import MODEL_PARALLEL, SHARDING, fitting_layouts, fitting_sizes, sizes_of
from megalith.config.rule import Draft, Rule, divisors, multiples, rule, show
from megalith.errors import LayoutError

_SPLIT = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)

_HOW_TO_START = {"srun": "srun --ntasks", "mpirun": "mpirun -n", "hand": "WORLD_SIZE"}


@rule("world_size", *MODEL_PARALLEL)
def processes_fill_the_layout(draft: Draft) -> str:
    world, sizes = draft.run.launch.world_size, sizes_of(draft)
    unit = prod(sizes.values())
    if world % unit == 0:
        return ""
    shown = " x ".join(show(draft, name) for name, size in sizes.items() if size > 1)
    layouts = fitting_layouts(draft)
    use = f"use {layouts}" if layouts else f"leave {'them' if ' x ' in shown else 'it'} out"
    started = "1 process was started" if world == 1 else f"{world} processes were started"
    launcher = draft.run.launch.launcher
    how = "--nproc" if draft.run.launch.nproc else _HOW_TO_START.get(launcher, "torchrun --nproc_per_node")
    return (
        f"{shown} needs a multiple of {unit} processes and {started} (world size ({world}) is not divisible by "
        f"{unit}); start {multiples(world, unit)} ({how}), or with {world} {use}"
    )


@rule("num_attention_heads", "tensor_model_parallel_size")
def heads_divide_over_tensor_ranks(draft: Draft) -> str:
    heads, tp = draft.run.model.num_attention_heads, draft.run.parallel.tensor_model_parallel_size
    if heads % tp == 0:
        return ""
    return (
        f"{show(draft, 'num_attention_heads')} is not divisible by {show(draft, 'tensor_model_parallel_size')}; "
        f"nearest: --tensor-model-parallel-size {fitting_sizes(draft, 'tensor_model_parallel_size')}"
    )


@rule("num_attention_heads", "num_query_groups", "group_query_attention", "tensor_model_parallel_size")
def query_groups_divide_over_tensor_ranks(draft: Draft) -> str:
    model, tp = draft.run.model, draft.run.parallel.tensor_model_parallel_size
    groups = model.query_groups
    if groups % tp == 0 or tp % groups == 0 or not model.group_query_attention:
        return ""
    return (
        f"{show(draft, 'num_query_groups')} neither divides by {show(draft, 'tensor_model_parallel_size')} nor divides "
        f"it; nearest: --tensor-model-parallel-size {fitting_sizes(draft, 'tensor_model_parallel_size')}"
    )


@rule("ffn_hidden_size", "hidden_size", "swiglu", "tensor_model_parallel_size")
def feed_forward_divides_over_tensor_ranks(draft: Draft) -> str:
    size, tp = draft.run.model.ffn_size, draft.run.parallel.tensor_model_parallel_size
    if size % tp == 0:
        return ""
    return (
        f"feed-forward layers of {size} (--ffn-hidden-size) are not divisible by "
        f"{show(draft, 'tensor_model_parallel_size')}; nearest: --tensor-model-parallel-size "
        f"{fitting_sizes(draft, 'tensor_model_parallel_size')}, or --ffn-hidden-size {multiples(size, tp)}"
    )


@rule("seq_length", "tensor_model_parallel_size", "context_parallel_size", "sequence_parallel")
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


@rule("num_attention_heads", "tensor_model_parallel_size", "context_parallel_size", "cp_comm_type")
def heads_divide_over_exchanging_ranks(draft: Draft) -> str:
    parallel, heads = draft.run.parallel, draft.run.model.num_attention_heads
    unit = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    if parallel.cp_comm_type != "a2a" or parallel.context_parallel_size == 1 or heads % unit == 0:
        return ""
    return (
        f"--cp-comm-type a2a exchanges heads: {show(draft, 'num_attention_heads')} is not divisible by "
        f"{show(draft, 'tensor_model_parallel_size')} x {show(draft, 'context_parallel_size')}; use --cp-comm-type p2p"
    )


@rule("num_layers", "pipeline_model_parallel_size", *_SPLIT)
def layers_divide_over_the_pipeline(draft: Draft) -> str:
    try:
        draft.run.stages  # noqa: B018 - for its error
    except LayoutError as error:
        given = [show(draft, name) for name in _SPLIT if name in draft.given]
        flags = ", ".join([show(draft, "num_layers"), show(draft, "pipeline_model_parallel_size"), *given])
        fitting = fitting_sizes(draft, "pipeline_model_parallel_size")
        return f"{flags}: {error}; use --pipeline-model-parallel-size {fitting}{'' if given else _uneven(draft)}"
    return ""


def _uneven(draft: Draft) -> str:
    """The remedy of a shorter first stage, where the others then have equal numbers of layers."""
    layers, stages = draft.run.model.num_layers, draft.run.parallel.pipeline_model_parallel_size
    others = -(-layers // stages)
    first = layers - (stages - 1) * others
    return f", or --decoder-first-pipeline-num-layers {first} ({others} in the others)" if first > 0 else ""


@rule("num_layers", "pipeline_model_parallel_size", *_SPLIT)
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


@rule("global_batch_size", "micro_batch_size", "world_size", "num_layers", *MODEL_PARALLEL, *_SPLIT)
def interleaving_needs_rounds_of_micro_batches(draft: Draft) -> str:
    run = draft.run
    pp, sizes = run.parallel.pipeline_model_parallel_size, run.batch_sizes
    counts = {stage.size: stage.size // sizes.unit for stage in sizes.stages if stage.size >= sizes.unit}
    wrong = [size for size, count in counts.items() if count % pp] if run.layout.dp else []
    if run.parallel.virtual_stages(run.model.num_layers) == 1 or pp == 1 or not wrong:
        return ""
    size = show(draft, "global_batch_size") if len(sizes.stages) == 1 else f"a global batch of {wrong[0]} samples"
    return (
        f"virtual pipeline stages work on rounds of {pp} micro-batches, and {size} makes {wrong[0] // sizes.unit}; "
        f"nearest: {multiples(wrong[0], sizes.unit * pp)}"
    )


@rule("pipeline_schedule", "num_layers", *MODEL_PARALLEL, *_SPLIT)
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


@rule("use_torch_fsdp2", "use_distributed_optimizer")
def optimizer_state_is_sharded_once(draft: Draft) -> str:
    parallel = draft.run.parallel
    if not (parallel.use_torch_fsdp2 and parallel.use_distributed_optimizer):
        return ""
    return (
        "--use-torch-fsdp2 and --use-distributed-optimizer exclude each other: the former shards the optimizer state "
        "too; use one of them"
    )


@rule("use_torch_fsdp2", "use_megatron_fsdp")
def one_way_to_shard(draft: Draft) -> str:
    parallel = draft.run.parallel
    if not (parallel.use_torch_fsdp2 and parallel.use_megatron_fsdp):
        return ""
    return "--use-torch-fsdp2 and --use-megatron-fsdp exclude each other, and do the same here; use one of them"


@rule("pipeline_schedule", "world_size", *SHARDING, *MODEL_PARALLEL)
def weight_gradients_of_sharded_weights_are_not_put_off(draft: Draft) -> str:
    run = draft.run
    if not run.fully_sharded or run.pipeline_schedule != "zb-h1":
        return ""
    return (
        "--pipeline-schedule zb-h1 computes weight gradients after the backward pass, when "
        f"{show(draft, run.parallel.dividing_setting)} has reduced them; use --pipeline-schedule 1f1b, or "
        "--use-distributed-optimizer"
    )


@rule("sequence_parallel", "tensor_model_parallel_size")
def sequence_parallel_alone(draft: Draft) -> str:
    parallel = draft.run.parallel
    if not parallel.sequence_parallel or parallel.tensor_model_parallel_size > 1:
        return ""
    return "--sequence-parallel is off: it divides the work of tensor-parallel processes, and there is one"


@rule("world_size", *SHARDING, *MODEL_PARALLEL)
def distributed_optimizer_alone(draft: Draft) -> str:
    run = draft.run
    if run.parallel.dividing_setting != "use_distributed_optimizer" or run.layout.dp * run.layout.cp > 1:
        return ""
    return "--use-distributed-optimizer has no effect: with one data-parallel process there is nothing to split"


@rule("context_parallel_size", "cp_comm_type", "attention_backend", "transformer_impl")
def ring_has_its_own_attention(draft: Draft) -> str:
    run = draft.run
    if run.parallel.context_parallel_size == 1 or run.parallel.cp_comm_type != "p2p" or run.model.fused_attention:
        return ""
    return (
        f"{show(draft, 'attention_backend')}, {show(draft, 'transformer_impl')}: no effect on attention under "
        "--cp-comm-type p2p, which merges parts of its own; --cp-comm-type a2a uses that kernel"
    )


@rule("torch_fsdp2_reshard_after_forward", "world_size", *SHARDING, *MODEL_PARALLEL)
def full_sharding_alone(draft: Draft) -> str:
    run, name = draft.run, draft.run.parallel.dividing_setting
    if not run.parallel.torch_fsdp2_reshard_after_forward and not run.parallel.use_torch_fsdp2:
        return "--torch-fsdp2-no-reshard-after-forward has no effect without --use-torch-fsdp2"
    if name in ("", "use_distributed_optimizer") or run.layout.dp * run.layout.cp > 1:
        return ""
    return f"{show(draft, name)} has no effect: with one data-parallel process there is nothing to split"


@rule("use_distributed_optimizer", "use_megatron_fsdp", "data_parallel_sharding_strategy")
def strategy_says_what_is_divided(draft: Draft) -> str:
    parallel = draft.run.parallel
    if not (parallel.use_megatron_fsdp and parallel.data_parallel_sharding_strategy == "no_shard"):
        return ""
    return f"{show(draft, 'use_megatron_fsdp')} divides nothing: {show(draft, 'data_parallel_sharding_strategy')}"


LAYOUT_RULES: tuple[Rule, ...] = (
    processes_fill_the_layout,
    heads_divide_over_tensor_ranks,
    query_groups_divide_over_tensor_ranks,
    feed_forward_divides_over_tensor_ranks,
    sequence_divides_over_its_ranks,
    heads_divide_over_exchanging_ranks,
    layers_divide_over_the_pipeline,
    virtual_stages_need_a_pipeline,
    interleaving_needs_rounds_of_micro_batches,
    schedule_fits_the_stages,
    optimizer_state_is_sharded_once,
    one_way_to_shard,
    weight_gradients_of_sharded_weights_are_not_put_off,
)

LAYOUT_NOTICES: tuple[Rule, ...] = (
    sequence_parallel_alone,
    distributed_optimizer_alone,
    ring_has_its_own_attention,
    full_sharding_alone,
    strategy_says_what_is_divided,
    idle_without("data_parallel_sharding_strategy", "use_megatron_fsdp", "--use-megatron-fsdp is not given"),
)
