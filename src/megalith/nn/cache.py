"""The port through which keys and values of earlier tokens enter attention, so that generation reads each token once.

The implementation (serve.cache) stores them, and knows which tokens belong to which sequence. For all other layers the
new tokens of all sequences are one sequence, [S, 1, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from megalith.nn.attend import AttentionRule


class LayerCache(Protocol):
    """The keys and values of one layer."""

    def attend(self, q_SBHK: Tensor, k_SBGK: Tensor, v_SBGK: Tensor, rule: AttentionRule) -> Tensor:
        """Store the new keys and values, and attend from each new token to its sequence up to itself.

        Shapes: [S, B, H, K], 2 x [S, B, G, K] with H a multiple of G -> [S, B, H, K]; S new tokens. What a token sees
        of its sequence is said by the `rule` of the layer.
        """
        ...


class KVCache(Protocol):
    """What is read now, with all that was read before."""

    @property
    def positions_S(self) -> Tensor:
        """Position of each new token in its sequence, [S]."""
        ...

    @property
    def length(self) -> int:
        """Length of the longest sequence with its new tokens: every position is below it."""
        ...

    @property
    def layers(self) -> Sequence[LayerCache]:
        """Cache of each layer of this stage."""
        ...
