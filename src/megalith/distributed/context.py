"""Ranks and process groups of a run as a frozen object, built in the composition root and passed to constructors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.distributed.p2p import P2PChannels, create_channels
from megalith.layout import AXES, FOLDED, Layout

JOINED = (("cp", "dp"), ("tp", "pp"), AXES)
"""Sets of axes with a joint process group: for gradients, norms of a replica, and all ranks."""
_NAMES = (*((axis,) for axis in (*AXES, *FOLDED)), *JOINED)


class Observer:
    """Observer of collectives and messages, for debug checks and hang reports; these methods do nothing."""

    def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
        """Receive the `operation` that is about to run over `axis`; `detail` must also be equal on all its ranks."""

    def after(self, operation: str, axis: Axis) -> None:
        """Receive that the operation was started, or has ended if it is synchronous."""

    def waiting(self, peer: int | None = None) -> None:
        """Receive that this rank starts to wait for an operation, or for a message of rank `peer`."""

    def waited(self) -> None:
        """Receive that the wait has ended."""


@dataclass(frozen=True)
class Axis:
    """Process group of the ranks that differ from this one in one kind of parallelism, or in several joined ones."""

    name: str  # "tp", "cp", "dp", "pp", several of these joined by "+", "etp", "ep" or "edp"
    ranks: tuple[int, ...] = (0,)  # global ranks, in order; this one is among them
    index: int = 0  # position of this rank in `ranks`
    # None with one rank, or in plans
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    observer: Observer | None = field(default=None, compare=False, repr=False)  # receives each collective
    # of plans, where the other ranks are not there: receives each collective, and returns what is waited for
    planned: Callable[[str, Axis, Any], Any] | None = field(default=None, compare=False, repr=False)

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
    """Coordinates of this rank in a layout, and its process groups."""

    layout: Layout  # the whole layout
    rank: int  # of this process
    device: torch.device  # of its tensors
    axes: Mapping[frozenset[str], Axis] = field(repr=False)  # by the names of their axes, single and joined (`JOINED`)
    # first and last pipeline stage, which may tie embeddings; None on other stages, and without pipeline
    ends: Axis | None = field(default=None, repr=False)
    # connections to the neighbouring pipeline stages; None without pipeline
    p2p_channels: P2PChannels | None = field(default=None, repr=False)

    @property
    def tp(self) -> Axis:
        return self.flatten_axes("tp")

    @property
    def cp(self) -> Axis:
        return self.flatten_axes("cp")

    @property
    def dp(self) -> Axis:
        return self.flatten_axes("dp")

    @property
    def pp(self) -> Axis:
        return self.flatten_axes("pp")

    @property
    def etp(self) -> Axis:
        """Return the ranks over which each expert is sharded (expert tensor parallelism)."""
        return self.flatten_axes("etp")

    @property
    def ep(self) -> Axis:
        """Return the ranks over which the experts are distributed."""
        return self.flatten_axes("ep")

    @property
    def edp(self) -> Axis:
        """Return the ranks that hold replicas of the same experts."""
        return self.flatten_axes("edp")

    @property
    def has_expert_axes(self) -> bool:
        """Return whether experts are replicated on other ranks than dense weights."""
        return self.ep.size > 1 or self.layout.expert_tp != self.layout.tp

    @property
    def world(self) -> Axis:
        return self.flatten_axes(*AXES)

    def flatten_axes(self, *names: str) -> Axis:
        """Return the axis over all ranks that differ in these kinds of parallelism, such as ("cp", "dp")."""
        return self.axes[frozenset(names)]

    @classmethod
    def solo(cls, device: torch.device | str = "cpu") -> ParallelContext:
        """Return the context of a single process: every axis has one rank, and collectives do nothing."""
        axes = {frozenset(names): Axis("+".join(names)) for names in _NAMES}
        return cls(Layout(), 0, torch.device(device), axes)

    @classmethod
    def create(
        cls, layout: Layout, device: torch.device, *, timeout: timedelta | None = None, observer: Observer | None = None
    ) -> ParallelContext:
        """Create all process groups of a layout; every rank calls this with equal arguments."""
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
        ends, p2p_channels = None, None
        if layout.pp > 1:
            for ranks in layout.groups("pp"):
                pair = (ranks[0], ranks[-1])
                group = group_of(pair)
                if rank in pair:
                    ends = Axis("ends", pair, pair.index(rank), group, observer)
            p2p_channels = create_channels(layout, rank, device, timeout=timeout, observer=observer)
        return cls(layout, rank, device, axes, ends, p2p_channels)
