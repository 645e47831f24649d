"""The settings of multi-token prediction, a part of the architecture."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting


@dataclass(frozen=True, kw_only=True)
class PredictionSettings:
    """Layers behind the last one that predict the tokens after the next (DeepSeek-V3, arXiv:2412.19437)."""

    mtp_num_layers: int | None = setting(
        None,
        help="layers of multi-token prediction, one for each further token; none unless given",
        unit="layers",
        at_least=0,
    )
    mtp_loss_scaling_factor: float = setting(
        0.1, help="what the mean of the losses of these layers is multiplied by", at_least=0
    )

    @property
    def predictions(self) -> int:
        """Tokens after the next one that are predicted in training."""
        return self.mtp_num_layers or 0
