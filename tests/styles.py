"""The options that make a small GPT-2 a Llama or give it latent attention, for tests of both."""

from __future__ import annotations

import dataclasses

from megalith.config import ModelConfig


def as_llama(model: ModelConfig) -> ModelConfig:
    """Return a model of 16 channels and 4 heads in Llama's style, with two query groups."""
    return dataclasses.replace(
        model,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        group_query_attention=True,
        num_query_groups=2,
        ffn_hidden_size=48,
    )


def with_latent_attention(model: ModelConfig) -> ModelConfig:
    """Return a model of 16 channels and 4 heads with multi-latent attention."""
    return dataclasses.replace(
        model,
        position_embedding_type="rope",
        multi_latent_attention=True,
        kv_lora_rank=8,
        qk_head_dim=4,
        qk_pos_emb_head_dim=4,
        v_head_dim=4,
    )
