"""FLOPs are counted as Megatron counts them, and the peak is measured in time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megalith.config import ModelConfig
from megalith.config.flops import step_flops
from megalith.datasheet import ACCELERATORS, find_accelerator
from megalith.device import DESCRIBED, nvidia
from megalith.distributed.context import ParallelContext
from megalith.models.gpt import GPT
from megalith.models.plain import build_registered
from megalith.registry import Entry, Registered
from megalith.train import throughput
from megalith.train.throughput import measure_peak, registered_flops


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


class Clock:
    """A clock that only products move, at 1 TFLOP/s, and a library that needs 0.1 s for the first two of each size."""

    def __init__(self) -> None:
        self.now, self.calls, self.operands = 0.0, 0, list[torch.Tensor]()
        self._of_size: dict[int, int] = {}

    def mm(self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        size = a.shape[0]
        self.operands += [a, b]
        self._of_size[size] = seen = self._of_size.get(size, 0) + 1
        noise = 40.0 if seen % 3 else 1.0  # two of three samples are taken while something else runs
        self.now += 2 * size**3 / 1e12 * noise + (0.1 if seen <= 2 else 0.0)
        out.zero_()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(torch, "mm", made.mm)
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


@pytest.mark.parametrize("budget", [0.0, 0.25, 2.0])
def test_a_slow_start_and_noise_do_not_lower_the_peak(clock: Clock, budget: float) -> None:
    assert measure_peak(torch.device("cpu"), torch.float32, budget) == pytest.approx(1e12)
    assert clock.now >= budget, "samples are spread over the whole budget"


def test_the_operands_are_random(clock: Clock) -> None:
    measure_peak(torch.device("cpu"), torch.float32)
    assert all(operand.unique().numel() > 1000 for operand in clock.operands)


@pytest.mark.parametrize(
    ("name", "dtype", "found"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, ("H100 SXM, bf16", 989.4e12)),
        ("NVIDIA H100 PCIe", torch.float16, ("H100 PCIe, fp16", 756e12)),
        ("NVIDIA GH200 480GB", torch.float32, ("GH200, fp32", 66.9e12)),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, ("A100, bf16", 312e12)),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", torch.float16, None),
        ("NVIDIA A10G", torch.bfloat16, ("A10G, bf16", 70e12)),
        ("NVIDIA L40S", torch.bfloat16, ("L40S, bf16", 362.05e12)),
        ("NVIDIA L4", torch.bfloat16, ("L4, bf16", 121e12)),
        ("Tesla V100-SXM2-16GB", torch.float16, ("V100 SXM, fp16", 125e12)),
        ("Tesla V100-SXM2-16GB", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, ("RTX 4090, bf16", 165.2e12)),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA B200", torch.bfloat16, ("B200, bf16", 2250e12)),
        ("NVIDIA GB200", torch.bfloat16, ("GB200, bf16", 2500e12)),
        ("NVIDIA GeForce GTX 1080", torch.float32, None),
    ],
)
def test_the_datasheet_is_found_by_the_drivers_name(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, found: tuple[str, float] | None
) -> None:
    monkeypatch.setitem(DESCRIBED, torch.device("cuda", 0), nvidia(name, (8, 0)))
    peak = throughput.datasheet_peak(torch.device("cuda", 0), dtype)
    assert peak == (found and (found[0], pytest.approx(found[1])))
    assert throughput.datasheet_peak(torch.device("cpu"), dtype) is None


def test_each_format_of_an_accelerator_is_at_least_as_fast_as_the_wider_one() -> None:
    for known in ACCELERATORS:
        rates = [known.teraflops[name] for name in ("fp32", "tf32", "fp16", "fp8") if name in known.teraflops]
        assert rates == sorted(rates), known.name
        assert all(find_accelerator(f"NVIDIA {known.name}") is not None for known in ACCELERATORS)


def test_a_measurement_leaves_the_random_state_of_the_run() -> None:
    before = torch.get_rng_state()
    measure_peak(torch.device("cpu"), torch.float32, budget_seconds=0.01)
    assert torch.equal(torch.get_rng_state(), before)


class Gated(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, *, region: Any, dtype: Any, device: Any) -> None:
        super().__init__()
        sizes = [(16, 80), (16, 80), (80, 16)]
        self.matrices = nn.ModuleList(nn.Linear(*size, bias=False, dtype=dtype, device=device) for size in sizes)


class Table(nn.Module):
    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, 16)


def test_flops_of_registered_layers_are_those_of_their_own_matrices() -> None:
    config = ModelConfig(
        num_layers=3, hidden_size=16, num_attention_heads=4, max_position_embeddings=8, add_bias_linear=False
    )
    own = replace(config, mlp=Registered(Entry("mlp", "gated", Gated)))
    tokens = 3 * 8
    found = registered_flops([GPT(own, 40)], ParallelContext.solo(), tokens, step_flops(own, 40, 8, 3))
    swiglu = step_flops(replace(config, swiglu=True, ffn_hidden_size=80), 40, 8, 3)
    assert found == pytest.approx(swiglu)
    other = replace(config, model=Registered(Entry("model", "table", Table)))
    model = build_registered(other, 40)
    assert registered_flops([model], ParallelContext.solo(), tokens, 1e9) == 6 * tokens * 40 * 16
