"""Each recipe fits the GPUs that its head names, by the memory that `benchmarks/fit.py` counts on shapes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from megalith.errors import MegalithError

from .test_recipes import RECIPES, VOCABULARIES, gpus

ROOT = Path(__file__).resolve().parents[3]
COUNTED = [path for path in RECIPES if gpus(path)]
SMALL = (
    "--num-layers {} --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --global-batch-size {} --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255 --hidden-dropout 0 --attention-dropout 0 {}"
)


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("fit")


def _count(fit: Any, layers: int, batch: int = 2, flags: str = "", world_size: int = 1) -> list[Any]:
    words = SMALL.format(layers, batch, flags).split()
    found: list[Any] = fit.count(words, 24, vocab_size=256, world_size=world_size)
    return found


@pytest.mark.parametrize("path", COUNTED, ids=lambda path: path.stem)
def test_a_recipe_fits_its_gpus(path: Path, fit: Any) -> None:
    gib, needs = fit.needed(path, vocab_size=VOCABULARIES.get(path.name.partition("-")[0], 50_304))
    assert needs and max(need.peak for need in needs) <= fit.room(gib)


def test_what_cannot_be_counted_is_said(fit: Any) -> None:
    with pytest.raises(MegalithError, match="FSDP2"):
        _count(fit, 2, 4, "--use-torch-fsdp2", 2)


def test_four_gpus_of_24_gib_have_recipes() -> None:
    heads = {path.stem: path.read_text(encoding="utf-8").split("\n\n")[0] for path in COUNTED if gpus(path) == 4}
    assert [name for name, head in heads.items() if "# GiB of a GPU: 24" in head and "RTX 4090" in head]


def test_a_larger_micro_batch_does_not_fit(fit: Any) -> None:
    words = ["--config", str(ROOT / "recipes/gpt3-1.3b-4gpu.toml"), "--micro-batch-size", "4"]
    (need,) = fit.count(words, 24, world_size=4)
    assert need.peak > fit.room(24)


def test_weights_gradients_and_states_are_counted_to_the_byte_of_a_block(fit: Any) -> None:
    """bf16 weights, fp32 gradients, and 12 bytes of master weights and moments, which ZeRO-1 divides."""
    alone, divided = (_count(fit, 2, 8, flags, 4)[0] for flags in ("--bf16", "--bf16 --use-distributed-optimizer"))
    parameters = 2 * (12 * 64 * 64 + 13 * 64) + (256 + 128) * 64 + 2 * 64
    blocks = 512 * 100  # each tensor takes whole blocks
    assert 0 <= alone.weights - 2 * parameters <= blocks and 0 <= alone.gradients - 4 * parameters <= blocks
    assert 0 <= alone.optimizer - 12 * parameters <= 3 * blocks
    assert abs(divided.optimizer - 12 * parameters // 4) <= 3 * blocks  # the weights move to one flat memory


def test_what_a_layer_keeps_is_what_the_theory_counts(fit: Any) -> None:
    """16 T D numbers of a layer without dropout, and the log-sum-exp of its heads (benchmarks/memory.py)."""
    few, many = (_count(fit, layers)[0].kept for layers in (2, 4))
    tokens = 2 * 128
    assert (many - few) / 2 == pytest.approx(4 * tokens * (16 * 64 + 4), rel=0.05)


def test_recomputation_and_pipelines_are_counted(fit: Any) -> None:
    again = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert _count(fit, 4, flags=again)[0].peak < _count(fit, 4)[0].peak
    first, last = _count(fit, 4, 16, "--pipeline-model-parallel-size 2", 2)
    one = _count(fit, 2, 16)[0]
    assert (first.rank, last.rank) == (0, 1)
    assert first.peak > one.peak - last.kept, "the first stage keeps two micro-batches"


@pytest.mark.parametrize("exchange", ["allgather", "alltoall"])
def test_experts_are_counted_by_the_tokens_that_they_get(
    exchange: str, fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row keeps at least its input, the result of the first projection, and what the second one multiplies."""
    flags = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type"
    kept = []
    for rows in (1, 2):
        monkeypatch.setattr(fit, "ROWS", rows)
        kept.append(_count(fit, 2, 4, f"{flags} {exchange} --position-embedding-type rope", 2)[0].kept)
    rows, numbers = 2 * 128 * 2, 64 + 2 * 256  # a balanced router's, in each of two layers
    assert kept[1] - kept[0] >= 2 * 4 * rows * numbers


@pytest.mark.parametrize("exchange", ["p2p", "a2a"])
def test_context_parallelism_halves_what_a_rank_keeps(exchange: str, fit: Any) -> None:
    flags = f"--bf16 --context-parallel-size 2 --cp-comm-type {exchange}"
    whole, divided = _count(fit, 4, flags="--bf16")[0].kept, _count(fit, 4, flags=flags, world_size=2)[0].kept
    assert divided == pytest.approx(whole / 2, rel=0.15)
