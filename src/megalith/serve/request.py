"""What a user asks of a model, checked without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """A way to choose tokens.

    Attributes:
        temperature: The logits are divided by it; 0 takes the most likely token (greedy).
        top_k: Only the k most likely tokens are candidates; 0 for all.
        top_p: Only the most likely tokens that together have this probability are candidates (Holtzman et al. 2020,
            arXiv:1904.09751); 0 or 1 for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0

    def violations(self) -> list[str]:
        """What is wrong with these values, in the words of the flags."""
        checks = {
            f"--temperature {self.temperature:g} is not a number of 0 or more; 0 is greedy, 1 the model's own": (
                math.isfinite(self.temperature) and self.temperature >= 0.0
            ),
            f"--top-k {self.top_k} is negative; 0 allows every token, 40 the 40 most likely": self.top_k >= 0,
            f"--top-p {self.top_p:g} is not between 0 and 1; 0 allows every token": 0.0 <= self.top_p <= 1.0,
        }
        return [message for message, holds in checks.items() if not holds]
