"""Full sharding beside replicas in one process group: equal steps, what is held and moved when, who sees which weights.

Gradients, losses and norms of every layout are in test_parity.py, checkpoints in test_train_checkpoint.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.assemble.model import build_chunks, build_run_optimizer, draw_weights
from megalith.config import RunConfig, load
from megalith.distributed.context import Axis, ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.layout import Layout
from megalith.schedules.parameters import LearningRateSchedule, ParameterSchedule, WeightDecaySchedule
from megalith.train.consensus import NeverStop, RankConsensus
from megalith.train.evaluation import EvaluationSet, evaluate
from megalith.train.state import TrainState
from megalith.train.step import MicroBatch, train_step

BASE = (
    "--num-layers 3 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 16 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 6 --train-iters 4 --lr 1e-2 --hidden-dropout 0 --attention-dropout 0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 30 --init-method-std 0.2 --clip-grad 0.5 "
    "--log-num-zeros-in-grad --disable-bias-linear"
)
"""Without biases: the gradient of a key's bias is zero but for rounding, which Adam makes visible."""
ZERO3, ZERO2 = "--use-torch-fsdp2", "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward"
LAYERS, UNITS, MICRO_BATCHES = 3, 4, 3
VOCABULARY = 43


def _state(flags: str, dtype: torch.dtype | None, observer: Any = None) -> tuple[RunConfig, TrainState]:
    words = f"{BASE} {flags}".split()
    run = load(words, {"WORLD_SIZE": "2", "RANK": "0"}, files=False)
    context = ParallelContext.create(Layout(dp=2), torch.device("cpu"), observer=observer)
    streams = RandomStreams(1, context)
    chunks = build_chunks(run, VOCABULARY, context, streams.own, dtype=dtype)
    draw_weights(run, chunks, streams, context)
    schedule = ParameterSchedule(LearningRateSchedule(1e-2, 1e-2, 99, "constant"), WeightDecaySchedule(0.01, 0.01, 99))
    return run, TrainState(chunks, build_run_optimizer(run, chunks, context), streams, schedule, context=context)


def _batches(replica: int) -> Iterator[MicroBatch]:
    generator = torch.Generator().manual_seed(5)
    for number in count():
        ids = torch.randint(0, VOCABULARY, (1, 17), generator=generator)
        if number % 2 == replica:
            yield {
                "tokens": ids[:, :-1],
                "labels": ids[:, 1:],
                "position_ids": torch.arange(16)[None],
                "loss_mask": torch.ones(1, 16),
            }


def _whole_weights(state: TrainState) -> dict[str, Tensor]:
    """The weights that the next forward pass computes with, put together from the boxes of all ranks."""
    wholes: dict[str, Tensor] = {}
    for boxes in _from_all([(b.name, b.tensor, b.offset, b.shape) for b in state.optimizer.weight_boxes()]):
        for name, tensor, offset, shape in boxes:
            whole = wholes.setdefault(name, torch.full(shape, torch.nan, dtype=tensor.dtype))
            whole[tuple(slice(start, start + size) for start, size in zip(offset, tensor.shape, strict=True))] = tensor
    return wholes


def _from_all(item: Any) -> list[Any]:
    items: list[Any] = [None, None]
    dist.all_gather_object(items, item)
    return items


# --- steps ----------------------------------------------------------------------------------------------------------


def _train(flags: str, dtype: torch.dtype | None) -> dict[str, Any]:
    """Steps with an evaluation after each, which leaves ZeRO-2 with gathered weights."""
    run, state = _state(flags, dtype)
    sum_over_ranks = RankConsensus(NeverStop(), state.context, contributes=state.contributes_losses).sum_over_ranks
    train, held_out = _batches(state.context.dp.index), _batches(state.context.dp.index)
    seen = []
    for _ in range(3):
        result = train_step(state, train, MICRO_BATCHES, sum_over_ranks=sum_over_ranks)
        params_norm = state.optimizer.params_norm()
        evaluation = evaluate(state, EvaluationSet("validation", held_out, 1), 1, sum_over_ranks=sum_over_ranks)
        assert evaluation is not None
        names = ("applied", "loss_scale", "loss", "grad_norm", "num_zeros")
        seen.append(
            {name: getattr(result, name) for name in names} | {"params_norm": params_norm, "held_out": evaluation.loss}
        )
    return {"steps": seen, "weights": _whole_weights(state)}


PRECISIONS = {
    "fp64": ("", torch.float64, 1e-11),
    "bf16": ("--bf16", None, 5e-3),
    "fp16": ("--fp16 --initial-loss-scale 4096", None, 5e-3),
    "fp16-summed-in-fp32": ("--fp16 --initial-loss-scale 4096 --accumulate-allreduce-grads-in-fp32", None, 5e-3),
    "fp16-that-overflows": ("--fp16 --initial-loss-scale 4294967296 --hysteresis 1", None, 1e-3),
}
"""Flags, dtype and tolerance: autograd rounds the gradients of an embedding where the sink of replicas does not.

Replicas sum the gradients of micro-batches in fp16 where no flag says otherwise, and shards sum them in fp32.
"""


