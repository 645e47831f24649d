"""Options whose effect shows in what is derived from the configuration: stages of a pipeline, the plan of a run."""

from __future__ import annotations

import pytest

from megalith.config import RunConfig, load
from megalith.errors import ConfigError

BASE = (
    "--num-layers 8 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 30"
)


def _run(flags: str, processes: int = 1) -> RunConfig:
    return load(f"{BASE} {flags}".split(), {"WORLD_SIZE": str(processes), "RANK": "0"}, files=False)


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("", [2, 2, 2, 2]),
        ("--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3", [1, 2, 2, 3]),
        ("--decoder-last-pipeline-num-layers 5", [1, 1, 1, 5]),
        ("--num-layers 7 --account-for-embedding-in-pipeline-split", [1, 2, 2, 2]),
        ("--num-layers 7 --account-for-loss-in-pipeline-split", [2, 2, 2, 1]),
        (
            "--num-layers 6 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            [1, 2, 2, 1],
        ),
    ],
)
def test_layers_of_the_stages(flags: str, sizes: list[int]) -> None:
    """What counts as a layer of its own takes the place of one."""
    run = _run(f"--pipeline-model-parallel-size 4 {flags}", 4)
    assert [len(part) for stage in run.stages for part in stage] == sizes


def test_part_of_the_optimizer_on_the_host() -> None:
    assert _run("--optimizer-cpu-offload --optimizer-offload-fraction 0.25").optimizer.offloaded == 0.25
    assert _run("--optimizer-cpu-offload").optimizer.offloaded == 1.0
    assert _run("").optimizer.offloaded == 0.0


def test_names_of_other_versions() -> None:
    assert _run("--optimizer muon --muon-use-nesterov").optimizer.muon_nesterov
    assert not _run("--optimizer muon").optimizer.muon_nesterov
    for old, new in (("granularity full", "granularity"), ("method block", "method"), ("num-layers 2", "num-layers")):
        with pytest.raises(ConfigError, match=f"--recompute-{new}"):
            _run(f"--checkpoint-{old}")
