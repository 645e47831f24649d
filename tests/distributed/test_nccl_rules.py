"""Training, evaluation and saves complete under NCCL's rules, in every kind of layout and whatever the timing."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megalith.assemble import model, training
from megalith.assemble.training import build_run
from megalith.checkpoint import DirectoryStore
from megalith.config import load
from megalith.distributed import comm
from megalith.distributed.context import Axis, ParallelContext
from megalith.optim.build import build_optimizer
from megalith.train.loop import train

from ..e2e import small_run
from .conftest import Ranks
from .nccl_rules import Issue, NewGroup, Part, Program, Violation, Wait, nccl_rules, prove

STEPS, SAVED_AT = 4, 2
SECONDS = 40.0  # after which a wait is given up: a machine may be busy
MODEL = [
    *("--hidden-size", 16, "--num-attention-heads", 4, "--seq-length", 16, "--max-position-embeddings", 16),
    *("--micro-batch-size", 1, "--lr", 1e-2),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", 99, "--split", "90,5,5", "--num-workers", 0),
    *("--train-iters", STEPS, "--eval-interval", 2, "--eval-iters", 1, "--clip-grad", 0.5),
]
TP2, PP2, CP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
VPP2, SP, ZB = "--num-virtual-stages-per-pipeline-rank 2", "--sequence-parallel", "--pipeline-schedule zb-h1"
ZERO1, ZERO3 = "--use-distributed-optimizer", "--use-torch-fsdp2"
ZERO2 = f"{ZERO3} --torch-fsdp2-no-reshard-after-forward"
EP2 = (
    "--expert-model-parallel-size 2 --num-experts 4 --moe-ffn-hidden-size 12 --moe-router-topk 2 "
    "--position-embedding-type rope --swiglu --ffn-hidden-size 48 --moe-aux-loss-coeff 0.01"
)
SMALL_BUCKETS = 1500
"""Elements of a gradient bucket, so that several are on their way at once."""

LAYOUTS = {
    "tp2-pp2": (4, f"{TP2} {PP2} {SP}"),
    "pp2-vpp2-dp2-zero1": (4, f"{PP2} {VPP2} {ZERO1}"),
    "pp2-zb": (2, f"{PP2} {ZB}"),
    "cp2-dp2-zero2": (4, f"{CP2} {ZERO2}"),
    "dp4-ep2-zero1": (4, f"{EP2} --moe-token-dispatcher-type alltoall {ZERO1}"),
    "dp2-zero3": (2, ZERO3),
}
MORE_LAYOUTS = {
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "pp4-zb": (4, f"--pipeline-model-parallel-size 4 {ZB}"),
    "tp2-pp2-zb": (4, f"{TP2} {PP2} {ZB}"),
    "pp2-zb-dp2-zero1-fp16": (4, f"{PP2} {ZB} {ZERO1} --fp16 --initial-loss-scale 1024"),
    "pp2-vpp2-dp2-zero3": (4, f"{PP2} {VPP2} {ZERO3}"),
    "tp2-pp2-vpp2-per-token": (4, f"{TP2} {PP2} {VPP2} {SP} --calculate-per-token-loss"),
    "tp2-dp2-zero2-bf16": (4, f"{TP2} {SP} {ZERO2} --bf16"),
    "tp2-cp2": (4, f"{TP2} {CP2} {SP}"),
    "cp4": (4, "--context-parallel-size 4"),
    "cp2-dp2-all-to-all": (4, f"{CP2} --cp-comm-type a2a"),
    "cp2-pp2": (4, f"{CP2} {PP2}"),
    "tp2-dp2-ep2": (4, f"{TP2} {SP} {EP2} --moe-token-dispatcher-type allgather"),
    "tp2-dp2-ep2-etp1": (4, f"{TP2} {SP} {EP2} --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall"),
    "pp2-dp2-ep2-zero1": (4, f"{PP2} {EP2} --moe-token-dispatcher-type alltoall {ZERO1}"),
    "pp2-prediction-recompute": (
        2,
        f"{PP2} --position-embedding-type rope --mtp-num-layers 1 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    "tp2-pp2-per-rank-files": (4, f"{TP2} {PP2} --ckpt-format torch"),
    "dp2-per-rank-files-zero1": (2, f"--ckpt-format torch {ZERO1}"),
}

Outcome = tuple[Program, Any, str]
"""What a rank did, what it returned, and why it gave up."""


def by_the_rules(function: Callable[..., Any], *args: Any, seed: int = 0, seconds: float = SECONDS) -> Outcome:
    """Call a function, on each rank, under the rules."""
    program, result, error = Program(), None, ""
    try:
        with nccl_rules(seed=seed, seconds=seconds) as rules:
            program = rules.program
            result = function(*args)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    return program, result, error


def require_kept(outcomes: list[Outcome]) -> None:
    """Raise Violation if a rank gave up, or would in other timings."""
    programs = [program for program, _, _ in outcomes]
    prove(programs)
    prove(programs, one_queue=True)
    errors = [f"rank {rank}: {error}" for rank, (_, _, error) in enumerate(outcomes) if error]
    if errors:
        raise Violation("\n".join(errors))


def violation(ranks: Ranks, function: Callable[..., Outcome], *args: Any) -> str:
    """Return what a function breaks on two ranks, which are replaced if they are stuck."""
    with pytest.raises(Violation) as found:
        require_kept(ranks.run(2, function, *args))
    if "for ever" in str(found.value):
        ranks.close()
    return str(found.value)


# --- runs ----------------------------------------------------------------------------------------------------------


def _run(folder: str, layout: str) -> list[float]:
    """Train until a save, resume from it, and train on beside asynchronous saves; the losses."""
    size, rank = dist.get_world_size(), dist.get_rank()
    environ = {name: str(value) for name, value in [("WORLD_SIZE", size), ("RANK", rank), ("LOCAL_RANK", rank)]}
    text, save = f"{folder}/text", f"{folder}/save"
    words = [*MODEL, "--device", "cpu", "--data-path", text, "--save", save, "--load", save]
    parts = 4 if "virtual" in layout or "parallel-size 4" in layout else 2  # of the model
    words += [*layout.split(), "--num-layers", parts, "--global-batch-size", 2 * parts]
    losses, beside = [], [] if "--ckpt-format torch" in layout else ["--async-save"]
    for further in (["--exit-interval", SAVED_AT, "--save-interval", SAVED_AT], [*beside, "--save-interval", 1]):
        config = load([str(word) for word in (*words, *further)], environ)
        context = ParallelContext.create(config.layout, torch.device("cpu"))
        with ExitStack() as stack:
            small_buckets = partial(build_optimizer, bucket_size=SMALL_BUCKETS)
            stack.enter_context(patch.object(model, "build_optimizer", small_buckets))
            stack.enter_context(patch.object(training, "measure_peak", lambda *_, **__: 1e9))
            stack.enter_context(DirectoryStore(save, context).claim())
            built = build_run(config, context)
            stack.callback(built.loaders.close)
            stack.callback(built.run.close)
            losses += [result.loss for result in train(built.run)]
    return losses


def _run_by_the_rules(folder: str, layout: str, seed: int) -> Outcome:
    return by_the_rules(_run, folder, layout, seed=seed)


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.full) for layout in MORE_LAYOUTS)]
)
def test_a_run_completes(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """With a save, a resume, evaluations and asynchronous saves."""
    size, flags = {**LAYOUTS, **MORE_LAYOUTS}[layout]
    small_run.write_text(tmp_path)
    outcomes = ranks.run(size, _run_by_the_rules, str(tmp_path), flags, 0)
    require_kept(outcomes)
    for _, losses, _ in outcomes:
        assert len(losses) == STEPS and all(map(math.isfinite, losses))
    assert DirectoryStore(tmp_path / "save").iterations() == [*range(SAVED_AT, STEPS + 1)]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_delays_change_no_loss(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    size, flags = LAYOUTS[layout]
    for place in ("plain", "delayed"):
        (tmp_path / place).mkdir()
        small_run.write_text(tmp_path / place)
    wanted = ranks.run(size, _run, str(tmp_path / "plain"), flags)
    outcomes = ranks.run(size, _run_by_the_rules, str(tmp_path / "delayed"), flags, 1)
    require_kept(outcomes)
    assert [losses for _, losses, _ in outcomes] == wanted


def _axis(name: str = "all") -> Axis:
    """An axis over all ranks, with a communicator of its own."""
    ranks = tuple(range(dist.get_world_size()))
    return Axis(name, ranks, dist.get_rank(), dist.new_group(list(ranks)))


def _every_operation() -> None:
    """Assert what each function of `comm` gives, and a message; of several at once."""
    axis, other = _axis(), _axis()
    rank, size = axis.index, axis.size
    own = torch.full((2 * size, 3), 1.0 + rank)
    rows = [value for value in range(1, size + 1) for _ in range(2 * size)]
    reduced = comm.start_all_reduce(own.clone(), axis)
    gathered = comm.start_all_gather(own, other)
    shifted = comm.start_ring_shift(own, axis)
    scattered = comm.start_reduce_scatter(own, other)
    assert (shifted.wait() == 1.0 + (rank - 1) % size).all()
    assert (scattered.wait() == size * (size + 1) / 2).all() and (reduced.wait() == size * (size + 1) / 2).all()
    assert gathered.wait()[:, 0].tolist() == rows
    whole = torch.zeros(2 * size * size, 3)
    part = whole[2 * size * rank : 2 * size * (rank + 1)]  # in place
    part.fill_(1.0 + rank)
    assert comm.start_all_gather(part, axis, out=whole).wait()[:, 0].tolist() == rows
    assert (comm.all_reduce(own.clone(), axis, "max") == size).all()
    assert (comm.broadcast(own.clone(), axis, size - 1) == size).all()
    assert comm.all_to_all(own, axis, 0, 0)[:, 0].tolist() == [value for value in range(1, size + 1) for _ in range(2)]
    counts = [*range(size)]
    received = comm.all_to_all_rows(own[: sum(counts)], axis, counts, [rank] * size)
    assert received[:, 0].tolist() == [value for value in range(1, size + 1) for _ in range(rank)]
    assert comm.all_gather_objects(f"rank {rank}", axis) == [f"rank {place}" for place in range(size)]
    comm.barrier(axis)
    message = torch.full((2,), 7.0)
    if rank == 0:
        dist.isend(message, 1, group=axis.group).wait()
    elif rank == 1:
        found = torch.zeros(2)
        dist.irecv(found, 0, group=axis.group).wait()
        assert torch.equal(found, message)


def _communicate() -> Outcome:
    return by_the_rules(_every_operation)


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_gives_what_gloo_gives(ranks: Ranks, size: int) -> None:
    outcomes = ranks.run(size, _communicate)
    require_kept(outcomes)
    ranks.run(size, _every_operation)


# --- what breaks a rule --------------------------------------------------------------------------------------------


def _crossing_messages() -> None:
    group, peer = _axis().group, 1 - dist.get_rank()
    sent = dist.isend(torch.ones(2), peer, group=group)
    received = dist.irecv(torch.zeros(2), peer, group=group)
    assert sent and received
    received.wait()
    sent.wait()


def _other_reduction() -> None:
    comm.all_reduce(torch.ones(2), axis := _axis(), "max" if axis.index else "sum")


def _other_shape() -> None:
    comm.all_gather(torch.ones(4 if (axis := _axis()).index else 2), axis)


def _other_order() -> None:
    axis, x = _axis(), torch.ones(2)
    calls: list[Callable[..., Any]] = [comm.all_reduce, comm.all_gather]
    for call in reversed(calls) if axis.index else calls:
        call(x, axis)


def _other_root() -> None:
    comm.broadcast(torch.ones(2), axis := _axis(), axis.index)


def _other_rows() -> None:
    comm.all_to_all_rows(torch.ones(2, 3), _axis(), [1, 1], [1, 0] if dist.get_rank() else [1, 1])


def _other_message() -> None:
    group, rank = _axis().group, dist.get_rank()
    work = dist.irecv(torch.zeros(3), 0, group=group) if rank else dist.isend(torch.ones(2), 1, group=group)
    assert work
    work.wait()


def _crossing_communicators() -> None:
    axes = [_axis("a"), _axis("b")]
    for axis in reversed(axes) if dist.get_rank() else axes:
        comm.all_reduce(torch.ones(2), axis)


def _crossing_queues() -> None:
    """Two operations of each communicator, which end if those of another one run beside them."""
    a, b = _axis("a"), _axis("b")
    pending = [comm.start_all_reduce(torch.ones(2), axis) for axis in ([b, b, a, a] if a.index else [a, a, b, b])]
    for handle in pending:
        handle.wait()


def _a_rank_that_leaves() -> None:
    if (axis := _axis()).index == 0:
        comm.all_reduce(torch.ones(2), axis)


def _write_before_wait() -> None:
    pending = comm.start_all_gather(x := torch.ones(2), _axis())
    x.zero_()
    pending.wait()


def _write_of_a_result_before_wait() -> None:
    pending = comm.start_all_reduce(x := torch.ones(2), _axis())
    x.zero_()
    pending.wait()


def _no_wait() -> None:
    comm.start_all_reduce(torch.ones(2), _axis())


def _other_thread() -> None:
    from threading import Thread

    axis, errors = _axis(), list[Violation]()

    def reduce() -> None:
        try:
            comm.all_reduce(torch.ones(2), axis)
        except Violation as error:
            errors.append(error)

    thread = Thread(target=reduce, name="beside")
    thread.start()
    thread.join()
    raise errors[0]


def _strides() -> None:
    dist.all_reduce(torch.ones(2, 3).t(), group=_axis().group)


def _unknown_dtype() -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.int16), group=_axis().group)


BREACHES: dict[Callable[[], None], list[str]] = {
    _crossing_messages: ["for ever", "rank 0", "send to rank 1", "rank 1", "send to rank 0"],
    _other_reduction: ["rank 0", "(sum)", "rank 1", "(max)"],
    _other_shape: ["rank 0", "[2] float32", "rank 1", "[4] float32"],
    _other_order: ["rank 0", "all_reduce", "rank 1", "all_gather"],
    _other_root: ["from rank 0", "from rank 1"],
    _other_rows: ["all_to_all", "(1, 1) -> (1, 0)"],
    _other_message: ["[2] float32", "[3] float32"],
    _crossing_communicators: ["for ever", "rank 0 waits", "(0, 1) [0]", "rank 1 waits", "(0, 1) [1]"],
    _crossing_queues: ["for ever", "rank 0 cannot start", "(0, 1) [0]", "rank 1 cannot start", "(0, 1) [1]"],
    _a_rank_that_leaves: ["for ever", "rank 0 waits", "rank 1 has ended"],
    _write_before_wait: ["written to", "all_gather"],
    _write_of_a_result_before_wait: ["written to", "all_reduce"],
    _no_wait: ["never waited for", "all_reduce"],
    _other_thread: ["all_reduce", "beside"],
    _strides: ["strides (1, 3)", "all_reduce"],
    _unknown_dtype: ["int16"],
}


def _break(name: str) -> Outcome:
    function = globals()[name]
    return by_the_rules(function, seconds=0.5 if "for ever" in BREACHES[function] else SECONDS)


@pytest.mark.parametrize("breach", BREACHES, ids=lambda breach: breach.__name__.strip("_"))
def test_a_broken_rule_is_named(ranks: Ranks, breach: Callable[[], None]) -> None:
    text = violation(ranks, _break, breach.__name__)
    assert [word for word in BREACHES[breach] if word not in text] == []


def _early_reads() -> None:
    with nccl_rules():
        axis = _axis()
        pending = comm.start_all_reduce(x := torch.ones(2), axis)
        assert x.isnan().all() and (pending.wait() == 2.0).all()
        whole = torch.ones(axis.size, 3)
        part = whole[axis.index : axis.index + 1]  # in place: no other rank writes to it
        pending = comm.start_all_gather(part, axis, out=whole)
        assert (part == 1.0).all() and whole.isnan().sum() == 3
        assert (pending.wait() == 1.0).all()
        pending = comm.start_reduce_scatter(whole, axis, out=part)
        assert part.isnan().all() and whole.isnan().sum() == 3
        assert (pending.wait() == 2.0).all()


def test_a_result_that_is_read_before_the_wait_is_not_a_number(ranks: Ranks) -> None:
    ranks.run(2, _early_reads)


def test_communicators_are_made_in_the_same_order_by_all_ranks() -> None:
    made = [[NewGroup((0, 1)), NewGroup((0,))], [NewGroup((0,)), NewGroup((0, 1))]]
    with pytest.raises(Violation, match="different communicators"):
        prove([[*program] for program in made])
    with pytest.raises(Violation, match="rank 1 has ended"):
        prove([[NewGroup((0, 1))], []])


def test_a_group_call_ends_one_message_without_the_other() -> None:
    """Rank 1 receives from rank 0 and goes on, while rank 0 waits for its own message from rank 2."""
    part = partial(Part, call="[1] float32")
    programs: list[Program] = [
        [NewGroup((0, 1, 2)), Issue(0, 0, (part(1, True), part(2, False))), Wait(0)],
        [NewGroup((0, 1, 2)), Issue(0, 0, (part(0, False),)), Wait(0), Issue(1, 0, (part(2, True),)), Wait(1)],
        [NewGroup((0, 1, 2)), Issue(0, 0, (part(1, False),)), Wait(0), Issue(1, 0, (part(0, True),)), Wait(1)],
    ]
    prove(programs)
    prove(programs, one_queue=True)
    programs[0] = [programs[0][0], Issue(0, 0, (part(2, False),)), Issue(1, 0, (part(1, True),)), Wait(0), Wait(1)]
    with pytest.raises(Violation, match="for ever"):
        prove(programs)


# --- defects that training could have ------------------------------------------------------------------------------


def _one_communicator_for_each_pair() -> None:
    """Messages in both directions share a communicator, which gloo does not mind."""
    made: dict[tuple[int, ...], Any] = {}
    new_group = dist.new_group

    def shared(ranks: list[int], timeout: Any = None) -> Any:
        if tuple(ranks) not in made:
            made[tuple(ranks)] = new_group(ranks, timeout=timeout)
        return made[tuple(ranks)]

    dist.new_group = shared


def _other_order_of_gathers() -> None:
    """The second rank gathers updated weights in another order."""
    from megalith.optim import shards

    order = shards._gather_order
    shards._gather_order = lambda *args: order(*args)[:: -1 if dist.get_rank() else 1]


def _late_wait() -> None:
    """Weights are used before they are gathered."""
    from megalith.optim import shards

    shards.ParameterBuffers._wait_for = lambda self, number: None


def _defective_run(folder: str, layout: str, defect: str) -> Outcome:
    def run() -> list[float]:
        globals()[defect]()
        return _run(folder, layout)

    return by_the_rules(run, seconds=8.0 if defect == _one_communicator_for_each_pair.__name__ else SECONDS)


@pytest.mark.parametrize(
    ("layout", "defect", "named"),
    [
        (PP2, _one_communicator_for_each_pair, ["for ever", "receive from rank 1", "receive from rank 0"]),
        (ZERO1, _other_order_of_gathers, ["different calls", "all_gather"]),
        (ZERO1, _late_wait, ["nan"]),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_a_defect_is_found(
    ranks: Ranks, tmp_path: Path, layout: str, defect: Callable[[], None], named: list[str]
) -> None:
    small_run.write_text(tmp_path)
    text = violation(ranks, _defective_run, str(tmp_path), layout, defect.__name__)
    ranks.close()  # their modules are changed
    assert [word for word in named if word not in text] == []
