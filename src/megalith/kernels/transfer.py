"""Copies between host and device that no thread waits for.

A copy from pageable memory, and any read of a device's value, waits until the device has done all work before it, and
then the device waits for the next launch. The copies here are queued like kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.device import is_host


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host tensor on an accelerator, through pinned memory; `x` itself if it is on the device."""
    if is_host(device) or not is_host(x.device):
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A copy on the host of a tensor on any device, which starts at once; `tolist` waits for this copy alone."""

    def __init__(self, x: Tensor) -> None:
        self._copy, self._done = x, None
        if not is_host(x.device):
            self._copy, self._done = x.to("cpu", non_blocking=True), torch.Event(x.device)  # to pinned memory
            self._done.record()

    def tolist(self) -> list[float]:
        """Return the values of a tensor [n]."""
        if self._done is not None:
            self._done.synchronize()
        values: list[float] = self._copy.tolist()
        return values
