"""The flat buffers of Megatron's distributed optimizer: where each parameter stands in them.

A (tensor, pipeline) place has its parameters in reverse order, each from the next multiple of 64 elements, in one
buffer or in several buckets of one; a bucket is padded at its end. What stands in the gaps is undefined. Source:
docs/reference/checkpoints.md#optimizer-in-torch_dist, verified on checkpoints of core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalith.checkpoint.content import volume
from megalith.errors import CheckpointError

_ALIGNMENT = 64


@dataclass(frozen=True)
class Place:
    """Where a parameter stands: from element `start` of bucket `bucket`, in the given local shape."""

    bucket: int
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + volume(self.shape)


def _aligned(end: int) -> int:
    return -(-end // _ALIGNMENT) * _ALIGNMENT


def bucket_sizes(shapes: Mapping[str, Sequence[int]], limit: int | None, alone: Collection[str] = ()) -> list[int]:
    """How Megatron divides a buffer into buckets: elements of each without the padding at its end.

    Args:
        shapes: parameter name -> local shape, in module order.
        limit: a bucket is closed when it has so many elements; one bucket if None.
        alone: parameters that have a bucket of their own: an embedding that two pipeline stages share.
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


def coalesced_places(
    shapes: Mapping[str, Sequence[int]], total: int, limits: Sequence[int | None], alone: Collection[str], where: str
) -> dict[str, Place]:
    """Where parameters stand in a buffer whose buckets were put together, each without its padding.

    The buffer does not say where its buckets ended: they are those of the first of the `limits` that it can be.

    Args:
        shapes, alone: as of `bucket_sizes`.
        total: elements of the buffer.
        limits: sizes of a bucket that the run may have had.
        where: names the file in errors.

    Raises:
        CheckpointError: it cannot be any of them.
    """
    divisions = [bucket_sizes(shapes, limit, only) for limit in limits for only in (alone, ())]
    sizes = next((sizes for sizes in divisions if sum(sizes) == total), [total])
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return {
        name: Place(0, starts[place.bucket] + place.start, place.shape)
        for name, place in places(shapes, sizes, where).items()
    }


def bucket_limits(args: Mapping[str, Any]) -> list[int | None]:
    """The sizes of a bucket that the saved args allow, the likeliest first."""
    given, replicas = args.get("ddp_bucket_size"), int(args.get("data_parallel_size") or 1)
    several = [int(given)] if given else [max(40_000_000, 1_000_000 * replicas)]
    return [*several, None] if args.get("overlap_grad_reduce") else [None, *several]


def buffer_size(shapes: Mapping[str, Sequence[int]]) -> int:
    """Elements of a buffer of one bucket, without the padding at its end."""
    end = 0
    for shape in reversed(list(shapes.values())):
        end = _aligned(end) + volume(shape)
    return end


def places(shapes: Mapping[str, Sequence[int]], bucket_sizes: Sequence[int], where: str) -> dict[str, Place]:
    """Lay parameters out.

    Args:
        shapes: parameter name -> local shape, in module order.
        bucket_sizes: elements of each bucket without the padding at its end.
        where: names the file in errors.

    Raises:
        CheckpointError: the parameters do not fill the buckets.
    """
    found: dict[str, Place] = {}
    bucket, end = 0, 0
    for name in reversed(list(shapes)):
        shape = tuple(shapes[name])
        start = _aligned(end)
        # A bucket that ends before a shared embedding counts the gap before that as its own.
        if end and bucket < len(bucket_sizes) and bucket_sizes[bucket] in (end, start):
            bucket, start = bucket + 1, 0
        end = start + volume(shape)
        if bucket >= len(bucket_sizes) or end > bucket_sizes[bucket]:
            raise CheckpointError(
                f"{where}: the buffer of the distributed optimizer has buckets of {list(bucket_sizes)} elements, "
                f"and {name} does not fit: it was saved from another model or layout than the args say"
            )
        found[name] = Place(bucket, start, shape)
    if bucket != len(bucket_sizes) - 1 or bucket_sizes[-1] not in (end, _aligned(end)):
        raise CheckpointError(
            f"{where}: the parameters end at element {end} of bucket {bucket}, the buckets of the distributed "
            f"optimizer have {list(bucket_sizes)} elements: it was saved from another model or layout than the args say"
        )
    return found
