"""Any layout to any layout (F07): what one set of ranks saves, any other loads, and the run goes on as if nothing were.

Two laws. Reshard: in whatever layout a checkpoint is loaded, every rank holds exactly its part of what was saved,
weights and moments. Continuation: a run that changes its layout every few steps has the losses of one process that
never stopped, on the same samples, the global batch kept (F32).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.assemble.model import build_chunks, build_run_optimizer, defer_weight_gradients, draw_weights
from megalith.assemble.schedule import build_schedule
from megalith.checkpoint import DirectoryStore
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.layout import Layout
from megalith.train.agreement import Agreement, NeverStop
from megalith.train.checkpointing import CheckpointSaver, find_checkpoint, restore
from megalith.train.state import TrainState
from megalith.train.step import train_step

from .test_parity import Case, required_cases
from .test_train_checkpoint import (
    IDENTITY,
    _batches,
    build_state,
    check_content,
    config_of,
    expected_here,
    fill,
    save,
)

ROWS = 40
FSDP = [
    Case(Layout(dp=2), fsdp="zero3"),
    Case(Layout(pp=2, dp=2), fsdp="zero2"),
    Case(Layout(tp=2, dp=2), fsdp="zero3"),
]
LAYOUTS = [Case(Layout()), *required_cases(), *FSDP, Case(Layout(pp=2), schedule="zb-h1")]


def flags_of(case: Case) -> str:
    sizes = case.layout
    flags = [
        f"--tensor-model-parallel-size {sizes.tp} --pipeline-model-parallel-size {sizes.pp}",
        f"--context-parallel-size {sizes.cp} --pipeline-schedule {case.schedule}",
        "--sequence-parallel" if case.sequence_parallel else "",
        f"--num-virtual-stages-per-pipeline-rank {case.virtual_stages}" if case.virtual_stages > 1 else "",
        "--use-distributed-optimizer" if case.zero1 else "",
        "--use-torch-fsdp2" if case.fsdp else "",
        "--torch-fsdp2-no-reshard-after-forward" if case.fsdp == "zero2" else "",
    ]
    return " ".join(flag for flag in flags if flag)


def on_ranks(ranks: Any, case: Case, function: Any, *args: Any) -> list[Any]:
    world_size = case.layout.world_size
    return ranks.run(world_size, function, *args) if world_size > 1 else [function(*args)]


def take_over(
    folder: str, flags: str, world_size: int, before: Sequence[int], after: int | None
) -> dict[int, list[str]]:
    """Load each of the iterations `before` into one state, and save what `after` fills.

    Returns:
        Iteration -> what of it is wrong here.
    """
    run = config_of(flags, world_size, _rank(world_size))
    state, wrong = build_state(run, ROWS), {}
    store = DirectoryStore(folder, state.context)
    for seed in before:
        found = find_checkpoint(store, seed)
        assert found is not None
        restore(store, found, state, run)
        here = expected_here(state, seed)
        wrong[seed] = [key for key, (live, value) in here.items() if not torch.equal(live, value)]
    if after is not None:
        fill(state, after)
        CheckpointSaver(store, run, IDENTITY).save(state)
    return wrong


def _rank(world_size: int) -> int:
    return torch.distributed.get_rank() if world_size > 1 else 0


SOME = [
    Case(Layout()),
    Case(Layout(tp=2, pp=2), sequence_parallel=True, virtual_stages=2),
    Case(Layout(cp=2, dp=2), zero1=True),
    Case(Layout(tp=2, dp=2), fsdp="zero3"),
    Case(Layout(pp=2), schedule="zb-h1"),
    Case(Layout(pp=2, dp=2), fsdp="zero2"),
    Case(Layout(tp=4)),
]


def test_each_layout_loads_what_those_before_it_saved(ranks: Any, tmp_path: Path) -> None:
    for number, case in enumerate(SOME, 1):
        before, size = range(1, number), case.layout.world_size
        for wrong in on_ranks(ranks, case, take_over, str(tmp_path), flags_of(case), size, before, number):
            assert wrong == {seed: [] for seed in before}, f"{case} reads from {SOME}"
    check_content(DirectoryStore(tmp_path).folder(len(SOME)), "", ROWS, len(SOME))


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a checkpoint of each layout."""
    folder = str(tmp_path_factory.mktemp("saved"))
    for number, case in enumerate(LAYOUTS, 1):
        on_ranks(ranks, case, save, folder, flags_of(case), case.layout.world_size, ROWS, number)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("after", LAYOUTS, ids=str)
