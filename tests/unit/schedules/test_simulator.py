"""The laws of pipeline schedules, for all small cases: they end, in the known time, with the known memory.

And the proof can fail: known bad orders are found.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from megalith.schedules.pipeline import SCHEDULES, Op, Schedule, make_schedule, violations
from megalith.schedules.simulator import Costs, Deadlock, Mismatch, simulate

GROUPED = ("interleaved:4", "interleaved:7")
NAMES = (*SCHEDULES, *GROUPED)
SIZES = [*product(range(1, 7), range(1, 5), range(1, 17)), *product((7, 8), (1, 2, 4), (1, 7, 8, 16))]
COSTS = (
    Costs(Fraction(1), Fraction(1), Fraction(1)),
    Costs(Fraction(3), Fraction(4), Fraction(2)),
    Costs(Fraction(5, 2), Fraction(2), Fraction(2)),
)


def all_of(name: str) -> list[Schedule]:
    found = [make_schedule(name, *sizes) for sizes in SIZES if not violations(name, *sizes)]
    assert len(found) > 100
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_schedule_deadlocks_on_ordered_communicators(name: str) -> None:
    for schedule in all_of(name):
        simulation = simulate(schedule)
        assert [tuple(span.op for span in spans) for spans in simulation.spans] == list(schedule.ops)


@pytest.mark.parametrize("name", NAMES)
def test_neither_the_window_of_sends_nor_a_prefetch_of_one_costs_time(name: str) -> None:
    costs = Costs(Fraction(3), Fraction(2), Fraction(2), message=Fraction(1, 2))
    for schedule in all_of(name)[::3]:
        assert simulate(schedule, costs).makespan == simulate(schedule, costs, prefetch=50, window=50).makespan


@pytest.mark.parametrize("costs", COSTS)
def test_the_bubble_of_1f1b(costs: Costs) -> None:
    """(p - 1) (f + b) on every stage, b the whole backward pass."""
    both = costs.forward + costs.backward + costs.weight
    for schedule in all_of("1f1b"):
        simulation = simulate(schedule, costs)
        assert {simulation.idle(stage) for stage in range(schedule.stages)} == {(schedule.stages - 1) * both}
        share = Fraction(schedule.stages - 1, schedule.micro_batches + schedule.stages - 1)
        assert simulation.bubble == share


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", ["interleaved", *GROUPED])
def test_chunks_divide_the_bubble(name: str, costs: Costs) -> None:
    """(p - 1) (f + b) / v, in groups of any size."""
    both = costs.forward + costs.backward + costs.weight
    for schedule in all_of(name):
        simulation = simulate(schedule, costs)
        assert simulation.idle(0) == (schedule.stages - 1) * both / schedule.chunks


@pytest.mark.parametrize("costs", COSTS)
def test_the_bubble_of_zb_h1(costs: Costs) -> None:
    """(p - 1) (f + b - w), b the input gradient only, from p micro-batches on; never longer than 1F1B."""
    bubble = costs.forward + costs.backward - costs.weight
    for schedule in all_of("zb-h1"):
        simulation = simulate(schedule, costs)
        if schedule.micro_batches >= schedule.stages:
            assert simulation.idle(0) == (schedule.stages - 1) * bubble
        plain = make_schedule("1f1b", schedule.stages, 1, schedule.micro_batches)
        assert simulation.makespan <= simulate(plain, costs).makespan


def test_the_time_of_evaluation() -> None:
    """m f of work, and the first micro-batch on its way to the last stage."""
    for schedule in all_of("forward"):
        if schedule.chunks == 1:
            assert simulate(schedule).makespan == schedule.micro_batches + schedule.stages - 1
            assert set(simulate(schedule).peaks) == {1}


def test_live_activations() -> None:
    """1F1B: at most p - s, reached; ZB-H1: as many as its first stage; interleaved: the warm-up and one."""
    for schedule in all_of("1f1b"):
        peaks = [min(schedule.micro_batches, schedule.stages - stage) for stage in range(schedule.stages)]
        assert list(simulate(schedule).peaks) == peaks
    for schedule in all_of("zb-h1"):
        assert max(simulate(schedule).peaks) == min(schedule.micro_batches, schedule.stages)
    for name, group in (("interleaved", 0), ("interleaved:4", 4), ("interleaved:7", 7)):
        for schedule in all_of(name):
            p, v, every = schedule.stages, schedule.chunks, schedule.chunks * schedule.micro_batches
            ahead = (v - 1) * max(p, min(group, schedule.micro_batches))
            peaks = [min(every, ahead + 2 * (p - s - 1) + 1) for s in range(p)]
            assert list(simulate(schedule).peaks) == peaks


def test_swapped_micro_batches_are_found() -> None:
    schedule = make_schedule("1f1b", 2, 1, 2)
    first, second = schedule.ops
    swapped = (Op("F", 0, 1), Op("B", 0, 1), Op("F", 0, 0), Op("B", 0, 0))
    with pytest.raises(Mismatch, match="stage 0 .*micro-batch 0.*stage 1 .*micro-batch 1"):
        simulate(replace(schedule, ops=(first, swapped)))


def test_a_stage_that_waits_for_what_it_causes_is_found() -> None:
    schedule = make_schedule("1f1b", 2, 1, 2)
    early = (Op("F", 0, 0), Op("B", 0, 0), Op("F", 0, 1), Op("B", 0, 1))
    assert simulate(replace(schedule, ops=(early, schedule.ops[1]))).makespan > simulate(schedule).makespan
    wrong = (Op("B", 0, 0), Op("F", 0, 0), Op("F", 0, 1), Op("B", 0, 1))
    with pytest.raises(Deadlock, match="stage 1 .*activation"):
        simulate(replace(schedule, ops=(wrong, schedule.ops[1])))
    alone = make_schedule("interleaved", 1, 2, 1)
    with pytest.raises(Deadlock, match=r"stage 0 cannot compute F1\.0"):
        simulate(replace(alone, ops=((Op("F", 1, 0), *alone.ops[0]),)))


def test_a_message_takes_its_time() -> None:
    """One way there and one back."""
    costs = Costs(message=Fraction(1, 4))
    schedule = make_schedule("1f1b", 2, 1, 1)
    assert simulate(schedule, costs).makespan == simulate(schedule).makespan + Fraction(1, 2)
