"""Sending and receiving between pipeline stages.

One communicator for each directed edge: NCCL matches messages by their order in a communicator (gloo by tag), and with
one communicator for a pair of stages two messages that cross wait for each other for ever (design.md section 7).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from megalith.layout import Layout


@dataclass(frozen=True)
class Edge:
    """A one-way connection to or from another stage."""

    peer: int
    group: dist.ProcessGroup = field(compare=False, repr=False)


@dataclass(frozen=True)
class PipelineLinks:
    """The edges of one stage. Stages form a ring: the last one's successor is the first (virtual stages need it).

    Attributes:
        device: where received tensors are put.
        to_next, from_previous: activations.
        to_previous, from_next: gradients.
    """

    device: torch.device
    to_next: Edge
    from_previous: Edge
    to_previous: Edge
    from_next: Edge


def create_links(layout: Layout, rank: int, device: torch.device, *, timeout: timedelta | None) -> PipelineLinks:
    """Make the edges of all pipelines of the layout; every rank calls this. Returns those of this rank."""
    outgoing: dict[str, Edge] = {}
    incoming: dict[str, Edge] = {}
    for ranks in layout.groups("pp"):
        for direction, step in (("forward", 1), ("backward", -1)):
            for place, source in enumerate(ranks):
                target = ranks[(place + step) % len(ranks)]
                group = dist.new_group(sorted((source, target)), timeout=timeout)
                if rank == source:
                    outgoing[direction] = Edge(target, group)
                if rank == target:
                    incoming[direction] = Edge(source, group)
    return PipelineLinks(device, outgoing["forward"], incoming["forward"], outgoing["backward"], incoming["backward"])
