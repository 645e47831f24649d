"""The keys and values of the tokens already seen, kept so that generation reads each token once."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """The keys and values of one layer, in buffers of the largest length.

    Shapes: keys and values [S_max, B, G, K] with G key-value heads of size K.
    """

    def __init__(
        self, max_length: int, batch: int, groups: int, head_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (max_length, batch, groups, head_size)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def extend(self, k_SBGK: Tensor, v_SBGK: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new keys and values; return all up to now, [length, B, G, K] each."""
        stop = self.length + k_SBGK.shape[0]
        self.keys[self.length : stop] = k_SBGK
        self.values[self.length : stop] = v_SBGK
        self.length = stop
        return self.keys[:stop], self.values[:stop]


class KVCache:
    """One `LayerCache` for each layer of a model."""

    def __init__(
        self,
        num_layers: int,
        max_length: int,
        batch: int,
        groups: int,
        head_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_length = max_length
        self.layers = [
            LayerCache(max_length, batch, groups, head_size, dtype=dtype, device=device) for _ in range(num_layers)
        ]

    @property
    def length(self) -> int:
        """The number of tokens held."""
        return self.layers[0].length
