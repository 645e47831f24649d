"""Adapters beside linear layers: what they add, what they train, and which rows of a fused projection they are for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megalith.nn.linear import Linear, column, row
from megalith.nn.lora import Lora, adapt, merge, parts_of_rows
from megalith.nn.placement import Fused, GroupedHeads, Placement, Split
from megalith.nn.region import SOLO


def test_rows_of_a_fused_projection_belong_to_its_parts() -> None:
    assert parts_of_rows(Fused(0, 2), 6).tolist() == [0, 0, 0, 1, 1, 1]
    heads = GroupedHeads(groups=2, queries_per_group=2, head_size=1)
    assert parts_of_rows(heads, 8).tolist() == [0, 0, 1, 2] * 2
    assert parts_of_rows(heads, 3).tolist() == [0, 1, 2], "a rank with one of the queries that share a key"
    gated = GroupedHeads(groups=1, queries_per_group=2, head_size=2, gated=True)
    assert parts_of_rows(gated, 12).tolist() == [0] * 8 + [1, 1, 2, 2], "the gates of queries are of their projection"


def adapted(placement: Placement, rows: int, parts: list[int]) -> Linear:
    """A frozen layer of 5 inputs with random adapters of rank 2."""
    holder = nn.Module()
    holder.layer = Linear(5, rows, placement, bias=True, dtype=torch.float64, device="cpu")
    adapt(holder, Lora(2, 0.7), lambda name: parts if name == "layer" else (), SOLO)
    for parameter in holder.parameters():
        nn.init.normal_(parameter)
    layer: Linear = holder.layer
    return layer


@pytest.mark.parametrize(
    ("placement", "rows", "parts", "apply"),
    [
        (Split(0), 6, [0], lambda x, layer: column(x, SOLO, layer)[0]),
        (Split(1), 6, [0], lambda x, layer: row(x, SOLO, layer)),
        (Fused(0, 2), 6, [1], lambda x, layer: column(x, SOLO, layer)[0]),
        (GroupedHeads(2, 2, 3), 24, [0, 2], lambda x, layer: column(x, SOLO, layer)[0]),
    ],
)
def test_the_product_of_each_part_is_added_to_its_rows(
    placement: Placement, rows: int, parts: list[int], apply: Callable[[torch.Tensor, Linear], torch.Tensor]
) -> None:
    torch.manual_seed(1)
    layer, x = adapted(placement, rows, parts), torch.randn(3, 1, 5, dtype=torch.float64)
    adapter = layer.adapter
    assert adapter is not None and layer.bias is not None
    whole = placement == Split(0) or placement == Split(1)
    of_rows = [0] * rows if whole else parts_of_rows(placement, rows).tolist()  # type: ignore[arg-type]
    wanted = x @ layer.weight.t() + layer.bias
    for number, part in enumerate(of_rows):
        if part in parts:
            place = 2 * parts.index(part)
            added = 0.7 * x @ adapter.lora_A.weight[place : place + 2].t() @ adapter.lora_B.weight[number]
            wanted = wanted + nn.functional.one_hot(torch.tensor(number), rows) * added[..., None]
    found = apply(x, layer)
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is None
    grad = adapter.lora_B.weight.grad
    assert grad is not None
    assert [bool(one.any()) for one in grad] == [part in parts for part in of_rows]
    merge(layer)
    assert layer.adapter is None and "adapter" not in dict(layer.named_modules())
    torch.testing.assert_close(apply(x, layer), wanted)
