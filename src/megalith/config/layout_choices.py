"""Which sizes would fit where the given ones do not: the remedies of the rules of layouts."""

from __future__ import annotations

from itertools import product
from math import log, prod

from megalith.config.rule import Draft

SHARDING = (
    "use_distributed_optimizer",
    "use_torch_fsdp2",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
)
"""Settings of what data-parallel processes divide."""
MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")

_MOST = 3


def sizes_of(draft: Draft) -> dict[str, int]:
    """The sizes of the kinds of parallelism that divide the model, by the name of their setting."""
    return {name: getattr(draft.run.parallel, name) for name in MODEL_PARALLEL}


def fitting_sizes(draft: Draft, name: str) -> str:
    """The sizes of one kind of parallelism next to the given one that the model allows: `1 or 2 or 4`.

    They also fill the processes that were started, if the other sizes allow any that do.
    """
    world, sizes = draft.run.launch.world_size, sizes_of(draft)
    others, given = prod(sizes.values()) // sizes[name], sizes[name]
    allowed = [size for size in range(1, 4 * given + 1) if _model_allows(draft, name, size)]
    filling = [size for size in allowed if world % (size * others) == 0]
    nearest = sorted(filling or allowed, key=lambda size: abs(size - given))[:_MOST]
    return " or ".join(map(str, sorted(nearest)))


def fitting_layouts(draft: Draft) -> str:
    """The layouts next to the given one that the processes and the model allow, as flags; empty if none divides.

    Those that keep most processes at work on one copy of the model come first.
    """
    world, given = draft.run.launch.world_size, sizes_of(draft)
    names = [name for name, size in given.items() if size > 1]
    choices = [
        [
            size
            for size in range(1, min(given[name], world) + 1)
            if world % size == 0 and _model_allows(draft, name, size)
        ]
        for name in names
    ]
    fitting = [sizes for sizes in product(*choices) if world % prod(sizes) == 0 and prod(sizes) > 1]
    asked = tuple(given[name] for name in names)
    nearest = sorted(fitting, key=lambda sizes: (-prod(sizes), _distance(sizes, asked)))[:_MOST]
    return ", or ".join(
        " ".join(f"--{name.replace('_', '-')} {size}" for name, size in zip(names, sizes, strict=True) if size > 1)
        for sizes in nearest
    )


def _distance(sizes: tuple[int, ...], others: tuple[int, ...]) -> float:
    return max(abs(log(one / other)) for one, other in zip(sizes, others, strict=True))


def _model_allows(draft: Draft, name: str, size: int) -> bool:
    """Whether the model divides by this size; of settings that are missing nothing is said."""
    model, parallel, length = draft.run.model, draft.run.parallel, draft.run.data.seq_length
    if name == "pipeline_model_parallel_size":
        own_split = parallel.decoder_first_pipeline_num_layers or parallel.decoder_last_pipeline_num_layers
        return bool(own_split) or not model.num_layers or model.num_layers % size == 0
    if name == "context_parallel_size":
        return size == 1 or not length or length % (2 * size) == 0
    heads, hidden = model.num_attention_heads, model.hidden_size
    if not heads or not hidden:
        return True
    groups = model.query_groups
    return heads % size == 0 and model.ffn_size % size == 0 and (groups % size == 0 or size % groups == 0)
