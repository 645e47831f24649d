"""The parts of a run in a program of its own: steps without the loop, weights loaded behind the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megalith.assemble import model
from megalith.assemble.model import build_chunks, build_run_optimizer, draw_weights
from megalith.assemble.schedule import build_schedule
from megalith.config import from_values
from megalith.distributed.comm import AsyncHandle
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.optim.build import build_optimizer
from megalith.parallel.data import Zero1
from megalith.registry import EMPTY, Entry, Registry
from megalith.train.evaluation import EvaluationSet, evaluate
from megalith.train.state import TrainState
from megalith.train.step import MicroBatch, train_step

LENGTH, VOCABULARY = 16, 32
VALUES: dict[str, Any] = {
    **{"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": LENGTH},
    **{"seq_length": LENGTH, "micro_batch_size": 1, "global_batch_size": 4, "train_iters": 5, "lr": 1e-2},
    **{"mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": 31},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
}


def _state(
    values: dict[str, Any], world_size: int, dtype: torch.dtype | None = None, registry: Registry = EMPTY
) -> tuple[TrainState, int]:
    environ = {"WORLD_SIZE": str(world_size), "RANK": "0"} if world_size > 1 else {}
    run = from_values({**VALUES, **values}, environ=environ, registry=registry)
    cpu = torch.device("cpu")
    context = ParallelContext.create(run.layout, cpu) if world_size > 1 else ParallelContext.solo(cpu)
    streams = RandomStreams(1, context)
    chunks = build_chunks(run, VOCABULARY, context, streams.own, dtype=dtype)
    draw_weights(run, chunks, streams, context)
    optimizer = build_run_optimizer(run, chunks, context)
    return TrainState(chunks, optimizer, streams, build_schedule(run), context=context), run.num_micro_batches


def _batches(replica: int, replicas: int) -> Iterator[MicroBatch]:
    """The samples of one replica; the number of them that count differs from sample to sample."""
    generator = torch.Generator().manual_seed(3)
    for number in range(1000):
        ids = torch.randint(0, VOCABULARY, (1, LENGTH + 1), generator=generator)
        mask = (torch.arange(LENGTH) >= number % 5).float()[None]
        if number % replicas == replica:
            positions = torch.arange(LENGTH)[None]
            yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions, "loss_mask": mask}


def _losses(values: dict[str, Any], world_size: int) -> list[float]:
    """Of two steps and an evaluation, with nothing said of how the ranks agree."""
    state, micro_batches = _state(values, world_size, torch.float64)
    batches = _batches(state.context.dp.index, state.context.dp.size)
    losses = [train_step(state, batches, micro_batches).loss for _ in range(2)]
    held_out = evaluate(state, EvaluationSet("validation", batches, 1), micro_batches)
    assert held_out is not None
    return [*losses, held_out.loss]


@pytest.mark.parametrize(
    "layout", ["pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size", ""]
)
def test_a_step_alone_reports_the_loss_of_all_ranks(ranks: Any, layout: str) -> None:
    wanted = _losses({}, 1)
    for found in ranks.run(2, _losses, {layout: 2} if layout else {}, 2):
        assert found == pytest.approx(wanted, rel=1e-6)  # sums of losses are in fp32


def _loaded_again(values: dict[str, Any]) -> list[str]:
    """Which weights are not those that were loaded after a step, when another step at rate 0 is done."""
    state, micro_batches = _state({"bf16": True, "lr": 0.5, **values}, 2)
    batches = _batches(state.context.dp.index, state.context.dp.size)
    first = _weights(state)
    saved = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    train_step(state, batches, micro_batches)
    state.model.load_state_dict(saved)
    state.optimizer.zero_grad(micro_batches)
    again = _weights(state)
    state.lr_schedule_samples = 10**6  # where the rate is 0
    assert state.learning_rate == 0.0
    train_step(state, batches, micro_batches)
    last = _weights(state)
    return [
        name for name in first if not (torch.equal(first[name], again[name]) and torch.equal(first[name], last[name]))
    ]


def _weights(state: TrainState) -> dict[str, Tensor]:
    return {f"{box.name} from {box.offset}": box.tensor.clone() for box in state.optimizer.weight_boxes()}


@pytest.mark.parametrize("sharding", ["", "use_distributed_optimizer", "use_torch_fsdp2"])
def test_loaded_weights_stay_loaded(ranks: Any, sharding: str) -> None:
    for undone in ranks.run(2, _loaded_again, {sharding: True} if sharding else {}):
        assert undone == []


class Crossing(nn.Module):
    """A feed-forward layer that reads the weight of another layer, whose call comes later."""

    made: ClassVar[dict[int, Crossing]] = {}

    def __init__(self, config: Any, layer: int, *, region: Any, dtype: Any, device: Any) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16, dtype=dtype, device=device)
        self.other = 1 - layer
        self.made[layer] = self

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(nn.functional.linear(x, self.up.weight + self.made[self.other].up.weight))


class _Late:
    """A gather whose result is in place when it is waited for, and not before."""

    def __init__(self, gather: Callable[[Zero1, Tensor], AsyncHandle], data: Zero1, parameters: Tensor) -> None:
        before = parameters.clone()
        self._parameters, self._gathered = parameters, gather(data, parameters).wait().clone()
        parameters.copy_(before)

    def wait(self) -> None:
        self._parameters.copy_(self._gathered)


def _crossing(sharding: str) -> list[float]:
    registry = Registry((Entry("mlp", "crossing", Crossing),))
    buckets, late = partial(build_optimizer, bucket_size=100), partial(_Late, Zero1.gather)
    with (
        patch.object(model, "build_optimizer", buckets),
        patch.object(Zero1, "gather", lambda *arguments: late(*arguments)),
    ):
        values = {"mlp": "crossing", **({sharding: True} if sharding else {})}
        state, micro_batches = _state(values, 2, torch.float64, registry)
        batches = _batches(state.context.dp.index, state.context.dp.size)
        return [train_step(state, batches, micro_batches).loss for _ in range(4)]


def test_a_registered_layer_reads_updated_weights_of_other_layers(ranks: Any) -> None:
    wanted, found = (ranks.run(2, _crossing, sharding)[0] for sharding in ("", "use_distributed_optimizer"))
    assert found == pytest.approx(wanted, rel=1e-9)
