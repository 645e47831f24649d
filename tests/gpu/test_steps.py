"""Training steps of one process: styles and options in fp32, fp16 and bf16, compiled, with optimizer states on the
host. The reference is fp64 on the CPU."""

from __future__ import annotations

import shutil
from functools import cache

import pytest
import torch

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.models.gpt import GPT
from megalith.optim import build_optimizer

from .small import ON_GPU, PRECISIONS, STYLES, VOCABULARY, bf16_or_skip, losses, train

OPTIONS = {
    "window": "--window-size 9,0",
    "sinks": "--softmax-type learnable",
    "off-by-one": "--softmax-type off-by-one --window-size 9,0 --window-attn-skip-freq 2",
    "gates": "--attention-output-gate --quick-geglu --apply-layernorm-1p --qk-l2-norm",
    "yarn": "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16",
    "label smoothing": "--label-smoothing 0.1",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "unfused": "--attention-backend unfused",
    "per token": "--calculate-per-token-loss",
    "nadam": "--optimizer nadam",
    "sgd": "--optimizer sgd --lr 0.1",
    "muon": "--optimizer muon",
}


@cache
def exact(flags: str) -> list[float]:
    return losses(flags, "cpu", dtype=torch.float64)


@pytest.mark.parametrize("flags", [*STYLES.values(), *OPTIONS.values()], ids=[*STYLES, *OPTIONS])
def test_losses_in_fp32_are_those_in_fp64(flags: str, device: str) -> None:
    found = losses(flags, device)
    assert found == pytest.approx(exact(flags), rel=1e-4)
    assert found[-1] < found[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("style", STYLES)
def test_losses_in_half_precision_follow(style: str, precision: str, device: str) -> None:
    bf16_or_skip(precision, device)
    assert losses(f"{STYLES[style]} {PRECISIONS[precision]}", device) == pytest.approx(exact(STYLES[style]), rel=1e-2)


def test_the_loss_scale_falls_until_no_gradient_overflows(device: str) -> None:
    results = train("--fp16 --initial-loss-scale 4294967296 --hysteresis 1", device, steps=24)
    applied = [result.applied for result in results]
    assert not applied[0] and applied[-1]
    assert results[-1].loss_scale == 2.0**32 / 2 ** applied.count(False)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.full), pytest.param("cuda", marks=ON_GPU)], indirect=True
)
@pytest.mark.parametrize("style", STYLES)
def test_compiled_losses_are_those_in_fp64(style: str, device: str) -> None:
    """Ends with an error if a block is compiled again after its first steps."""
    if device == "cpu" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    if device == "cuda" and torch.cuda.get_device_capability() < (7, 5):
        pytest.skip("torch.compile is not used on GPUs before sm_75")
    torch.compiler.reset()
    flags = f"{STYLES[style]} --compile"
    assert losses(flags, device) == pytest.approx(exact(STYLES[style]), rel=1e-4)
    try:
        torch.compiler.set_stance("fail_on_recompile")
        losses(flags, device, steps=2)
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", "adam"), ("bf16", "adam"), ("fp32", "nadam")])
def test_states_on_the_host_change_no_loss(precision: str, optimizer: str, share: float, device: str) -> None:
    bf16_or_skip(precision, device)
    flags = f"{PRECISIONS[precision]} --optimizer {optimizer}"
    offload = f"--optimizer-cpu-offload --optimizer-offload-fraction {share}"
    assert losses(f"{flags} {offload}", device) == pytest.approx(losses(flags, device), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none")
def test_states_on_the_host_leave_the_device() -> None:
    config, used = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, max_position_embeddings=64), []
    for offload in (0.0, 1.0):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = GPT(config, VOCABULARY, dtype=torch.float16, device="cuda")
        optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig(fp16=True), offload=offload)
        used.append(torch.cuda.memory_allocated() - before)
        del model, optimizer
    elements = sum(parameter.numel() for parameter in GPT(config, VOCABULARY, device="meta").parameters())
    assert used[0] - used[1] >= 11 * elements
