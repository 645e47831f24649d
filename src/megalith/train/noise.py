"""The gradient noise scale: the batch size, in samples, up to which larger batches pay (`--log-gradient-noise-scale`).

The expected squared norm of a gradient over a batch of B samples is |G|^2 + tr(S)/B, with the true gradient G and the
covariance S of the gradient of one sample. Two batch sizes give both unknowns, and tr(S)/|G|^2 is the scale: far below
it a batch of twice the size does nearly twice the work, far above it nothing. The small batch is the first
micro-batches of the step, computed once more by themselves; both parts are averaged over the reports before they are
divided, for each alone is noisy.

Source: McCandlish et al. 2018, arXiv:1812.06162, section 2.2 and appendix A.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

DECAY = 0.9  # of the running averages, from one report to the next


@dataclass
class NoiseScale:
    """The running averages of a process.

    Attributes:
        signal: of |G|^2, not yet corrected for its start from zero.
        noise: of tr(S), likewise.
    """

    signal: float = 0.0
    noise: float = 0.0

    def add(self, small: int, small_norm: float, large: int, large_norm: float) -> float | None:
        """Take two batches into account.

        Args:
            small, large: samples.
            small_norm, large_norm: of their gradients.

        Returns:
            The noise scale in samples; None while the average of |G|^2 is not positive, and for norms that are no
            numbers, which are left out.
        """
        assert 0 < small < large
        if not (math.isfinite(small_norm) and math.isfinite(large_norm)):
            return None
        signal = (large * large_norm**2 - small * small_norm**2) / (large - small)
        noise = (small_norm**2 - large_norm**2) / (1.0 / small - 1.0 / large)
        self.signal += (1.0 - DECAY) * (signal - self.signal)
        self.noise += (1.0 - DECAY) * (noise - self.noise)
        return max(0.0, self.noise) / self.signal if self.signal > 0.0 else None

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return asdict(self)

    def load_state(self, state: Mapping[str, float]) -> None:
        """Of `state`; of a checkpoint without it the averages begin anew."""
        self.signal, self.noise = float(state.get("signal", 0.0)), float(state.get("noise", 0.0))
