"""A registered loss is the same, with its gradients, over a vocabulary that tensor-parallel ranks share; in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.unit.models.test_own_loss import CONFIG, ROWS, batch, hidden_z_loss, own, z_loss
from torch import Tensor

from megalith.distributed.context import ParallelContext
from megalith.layout import Layout
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.models.language_model import named_placements
from megalith.nn.placement import Replicated, local_part
from megalith.nn.region import Region
from megalith.parallel.tensor import SequenceParallel, TensorParallel

from .conftest import Ranks

LOSSES = {"logits": z_loss, "hidden": hidden_z_loss}


def result(on: str, region: Region | None = None) -> tuple[float, dict[str, Tensor]]:
    model = GPT(replace(CONFIG, loss=own(LOSSES[on], on)), ROWS, region=region, dtype=torch.float64)
    initialise(model, 3)
    (loss,) = model.losses(batch(), None)
    loss.summed.backward()
    found = {}
    for name, parameter, placement in named_placements(model):
        assert parameter.grad is not None, name
        partial = model.region.needs_grad_reduce and placement == Replicated()
        found[name] = model.region.all_reduce_sum(parameter.grad) if partial else parameter.grad
    return float(loss.summed.detach()), found


def on_rank(on: str, sequence_parallel: bool) -> None:
    context = ParallelContext.create(Layout(tp=2), torch.device("cpu"))
    wanted, of_one = result(on)
    region = (SequenceParallel if sequence_parallel else TensorParallel)(context.tp)
    found, of_many = result(on, region)
    assert found == pytest.approx(wanted, rel=1e-12)
    for name, _, placement in named_placements(GPT(CONFIG, ROWS)):
        part = local_part(of_one[name], placement, 2, context.tp.index)
        torch.testing.assert_close(of_many[name], part, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("on", LOSSES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_over_a_shared_vocabulary(ranks: Ranks, on: str, sequence_parallel: bool) -> None:
    ranks.run(2, on_rank, on, sequence_parallel)
