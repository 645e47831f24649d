"""Any layout to any layout (F07): what one set of ranks saves, any other loads, and the run goes on as if nothing were.

Two laws. Reshard: in whatever layout a checkpoint is loaded, every rank holds exactly its part of what was saved,
weights and moments. Continuation: a run that changes its layout every few steps has the losses of one process that
never stopped, to 1e-12 over the next ten steps, on the same samples, the global batch kept (F32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalith.assemble.data import build_loaders
from megalith.assemble.model import build_chunks, build_run_optimizer, defer_weight_gradients, draw_weights
from megalith.assemble.schedule import build_schedule
from megalith.checkpoint import DirectoryStore
from megalith.config import RunConfig
from megalith.data.build import Datasets
from megalith.data.gpt_dataset import GPTDataset, GPTDatasetOptions
from megalith.data.samples import SplitRatios, SplitSpec
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.layout import Layout
from megalith.tokenizers.null import NullTokenizer
from megalith.train.checkpoint_fit import find_checkpoint
from megalith.train.checkpoint_restore import restore
from megalith.train.checkpoint_saver import CheckpointSaver
from megalith.train.consensus import NeverStop, RankConsensus
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
    "some": [CARAVAN[0], CARAVAN[2], CARAVAN[6], CARAVAN[8], CARAVAN[-1]],
    "experts": OF_EXPERTS[:3],
    "all": CARAVAN,
    "all-experts": OF_EXPERTS,
    "bert": OF_BERT,
    "t5": OF_T5,
}
SAMPLE = ("some", "experts")
PRECISE = "--train-iters 50 --clip-grad 0.5 --global-batch-size 12"
AHEAD = 10
"""Steps that a run continues for after another layout took over; three in the ways of `make test`."""
Steps = list[tuple[int, float, float | None]]


def start_or_resume(folder: str, case: Case) -> tuple[RunConfig, TrainState, DirectoryStore]:
    """The state, in fp64, of a run that begins or has a checkpoint in the folder."""
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
    return run, state, store


def train_in(folder: str, case: Case, save_at: int, until: int) -> Steps:
    """Start or go on until an iteration, and save on the way; iteration, loss and norm of each step."""
    run, state, store = start_or_resume(folder, case)
    consensus = RankConsensus(NeverStop(), state.context, contributes=state.contributes_losses)
    batches = islice(
        batches_of(case, state.context.dp.index, 2 * until), state.consumed_samples // case.layout.dp, None
    )  # the samples of this replica that are left
    steps = []
    while state.iteration < until:
        result = train_step(
            state,
            batches,
            run.num_micro_batches,
            pipeline_schedule=run.pipeline_schedule,
            sum_over_ranks=consensus.sum_over_ranks,
        )
        steps.append((result.iteration, float(result.loss), result.grad_norm))
        if state.iteration == save_at:
            CheckpointSaver(store, run, IDENTITY).save(state)
    return steps


def assert_same_course(steps: Steps, wanted: Steps, what: str) -> None:
    for (iteration, loss, norm), (at, wanted_loss, wanted_norm) in zip(steps, wanted, strict=True):
        assert iteration == at
        assert loss == pytest.approx(wanted_loss, rel=1e-12, abs=0.0), f"{what}, iteration {at}"
        assert norm == pytest.approx(wanted_norm, rel=1e-12, abs=0.0), f"{what}, iteration {at}"
    assert len({round(loss, 6) for _, loss, _ in wanted}) == len(wanted), "the losses must move"


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in SAMPLE else pytest.mark.full) for way in WAYS])
def test_a_run_that_changes_its_layout_is_the_run_that_does_not(ranks: Any, tmp_path: Path, way: str) -> None:
    """Each layout saves after two steps, and continues for as many as the next one is compared in too."""
    cases, ahead = WAYS[way], 3 if way in SAMPLE else AHEAD
    first = Case(Layout(), cases[0].model, data=cases[0].data)
    alone = train_in(str(tmp_path / "alone"), first, 0, 2 * len(cases) + ahead)
    for number, case in enumerate(cases, 1):
        steps = on_ranks(ranks, case, train_in, str(tmp_path / "caravan"), case, 2 * number, 2 * number + ahead)[0]
        assert_same_course(steps, alone[2 * number - 2 : 2 * number + ahead], str(case))


def of_the_table(model: str) -> list[Case]:
    """The layouts of the table of F07."""
    return [
        Case(Layout(), model),
        Case(Layout(dp=2), model),
        Case(Layout(dp=2), model, zero1=True),
        Case(Layout(tp=2), model, sequence_parallel=True),
        Case(Layout(pp=2), model),
        Case(Layout(tp=2, pp=2), model, sequence_parallel=True),
        Case(Layout(cp=2), model),
        Case(Layout(pp=2), model, virtual_stages=2),
        Case(Layout(dp=2), model, fsdp="zero3"),
        *([Case(Layout(dp=2, ep=2), model)] if "mixture" in model else []),
    ]


@pytest.mark.full
@pytest.mark.parametrize("before", [*of_the_table("gpt2"), *of_the_table("mixture-sigmoid")], ids=str)
def test_every_layout_goes_on_as_the_one_before_it_would(ranks: Any, tmp_path: Path, before: Case) -> None:
    wanted = on_ranks(ranks, before, train_in, str(tmp_path), before, 2, 2 + AHEAD)[0][2:]
    for after in of_the_table(before.model):
        steps = on_ranks(ranks, after, train_in, str(tmp_path), after, 0, 2 + AHEAD)[0]
        assert_same_course(steps, wanted, f"{before} to {after}")


# --- F32: replicas come and go -------------------------------------------------------------------------------------


class RandomText:
    """One document of random tokens, in which no sample is like another."""

    lengths = np.array([12_000], np.int32)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> Any:
        tokens = np.random.default_rng(sequence).integers(0, 39, self.lengths[sequence])
        return tokens[offset : None if length is None else offset + length]


def dataset_of(run: RunConfig) -> GPTDataset:
    spec = SplitSpec(0, run.train_iters * run.global_batch_size, SplitRatios.parse(None), "text")
    options = GPTDatasetOptions(run.data.seq_length, run.train.seed)
    return GPTDataset(RandomText(), spec, options=options, tokenizer=NullTokenizer(39))


def read_in(folder: str, case: Case, until: int) -> tuple[Steps, list[list[tuple[int, ...]]]]:
    """Start or go on with the loader of a run until an iteration and save; the steps, and what each has read here."""
    run, state, store = start_or_resume(folder, case)
    consensus = RankConsensus(NeverStop(), state.context, contributes=state.contributes_losses)
    datasets, read = Datasets(dataset_of(run), None, None), list[tuple[int, ...]]()
    loader = build_loaders(
        run, datasets, state.context.dp.index, iteration=state.iteration, consumed_train=state.consumed_samples
    ).train

    def reading() -> Iterator[Any]:
        for batch in loader:
            read.extend(map(tuple, batch["tokens"].tolist()))
            yield batch

    batches, steps, samples = reading(), [], []
    while state.iteration < until:
        read.clear()
        result = train_step(
            state,
            batches,
            run.num_micro_batches,
            pipeline_schedule=run.pipeline_schedule,
            sum_over_ranks=consensus.sum_over_ranks,
        )
        steps.append((result.iteration, float(result.loss), result.grad_norm))
        samples.append(list(read))
    loader.close()
    CheckpointSaver(store, run, IDENTITY).save(state)
    return steps, samples


def test_replicas_come_and_go_and_no_sample_is_repeated_or_skipped(ranks: Any, tmp_path: Path) -> None:
    """F32: data parallel 4, 2, 3; every step has the samples, and the loss, of one process that never stopped."""
    cases = [Case(Layout(dp=4), zero1=True), Case(Layout(dp=2)), Case(Layout(dp=3), zero1=True)]
    alone, in_order = read_in(str(tmp_path / "alone"), Case(Layout()), 4 * len(cases))
    dataset = dataset_of(cases[0].config(PRECISE))
    numbered = [tuple(dataset[number]["tokens"].tolist()) for number in range(12 * len(alone))]
    assert [row for rows in in_order for row in rows] == numbered and len(set(numbered)) == len(numbered)
    for number, case in enumerate(cases):
        results = ranks.run(case.layout.world_size, read_in, str(tmp_path / "elastic"), case, 4 * number + 4)
        here = slice(4 * number, 4 * number + 4)
        assert_same_course(results[0][0], alone[here], str(case))
        for together, wanted in zip(zip(*(rows for _, rows in results), strict=True), in_order[here], strict=True):
            assert sorted(row for rows in together for row in rows) == sorted(wanted), str(case)
