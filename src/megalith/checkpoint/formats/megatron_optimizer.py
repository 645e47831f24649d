"""The optimizer's state in Megatron's per-rank files: which tensor belongs to which parameter.

    fp32          {state: {i: {step, exp_avg, exp_avg_sq}}, param_groups: [{..., params: [i, ...]}, ...]}
    half          {optimizer: the above, fp32_from_fp16_params: [[tensor, ...] by group], grad_scaler: ...}
    distributed   {optimizer: {param_groups: [{..., step}, ...]}, grad_scaler: ...} and, in `distrib_optim.pt`,
                  {buckets_coalesced: True, chunk: {(dtype, dtype): {param, exp_avg, exp_avg_sq, numel_unpadded}}}

Index i counts through the groups; within a group, parameters are in the order of the model's dict. Groups are
identified by their settings (`wd_mult`, `max_lr`, `is_decoupled_lr`), as their order differs between versions.

The flat buffer of a (tensor, pipeline) rank has the parameters in reverse order, each at a multiple of 64 elements, in
one or several buckets; a bucket is padded at its end. The contents of the gaps are undefined. Source:
docs/reference/checkpoints.md#optimizer-in-format-torch and #optimizer-in-torch_dist, verified on checkpoints of core
0.16.1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megalith.checkpoint.content import volume
from megalith.errors import CheckpointError

_ALIGNMENT = 64


@dataclass(frozen=True)
class BufferRange:
    """Range of a parameter in a flat buffer: from element `start` of bucket `bucket`, with the given local shape."""

    bucket: int
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + volume(self.shape)


def _aligned(end: int) -> int:
    return -(-end // _ALIGNMENT) * _ALIGNMENT


def bucket_sizes(shapes: Mapping[str, Sequence[int]], limit: int | None, alone: Collection[str] = ()) -> list[int]:
    """Return the number of elements of each of Megatron's buckets of a buffer, without the padding at its end.

    A bucket is closed when it has `limit` elements; with None all are in one bucket. Parameters in `alone`, such as an
    embedding that two pipeline stages share, have a bucket each. `shapes` are in module order.
    """
    sizes: list[int] = []
    end, held = 0, False
    for name in reversed(list(shapes)):
        start = _aligned(end)
        if name in alone and held:
            sizes.append(start)
            start = 0
        end, held = start + volume(shapes[name]), True
        if name in alone or (limit is not None and end >= limit):
            sizes.append(end)
            end, held = 0, False
    return [*sizes, end] if held else sizes


def coalesced_ranges(
    shapes: Mapping[str, Sequence[int]], total: int, limits: Sequence[int | None], alone: Collection[str], where: str
) -> dict[str, BufferRange]:
    """Return the range of each parameter in a buffer of `total` elements whose buckets were joined without padding.

    The buffer does not record where its buckets ended: the first of the `limits` that gives `total` elements is taken.
    """
    divisions = [bucket_sizes(shapes, limit, only) for limit in limits for only in (alone, ())]
    sizes = next((sizes for sizes in divisions if sum(sizes) == total), [total])
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return {
        name: BufferRange(0, starts[place.bucket] + place.start, place.shape)
        for name, place in buffer_ranges(shapes, sizes, where).items()
    }


def bucket_limits(args: Mapping[str, Any]) -> list[int | None]:
    """Return the possible bucket sizes, in elements, under the saved args, the likeliest first."""
    given, replicas = args.get("ddp_bucket_size"), int(args.get("data_parallel_size") or 1)
    several = [int(given)] if given else [max(40_000_000, 1_000_000 * replicas)]
    return [*several, None] if args.get("overlap_grad_reduce") else [None, *several]


def buffer_ranges(
    shapes: Mapping[str, Sequence[int]], bucket_sizes: Sequence[int], where: str
) -> dict[str, BufferRange]:
    """Return the range of each parameter, given in module order, in buckets of these sizes without their padding."""
    found: dict[str, BufferRange] = {}
    bucket, end = 0, 0
    for name in reversed(list(shapes)):
        shape = tuple(shapes[name])
        start = _aligned(end)
        # A bucket that ends before a shared embedding includes the alignment gap in front of it.
        if end and bucket < len(bucket_sizes) and bucket_sizes[bucket] in (end, start):
            bucket, start = bucket + 1, 0
        end = start + volume(shape)
        if bucket >= len(bucket_sizes) or end > bucket_sizes[bucket]:
            raise CheckpointError(
                f"{where}: the buffer of the distributed optimizer has buckets of {list(bucket_sizes)} elements, "
                f"and {name} does not fit: it was saved from another model or layout than the args say"
            )
        found[name] = BufferRange(bucket, start, shape)
    if bucket != len(bucket_sizes) - 1 or bucket_sizes[-1] not in (end, _aligned(end)):
        raise CheckpointError(
            f"{where}: the parameters end at element {end} of bucket {bucket}, the buckets of the distributed "
            f"optimizer have {list(bucket_sizes)} elements: it was saved from another model or layout than the args say"
        )
    return found


MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "fp32_param"
BUFFERS = {"param": MAIN, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Name of a flat buffer -> kind of state."""


