"""The gradients of parameters that are cut over the replicas by rows (ZeRO-2 and ZeRO-3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from megalith.parallel.data import CopiedPart, Copies, kind_of, sum_copies
from megalith.parallel.fsdp import FullyShard


class ShardedGradients:
    """Gradients that autograd makes and FSDP2 reduces; what other ranks hold too is summed when the step ends.

    Args:
        parts: of the model; their parameters have different names.
        copies: which parameters other ranks hold too, beside data parallelism, by name.
    """

    def __init__(self, parts: Sequence[FullyShard], copies: Mapping[str, tuple[Copies, ...]]) -> None:
        self._parts, self._copies = parts, copies
        self._part_of = {name: part for part in parts for name in part.shapes}
        self._pieces: dict[str, Tensor] | None = None
        kinds = {name: kind_of(copies.get(name, ())) for name in self._part_of}
        self._alike = [[name for name in kinds if kinds[name] == kind] for kind in sorted(set(kinds.values())) if kind]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the parameters before they were cut, by name."""
        return {name: part.shapes[name] for name, part in self._part_of.items()}

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return next(iter(self._parts[0].shards.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """That they are held in."""
        return next(iter(self._parts[0].shards.values())).dtype

    @property
    def pieces(self) -> Mapping[str, Tensor]:
        """After `finish` the gradients of the rows that are here."""
        assert self._pieces is not None, "the backward passes of the step have not ended"
        return self._pieces

    def owned(self, name: str) -> tuple[int, int]:
        """The elements [start, stop) of a parameter, flattened, that are here; empty where start is stop."""
        return self._part_of[name].owned(name)

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Start a step.

        Args:
            num_micro_batches: backward passes of the step; without it every one of them reduces.
        """
        self._pieces = None
        for part in self._parts:
            part.begin(num_micro_batches)

    @torch.no_grad()
    def finish(self) -> None:
        """End the backward passes of a step. Every rank calls this; calling it again does nothing."""
        if self._pieces is not None:
            return
        self._pieces = {name: grad for part in self._parts for name, grad in part.gradients().items()}
        for names in self._alike:
            self._sum_copies(names, self._pieces)

    def _sum_copies(self, names: Sequence[str], pieces: Mapping[str, Tensor]) -> None:
        """Sum what is partial of these parameters, of one kind, in one collective."""
        flat = torch.cat([pieces[name].reshape(-1) for name in names])
        parts, origin = [], 0
        for name in names:
            shape, (start, stop) = self._part_of[name].shapes[name], self.owned(name)
            width = prod(shape[1:])
            for copies in filter(lambda copies: copies.partial, self._copies[name]):
                ends = (min(max(row * width, start), stop) for row in copies.rows or (0, shape[0]))
                parts.append(CopiedPart(copies, *(end - start + origin for end in ends)))
            origin += stop - start
        sum_copies(flat, parts)
        for name, part in zip(names, flat.split([pieces[name].numel() for name in names]), strict=True):
            pieces[name].view(-1).copy_(part)
