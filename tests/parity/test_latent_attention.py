"""Multi-latent attention is that of the real Megatron, and does with a cache what it does without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megalith.config import ModelConfig
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.serve.model_runner import ModelRunner
from megalith.serve.runner import Batch, Chunk

FIXTURES = Path(__file__).parent / "fixtures" / "latent_attention"
KINDS: dict[str, dict[str, Any]] = {
    "yarn": {
        "q_lora_rank": 14,
        "rotary_scaling_factor": 40.0,
        "mscale_all_dim": 0.7,
        "yarn_original_max_position_embeddings": 16,
    },
    "rope": {"rope_type": "rope"},
}


def config_of(kind: str, **more: Any) -> ModelConfig:
    settings = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "ffn_hidden_size": 48,
        "multi_latent_attention": True,
        "kv_lora_rank": 12,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 6,
        "v_head_dim": 10,
        "add_bias_linear": False,
        "swiglu": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
    }
    return ModelConfig(**{**settings, **KINDS[kind], **more})


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_losses_and_gradients_are_megatrons(kind: str) -> None:
    golden = load_file(FIXTURES / f"{kind}.safetensors")
    model = GPT(config_of(kind), 64)
    weights = {name.removeprefix("weight."): x for name, x in golden.items() if name.startswith("weight.")}
    model.load_state_dict(weights)
    tokens, labels = golden["ids"][:, :-1], golden["ids"][:, 1:]
    assert _relative(model(tokens), golden["logits"]) < 1e-5
    loss = model(tokens, labels_BS=labels)
    assert _relative(loss, golden["loss"]) < 1e-5
    loss.mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert _relative(parameter.grad, golden[f"gradient.{name}"]) < 1e-5, name


@pytest.mark.parametrize("value_size", [10, 20])
def test_token_by_token_is_the_whole_text(value_size: int) -> None:
    """Also with value heads that are larger than those of the keys, which are filled up then."""
    model = GPT(config_of("yarn", v_head_dim=value_size), 64, dtype=torch.float64)
    initialise(model, 1)
    tokens = torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(1))
    runner = ModelRunner(model, num_blocks=4)
    found = []
    for start, stop in [(0, 7), *((place, place + 1) for place in range(7, 24))]:
        piece = Chunk(tuple(tokens[0, start:stop].tolist()), start, (0, 1, 2, 3), num_logits=stop - start)
        found.append(runner.run(Batch((piece,))))
    with torch.no_grad():
        whole = model(tokens)[0]
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-10, atol=1e-10)