class UnreadableState(CheckpointError):
    """Raised if the checkpoint has optimizer state that cannot be read; its weights can be read."""


Shapes = Mapping[str, tuple[int, ...]]
"""Parameter name -> shape on this rank, in the order of the model's dict."""

_MAIN_KEYS = ("fp32_from_fp16_params", "fp32_from_fp16")
_INNER_KEYS = ("optimizer", "optimizer_state_dict")
_WITHOUT = "load with --no-load-optim to continue from the weights alone"
# Parameters that --decoupled-lr applies to: weights, not the bias of BERT's output.
_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight", "lm_head.output_layer.weight")


def decays(name: str, shape: Sequence[int]) -> bool:
    """Return whether Megatron applies weight decay to a parameter."""
    return len(shape) > 1 and not name.endswith(".bias")


def inner(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state dict of torch's or Apex's optimizer within Megatron's."""
    for key in _INNER_KEYS:
        if isinstance(state.get(key), Mapping):
            found: Mapping[str, Any] = state[key]
            return found
    return state


def with_rates(
    groups: Sequence[Mapping[str, Any]], scheduler: Mapping[str, Any] | None, args: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the parameter groups with the keys by which megatron-core 0.16 and newer identify them.

    0.16.1 to 0.18.2 find a group by wd_mult, lr_mult, is_expert_parallel and is_decoupled_lr. 0.19.2 adds max_lr,
    min_lr, start_wd, end_wd and optimizer, and omits those that no override sets. All these versions express
    `--decoupled-lr` and muP as max_lr and min_lr, with an lr_mult of 1, and log the rate of the first group with
    default_config. Groups with a max_lr, and all groups without an `opt_param_scheduler`, are returned unchanged.
    """
    if not scheduler or "max_lr" not in scheduler:
        return [dict(group) for group in groups]
    plain = {key: float(scheduler.get(key) or 0.0) for key in ("max_lr", "min_lr")}
    given = {"max_lr": args.get("decoupled_lr"), "min_lr": args.get("decoupled_min_lr")}
    apart = plain | {key: float(rate) for key, rate in given.items() if rate is not None}
    return [dict(group) if "max_lr" in group else _with_rates(group, plain, apart) for group in groups]


def _with_rates(group: Mapping[str, Any], plain: Mapping[str, float], apart: Mapping[str, float]) -> dict[str, Any]:
    decoupled, factor = bool(group.get("is_decoupled_lr")), float(group.get("lr_mult", 1.0))
    rates = {key: rate * factor for key, rate in (apart if decoupled else plain).items()}
    default = not decoupled and factor == 1.0
    return {**group, **rates, "lr_mult": 1.0, "is_decoupled_lr": False, "default_config": default}


def is_distributed(state: Mapping[str, Any]) -> bool:
    """Return whether the tensors are in `distrib_optim.pt`."""
    groups = inner(state).get("param_groups", ())
    return bool(groups) and not any("params" in group for group in groups)


def optimizers(state: Any, count: int, where: str) -> list[Mapping[str, Any]]:
    """Return the states of one or two optimizers (dense; experts); raise an UnreadableState for other forms."""
    found = state if isinstance(state, list) else [state]
    if len(found) != count or not all(isinstance(part, Mapping) and "param_groups" in inner(part) for part in found):
        raise UnreadableState(
            f"{where} holds the state of {len(found)} optimizers where its args say {count}, or in a form that this "
            f"version does not know; {_WITHOUT}"
        )
    return found


def scalars_common(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameter groups, steps and loss scaler in the form of `common.pt`."""
    body = inner(state)
    groups = [dict(group) for group in body["param_groups"]]
    moments = body.get("state", {})
    steps = [entry["step"] for entry in moments.values() if "step" in entry][:1]
    found = {"param_groups": groups, "state": {"common_step": steps[0]} if steps else {}}
    return {"optimizer": found, "grad_scaler": state.get("grad_scaler")}


def state_tensors(
    state: Mapping[str, Any], shapes: Shapes, decoupled_lr: float | None, where: str
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield kind, name and tensor of a non-distributed optimizer; raise an UnreadableState if shapes differ."""
    body = inner(state)
    groups = body["param_groups"]
    found = _checked_members(groups, shapes, decoupled_lr, where)
    moments, main = body.get("state", {}), next((state[key] for key in _MAIN_KEYS if key in state), None)
    for number, (group, names) in enumerate(zip(groups, found, strict=True)):
        for position, (index, name) in enumerate(zip(group["params"], names, strict=True)):
            tensors = {kind: moments[index][kind] for kind in MOMENTS if kind in moments.get(index, ())}
            if main is not None:
                tensors[MAIN] = main[number][position]
            for kind, tensor in tensors.items():
                if tuple(tensor.shape) != shapes[name]:
                    raise UnreadableState(
                        f"{where}: {kind} of parameter {index} has shape {list(tensor.shape)}, and its "
                        f"weight, {name}, has {list(shapes[name])}; {_WITHOUT}"
                    )
                yield kind, name, tensor


def members(groups: Sequence[Mapping[str, Any]], shapes: Shapes, decoupled_lr: float | None) -> list[list[str]]:
    """Return the names of the parameters of each group, in the order of the model's dict."""
    of_group = [_is_decoupled(group, decoupled_lr) for group in groups]
    apart = any(of_group)
    kind_of = {name: (decays(name, shape), apart and name in _TABLES) for name, shape in shapes.items()}
    kinds = [
        (bool(group.get("wd_mult", group.get("weight_decay", 0.0))), decoupled)
        for group, decoupled in zip(groups, of_group, strict=True)
    ]
    return [[name for name in shapes if kind_of[name] == kind] for kind in kinds]


def _is_decoupled(group: Mapping[str, Any], decoupled_lr: float | None) -> bool:
    """Return whether a group has the rate of `--decoupled-lr`: by a flag (older versions) or an overridden max_lr."""
    overrides = not group.get("default_config", True)
    return bool(group.get("is_decoupled_lr")) or (
        overrides and decoupled_lr is not None and group.get("max_lr") == decoupled_lr
    )


def _checked_members(
    groups: Sequence[Mapping[str, Any]], shapes: Shapes, decoupled_lr: float | None, where: str
) -> list[list[str]]:
    """Return `members`; raise an UnreadableState if the groups have other numbers of parameters."""
    found = members(groups, shapes, decoupled_lr)
    if [len(names) for names in found] != [len(group["params"]) for group in groups]:
        raise UnreadableState(
            f"{where}: its optimizer has groups of {[len(group['params']) for group in groups]} parameters, where the "
            f"model in it would have groups of {[len(names) for names in found]}; {_WITHOUT}"
        )
    return found


def buffer_tensors(buffer: Mapping[str, Any], shapes: Shapes, where: str) -> Iterator[tuple[str, str, Tensor]]:
    """Yield kind, parameter name and view of one chunk's flat buffers; raise an UnreadableState if shapes differ."""
    size = int(buffer["numel_unpadded"])
    for label in BUFFERS:
        if label in buffer and tuple(buffer[label].shape) != (size,):
            raise UnreadableState(
                f"{where}: {label} has shape {list(buffer[label].shape)} instead of [{size}]; {_WITHOUT}"
            )
    try:
        found = buffer_ranges(shapes, [size], where)
    except CheckpointError as error:
        raise UnreadableState(f"{error}; {_WITHOUT}") from error
    for name, place in found.items():
        for label, kind in BUFFERS.items():
            if label in buffer:
                yield kind, name, buffer[label][place.start : place.start + volume(place.shape)].view(place.shape)


def chunk_buffers(
    body: Mapping[Any, Any], weights: Sequence[Mapping[str, Tensor]], where: str
) -> list[tuple[Mapping[str, Any], Shapes]]:
    """Return the buffers of a `distrib_optim.pt`, each with names and shapes of its parameters.

    Megatron has a buffer for each parameter dtype of a model chunk, under (dtype, dtype of the gradients). `weights`
    are the stored weights of each chunk. Raises an UnreadableState if the layout of the buffers is unknown.
    """
    if not body.get("buckets_coalesced"):
        raise UnreadableState(
            f"{where} has separate buckets of the distributed optimizer, as before Megatron-core 0.7; this version "
            f"reads joined buckets only; {_WITHOUT}"
        )
    numbered = [body[index] for index in sorted(key for key in body if isinstance(key, int))]
    if len(numbered) != len(weights):
        raise UnreadableState(
            f"{where} has buffers of {len(numbered)} model chunks, and the checkpoint has weights of "
            f"{len(weights)}; {_WITHOUT}"
        )
    return [
        (by_dtype[key], {name: tuple(tensor.shape) for name, tensor in members.items()})
        for by_dtype, part in zip(numbered, weights, strict=True)
        for key, members in _members_of_buffers(list(by_dtype), part, where)
    ]


def _members_of_buffers(
    keys: Sequence[Any], weights: Mapping[str, Tensor], where: str
) -> list[tuple[Any, Mapping[str, Tensor]]]:
    """Return the weights of each of a chunk's buffers: all weights if there is one buffer, else those of its dtype."""
    if len(keys) == 1:
        return [(keys[0], weights)]
    of_weights = [str(dtype) for dtype in dict.fromkeys(tensor.dtype for tensor in weights.values())]
    of_buffers = [str(key[0]) if isinstance(key, tuple) and key else str(key) for key in keys]
    if sorted(of_weights) != sorted(of_buffers):
        raise UnreadableState(
            f"{where} has buffers for parameters in {', '.join(of_buffers)}, and the weights of the checkpoint are in "
            f"{', '.join(of_weights)}, so they cannot be matched; {_WITHOUT}"
        )
    return [
        (key, {name: tensor for name, tensor in weights.items() if str(tensor.dtype) == dtype})
        for key, dtype in zip(keys, of_buffers, strict=True)
    ]
