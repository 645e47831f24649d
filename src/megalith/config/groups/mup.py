"""The settings of muP, a part of the architecture."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting


@dataclass(frozen=True, kw_only=True)
class MupSettings:
    """Weights, rates and factors by the width of the model, so that what was tuned on a narrow one suits a wide one.

    Source: Yang et al. 2022, arXiv:2203.03466; which factor acts where is Megatron's choice.
    """

    use_mup: bool = setting(
        False,
        help="maximal update parametrisation: initial weights, rates and factors that fit any width once they are "
        "tuned at --mup-base-hidden-size",
    )
    mup_base_hidden_size: int | None = setting(
        None, help="width that rates and initial weights are meant for; --hidden-size unless given", at_least=1
    )
    mup_width_mult: float | None = setting(
        None, help="--hidden-size / --mup-base-hidden-size, which it follows from by itself", above=0
    )
    mup_base_head_dim: float | None = setting(
        None, help="attention scores get the factor sqrt(this) / head size; 1 / head size unless given", above=0
    )
    mup_attn_scale_power: float = setting(1.0, help="power of the head size that attention scores are divided by")
    mup_embedding_mult: float = setting(1.0, help="factor of embeddings", above=0)
    mup_output_mult: float = setting(
        1.0, help="factor of logits; --mup-base-hidden-size / --hidden-size unless given", above=0
    )
