"""Process groups: every collective and message in a world of one and of two, and layouts that give the losses of one
process. NCCL on GPUs, gloo on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith.distributed import comm, p2p
from megalith.distributed.context import Axis, ParallelContext
from megalith.layout import Layout

from ..distributed.conftest import Ranks
from .small import ON_GPU, ON_TWO_GPUS, STYLES, bf16_or_skip, losses

WORLDS = [
    ("cpu", 1),
    ("cpu", 2),
    pytest.param("cuda", 1, marks=ON_GPU),
    pytest.param("cuda", 2, marks=ON_TWO_GPUS),
]
TWO = ["cpu", pytest.param("cuda", marks=ON_TWO_GPUS)]


class _Many(int):
    """A number of ranks that is not taken for one, so that `comm` communicates in a world of one too."""

    def __eq__(self, other: object) -> bool:
        return False

    def __gt__(self, other: int) -> bool:
        return True

    __hash__ = int.__hash__


class _Communicating(Axis):
    size = property(lambda self: _Many(len(self.ranks)))  # type: ignore[assignment]


def _axis(device: str) -> tuple[Axis, torch.device]:
    here = torch.device(device, dist.get_rank() if device == "cuda" else None)
    world = ParallelContext.create(Layout(tp=dist.get_world_size()), here).world
    return _Communicating("all", world.ranks, world.index, dist.group.WORLD), here


def _collectives(device: str, dtype: torch.dtype) -> None:
    """Assert what every function of `comm` gives for rows that tell from which rank they are."""
    axis, here = _axis(device)
    rank, size = axis.index, len(axis.ranks)
    own = torch.full((2 * size, 3), 1.0 + rank, device=here).to(dtype)
    summed, highest = size * (size + 1) / 2, float(size)

    def equal(found: torch.Tensor, rows: list[float] | float) -> None:
        wanted = torch.tensor(rows, device=here).to(dtype)
        assert found.device == here and found.dtype == dtype
        assert torch.equal(found, wanted[:, None].expand(-1, 3) if wanted.dim() else wanted.expand_as(found)), found

    each = [1.0 + other for other in range(size)]
    everyone = [value for value in each for _ in range(2 * size)]
    equal(comm.all_reduce(own.clone(), axis), summed)
    equal(comm.all_reduce(own[:, :1].expand(-1, 3), axis), summed)  # strides of 0
    equal(comm.all_reduce(own.clone(), axis, "max"), highest)
    equal(comm.all_reduce(own.clone(), axis, "min"), 1.0)
    equal(comm.all_gather(own, axis), everyone)
    equal(comm.all_gather(own.t(), axis, dim=1).t(), everyone)
    equal(comm.start_all_gather(own, axis, out=own.new_empty(2 * size * size, 3)).wait(), everyone)
    equal(comm.start_reduce_scatter(own, axis).wait(), [summed] * 2)
    equal(comm.start_reduce_scatter(own.clone(), axis, out=own.new_empty(2, 3)).wait(), [summed] * 2)
    equal(comm.all_to_all(own, axis, 0, 0), [value for value in each for _ in range(2)])
    counts = [1 + other for other in range(size)]  # as many rows as the number of the receiver
    rows = comm.all_to_all_rows(own[: sum(counts)], axis, counts, [1 + rank] * size)
    equal(rows, [value for value in each for _ in range(1 + rank)])
    equal(comm.broadcast(own.clone(), axis, size - 1), highest)
    if size > 1:  # no rank sends to itself
        equal(comm.start_ring_shift(own, axis).wait(), 1.0 + (rank - 1) % size)
    assert comm.all_gather_objects(rank, axis) == list(range(size))
    comm.barrier(axis)
    for pair in (comm.copy_in, comm.sum_out, comm.gather_in, comm.scatter_out):
        x = own.clone().requires_grad_()
        pair(x, axis).sum().backward()
        assert x.grad is not None
        equal(x.grad, 1.0 if pair in (comm.sum_out, comm.scatter_out) else float(size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("device", "size"), WORLDS)
def test_every_collective(pool: dict[str, Ranks], device: str, size: int, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16:
        bf16_or_skip("bf16", device)
    pool[device].run(size, _collectives, device, dtype)


def _crossing_messages(device: str) -> list[float]:
    """Both stages send before they receive, in both directions, as a pipeline does."""
    rank = dist.get_rank()
    here = torch.device(device, rank if device == "cuda" else None)
    channels = ParallelContext.create(Layout(pp=2), here).p2p_channels
    assert channels is not None
    sends = [p2p.send(torch.full((3,), 1.0 + rank, device=here), channel) for channel in _outgoing(channels)]
    received = [p2p.receive(channel, (3,), torch.float32, here) for channel in _incoming(channels)]
    found = [float(handle.wait().sum()) for handle in received]
    for handle in sends:
        handle.wait()
    return found


def _outgoing(channels: Any) -> tuple[p2p.Channel, p2p.Channel]:
    return channels.to_next, channels.to_previous


def _incoming(channels: Any) -> tuple[p2p.Channel, p2p.Channel]:
    return channels.from_previous, channels.from_next


@pytest.mark.parametrize("device", TWO)
def test_crossing_messages_of_a_pipeline(pool: dict[str, Ranks], device: str) -> None:
    assert pool[device].run(2, _crossing_messages, device) == [[6.0, 6.0], [3.0, 3.0]]


LAYOUTS = {  # on CPUs tests/distributed has all of them
    "DP": "",
    "ZeRO-1": "--use-distributed-optimizer",
    "ZeRO-2": "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
    "ZeRO-3": "--use-torch-fsdp2",
    "TP": "--tensor-model-parallel-size 2",
    "TP, SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP": "--pipeline-model-parallel-size 2",
    "CP": "--context-parallel-size 2",
    "CP, all-to-all": "--context-parallel-size 2 --cp-comm-type a2a",
}


@pytest.mark.parametrize(
    ("device", "layout"),
    [
        *(pytest.param("cpu", name, marks=[pytest.mark.full] * (name not in ("ZeRO-3", "PP"))) for name in LAYOUTS),
        *(pytest.param("cuda", name, marks=ON_TWO_GPUS) for name in LAYOUTS),
    ],
)
def test_two_ranks_give_the_losses_of_one(pool: dict[str, Ranks], device: str, layout: str) -> None:
    wanted = losses(STYLES["llama"], "cpu", dtype=torch.float64)
    for found in pool[device].run(2, losses, f"{STYLES['llama']} {LAYOUTS[layout]}", device):
        assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    ("device", "dispatcher"),
    [
        ("cpu", "alltoall"),
        *(pytest.param("cuda", name, marks=ON_TWO_GPUS) for name in ("allgather", "alltoall")),
    ],
)
def test_experts_on_two_ranks_give_the_losses_of_one(pool: dict[str, Ranks], device: str, dispatcher: str) -> None:
    flags = f"{STYLES['experts']} --moe-aux-loss-coeff 0"
    wanted = losses(flags, "cpu", dtype=torch.float64)
    flags += f" --expert-model-parallel-size 2 --moe-token-dispatcher-type {dispatcher}"
    for found in pool[device].run(2, losses, flags, device):
        assert found == pytest.approx(wanted, rel=1e-4)
