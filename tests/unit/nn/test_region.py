"""What regions refuse."""

from __future__ import annotations

import pytest
import torch

from megalith.distributed.context import Axis
from megalith.errors import LayoutError
from megalith.nn.dropout import HiddenDropout
from megalith.nn.region import SOLO
from megalith.parallel.tensor import SequenceParallel, TensorParallel

TWO = Axis("tp", (0, 1), 1)


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    region = SequenceParallel(TWO)
    with pytest.raises(LayoutError, match="7 tokens .* 2 "):
        region.local_sequence(torch.ones(7, 3))
    with pytest.raises(LayoutError, match="7 tokens"):
        region.reduce(torch.ones(7, 3))
    assert region.local_sequence(torch.arange(6)).tolist() == [3, 4, 5]
    assert region.local_sequence(torch.arange(6).expand(2, 6), dim=1).tolist() == [[3, 4, 5]] * 2


def test_dropout_on_several_ranks_needs_a_stream_of_each() -> None:
    with pytest.raises(LayoutError, match="random stream"), TensorParallel(TWO).local_rng(0.1):
        pass
    with pytest.raises(LayoutError, match="random stream"):
        HiddenDropout(0.1, SequenceParallel(TWO))(torch.ones(3))
    with TensorParallel(TWO).local_rng(0.0):
        pass


def test_hidden_dropout_alone_repeats_by_torchs_stream() -> None:
    layer, x = HiddenDropout(0.3, SOLO), torch.ones(100)
    torch.manual_seed(0)
    first, second = layer(x), layer(x)
    torch.manual_seed(0)
    assert torch.equal(layer(x), first) and not torch.equal(first, second)
    assert layer.eval()(x) is x
