"""The predicted time of a step: laws that hold for any rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalith.config import RunConfig, load
from megalith.plan.devices import DEVICES, Link
from megalith.plan.time import StepTime, step_time

VOCABULARY = 50304
WORDS = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 50303 --bf16 "
    "--micro-batch-size 2 --global-batch-size 64 "
)


def _run(flags: str = "", world_size: int = 1) -> RunConfig:
    return load((WORDS + flags).split(), {"RANK": "0", "WORLD_SIZE": str(world_size)}, files=False)


def _time(flags: str = "", world_size: int = 1, device: str = "H100", nodes: int = 1) -> StepTime:
    return step_time(_run(flags, world_size), VOCABULARY, DEVICES[device], nodes=nodes)


def test_parts_add_up_to_the_step() -> None:
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2"
    time = _time(flags, 16, nodes=2)
    assert time.step_seconds == pytest.approx(sum(time.parts.values()))
    assert all(time.parts[name] > 0 for name in ("products", "memory", "tp", "cp", "dp", "pp", "bubble", "optimizer"))
    assert time.tokens_per_second == pytest.approx(64 * 2048 / time.step_seconds)


def test_one_rank_computes_and_nothing_else() -> None:
    time = _time()
    assert {name for name, value in time.parts.items() if value} <= {"products", "memory", "launches", "optimizer"}


AGAIN = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize("more", ["--num-layers 26", "--seq-length 2050", "--hidden-size 2064", AGAIN, "--swiglu"])
def test_more_to_compute_is_never_faster(more: str) -> None:
    assert (
        _time(more + " --max-position-embeddings 4096 --ffn-hidden-size 8192").step_seconds
        > _time("--ffn-hidden-size 8192").step_seconds
    )


def test_replicas_without_communication_scale_perfectly() -> None:
    device = DEVICES["H100"]
    free = replace(device, rates=replace(device.rates, inside=Link(0, 1e30), between=Link(0, 1e30)))
    one, eight = (step_time(_run("", size), VOCABULARY, free) for size in (1, 8))
    passes = one.step_seconds - one.parts["optimizer"]
    assert eight.step_seconds - eight.parts["optimizer"] == pytest.approx(passes / 8)
