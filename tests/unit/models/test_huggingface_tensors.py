"""The table of tensors: it holds every element of our parameters once, and the heads where they belong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megalith.config import ModelConfig
from megalith.models.gpt import GPT
from megalith.models.huggingface import FAMILIES
from megalith.models.huggingface_tensors import Part, follows_from_config

LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 6,
    "ffn_hidden_size": 10,
    "untie_embeddings_and_output_weights": True,
}
MODELS = {
    "gpt2": ModelConfig(2, 16, 4, 8),
    "llama": ModelConfig(2, 16, 4, 8, **LLAMA),
    "mistral": ModelConfig(2, 16, 4, 8, **LLAMA),
    "qwen2": ModelConfig(2, 16, 4, 8, **LLAMA, add_qkv_bias=True),
    "qwen3": ModelConfig(2, 16, 4, 8, **LLAMA, qk_layernorm=True),
}
FURTHER = {
    "gpt2": ModelConfig(2, 16, 4, 8, untie_embeddings_and_output_weights=True, ffn_hidden_size=20),
    "llama": dataclasses.replace(MODELS["llama"], add_bias_linear=True),
    "qwen3": dataclasses.replace(MODELS["qwen3"], untie_embeddings_and_output_weights=False),
}


@pytest.mark.parametrize(("kind", "model"), [*MODELS.items(), *FURTHER.items()])
def test_every_element_once(kind: str, model: ModelConfig) -> None:
    counts = {name: torch.zeros(p.shape) for name, p in GPT(model, 12, device="meta").named_parameters()}
    for tensor in FAMILIES[kind].tensors(model, 12):
        covered = torch.zeros(tensor.shape)
        for part in tensor.parts:
            rows = tensor.rows(covered, part)
            rows += 1
            into = counts[part.parameter].narrow(0, part.at, part.length)
            assert rows.shape == into.shape, tensor.name
            into += 1
        assert (covered == 1).all(), tensor.name
    assert all((count == 1).all() for count in counts.values())


def test_heads_of_a_group_stand_together() -> None:
    table = {tensor.name: tensor for tensor in FAMILIES["llama"].tensors(MODELS["llama"], 12)}
    qkv = "decoder.layers.1.self_attention.linear_qkv.weight"  # 2 groups of 2 queries, a key and a value, 6 rows each
    name = "model.layers.1.self_attn.{}_proj.weight"
    assert table[name.format("q")].parts == (Part(qkv, 0, 0, 12), Part(qkv, 12, 24, 12))
    assert table[name.format("k")].parts == (Part(qkv, 0, 12, 6), Part(qkv, 6, 36, 6))
    assert table[name.format("v")].parts == (Part(qkv, 0, 18, 6), Part(qkv, 6, 42, 6))


def test_gpt2_is_transposed() -> None:
    table = {tensor.name: tensor for tensor in FAMILIES["gpt2"].tensors(MODELS["gpt2"], 12)}
    fused = table["transformer.h.0.attn.c_attn.weight"]
    assert fused.transposed and fused.shape == (16, 48) and len(fused.parts) == 12
    assert fused.parts[5] == Part("decoder.layers.0.self_attention.linear_qkv.weight", 16 + 4, 16, 4)  # key of head 1
    assert not table["transformer.wte.weight"].transposed


def test_the_embedding_may_be_cut() -> None:
    assert next(FAMILIES["llama"].tensors(MODELS["llama"], 7)).shape == (7, 16)


def test_what_older_files_hold_besides() -> None:
    for name in ("h.3.attn.bias", "transformer.h.11.attn.masked_bias", "model.layers.0.self_attn.rotary_emb.inv_freq"):
        assert follows_from_config(name)
    for name in ("transformer.h.3.attn.c_attn.bias", "lm_head.weight", "model.layers.0.self_attn.q_proj.bias"):
        assert not follows_from_config(name)
