"""The ranks of a run as one frozen object: made once in the composition root, handed to constructors, never global."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.distributed.p2p import PipelineLinks, create_links
from megalith.layout import AXES, FOLDED, Layout

JOINED = (("cp", "dp"), ("tp", "pp"), AXES)
"""The sets of axes over which something is summed at once: gradients, norms of a replica, everything."""
_NAMES = (*((axis,) for axis in (*AXES, *FOLDED)), *JOINED)


class Observer:
    """Is told of each collective before it starts: the debug checks and the reports of hangs. This one does nothing."""

    def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
        """`operation` is about to run over `axis`. `detail` is what else must be equal on all its ranks."""

    def after(self, operation: str, axis: Axis) -> None:
        """It has been started (or has ended, if it does not run in the background)."""

    def waiting(self, peer: int | None = None) -> None:
        """This rank needs the result of what it has started, or the message of a peer, and waits."""

    def waited(self) -> None:
        """It is there."""


@dataclass(frozen=True)
class Axis:
    """The ranks that differ from this one in one kind of parallelism (or in several, joined)."""

    name: str  # "tp", "cp", "dp", "pp", several of these joined by "+", "etp", "ep" or "edp"
    ranks: tuple[int, ...] = (0,)  # global ranks, in order; this one is among them
    index: int = 0  # the place of this rank among them
    # how to reach them; None where there is one rank only, or in plans without processes
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    observer: Observer | None = field(default=None, compare=False, repr=False)  # is told of each collective

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1


@dataclass(frozen=True)
class ParallelContext:
    """The place of this process in a layout, and how to reach the others."""

    layout: Layout  # the whole layout
    rank: int  # of this process
    device: torch.device  # where its tensors are
    axes: Mapping[frozenset[str], Axis] = field(repr=False)  # by the names of their axes, single and joined (`JOINED`)
    # the first and the last pipeline stage, which may share an embedding; None on a rank that is neither, and without
    # pipeline
    ends: Axis | None = field(default=None, repr=False)
    # to the neighbouring pipeline stages; None without pipeline
    links: PipelineLinks | None = field(default=None, repr=False)

    @property
    def tp(self) -> Axis:
        return self.join("tp")

    @property
    def cp(self) -> Axis:
        return self.join("cp")

    @property
    def dp(self) -> Axis:
        return self.join("dp")

    @property
    def pp(self) -> Axis:
        return self.join("pp")

    @property
    def etp(self) -> Axis:
        """The ranks that share each expert."""
        return self.join("etp")

    @property
    def ep(self) -> Axis:
        """The ranks that share the experts."""
        return self.join("ep")

    @property
    def edp(self) -> Axis:
        """The ranks that hold the same experts."""
        return self.join("edp")

    @property
    def has_expert_axes(self) -> bool:
        """Whether the replicas of experts are other ranks than those of dense weights."""
        return self.ep.size > 1 or self.layout.expert_tp != self.layout.tp

    @property
    def world(self) -> Axis:
        return self.join(*AXES)

    def join(self, *names: str) -> Axis:
        """The axis over all ranks that differ in these kinds of parallelism."""
        return self.axes[frozenset(names)]

    @classmethod
    def solo(cls, device: torch.device | str = "cpu") -> ParallelContext:
        """One process alone: every axis has one rank and no collective does anything."""
        axes = {frozenset(names): Axis("+".join(names)) for names in _NAMES}
        return cls(Layout(), 0, torch.device(device), axes)

    @classmethod
    def create(
        cls, layout: Layout, device: torch.device, *, timeout: timedelta | None = None, observer: Observer | None = None
    ) -> ParallelContext:
        """Make all groups of a layout; every rank calls this with equal arguments."""
        rank = dist.get_rank()
        assert dist.get_world_size() == layout.world_size, f"{layout} in a world of {dist.get_world_size()}"
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

        def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
            if ranks not in groups:
                groups[ranks] = None if len(ranks) == 1 else dist.new_group(list(ranks), timeout=timeout)
            return groups[ranks]

        axes = {}
        for names in _NAMES:
            for ranks in layout.groups(*names):
                group = group_of(ranks)
                if rank in ranks:
                    axes[frozenset(names)] = Axis("+".join(names), ranks, ranks.index(rank), group, observer)
        ends, links = None, None
        if layout.pp > 1:
            for ranks in layout.groups("pp"):
                pair = (ranks[0], ranks[-1])
                group = group_of(pair)
                if rank in pair:
                    ends = Axis("ends", pair, pair.index(rank), group, observer)
            links = create_links(layout, rank, device, timeout=timeout, observer=observer)
        return cls(layout, rank, device, axes, ends, links)