def test_every_layout_loads_every_other(ranks: Any, saved: str, after: Case) -> None:
    seeds = range(1, len(LAYOUTS) + 1)
    for wrong in on_ranks(ranks, after, take_over, saved, flags_of(after), after.layout.world_size, seeds, None):
        assert wrong == {seed: [] for seed in seeds}, f"{after} reads from {LAYOUTS}"


CARAVAN = [
    Case(Layout()),
    Case(Layout(dp=2), zero1=True),
    Case(Layout(tp=2, pp=2), sequence_parallel=True),
    Case(Layout(cp=4)),
    Case(Layout(pp=2), virtual_stages=2),
    Case(Layout(dp=4)),
    Case(Layout(cp=2, dp=2), zero1=True),
    Case(Layout(tp=2), sequence_parallel=True),
    Case(Layout(pp=2, dp=2), fsdp="zero3"),
    Case(Layout(tp=4)),
    Case(Layout(pp=4), schedule="zb-h1"),
]
"""Every second one is a sample."""
PRECISE = "--hidden-dropout 0 --attention-dropout 0 --clip-grad 0.5 --init-method-std 0.2"


def train_in(folder: str, flags: str, world_size: int, until: int) -> list[tuple[int, float, float | None]]:
    """Start or go on in fp64 until an iteration and save; iteration, loss and norm of each step."""
    run = config_of(f"{flags} {PRECISE}", world_size, _rank(world_size))
    context = ParallelContext.create(run.layout, torch.device("cpu")) if world_size > 1 else ParallelContext.solo()
    streams, store = RandomStreams(run.train.seed, context), DirectoryStore(folder, context)
    chunks = build_chunks(run, ROWS, context, streams.own, dtype=torch.float64)
    draw_weights(run, chunks, streams, context)
    optimizer = build_run_optimizer(run, chunks, context)
    deferred = defer_weight_gradients(run, chunks, optimizer)
    state = TrainState(chunks, optimizer, streams, build_schedule(run), context=context, deferred=deferred)
    if (found := find_checkpoint(store)) is not None:
        restore(store, found, state, run)
    agreement = Agreement(NeverStop(), context, counts=state.speaks)
    batches = _batches(ROWS, context.layout, context.dp.index, state.consumed_samples)
    steps = []
    while state.iteration < until:
        result = train_step(
            state, batches, run.num_micro_batches, schedule=run.pipeline_schedule, totals=agreement.totals
        )
        steps.append((result.iteration, float(result.loss), result.grad_norm))
    CheckpointSaver(store, run, IDENTITY).save(state)
    return steps


@pytest.mark.parametrize("cases", [CARAVAN[::2], pytest.param(CARAVAN, marks=pytest.mark.full)], ids=["some", "all"])
def test_a_run_that_changes_its_layout_is_the_run_that_does_not(
    ranks: Any, tmp_path: Path, cases: Sequence[Case]
) -> None:
    alone = train_in(str(tmp_path / "alone"), flags_of(Case(Layout())), 1, 2 * len(cases))
    for number, case in enumerate(cases, 1):
        results = on_ranks(
            ranks, case, train_in, str(tmp_path / "caravan"), flags_of(case), case.layout.world_size, 2 * number
        )
        for (iteration, loss, norm), (at, wanted, wanted_norm) in zip(
            results[0], alone[2 * number - 2 : 2 * number], strict=True
        ):
            assert iteration == at
            assert loss == pytest.approx(wanted, rel=1e-11), f"{case}, iteration {at}"
            assert norm == pytest.approx(wanted_norm, rel=1e-10), f"{case}, iteration {at}"
    assert len({round(loss, 6) for _, loss, _ in alone}) == 2 * len(cases), "the losses must move"
