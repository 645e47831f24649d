"""The settings of multi-latent attention, a part of the architecture."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting


@dataclass(frozen=True, kw_only=True)
class LatentSettings:
    """Attention whose queries, keys and values come from small latent vectors (DeepSeek-V2, arXiv:2405.04434)."""

    multi_latent_attention: bool = setting(
        False, help="queries, keys and values of each head out of a small latent vector, as in DeepSeek-V2 and V3"
    )
    q_lora_rank: int | None = setting(
        None, help="size of the latent vector of queries; they are made directly unless given", at_least=1
    )
    kv_lora_rank: int = setting(32, help="size of the latent vector of keys and values", at_least=1)
    qk_head_dim: int = setting(128, help="channels of a query or key head that positions do not turn", at_least=1)
    qk_pos_emb_head_dim: int = setting(
        64, help="channels of it that they turn, of keys shared by all heads", at_least=2
    )
    v_head_dim: int = setting(128, help="size of a value head", at_least=1)
    rope_type: str | None = setting(
        None,
        help="how positions turn the heads of multi-latent attention; yarn unless given",
        choices=("rope", "yarn"),
    )

    @property
    def latent_query_size(self) -> int:
        """Size of a query or key head of multi-latent attention."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim
