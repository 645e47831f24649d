"""Point-to-point communication between pipeline stages.

Each directed edge of the ring of stages is a `Channel` with its own communicator. NCCL matches messages by their order
in a communicator (gloo by tag): with one communicator per pair of stages, two crossing messages deadlock; with one per
edge they cannot (schedules/simulator.py). The usual remedy, a batch of the crossing messages, makes each of them wait
for the others (docs/decisions/0007-pipeline.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.device import is_host
from megalith.layout import Layout

if TYPE_CHECKING:
    from megalith.distributed.context import Observer


@dataclass(frozen=True)
class Channel:
    """One directed edge of the ring of stages: a one-way connection to or from another stage."""

    peer: int  # global rank of the other stage
    group: dist.ProcessGroup = field(compare=False, repr=False)  # of the two ranks
    observer: Observer | None = field(default=None, compare=False, repr=False)  # receives waits


@dataclass(frozen=True)
class P2PChannels:
    """Channels of one stage. Stages form a ring: the last one precedes the first (virtual stages need it)."""

    device: torch.device  # of received tensors
    # activations
    to_next: Channel
    from_previous: Channel
    # gradients
    to_previous: Channel
    from_next: Channel


def create_channels(
    layout: Layout, rank: int, device: torch.device, *, timeout: timedelta | None, observer: Observer | None = None
) -> P2PChannels:
    """Create the channels of all pipelines of the layout on every rank; return those of this rank."""
    outgoing: dict[str, Channel] = {}
    incoming: dict[str, Channel] = {}
    for ranks in layout.groups("pp"):
        for direction, step in (("forward", 1), ("backward", -1)):
            for place, source in enumerate(ranks):
                target = ranks[(place + step) % len(ranks)]
                group = dist.new_group(sorted((source, target)), timeout=timeout)
                if rank == source:
                    outgoing[direction] = Channel(target, group, observer)
                if rank == target:
                    incoming[direction] = Channel(source, group, observer)
                if not is_host(device) and rank in (source, target):
                    _connect(Channel(target if rank == source else source, group), device, sends=rank == source)
    return P2PChannels(device, outgoing["forward"], incoming["forward"], outgoing["backward"], incoming["backward"])


def _connect(channel: Channel, device: torch.device, *, sends: bool) -> None:
    """Transfer one element: NCCL connects two ranks at their first message and blocks until both call it, which the
    order of a schedule does not guarantee."""
    if sends:
        send(torch.zeros(1, device=device), channel).wait()
    else:
        receive(channel, (1,), torch.float32, device).wait()


class AsyncHandle:
    """Handle of an asynchronous operation (`torch.distributed.Work`) on a tensor; `wait` returns the tensor.

    Keeps the work and the inputs alive: gloo loses a message whose work is freed before it is complete.
    """

    def __init__(
        self,
        tensor: Tensor,
        work: Any = None,
        observer: Observer | None = None,
        *,
        peer: int | None = None,
        keep: Any = None,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._tensor, self._work, self._observer, self._peer = tensor, work, observer, peer
        self._keep, self._finish = keep, finish

    def wait(self) -> Tensor:
        """Return the tensor when the operation is complete; may be called again."""
        if self._work is not None:
            if self._observer is not None:
                self._observer.waiting(self._peer)
            self._work.wait()
            if self._observer is not None:
                self._observer.waited()
            self._work, self._keep = None, None
        if self._finish is not None:
            self._tensor, self._finish = self._finish(self._tensor), None
        return self._tensor


def send(tensor: Tensor, channel: Channel) -> AsyncHandle:
    """Start sending; do not write to the memory until the transfer is complete."""
    dense = tensor.detach().contiguous()
    return AsyncHandle(dense, dist.isend(dense, channel.peer, group=channel.group), channel.observer, peer=channel.peer)


def receive(channel: Channel, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> AsyncHandle:
    """Start receiving the next tensor that the peer sends, of this shape and dtype."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    work = dist.irecv(tensor, channel.peer, group=channel.group)
    return AsyncHandle(tensor, work, channel.observer, peer=channel.peer)
