"""What is told of a step about its experts has the layers of all pipeline stages."""

from __future__ import annotations

import torch

from megalith.config import ModelConfig
from megalith.distributed.context import ParallelContext
from megalith.layout import Layout
from megalith.models.gpt import GPT
from megalith.models.language_model import Stage
from megalith.train.moe import auxiliary_losses, expert_load, routers

from .conftest import Ranks

MIXTURE = ModelConfig(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    max_position_embeddings=8,
    num_experts=2,
    moe_router_load_balancing_type=("aux_loss",),
)


def _of_a_stage() -> tuple[list[float], list[list[float]]]:
    context = ParallelContext.create(Layout(pp=2), torch.device("cpu"))
    index = context.pp.index
    chunk = GPT(MIXTURE, 16, stage=Stage(range(index, index + 1), context.pp.is_first, context.pp.is_last))
    (router,) = routers([chunk])
    router.load_E.fill_(1.0 + index)
    chunk.auxiliary.record("load_balancing_loss", index, torch.tensor(2.0 + index))
    losses = auxiliary_losses([chunk], ["load_balancing_loss"], 1, context)
    return losses.tolist(), expert_load([chunk], context).tolist()


def test_every_stage_tells_of_all_layers(ranks: Ranks) -> None:
    assert ranks.run(2, _of_a_stage) == [([2.5], [[1.0, 1.0], [2.0, 2.0]])] * 2
