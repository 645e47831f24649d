"""Numbers that are not finite on one rank (reliability F10): all ranks act at the same step and name the place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from megalith.assemble.model import build_chunks, build_run_optimizer, defer_weight_gradients, draw_weights
from megalith.assemble.schedule import build_schedule
from megalith.config import load
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.train.anomalies import AnomalyPolicy, BadStepError
from megalith.train.consensus import NeverStop, RankConsensus
from megalith.train.results import BadStep, StepResult
from megalith.train.state import TrainState
from megalith.train.step import MicroBatch, train_step

from ..spoil import spoiled

LENGTH, VOCABULARY = 16, 40
BASE = (
    f"--num-layers 4 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings {LENGTH} "
    f"--seq-length {LENGTH} --micro-batch-size 2 --global-batch-size 8 --train-iters 5 --lr 1e-2 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 30 --hidden-dropout 0.1 --attention-dropout 0.1"
)
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"


@dataclass(frozen=True)
class Case:
    """What is spoiled in step 2 of 3, and what is to be found."""

    ranks: int
    flags: str
    spoil: str
    first: str
    samples: tuple[int, int]


CASES = {
    "activation-dp2": Case(
        2,
        "--use-distributed-optimizer",
        "point=activation,module=decoder.layers.2.mlp,rank=1,micro_batch=1",
        "the output of decoder.layers.2.mlp is not finite, on rank 1, micro-batch 1",
        (14, 15),
    ),
    "activation-tp2": Case(
        2,
        f"{TP2} --sequence-parallel",
        "point=activation,module=decoder.layers.1.self_attention,rank=1,micro_batch=2",
        "the output of decoder.layers.1.self_attention is not finite, on rank 1, micro-batch 2",
        (12, 13),
    ),
    "gradient-pp2": Case(
        2,
        PP2,
        "point=grad,module=decoder.layers.1.mlp,rank=0,micro_batch=1",
        "the gradient of the output of decoder.layers.1.mlp is not finite, on rank 0, micro-batch 1",
        (10, 11),
    ),
    "activation-vpp2": Case(
        2,
        f"{PP2} --num-virtual-stages-per-pipeline-rank 2",
        "point=activation,module=decoder.layers.2.input_layernorm,rank=0,micro_batch=3",
        "the output of decoder.layers.2.input_layernorm is not finite, on rank 0, micro-batch 3",
        (14, 15),
    ),
    "gradient-fsdp": Case(
        2,
        "--use-torch-fsdp2",
        "point=grad,module=decoder.layers.3.mlp,rank=1,micro_batch=0",
        "the gradient of the output of decoder.layers.3.mlp is not finite, on rank 1, micro-batch 0",
        (10, 11),
    ),
    "loss-cp2": Case(
        2,
        "--context-parallel-size 2",
        "point=loss,rank=1,micro_batch=1",
        "the loss of micro-batch 1 is not finite, on rank 1, micro-batch 1",
        (10, 11),
    ),
    "recomputed-zb-h1": Case(
        2,
        f"{PP2} --pipeline-schedule zb-h1 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        "point=activation,module=decoder.layers.3.mlp,rank=1,micro_batch=2",
        "the output of decoder.layers.3.mlp is not finite, on rank 1, micro-batch 2",
        (12, 13),
    ),
}


def _batches(replica: int) -> Iterator[MicroBatch]:
    generator = torch.Generator().manual_seed(5 + replica)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    while True:
        ids = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
        mask = torch.ones(2, LENGTH)
        yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions, "loss_mask": mask}


def _run(case: Case, action: str, spoil: str = "", steps: int = 3) -> dict[str, Any]:
    """Train in the layout of the case; what this rank was told, what it saw, and its weights."""
    words = f"{BASE} {case.flags}".split()
    config = load(words, {"WORLD_SIZE": str(case.ranks), "RANK": "0"}, files=False)
    context = ParallelContext.create(config.layout, torch.device("cpu"))
    streams = RandomStreams(1, context)
    chunks = build_chunks(config, VOCABULARY, context, streams.own)
    draw_weights(config, chunks, streams, context)
    optimizer = build_run_optimizer(config, chunks, context)
    deferred = defer_weight_gradients(config, chunks, optimizer)
    state = TrainState(chunks, optimizer, streams, build_schedule(config), context=context, deferred=deferred)
    policy = AnomalyPolicy(state, config.pipeline_schedule, policy=action)
    consensus = RankConsensus(NeverStop(), context, contributes=state.contributes_losses)
    batches, told, results, error = _batches(context.dp.index), list[BadStep](), list[StepResult](), ""

    take = partial(
        train_step,
        state,
        pipeline_schedule=config.pipeline_schedule,
        sum_over_ranks=consensus.sum_over_ranks,
        hooks=policy.hooks,
    )
    try:
        with spoiled(state, [f"nan@step=2,{spoil}"] if spoil else []):
            for _ in range(steps):
                attempt = policy.begin(batches)
                result = take(attempt.batches, config.num_micro_batches, apply=attempt.apply)
                results.append(policy.resolve(attempt, result, take, told.append))
    except BadStepError as refused:
        error = str(refused)
    return {
        "told": told,
        "steps": [(r.iteration, r.loss, r.applied, r.grad_norm) for r in results],
        "error": error,
        "weights": {box.name: box.tensor.clone() for box in optimizer.weight_boxes()},
        "counters": (state.iteration, state.consumed_samples, state.lr_schedule_samples),
    }


@pytest.mark.parametrize("name", CASES)
def test_every_rank_skips_the_step_and_names_the_place(name: str, ranks: Any) -> None:
    case = CASES[name]
    results = ranks.run(case.ranks, _run, case, "skip", case.spoil)
    clean = ranks.run(case.ranks, _run, case, "skip", "", 1)
    for result, good in zip(results, clean, strict=True):
        assert [applied for _, _, applied, _ in result["steps"]] == [True, False, True]
        assert result["steps"][0] == good["steps"][0]
        assert result["steps"][2][1] < 10.0, "the step after it is as if nothing had been"
        assert result["counters"] == (3, 24, 16), "samples are consumed, and the schedule does not move"
        (bad,) = result["told"]
        assert str(bad) == str(results[0]["told"][0])
        assert str(bad.first) == f"first of all {case.first}"
        assert (bad.action, bad.first_sample, bad.last_sample) == ("skip", *case.samples)
        assert bad.recomputed == "non-finite"


def test_every_rank_stops_with_the_same_words(ranks: Any) -> None:
    case = CASES["activation-dp2"]
    results = ranks.run(2, _run, case, "stop", case.spoil)
    assert [len(result["steps"]) for result in results] == [1, 1]
    assert results[0]["error"] == results[1]["error"]
    for fragment in ("the loss is nan at iteration 2", "rank 1, micro-batch 1", "14 to 15", "8 to 15", "--nan-policy"):
        assert fragment in results[0]["error"]


def test_a_weight_that_is_not_finite_stops_whatever_the_policy(ranks: Any) -> None:
    spoil = "point=weight,module=decoder.layers.1.mlp.linear_fc1.weight,rank=0"
    for policy in ("skip", "rerun"):
        results = ranks.run(2, _run, CASES["activation-tp2"], policy, spoil)
        for result in results:
            assert len(result["steps"]) == 1
            for fragment in ("decoder.layers.1.mlp.linear_fc1.weight", "rank 0", "--load"):
                assert fragment in result["error"]


@pytest.mark.parametrize("name", ["activation-dp2", "gradient-pp2"])
def test_a_transient_error_leaves_no_trace(name: str, ranks: Any) -> None:
    case = CASES[name]
    results = ranks.run(2, _run, case, "rerun", f"{case.spoil},times=1")
    clean = ranks.run(2, _run, case, "rerun")
    for result, good in zip(results, clean, strict=True):
        assert result["steps"] == good["steps"]
        assert all(torch.equal(weight, good["weights"][name]) for name, weight in result["weights"].items())
        (bad,) = result["told"]
        assert (bad.action, bad.recomputed) == ("rerun", "finite")


def test_a_persistent_error_ends_the_run(ranks: Any) -> None:
    case = CASES["gradient-pp2"]
    for result in ranks.run(2, _run, case, "rerun", case.spoil):
        assert result["told"][-1].recomputed == "anomalous"
        assert case.first in result["error"]
