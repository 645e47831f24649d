"""Any layout to any layout (F07): what one set of ranks saves, any other loads, and the run goes on as if nothing were.

Two laws. Reshard: in whatever layout a checkpoint is loaded, every rank holds exactly its part of what was saved,
weights and moments. Continuation: a run that changes its layout every few steps has the losses of one process that
never stopped, on the same samples, the global batch kept (F32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
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

from .test_parity import BERT, EXPERT_PARALLEL, EXPERTS, MODELS, T5, Case, batches_of, required_cases
from .test_train_checkpoint import IDENTITY, build_state, compare_content, expected_here, fill, plain_tensors

FSDP = [
    Case(Layout(dp=2), fsdp="zero3"),
    Case(Layout(pp=2, dp=2), fsdp="zero2"),
    Case(Layout(tp=2, dp=2), fsdp="zero3"),
]
LAYOUTS = [Case(Layout()), *required_cases(), *FSDP, Case(Layout(pp=2), schedule="zb-h1")]


def layouts_of(model: str, cases: Iterable[Case]) -> list[Case]:
    """One process and the layouts of these cases, each once, for one model; what stores nothing is left out."""
    plain = (replace(case, model=model, recompute="", exchange="p2p", dispatcher="allgather") for case in cases)
    return list(dict.fromkeys([Case(Layout(), model), *plain]))


FAMILIES = {
    "gpt2": LAYOUTS,
    "mixture-sigmoid": layouts_of("mixture-sigmoid", EXPERTS + EXPERT_PARALLEL),
    "bert": layouts_of("bert", BERT),
    "t5-relative": layouts_of("t5-relative", T5),
}
"""Model -> every layout that it is trained in: experts, with a bias that no optimizer moves, are spread or not."""


def on_ranks(ranks: Any, case: Case, function: Any, *args: Any) -> list[Any]:
    world_size = case.layout.world_size
    return ranks.run(world_size, function, *args) if world_size > 1 else [function(*args)]


def state_of(case: Case) -> TrainState:
    return build_state(case.config(), MODELS[case.model].vocab_size)


def take_over(folder: str, case: Case, before: Sequence[int], after: int | None) -> dict[int, list[str]]:
    """Load each of the iterations `before` into one state, and save what `after` fills.

    Returns:
        Iteration -> what of it is wrong here.
    """
    run, state, wrong = case.config(), state_of(case), {}
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


SOME = {
    "gpt2": [
        Case(Layout()),
        Case(Layout(tp=2, pp=2), sequence_parallel=True, virtual_stages=2),
        Case(Layout(cp=2, dp=2), zero1=True),
        Case(Layout(tp=2, dp=2), fsdp="zero3"),
        Case(Layout(pp=2), schedule="zb-h1"),
        Case(Layout(pp=2, dp=2), fsdp="zero2"),
        Case(Layout(tp=4)),
    ],
    "mixture-sigmoid": [
        Case(Layout(tp=2, dp=2, ep=2), "mixture-sigmoid", sequence_parallel=True, zero1=True),
        Case(Layout(), "mixture-sigmoid"),
        Case(Layout(dp=4, ep=4), "mixture-sigmoid", zero1=True),
        Case(Layout(pp=2, cp=2, ep=2), "mixture-sigmoid", virtual_stages=2),
        Case(Layout(dp=2), "mixture-sigmoid", fsdp="zero3"),
    ],
    "bert": [
        Case(Layout(tp=2, pp=2), "bert", sequence_parallel=True, virtual_stages=2),
        Case(Layout(dp=2), "bert", fsdp="zero3"),
        Case(Layout(), "bert"),
    ],
    "t5-relative": [
        Case(Layout(dp=2), "t5-relative", zero1=True),
        Case(Layout(tp=2), "t5-relative", sequence_parallel=True),
        Case(Layout(), "t5-relative"),
    ],
}


@pytest.mark.parametrize("model", SOME)
def test_each_layout_loads_what_those_before_it_saved(ranks: Any, tmp_path: Path, model: str) -> None:
    cases = SOME[model]
    for number, case in enumerate(cases, 1):
        before = range(1, number)
        for wrong in on_ranks(ranks, case, take_over, str(tmp_path), case, before, number):
            assert wrong == {seed: [] for seed in before}, f"{case} reads from {cases}"
    stored = plain_tensors(DirectoryStore(tmp_path).folder(len(cases)))
    compare_content(stored, state_of(Case(Layout(), model)), len(cases))


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Makes, once for each model, a folder with a checkpoint of each of its layouts."""

    @cache
    def folder_of(model: str) -> str:
        folder = str(tmp_path_factory.mktemp("saved"))
        for number, case in enumerate(FAMILIES[model], 1):
            on_ranks(ranks, case, take_over, folder, case, (), number)
        return folder

    return folder_of


