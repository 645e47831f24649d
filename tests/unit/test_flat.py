"""The arithmetic of flat memory: buckets, boxes and ranges."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from megalith.flat import boxes, lay_out, subtract_ranges

SHAPES = {"a": (3, 4), "b": (5,), "c": (10, 10), "d": (2, 2), "e": (1,)}


@pytest.mark.parametrize("bucket_size", [1, 10, 20, 1000])
@pytest.mark.parametrize("divisor", [1, 8, 12])
def test_every_parameter_has_a_place_of_its_own_in_one_bucket(bucket_size: int, divisor: int) -> None:
    layout = lay_out(SHAPES, {"d": ("tp", "whole")}, bucket_size=bucket_size, divisor=divisor)
    flat = torch.zeros(layout.size)
    for number, name in enumerate(SHAPES, start=1):
        layout.view(flat, name).add_(number)
    for number, (name, shape) in enumerate(SHAPES.items(), start=1):
        assert tuple(layout.view(flat, name).shape) == shape
        assert layout.view(flat, name).unique().tolist() == [number], "places overlap"
        assert name in layout.bucket_of(name).names
    assert [name for bucket in layout.buckets for name in bucket.names] == ["a", "b", "c", "e", "d"]
    assert [bucket.start for bucket in layout.buckets] == [0, *(bucket.stop for bucket in layout.buckets[:-1])]
    for bucket in layout.buckets:
        assert (bucket.stop - bucket.start) % divisor == 0
        assert bucket.kind == (("tp", "whole") if "d" in bucket.names else ())
        before_the_last = sum(prod(SHAPES[name]) for name in bucket.names[:-1])
        assert before_the_last < bucket_size, "a bucket goes on beyond its size"


def test_buckets_are_filled_to_their_size() -> None:
    buckets = lay_out(SHAPES, {}, bucket_size=17, divisor=1).buckets
    assert [bucket.names for bucket in buckets] == [("a", "b"), ("c",), ("d", "e")]


@pytest.mark.parametrize("shape", [(7,), (1, 1), (3, 4), (1, 6), (6, 1), (2, 3, 4)])
def test_boxes_are_the_elements_of_a_range(shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    for start, stop in product(range(prod(shape) + 1), repeat=2):
        if start > stop:
            continue
        found = list(boxes(start, stop, shape))
        elements = []
        for box in found:
            part = whole[tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))]
            assert tuple(part.shape) == box.extent and part.flatten()[0] == box.start
            elements += part.flatten().tolist()
        assert elements == list(range(start, stop))
        assert len(found) <= 2 * len(shape) - 1


def test_without_is_the_difference_of_sets() -> None:
    for first, last, third, fourth in product(range(7), repeat=4):
        holes = [(first, max(first, last)), (third, max(third, fourth))]
        rest = subtract_ranges((1, 5), holes)
        removed = {number for hole in holes for number in range(*hole)}
        assert [n for part in rest for n in range(*part)] == [n for n in range(1, 5) if n not in removed]
        assert all(start < stop for start, stop in rest)