def _distance(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The root of the sum of squared differences."""
    return math.hypot(*(float((weight.double() - others[name].double()).norm()) for name, weight in weights.items()))


@pytest.mark.parametrize("sharding", [ZERO3, ZERO2], ids=["zero3", "zero2"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_and_evaluations_are_those_of_replicas(ranks: Any, precision: str, sharding: str) -> None:
    flags, dtype, tolerance = PRECISIONS[precision]
    wanted = ranks.run(2, _train, flags, dtype)[0]
    for found in ranks.run(2, _train, f"{flags} {sharding}", dtype):
        for step, reference in zip(found["steps"], wanted["steps"], strict=True):
            assert step["applied"] is reference["applied"] and step["loss_scale"] == reference["loss_scale"]
            assert (step["grad_norm"] is None) is (reference["grad_norm"] is None)
            numbers = {name: value for name, value in reference.items() if value is not None}
            if dtype is None:
                numbers.pop("num_zeros", None)  # rounding decides
            assert {name: step[name] for name in numbers} == pytest.approx(numbers, rel=tolerance)
        assert found["weights"].keys() == wanted["weights"].keys()
        if precision == "fp16":  # the sign of a gradient of rounding alone decides where Adam moves an element
            summed = ranks.run(2, _train, PRECISIONS["fp16-summed-in-fp32"][0], dtype)[0]["weights"]
            assert 0 < _distance(found["weights"], summed) < _distance(wanted["weights"], summed)
            continue
        for name, weight in wanted["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=tolerance, atol=tolerance, msg=name)
    applied = [step["applied"] for step in wanted["steps"]]
    assert applied == [False] * 3 if "overflows" in precision else applied == [True] * 3


def _losses_before_and_after_a_write(flags: str) -> tuple[float, float]:
    """Of evaluations; in between the weights are written as a checkpoint writes them."""
    _, state = _state(flags, torch.float64)
    losses = []
    for _ in range(2):
        evaluation = evaluate(state, EvaluationSet("validation", _batches(0), 1), 1, sum_over_ranks=_same)
        assert evaluation is not None
        losses.append(evaluation.loss)
        for box in state.optimizer.weight_boxes():
            box.tensor.zero_()
    return losses[0], losses[1]


def _same(sums: Tensor) -> Tensor:
    return sums


@pytest.mark.parametrize("flags", [ZERO3, ZERO2], ids=["zero3", "zero2"])
def test_weights_that_are_written_are_those_of_the_next_pass(ranks: Any, flags: str) -> None:
    for before, after in ranks.run(2, _losses_before_and_after_a_write, flags):
        assert after == pytest.approx(math.log(VOCABULARY), rel=1e-6) != before


# --- what is held and moved, and when ---------------------------------------------------------------------------------


class _Counts:
    """Counts the collectives that start, as the checks and the reports of hangs see them."""

    def __init__(self) -> None:
        self.calls = Counter[str]()

    def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
        self.calls[operation] += 1

    def after(self, operation: str, axis: Axis) -> None:
        pass

    def waiting(self, peer: int | None = None) -> None:
        pass

    def waited(self) -> None:
        pass


def _moved(flags: str) -> dict[str, Any]:
    """Collectives up to the end of each micro-batch; whether a layer is cut between its passes; elements held."""
    counts = _Counts()
    _, state = _state(flags, torch.float64, counts)
    (model,) = state.chunks
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    layer = model.decoder.layers["1"]
    train_step(state, _batches(state.context.dp.index), MICRO_BATCHES)  # settles what torch does once
    state.optimizer.finish_param_sync()
    moved, between = [], []
    state.optimizer.zero_grad(MICRO_BATCHES)
    batches = _batches(state.context.dp.index)
    counts.calls.clear()
    for _ in range(MICRO_BATCHES):
        batch = next(batches)
        loss = model(batch["tokens"], labels_BS=batch["labels"]).sum()
        between.append(isinstance(next(layer.parameters()), DTensor))
        loss.backward()
        moved.append((counts.calls["all_gather"], counts.calls["reduce_scatter"]))
    state.optimizer.step(0.0, 0.0)
    held = sum(box.tensor.numel() for box in state.optimizer.weight_boxes())
    kept = sum(box.tensor.numel() for box in state.optimizer.state_boxes())
    return {"moved": moved, "between": between, "held": held, "state": kept, "all": sum(sizes.values())}


def test_weights_go_behind_each_pass_and_gradients_move_in_each(ranks: Any) -> None:
    results = ranks.run(2, _moved, ZERO3)
    each = 2 * LAYERS + 1  # what is outside the layers stays until the backward pass
    for result in results:
        assert result["moved"] == [(number * each, number * UNITS) for number in (1, 2, 3)]
        assert result["between"] == [True] * MICRO_BATCHES
    _check_shares(results)


def test_weights_stay_for_the_step_where_they_are_not_resharded(ranks: Any) -> None:
    results = ranks.run(2, _moved, ZERO2)
    for result in results:
        assert result["moved"] == [(UNITS, number * UNITS) for number in (1, 2, 3)]
        assert result["between"] == [False] * MICRO_BATCHES
    _check_shares(results)


def _check_shares(results: list[dict[str, Any]]) -> None:
    """Each element is held once, about as many here as there."""
    assert sum(result["held"] for result in results) == results[0]["all"]
    assert sum(result["state"] for result in results) == 2 * results[0]["all"]
    assert max(result["held"] for result in results) < 0.52 * results[0]["all"]
