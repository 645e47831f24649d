"""Plans of runs whose ranks share memory by full sharding, beside what the ranks count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from megalith.plan.devices import DEVICES
from megalith.plan.plan import plan_run

from ..live_memory import live_bytes
from .conftest import Ranks

FLAGS = (
    "--num-layers 5 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --lr 1e-3 "
    "--micro-batch-size 2 --global-batch-size 12 --train-iters 2 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255 --device cpu --num-workers 0 --use-torch-fsdp2"
)
"""Three micro-batches: one is neither the first nor the last."""


def _counted(flags: str) -> tuple[int, int]:
    return live_bytes(flags.split(), dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("more", ["", "--bf16 --torch-fsdp2-no-reshard-after-forward"])
def test_a_plan_of_fsdp2_equals_what_two_ranks_count(
    more: str, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = f"{FLAGS} {more}"
    counted = ranks.run(2, _counted, flags)
    planned = plan_run(flags.split(), DEVICES["CPU"], world_size=2).fullest
    assert planned.allocated_bytes == pytest.approx(max(between for between, _ in counted), rel=0.01)
    assert planned.peak_bytes == pytest.approx(max(peak for _, peak in counted), rel=0.02)