@pytest.mark.full
@pytest.mark.parametrize("after", [case for cases in FAMILIES.values() for case in cases], ids=str)
def test_every_layout_loads_every_other(ranks: Any, saved: Callable[[str], str], after: Case) -> None:
    others = FAMILIES[after.model]
    seeds = range(1, len(others) + 1)
    for wrong in on_ranks(ranks, after, take_over, saved(after.model), after, seeds, None):
        assert wrong == {seed: [] for seed in seeds}, f"{after} reads from {others}"


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
    Case(Layout(dp=3), zero1=True),
]
"""Every second one and the last are a sample."""
OF_EXPERTS = [
    Case(Layout(), "mixture-sigmoid"),
    Case(Layout(tp=2, dp=2, ep=2), "mixture-sigmoid", sequence_parallel=True, zero1=True),
    Case(Layout(pp=2), "mixture-sigmoid", virtual_stages=2),
    Case(Layout(dp=4, ep=4), "mixture-sigmoid", zero1=True, dispatcher="alltoall"),
    Case(Layout(cp=2, ep=2), "mixture-sigmoid"),
    Case(Layout(dp=2), "mixture-sigmoid", fsdp="zero3"),
    Case(Layout(pp=2, dp=2, ep=2), "mixture-sigmoid", schedule="zb-h1", dispatcher="alltoall"),
]
OF_BERT = [
    Case(Layout(tp=2), "bert", sequence_parallel=True, data="pairs"),
    Case(Layout(dp=2), "bert", zero1=True, data="pairs"),
    Case(Layout(pp=2), "bert", data="pairs"),
    Case(Layout(tp=2, dp=2), "bert", fsdp="zero3", data="pairs"),
]
OF_T5 = [
    Case(Layout(dp=2), "t5-relative", zero1=True, data="spans"),
    Case(Layout(tp=2), "t5-relative", sequence_parallel=True, data="spans"),
    Case(Layout(dp=2), "t5-relative", fsdp="zero3", data="spans"),
]
WAYS = {
    "some": [*CARAVAN[::2], CARAVAN[-1]],
    "experts": OF_EXPERTS[:4],
    "all": CARAVAN,
    "all-experts": OF_EXPERTS,
    "bert": OF_BERT,
    "t5": OF_T5,
}
PRECISE = "--train-iters 50 --clip-grad 0.5 --global-batch-size 12"


def train_in(folder: str, case: Case, until: int) -> list[tuple[int, float, float | None]]:
    """Start or go on in fp64 until an iteration and save; iteration, loss and norm of each step."""
    run, rows = case.config(PRECISE), MODELS[case.model].vocab_size
    several = case.layout.world_size > 1
    context = ParallelContext.create(run.layout, torch.device("cpu")) if several else ParallelContext.solo()
    streams, store = RandomStreams(run.train.seed, context), DirectoryStore(folder, context)
    chunks = build_chunks(run, rows, context, streams.own, dtype=torch.float64)
    draw_weights(run, chunks, streams, context)
    optimizer = build_run_optimizer(run, chunks, context)
    deferred = defer_weight_gradients(run, chunks, optimizer)
    state = TrainState(chunks, optimizer, streams, build_schedule(run), context=context, deferred=deferred)
    if (found := find_checkpoint(store)) is not None:
        restore(store, found, state, run)
    agreement = Agreement(NeverStop(), context, counts=state.speaks)
    batches = islice(
        batches_of(case, context.dp.index, 2 * until), state.consumed_samples // case.layout.dp, None
    )  # the samples of this replica that are left
    steps = []
    while state.iteration < until:
        result = train_step(
            state, batches, run.num_micro_batches, schedule=run.pipeline_schedule, totals=agreement.totals
        )
        steps.append((result.iteration, float(result.loss), result.grad_norm))
    CheckpointSaver(store, run, IDENTITY).save(state)
    return steps


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in ("some", "experts") else pytest.mark.full) for way in WAYS]
)
def test_a_run_that_changes_its_layout_is_the_run_that_does_not(ranks: Any, tmp_path: Path, way: str) -> None:
    cases = WAYS[way]
    first = Case(Layout(), cases[0].model, data=cases[0].data)
    alone = train_in(str(tmp_path / "alone"), first, 2 * len(cases))
    for number, case in enumerate(cases, 1):
        results = on_ranks(ranks, case, train_in, str(tmp_path / "caravan"), case, 2 * number)
        for (iteration, loss, norm), (at, wanted, wanted_norm) in zip(
            results[0], alone[2 * number - 2 : 2 * number], strict=True
        ):
            assert iteration == at
            assert loss == pytest.approx(wanted, rel=1e-11), f"{case}, iteration {at}"
            assert norm == pytest.approx(wanted_norm, rel=1e-10), f"{case}, iteration {at}"
    assert len({round(loss, 6) for _, loss, _ in alone}) == 2 * len(cases), "the losses must move"
