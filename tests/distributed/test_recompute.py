"""Recomputation with dropout on several ranks: the bits of the same layout without it, in every kind of layout.

The laws of test_parity hold without dropout, since layouts draw differently. Here one layout is compared with itself,
so that each random draw of the recomputation must be that of the forward pass: those of torch's streams, the
tensor-parallel ranks' own, and the seeds of attention in blocks and around the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.assemble.model import build_chunks, build_run_optimizer, defer_weight_gradients, draw_weights
from megalith.assemble.schedule import build_schedule
from megalith.config import load
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.models.transformer import Block
from megalith.optim.gradients import GradientBuffers
from megalith.train.consensus import NeverStop, RankConsensus
from megalith.train.state import TrainState
from megalith.train.step import MicroBatch, train_step

LENGTH, STEPS, VOCABULARY = 16, 2, 40
BASE = (
    f"--num-layers 4 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings {LENGTH} "
    f"--seq-length {LENGTH} --micro-batch-size 2 --global-batch-size 8 --train-iters 5 --lr 1e-2 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 30 --init-method-std 0.2 "
    "--hidden-dropout 0.2 --attention-dropout 0.2"
)
TP2, PP2, CP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
TP2_SP = f"{TP2} --sequence-parallel"
UNIFORM = "--recompute-method uniform --recompute-num-layers"
BLOCK = "--recompute-method block --recompute-num-layers"
CASES = {
    "tp2": (2, TP2, f"{UNIFORM} 1"),
    "tp2-sp": (2, TP2_SP, f"{UNIFORM} 3"),
    "tp2-sp-bf16": (2, f"{TP2_SP} --bf16", f"{BLOCK} 2"),
    "tp2-unfused": (2, f"{TP2} --attention-backend unfused", f"{UNIFORM} 1"),
    "cp2": (2, CP2, f"{UNIFORM} 2"),
    "cp2-a2a": (2, f"{CP2} --cp-comm-type a2a", f"{BLOCK} 3"),
    "pp2": (2, PP2, f"{UNIFORM} 2"),
    "pp2-vpp2": (2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2", f"{UNIFORM} 1"),
    "pp2-zb-h1": (2, f"{PP2} --pipeline-schedule zb-h1", f"{UNIFORM} 1"),
    "pp2-zb-h1-fp16": (2, f"{PP2} --pipeline-schedule zb-h1 --fp16 --initial-loss-scale 1024", f"{BLOCK} 1"),
    "dp2-zero1": (2, "--use-distributed-optimizer", f"{UNIFORM} 4"),
    "tp2-cp2-sp": (4, f"{TP2_SP} {CP2}", f"{UNIFORM} 1"),
    "tp2-pp2-sp-zb-h1": (4, f"{TP2_SP} {PP2} --pipeline-schedule zb-h1", f"{UNIFORM} 2"),
}


def _batches(replica: int) -> Iterator[MicroBatch]:
    generator = torch.Generator().manual_seed(5 + replica)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    while True:
        ids = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
        mask = torch.ones(2, LENGTH)
        yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions, "loss_mask": mask}


def _run(flags: str, world_size: int) -> tuple[list[Tensor], int]:
    """Losses, norms, gradients and weights of a few steps, what the streams give then; and how often a layer ran."""
    config = load(f"{BASE} {flags}".split(), {"WORLD_SIZE": str(world_size), "RANK": "0"}, files=False)
    context = ParallelContext.create(config.layout, torch.device("cpu"))
    streams = RandomStreams(1, context)
    chunks = build_chunks(config, VOCABULARY, context, streams.own)
    draw_weights(config, chunks, streams, context)
    optimizer = build_run_optimizer(config, chunks, context)
    deferred = defer_weight_gradients(config, chunks, optimizer)
    state = TrainState(chunks, optimizer, streams, build_schedule(config), context=context, deferred=deferred)
    calls: list[Any] = []
    for block in (module for chunk in chunks for module in chunk.modules() if isinstance(module, Block)):
        block.register_forward_pre_hook(lambda *call: calls.append(call[0]))
    sum_over_ranks = RankConsensus(NeverStop(), context, contributes=state.contributes_losses).sum_over_ranks
    batches, seen = _batches(context.dp.index), []
    for _ in range(STEPS):
        result = train_step(
            state,
            batches,
            config.num_micro_batches,
            pipeline_schedule=config.pipeline_schedule,
            sum_over_ranks=sum_over_ranks,
        )
        assert result.applied and result.grad_norm is not None
        seen.append(torch.tensor([result.loss, result.grad_norm]))
        if isinstance(optimizer.gradients, GradientBuffers):
            seen.append(optimizer.gradients.flat.clone())
    optimizer.finish_param_sync()
    seen += [parameter.detach() for chunk in chunks for parameter in chunk.parameters()]
    seen.append(torch.rand(3))
    with streams.own.used():
        seen.append(torch.rand(3))
    return seen, len(calls)


def _both(layout: str, recompute: str, world_size: int) -> tuple[list[int], int, int]:
    """Where the results with recomputation differ from those without, and how often a layer ran in each."""
    wanted, calls = _run(layout, world_size)
    found, more = _run(f"{layout} --recompute-granularity full {recompute}", world_size)
    different = [n for n, (a, b) in enumerate(zip(wanted, found, strict=True)) if not torch.equal(a, b)]
    return different, calls, more


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_with_dropout(name: str, ranks: Any) -> None:
    world_size, layout, recompute = CASES[name]
    for different, calls, more in ranks.run(world_size, _both, layout, recompute, world_size):
        assert different == []
        assert calls < more <= 2 * calls, "the layers must run again for this test to say anything"
