"""Pipeline schedules: every operation once, in an order that its data allows, and refusals that name the flag."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product

import pytest

from megalith.errors import LayoutError
from megalith.schedules.pipeline import (
    SCHEDULES,
    Op,
    Schedule,
    SizeNames,
    default_schedule,
    grouped,
    make_schedule,
    violations,
)

NAMES = (*SCHEDULES, grouped("interleaved", 3), grouped("interleaved", 5))
CASES = [
    case
    for case in product(NAMES, range(1, 6), range(1, 4), (1, 2, 3, 4, 5, 8, 10, 12))
    if not violations(case[0], *case[1:])
]


@pytest.fixture(scope="module")
def schedules() -> list[Schedule]:
    return [make_schedule(name, stages, chunks, micro_batches) for name, stages, chunks, micro_batches in CASES]


def test_the_cases_cover_every_schedule() -> None:
    plain = [case for case in CASES if case[0] in SCHEDULES]
    assert {(name, stages) for name, stages, _, _ in plain} == set(product(SCHEDULES, range(1, 6)))
    assert {(name, stages) for name, stages, chunks, _ in CASES if chunks > 1 and name not in SCHEDULES} == {
        *(("interleaved:3", stages) for stages in range(1, 4)),
        *(("interleaved:5", stages) for stages in range(1, 6)),
    }


def test_each_stage_does_each_operation_once(schedules: list[Schedule]) -> None:
    for schedule in schedules:
        kinds = {"forward": "F", "zb-h1": "FBW"}.get(schedule.name, "FB")
        every = Counter(
            Op(kind, chunk, micro_batch)  # type: ignore[arg-type]
            for kind in kinds
            for chunk in range(schedule.chunks)
            for micro_batch in range(schedule.micro_batches)
        )
        assert len(schedule.ops) == schedule.stages
        for ops in schedule.ops:
            assert Counter(ops) == every
        assert schedule.is_split == ("W" in kinds) and schedule.has_backward == ("B" in kinds)


def test_on_a_stage_f_comes_before_b_before_w(schedules: list[Schedule]) -> None:
    for schedule in schedules:
        for ops in schedule.ops:
            place = {op: number for number, op in enumerate(ops)}
            for op in ops:
                for later in "BW" if op.kind == "F" else "W" if op.kind == "B" else "":
                    assert place.get(Op(later, op.chunk, op.micro_batch), len(ops)) > place[op]  # type: ignore[arg-type]


def test_what_one_stage_makes_another_needs(schedules: list[Schedule]) -> None:
    for schedule in schedules:
        both = range(schedule.stages)
        made = Counter(m for stage in both for op in schedule.ops[stage] if (m := schedule.output_of(stage, op)))
        needed = Counter(m for stage in both for op in schedule.ops[stage] if (m := schedule.input_of(stage, op)))
        parts, directions = schedule.stages * schedule.chunks, 2 if schedule.has_backward else 1
        assert made == needed
        assert made.total() == (parts - 1) * directions * schedule.micro_batches


def test_messages_go_round_the_ring() -> None:
    schedule = make_schedule("interleaved", 4, 2, 4)
    forward = schedule.output_of(3, Op("F", 0, 2))
    assert forward is not None and forward == schedule.input_of(0, Op("F", 1, 2))
    assert (forward.source, forward.target, forward.chunk, forward.gradient) == (3, 0, 1, False)
    backward = schedule.output_of(0, Op("B", 1, 2))
    assert backward is not None and backward == schedule.input_of(3, Op("B", 0, 2))
    assert schedule.input_of(0, Op("F", 0, 2)) is schedule.output_of(3, Op("F", 1, 2)) is None
    assert schedule.input_of(3, Op("B", 1, 2)) is schedule.output_of(0, Op("B", 0, 2)) is None


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_actions_post_each_receive_before_it_is_needed(schedules: list[Schedule], prefetch: int) -> None:
    for schedule in schedules:
        for stage in range(schedule.stages):
            posted, needed = [], []
            for action in schedule.actions(stage, prefetch=prefetch):
                posted += action.receives
                if action.input is not None and not action.input.is_local:
                    needed.append(action.input)
                    assert action.input in posted
                assert len(posted) - len(needed) <= prefetch
            assert posted == needed  # in the same order: an edge is a queue


def test_actions_bound_the_unfinished_sends() -> None:
    actions = make_schedule("1f1b", 4, 1, 8).actions(0, window=3)
    unfinished, most = 0, 0
    for action in actions:
        unfinished += (action.output is not None) - (action.wait_for_send is not None)
        most = max(most, unfinished)
    assert most == 3


def test_micro_batches_are_first_met_in_order(schedules: list[Schedule]) -> None:
    """A stage may take each micro-batch's data when it first hears of it, posting a receive included."""
    for schedule in schedules:
        for stage in range(schedule.stages):
            actions = schedule.actions(stage)
            met = [n for action in actions for n in (*(r.micro_batch for r in action.receives), action.op.micro_batch)]
            assert list(dict.fromkeys(met)) == list(range(schedule.micro_batches))


