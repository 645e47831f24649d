"""Layers with frozen weights give what the layers themselves give."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.models.transformer import Block
from megalith.nn.cache import LayerCache
from megalith.nn.rope import Rotation
from megalith.serve.model_runner import ModelRunner
from megalith.serve.runner import Batch, Chunk

from .models import GPT2, LLAMA, STYLES

VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{style: (config, {}) for style, config in STYLES.items()},
    "one key-value head": (GPT2, {"group_query_attention": True, "num_query_groups": 1}),
    "a window": (GPT2, {"window_size": "3,0"}),
    "sinks": (GPT2, {"softmax_type": "learnable"}),
    "a sink": (LLAMA, {"softmax_type": "off-by-one"}),
    "norms of heads": (LLAMA, {"qk_layernorm": True}),
    "gated heads": (LLAMA, {"attention_output_gate": True}),
    "norms around one": (GPT2, {"apply_layernorm_1p": True}),
    "residuals of norms": (GPT2, {"apply_residual_connection_post_layernorm": True}),
    "a wide residual stream": (GPT2, {"fp32_residual_connection": True}),
    "part of a head turned": (LLAMA, {"rotary_percent": 0.5, "rotary_interleaved": True}),
    "layers without positions": (LLAMA, {"no_rope_freq": "2"}),
    "layer scaling": (GPT2, {"apply_query_key_layer_scaling": True}),
}
BATCHES = (
    Batch([Chunk([3, 1, 4, 1, 5], 0, [0, 1]), Chunk([9, 2], 0, [5])]),
    Batch([Chunk([6], 5, [0, 1])]),  # one token of a sequence in one stretch
    Batch([Chunk([5], 2, [5]), Chunk([3], 6, [0, 1])]),
    Batch([Chunk([5, 8, 9], 7, [0, 1, 4], num_logits=3)]),
    Batch([Chunk([7], 10, [0, 1, 4])]),  # its blocks do not follow one another
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_frozen_layers_are_the_layers(variant: str, dtype: torch.dtype) -> None:
    config, options = VARIANTS[variant]
    model = GPT(dataclasses.replace(config, **options), 32, dtype=dtype)
    initialise(model, 5)
    model.eval().requires_grad_(False)
    plain, lean = (ModelRunner(model, 8, 4) for _ in range(2))
    plain._layers = None
    for batch in BATCHES:
        expected, found = plain.run(batch), lean.run(batch)
        assert expected.isfinite().all()
        exact = dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=0.0 if exact else None, atol=1e-12 if exact else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("style", ["gpt2", "llama"])
@pytest.mark.parametrize("many", [4096, 1], ids=["few keys", "many keys"])
def test_a_token_sees_the_same_keys_in_half_precision(
    many: int, style: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.serve.cache._MANY_KEYS", many)
    model = GPT(STYLES[style], 32, dtype=dtype)
    initialise(model, 5)
    model.requires_grad_(False)
    exact = GPT(STYLES[style], 32, dtype=torch.float64)
    exact.eval().load_state_dict(model.state_dict())
    runner, texts = ModelRunner(model, 8, 4), ([3, 1, 4, 1, 5], [9, 2])
    runner.run(BATCHES[0])
    for batch in (BATCHES[1], BATCHES[2], Batch([Chunk([2], 7, [0, 1])]), Batch([Chunk([7], 8, [0, 1, 4])])):
        found = runner.run(batch)
        for logits, chunk in zip(found, batch.chunks, strict=True):
            text = texts[chunk.blocks[0] == 5]
            text += chunk.tokens
            wanted = exact(torch.tensor([text]))[0, -1]
            assert (logits.double() - wanted).abs().max() < 16 * torch.finfo(dtype).eps * wanted.abs().max()


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_a_token_goes_by_frozen_layers_and_no_other_way(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(STYLES[style], 32)
    initialise(model, 5)
    runner = ModelRunner(model.requires_grad_(False), 8, 4)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a layer was called")

    for module in (model.decoder, *(part for layer in model.decoder.layers.values() for part in layer.modules())):
        if "Norm" not in type(module).__name__:
            monkeypatch.setattr(module, "forward", never)
    assert runner.run(BATCHES[0]).shape == (2, 32)


class _ParallelBlock(Block):
    """Attention and feed-forward layer of the same input, as in GPT-NeoX."""

    def forward(self, x_SBD: Tensor, rope: Rotation | None, cache: LayerCache | None = None, **_: object) -> Tensor:  # type: ignore[override]
        attended: Tensor = self.self_attention(self.input_layernorm(x_SBD), rope, cache)
        fed: Tensor = self.mlp(self.pre_mlp_layernorm(x_SBD))
        return x_SBD + attended + fed


class _ParallelGPT(GPT):
    block_class = _ParallelBlock


def test_a_family_generates_with_its_own_blocks() -> None:
    model = _ParallelGPT(STYLES["llama"], 32, dtype=torch.float64)
    initialise(model, 5)
    tokens = [3, 1, 4, 1, 5]
    expected = model.eval()(torch.tensor([tokens]))[0, -1]
    sequential = GPT(STYLES["llama"], 32, dtype=torch.float64)
    sequential.load_state_dict(model.state_dict())
    assert not torch.allclose(sequential.eval()(torch.tensor([tokens]))[0, -1], expected), "the blocks do not differ"
    runner = ModelRunner(model.requires_grad_(False), 8, 4)
    torch.testing.assert_close(runner.run(Batch([Chunk(tokens, 0, [0, 1])]))[0], expected)


def test_weights_that_change_in_place_count() -> None:
    model = GPT(STYLES["gpt2"], 32, dtype=torch.float64)
    initialise(model, 5)
    runner = ModelRunner(model.requires_grad_(False), 8, 4)
    before = runner.run(BATCHES[0])
    initialise(model, 6)
    assert not torch.equal(runner.run(BATCHES[0]), before)
