"""The flat buffers of Megatron's distributed optimizer: where each parameter stands in them.

A (tensor, pipeline) place has its parameters in reverse order, each from the next multiple of 64 elements, in one
buffer or in several buckets of one; a bucket is padded at its end (spec/formats-checkpoint.md section 9, verified on
checkpoints of core 0.16.1). What stands in the gaps is undefined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def buffer_size(shapes: Mapping[str, Sequence[int]]) -> int:
    """Elements of a buffer of one bucket, without the padding at its end."""
    end = 0
    for shape in reversed(list(shapes.values())):
        end = -(-end // _ALIGNMENT) * _ALIGNMENT + volume(shape)
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
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if end and bucket < len(bucket_sizes) and end == bucket_sizes[bucket]:
            bucket, start = bucket + 1, 0
        end = start + volume(shape)
        if bucket >= len(bucket_sizes) or end > bucket_sizes[bucket]:
            raise CheckpointError(
                f"{where}: the buffer of the distributed optimizer has buckets of {list(bucket_sizes)} elements, "
                f"and {name} does not fit: it was saved from another model or layout than the args say"
            )
        found[name] = Place(bucket, start, shape)
    if bucket != len(bucket_sizes) - 1 or end != bucket_sizes[-1]:
        raise CheckpointError(
            f"{where}: the parameters end at element {end} of bucket {bucket}, the buckets of the distributed "
            f"optimizer have {list(bucket_sizes)} elements: it was saved from another model or layout than the args say"
        )
    return found
