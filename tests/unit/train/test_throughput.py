"""FLOPs are counted as Megatron counts them, and the peak is measured in time."""

from __future__ import annotations

import time

import pytest
import torch

from megalith.config import ModelConfig
from megalith.train.throughput import measure_peak, step_flops


def test_flops_are_those_of_the_matrices() -> None:
    layers, hidden, heads, sequence, vocabulary, batch, ffn, groups = 3, 64, 4, 32, 512, 2, 96, 2
    model = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        max_position_embeddings=sequence,
        group_query_attention=True,
        num_query_groups=groups,
        swiglu=True,
        ffn_hidden_size=ffn,
    )
    head = hidden // heads
    weights = hidden * (heads + 2 * groups) * head + hidden * hidden + 3 * hidden * ffn
    scores = 2 * heads * head * sequence / 2  # query x key and probabilities x value, over the earlier half
    a_token = layers * (weights + scores) + hidden * vocabulary
    assert step_flops(model, vocabulary, sequence, batch) == pytest.approx(6 * batch * sequence * a_token)


def test_flops_of_experts_on_latent_vectors_are_those_of_the_matrices() -> None:
    hidden, latent, ffn, shared, sequence = 64, 24, 40, 32, 32
    sizes = {"num_layers": 2, "hidden_size": hidden, "num_attention_heads": 4, "max_position_embeddings": sequence}
    sizes |= {"swiglu": True, "ffn_hidden_size": 96, "num_experts": 8, "moe_router_topk": 3, "moe_layer_freq": "[0,1]"}
    sizes |= {"moe_ffn_hidden_size": ffn, "moe_shared_expert_intermediate_size": shared}
    dense = step_flops(ModelConfig(**{**sizes, "num_experts": None}), 512, sequence, 1)
    found = step_flops(ModelConfig(**sizes, moe_latent_size=latent), 512, sequence, 1) - dense
    of_token = 2 * hidden * latent + 3 * 3 * latent * ffn + 3 * hidden * shared - 3 * hidden * 96
    assert found == pytest.approx(6 * sequence * of_token)


def test_flops_of_t5_are_those_of_both_stacks() -> None:
    hidden, heads, encoder, decoder, vocabulary, batch = 64, 4, 48, 16, 512, 2
    model = ModelConfig(
        model_family="t5",
        num_layers=3,
        decoder_num_layers=2,
        hidden_size=hidden,
        num_attention_heads=heads,
        max_position_embeddings=encoder,
    )
    square, feed_forward = hidden * hidden, 8 * hidden * hidden
    reads = 3 * encoder * (4 * square + feed_forward + 2 * hidden * encoder / 2)
    itself = decoder * (4 * square + 2 * hidden * decoder / 2)
    across = decoder * (2 * square + 2 * hidden * encoder) + encoder * 2 * square
    writes = 2 * (itself + across + decoder * feed_forward)
    expected = 6 * batch * (reads + writes + decoder * hidden * vocabulary)
    assert step_flops(model, vocabulary, encoder, batch, decoder) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_peak_is_measured_within_its_budget(dtype: torch.dtype) -> None:
    started = time.perf_counter()
    peak = measure_peak(torch.device("cpu"), dtype, budget_seconds=0.1)
    assert peak > 1e8
    assert time.perf_counter() - started < 2.0
