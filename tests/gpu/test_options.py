"""Options of the model and optimizer states on the host, on a CUDA device: the numbers of the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.optim import build_optimizer
from megalith.registry import Entry, Registered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    max_position_embeddings=64,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
OPTIONS = {
    "window": {"window_size": "9,0"},
    "sinks": {"softmax_type": "learnable"},
    "off-by-one": {"softmax_type": "off-by-one", "window_size": "9,0", "window_attn_skip_freq": "2"},
    "gates": {"attention_output_gate": True, "quick_geglu": True, "apply_layernorm_1p": True, "qk_l2_norm": True},
    "yarn": {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "label_smoothing": 0.1},
}


def _losses(
    device: str,
    config: ModelConfig,
    precision: PrecisionConfig,
    offload: float = 0.0,
    settings: OptimizerConfig | None = None,
) -> list[float]:
    model = GPT(config, 128, dtype=getattr(torch, precision.params_dtype), device=device)
    initialise(model, 3)
    optimizer = build_optimizer(model, settings or OptimizerConfig(), precision, offload=offload)
    tokens = torch.randint(0, 128, (4, 65), generator=torch.Generator().manual_seed(0)).to(device)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean()
        (loss * optimizer.loss_scale).backward()
        optimizer.step(1e-3, 0.1)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIONS)
def test_options_give_the_numbers_of_the_cpu(name: str) -> None:
    config, precision = dataclasses.replace(CONFIG, **OPTIONS[name]), PrecisionConfig()
    assert _losses("cuda", config, precision) == pytest.approx(_losses("cpu", config, precision), rel=1e-4)


@pytest.mark.parametrize("offload", [0.5, 1.0])
@pytest.mark.parametrize("precision", [PrecisionConfig(), PrecisionConfig(bf16=True)], ids=["fp32", "bf16"])
def test_states_on_the_host_change_no_number(precision: PrecisionConfig, offload: float) -> None:
    there, here = _losses("cuda", CONFIG, precision, offload), _losses("cuda", CONFIG, precision)
    assert there == pytest.approx(here, rel=1e-5)


@pytest.mark.parametrize("offload", [0.0, 0.5])
def test_a_class_of_torch_gives_the_numbers_of_the_cpu(offload: float) -> None:
    name = Registered(Entry("optimizer", "nadam", torch.optim.NAdam, options={"unit": "element"}))
    settings, precision = OptimizerConfig(optimizer=name), PrecisionConfig()
    there = _losses("cuda", CONFIG, precision, offload, settings)
    assert there == pytest.approx(_losses("cpu", CONFIG, precision, settings=settings), rel=1e-4)


def test_states_on_the_host_leave_the_device() -> None:
    used = []
    for offload in (0.0, 1.0):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = GPT(CONFIG, 128, dtype=torch.bfloat16, device="cuda")
        optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig(bf16=True), offload=offload)
        used.append(torch.cuda.memory_allocated() - before)
        del model, optimizer
    elements = sum(parameter.numel() for parameter in GPT(CONFIG, 128, device="meta").parameters())
    assert used[0] - used[1] >= 11 * elements
