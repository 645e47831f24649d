"""Which rows of a sharded vocabulary token ids are; ids that are none fail on every rank as they do on one device."""

from __future__ import annotations

import pytest
import torch

from megalith.distributed.context import Axis
from megalith.nn.embedding import Embedding, local_rows
from megalith.nn.loss import LogitsBuffer, vocabulary_loss
from megalith.nn.placement import Split, shard
from megalith.nn.region import SOLO
from megalith.parallel.tensor import TensorParallel

SIZE = 11


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_id_is_here_once_and_its_row_is_right(ranks: int) -> None:
    table, ids, found = torch.arange(float(SIZE)), torch.randint(0, SIZE, (3, 40)), torch.zeros(3, 40)
    for index in range(ranks):
        part = shard(SIZE, ranks, index, even=False)
        rows, elsewhere = local_rows(ids, part, SIZE)
        found += table[part.start : part.stop][rows].masked_fill(elsewhere, 0.0)
        assert ranks == 1 or elsewhere.any()
    assert torch.equal(found, ids.float())


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("wrong", [-1, SIZE])
def test_an_id_outside_the_vocabulary_fails_on_every_rank(ranks: int, wrong: int) -> None:
    for index in range(ranks):
        part = shard(SIZE, ranks, index, even=False)
        rows, _ = local_rows(torch.tensor([2, wrong]), part, SIZE)
        table = Embedding(part.size, 4, Split(0, SIZE), dtype=torch.float32, device=torch.device("cpu"))
        with pytest.raises(IndexError):
            table(rows)


def test_a_label_outside_the_vocabulary_is_an_error() -> None:
    weight = torch.nn.Parameter(torch.randn(SIZE, 4))
    for label in (-1, SIZE):
        with pytest.raises(RuntimeError):
            vocabulary_loss(torch.randn(1, 4), weight, torch.tensor([label]), None, LogitsBuffer(), SOLO, SIZE)


def test_a_vocabulary_has_a_row_for_every_rank() -> None:
    sizes = [TensorParallel(Axis("tp", tuple(range(4)), index)).shard(SIZE, even=False).size for index in range(4)]
    assert sizes == [3, 3, 3, 2]
