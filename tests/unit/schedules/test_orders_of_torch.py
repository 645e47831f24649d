"""Outside truth: the interleaved schedule is the one that torch.distributed.pipelining runs."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torchs

from megalith.schedules.pipeline import Op, make_schedule

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B"}


@pytest.mark.parametrize(("stages", "chunks", "rounds"), list(product((2, 3, 4), (2, 3), (1, 2, 3))))
def test_interleaved(stages: int, chunks: int, rounds: int) -> None:
    schedule = make_schedule("interleaved", stages, chunks, stages * rounds)
    for stage in range(stages):
        sizes = SimpleNamespace(
            pp_group_size=stages,
            n_local_stages=chunks,
            _n_microbatches=stages * rounds,
            rank=stage,
            number_of_rounds=rounds,
            microbatches_per_round=stages,
        )
        actions = torchs.ScheduleInterleaved1F1B._calculate_single_rank_operations(sizes, stage)  # type: ignore[arg-type]
        expected = [
            (KINDS[action.computation_type.name], action.stage_index // stages, action.microbatch_index)
            for action in actions
            if action is not None
        ]
        assert [Op(*words) for words in expected] == list(schedule.ops[stage])  # type: ignore[arg-type]
