"""Small models, and training steps of them on one device or over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megalith.assemble.model import build_chunks, build_run_optimizer, draw_weights
from megalith.assemble.schedule import build_schedule
from megalith.config import load
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.registry import Entry, Registry
from megalith.train.results import StepResult
from megalith.train.state import TrainState
from megalith.train.step import MicroBatch, train_step

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]
ON_TWO_GPUS = [
    ON_GPU[0],
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"needs two CUDA devices, and torch sees {torch.cuda.device_count()}"
    ),
]

LENGTH, VOCABULARY, MICRO_BATCHES = 64, 128, 2
MODEL = (
    f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length {LENGTH} "
    f"--max-position-embeddings {LENGTH} --micro-batch-size 2 --lr 1e-3 --hidden-dropout 0 --attention-dropout 0 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --init-method-std 0.05"
)
_LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --ffn-hidden-size 176 "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)
STYLES = {
    "gpt2": "",
    "llama": _LLAMA,
    "experts": f"{_LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 0.01",
}
REGISTRY = Registry((Entry("optimizer", "nadam", torch.optim.NAdam, options={"unit": "element"}),))
PRECISIONS = {"fp32": "", "bf16": "--bf16", "fp16": "--fp16 --initial-loss-scale 65536"}


def words(*given: object) -> list[str]:
    """Return words of a command line: texts are split at spaces, paths are not."""
    return [word for text in given for word in (text.split() if isinstance(text, str) else [str(text)])]


def bf16_or_skip(precision: str, device: str) -> None:
    """Skip a test in bf16 on a GPU that has no products of it."""
    if precision == "bf16" and device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16")


def losses(flags: str, device: str, *, steps: int = 5, dtype: torch.dtype | None = None) -> list[float]:
    """Return the loss of each step; arguments as of `train`."""
    results = train(flags, device, steps=steps, dtype=dtype)
    assert all(result.applied for result in results)
    return [result.loss for result in results]


def train(flags: str, device: str, *, steps: int = 5, dtype: torch.dtype | None = None) -> list[StepResult]:
    """Return the results of some steps, over all ranks if torch.distributed is initialised.

    Args:
        flags: of the run, beside those of `MODEL`.
        dtype: of the weights, in place of that of the run's precision, which they are drawn in.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    environment = {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    iterations = f"--global-batch-size {2 * MICRO_BATCHES} --train-iters {steps} --mock-data"
    run = load(words(MODEL, iterations, flags), environment, files=False, registry=REGISTRY)
    here = torch.device(device, rank if device == "cuda" else None)
    context = ParallelContext.create(run.layout, here) if world > 1 else ParallelContext.solo(here)
    streams = RandomStreams(1, context)
    chunks = build_chunks(run, VOCABULARY, context, streams.own)
    draw_weights(run, chunks, streams, context)
    if dtype is not None:
        drawn, chunks = chunks, build_chunks(run, VOCABULARY, context, streams.own, dtype=dtype)
        for chunk, same in zip(chunks, drawn, strict=True):
            chunk.load_state_dict(same.state_dict())
    optimizer = build_run_optimizer(run, chunks, context)
    state = TrainState(chunks, optimizer, streams, build_schedule(run), context=context)
    per_replica = MICRO_BATCHES // run.layout.dp
    batches = _batches(context.dp.index * per_replica, per_replica, context)
    return [train_step(state, batches, per_replica) for _ in range(steps)]


def _batches(first: int, count: int, context: ParallelContext) -> Iterator[MicroBatch]:
    """Yield the micro-batches `first` to `first + count` of every step, the same in each layout."""
    generator, positions = torch.Generator().manual_seed(5), torch.arange(LENGTH).expand(2, LENGTH)
    ids = [torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator) for _ in range(MICRO_BATCHES)]
    while True:
        for tokens in ids[first : first + count]:
            yield {
                "tokens": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "position_ids": positions,
                "loss_mask": torch.ones(2, LENGTH),
            }
