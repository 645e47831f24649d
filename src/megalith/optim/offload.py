"""Optimizer states on the host (`--optimizer-cpu-offload`): moments and main parameters in its memory, updates there.

Of a hosted parameter the device keeps the weights and the gradient. Each step its gradient goes to the host, the update
is made there, and the new weights come back:

| bytes a parameter           | on the device | on the host | each step over the bus |
|-----------------------------|---------------|-------------|------------------------|
| fp32                        | 8             | 8           | 12                     |
| bf16, fp32 gradients        | 6             | 12          | 6                      |

Norm, overflow check and clipping stay on the device, where the gradients are. Memory that a copy engine reads and
writes is pinned where there is CUDA. On a machine without a device of its own there is nothing to move.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

HOST = torch.device("cpu")


def choose_hosted(sizes: Mapping[str, int], fraction: float) -> frozenset[str]:
    """The first parameters, in order, that together have at most this part of all elements."""
    left, chosen = fraction * sum(sizes.values()), []
    for name, size in sizes.items():
        left -= size
        if left < -1e-6:
            break
        chosen.append(name)
    return frozenset(chosen)


def zeros_on_host(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros in the shape of a tensor."""
    return torch.zeros(like.shape, dtype=dtype, device=HOST, pin_memory=torch.cuda.is_available())


def on_host(tensor: Tensor) -> Tensor:
    """The tensor if it is on the host already, else a copy there, which has arrived."""
    if tensor.device == HOST:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=torch.cuda.is_available())
    return copy.copy_(tensor)
