"""The weights in one flat memory, laid out as the gradients are, so that updates by other ranks come in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import Parameter

from megalith.distributed.comm import Pending
from megalith.optim.flat import FlatLayout
from megalith.parallel.data import DataParallel


class ParameterMemory:
    """Moves the data of parameters into flat memory; the parameters remain the same objects.

    Args:
        parameters: By name, of one dtype.
        layout: Their places.
        data: Who owns what of each bucket.
    """

    def __init__(self, parameters: Mapping[str, Parameter], layout: FlatLayout, data: DataParallel) -> None:
        some = next(iter(parameters.values()))
        self._flat = torch.zeros(layout.size, dtype=some.dtype, device=some.device)
        self._layout, self._data = layout, data
        self._pending: list[Pending] = []
        for name, parameter in parameters.items():
            view = layout.view(self._flat, name)
            view.copy_(parameter.data)
            parameter.data = view

    def gather(self) -> None:
        """Bring the updated parameters from their owners: those of the first layers, which are needed first, before."""
        for bucket in reversed(self._layout.buckets):
            self._pending.append(self._data.gather(self._flat[bucket.start : bucket.stop]))
        self.wait()

    def wait(self) -> None:
        """Until all parameters are here."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
