"""A gradient sink that puts weight gradients off: the W operations of zero-bubble schedules (arXiv:2401.10241).

A weight gradient dW = dy^T x hangs on nothing and nothing but the update hangs on it, so a stage may compute it when
it would otherwise wait. Biases and norms keep their gradients in the backward pass: they cost little.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megalith.kernels.torch_private import version_of
from megalith.nn.sink import GradientSink


class _Gift(NamedTuple):
    """A gradient that is not yet computed."""

    give: Callable[[Parameter, Tensor, Tensor], None]
    parameter: Parameter
    factors: tuple[Tensor, Tensor]
    versions: tuple[int, int]


class DeferredSink:
    """Passes everything on to another sink: at once, or when it is told to.

    Args:
        sink: where the gradients end up.
    """

    def __init__(self, sink: GradientSink) -> None:
        self._sink = sink
        self._queues: dict[Hashable, list[_Gift]] = {}
        self._open: list[_Gift] | None = None

    @contextmanager
    def collect(self, key: Hashable) -> Iterator[None]:
        """Put off what is given inside, until `play(key)`."""
        assert self._open is None and key not in self._queues, f"weight gradients of {key} are put off already"
        self._open = self._queues[key] = []
        try:
            yield
        finally:
            self._open = None

    @torch.no_grad()
    def play(self, key: Hashable) -> None:
        """Pass on what was put off under `key`, in the order in which it came."""
        for gift in self._queues.pop(key):
            assert gift.versions == _versions(*gift.factors), (
                "a factor of a weight gradient was overwritten before the weight gradient was computed; "
                "whoever uses its memory again must lend it (GradientSink.matmul)"
            )
            gift.give(gift.parameter, *gift.factors)

    def matmul(self, parameter: Parameter, grad_TO: Tensor, x_TI: Tensor, *, lent: bool = False) -> None:
        """As `GradientSink.matmul`; what is only lent cannot be put off."""
        if self._open is None or lent:
            self._sink.matmul(parameter, grad_TO, x_TI)
        else:
            self._put_off(self._sink.matmul, parameter, grad_TO, x_TI)

    def rows(self, parameter: Parameter, ids_T: Tensor, grad_TD: Tensor) -> None:
        """As `GradientSink.rows`."""
        if self._open is None:
            self._sink.rows(parameter, ids_T, grad_TD)
        else:
            self._put_off(self._sink.rows, parameter, ids_T, grad_TD)

    def _put_off(
        self, give: Callable[[Parameter, Tensor, Tensor], None], parameter: Parameter, first: Tensor, second: Tensor
    ) -> None:
        assert self._open is not None
        self._open.append(_Gift(give, parameter, (first, second), _versions(first, second)))


def _versions(first: Tensor, second: Tensor) -> tuple[int, int]:
    """How often the memory of each was written to by torch."""
    return version_of(first), version_of(second)
