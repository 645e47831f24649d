"""muP: the rate and the epsilon of a parameter by the width of its model (Yang et al. 2022, arXiv:2203.03466).

With m the width multiplier, Megatron's rules:

| optimizer                      | matrices of hidden states, output layer | embeddings, biases, norms |
|--------------------------------|-----------------------------------------|---------------------------|
| AdamW                          | rate / m, epsilon / m                   | as given                  |
| Lion, SOAP, the rest of Muon   | rate / m                                | as given                  |
| Muon's own matrices            | as given: its updates have their scale  |                           |
| SGD                            | as given                                | rate x m                  |

A rate that is given by `--decoupled-lr` stays as it is. The whole schedule is scaled, its start and its lowest rate
too; the weight decay is not, of which the rate is a factor.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class WidthScaling:
    """What the width means for rates.

    Attributes:
        multiplier: m, 1 without muP.
        tied: parameters that are copies of the word embedding, by name.
    """

    multiplier: float = 1.0
    tied: Collection[str] = ()

    def rate(self, name: str, parameter: Tensor, optimizer: str) -> float:
        """What the rate of a parameter is multiplied by.

        Args:
            name, parameter: which one.
            optimizer: that updates it, as `--optimizer` names it.
        """
        if optimizer == "sgd":
            return 1.0 if self._is_matrix(name, parameter) else self.multiplier
        return 1.0 / self.multiplier if self._is_matrix(name, parameter) else 1.0

    def epsilon(self, name: str, parameter: Tensor, optimizer: str) -> float:
        """What the epsilon of a parameter is multiplied by; arguments as of `rate`."""
        return 1.0 / self.multiplier if optimizer == "adam" and self._is_matrix(name, parameter) else 1.0

    def _is_matrix(self, name: str, parameter: Tensor) -> bool:
        """Whether both extents of a parameter grow with the width, or the one that is summed over."""
        return parameter.dim() > 1 and not name.startswith("embedding.") and name not in self.tied