def test_the_end_of_each_micro_batch_is_announced_once(schedules: list[Schedule]) -> None:
    for schedule in schedules:
        actions = schedule.program(0).actions
        ended = [action.op.micro_batch for action in actions if action.ends_micro_batch]
        assert sorted(ended) == list(range(schedule.micro_batches))
        assert actions[-1].ends_micro_batch


def test_known_schedules() -> None:
    """The pictures of the papers: 1F1B of 4 stages and 8 micro-batches, stage 2; ZB-H1 of 3 stages, the last one."""
    assert " ".join(map(str, make_schedule("1f1b", 4, 1, 4).ops[2])) == "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3"
    assert (
        " ".join(map(str, make_schedule("zb-h1", 3, 1, 4).ops[2]))
        == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 W0.0 F0.3 B0.3 W0.1 W0.2 W0.3"
    )
    assert " ".join(map(str, make_schedule("interleaved", 2, 2, 2).ops[1])) == "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1"


def test_a_group_passes_a_chunk_before_the_next_chunk() -> None:
    """Megatron's `--microbatch-group-size-per-virtual-pipeline-stage`; the last group may be smaller."""
    ops = make_schedule("interleaved:3", 2, 2, 5).ops[0]
    forwards = [str(op) for op in ops if op.kind == "F"]
    assert forwards == ["F0.0", "F0.1", "F0.2", "F1.0", "F1.1", "F1.2", "F0.3", "F0.4", "F1.3", "F1.4"]
    assert [op.kind for op in ops[:6]] == ["F"] * 6 and ops[6] == Op("B", 1, 0)


@pytest.mark.parametrize(
    ("name", "micro_batches", "named"),
    [("interleaved:3", 8, ("--pipeline-model-parallel-size 4", "interleaved:4")), ("interleaved:5", 8, ("5 or 9",))],
)
def test_groups_that_would_wait_for_the_last_stage_are_refused(
    name: str, micro_batches: int, named: tuple[str, ...]
) -> None:
    with pytest.raises(LayoutError) as raised:
        make_schedule(name, 4, 2, micro_batches)
    assert all(text in str(raised.value) for text in named)


def test_micro_batches_that_do_not_divide_are_refused_by_flag() -> None:
    with pytest.raises(LayoutError) as raised:
        make_schedule("interleaved", 4, 2, 6)
    text = str(raised.value)
    assert "--pipeline-model-parallel-size 4" in text and "nearest: 4 or 8" in text
    assert "nearest: 4," in violations("interleaved", 4, 2, 3)[0]


def test_all_violations_are_named_at_once() -> None:
    found = violations("zigzag", 0, -1, 0, SizeNames("--pp", "--vp", "--microbatches"))
    for text, named in zip(found, ("--pp 0 ", "--vp -1 ", "--microbatches 0 ", "zigzag"), strict=True):
        assert named in text
    assert re.search(r"zb-h1\b.*\b2\b", violations("zb-h1", 4, 2, 8)[0])


def test_the_schedule_of_a_run_follows_its_chunks() -> None:
    assert (default_schedule(1), default_schedule(2)) == ("1f1b", "interleaved")
