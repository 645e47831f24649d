"""The weights in one flat memory, laid out as the gradients are, so that updates by other ranks come in place.

They may come while the next forward pass has begun: each part of the model then waits, before it is called, for the
buckets of the weights it reads. Which part that is cannot be read off a module tree alone, since a weight may be used
without a call of the module that holds it (fused linears, the output layer). So the calls of the first step, when
nothing is on its way yet, are watched: a weight belongs to the innermost module around it that is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from megalith.distributed.comm import Pending
from megalith.optim.flat import Bucket, FlatLayout
from megalith.parallel.data import DataParallel


class ParameterMemory:
    """Moves the data of parameters into flat memory; the parameters remain the same objects.

    Args:
        modules: That hold the parameters.
        parameters: By name, of one dtype.
        layout: Their places.
        data_of: Who owns what of a bucket.
        overlap: Whether `gather` returns at once and the modules wait.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        parameters: Mapping[str, Parameter],
        layout: FlatLayout,
        data_of: Callable[[Bucket], DataParallel],
        *,
        overlap: bool,
    ) -> None:
        some = next(iter(parameters.values()))
        self._flat = torch.zeros(layout.size, dtype=some.dtype, device=some.device)
        self._layout, self._data_of = layout, data_of
        self._pending: dict[int, Pending] = {}
        for name, parameter in parameters.items():
            view = layout.view(self._flat, name)
            view.copy_(parameter.data)
            parameter.data = view
        buckets = {parameters[name]: number for number, bucket in enumerate(layout.buckets) for name in bucket.names}
        self._calls = _Calls(modules, buckets, self._wait_for) if overlap else None
        self._order = _order_of_need(modules, buckets, len(layout.buckets))

    def gather(self) -> None:
        """Bring the updated parameters from their owners, what the forward pass needs first before the rest."""
        for number in self._order:
            bucket = self._layout.buckets[number]
            self._pending[number] = self._data_of(bucket).gather(self._flat[bucket.start : bucket.stop])
        if self._calls is None:
            self.wait()
            return
        for number in self._calls.not_awaited():
            self._wait_for(number)

    def wait(self) -> None:
        """Until all parameters are here."""
        for number in self._order:
            self._wait_for(number)

    def _wait_for(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.wait()


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """A module and its descendants, down to the elements of lists of layers: each of these is one part."""
    yield module
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield from _parts(child)


def _order_of_need(modules: Iterable[nn.Module], buckets: Mapping[Parameter, int], count: int) -> list[int]:
    """The buckets in the order in which their weights are waited for; the same on all replicas, whatever they call.

    Buckets are in reverse order of the modules, but what no call announces must be there from the start.
    """
    silent = [part for module in modules for part in _parts(module) if type(part).forward is nn.Module.forward]
    first = {buckets[parameter] for part in silent for parameter in part.parameters()}
    return sorted(range(count), key=lambda number: (number not in first, -number))


class _Calls:
    """Watches the calls of the first step; from then on parts of the model wait for their weights when called."""

    def __init__(
        self, modules: Iterable[nn.Module], buckets: Mapping[Parameter, int], wait: Callable[[int], None]
    ) -> None:
        self._buckets, self._wait = buckets, wait
        self._parts = [part for module in modules for part in _parts(module)]  # outer ones first
        self._called: set[nn.Module] = set()
        self._hooks = [part.register_forward_pre_hook(self._on_call) for part in self._parts]
        self._awaited: dict[nn.Module, list[int]] | None = None
        self._alone: list[int] = []

    def _on_call(self, part: nn.Module, args: Any) -> None:
        if self._awaited is None:
            self._called.add(part)
            return
        for number in self._awaited.get(part, ()):
            self._wait(number)

    def not_awaited(self) -> list[int]:
        """The buckets that no call waits for; ends the watching."""
        if self._awaited is None:
            reader: dict[Parameter, nn.Module] = {}
            for part in filter(self._called.__contains__, self._parts):
                reader |= dict.fromkeys(part.parameters(), part)
            self._awaited = {
                part: sorted({self._buckets[parameter] for parameter, own in reader.items() if own is part})
                for part in set(reader.values())
            }
            self._alone = sorted({number for parameter, number in self._buckets.items() if parameter not in reader})
            for part, hook in zip(self._parts, self._hooks, strict=True):
                if part not in self._awaited:
                    hook.remove()
        return self._alone
