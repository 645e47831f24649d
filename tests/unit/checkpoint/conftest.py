"""A small checkpoint that has everything a real one has."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megalith.checkpoint import CheckpointContent
from megalith.checkpoint.formats.torch_dist import (
    LocalTensor,
    dense,
    model_chunks,
    optimizer_chunks,
    optimizer_common,
    rng_object_key,
)
from megalith.nn.placement import Fused, Placement, Replicated, Split

LAYERS = 2
SHAPES: dict[str, tuple[tuple[int, ...], Placement]] = {
    "embedding.word_embeddings.weight": ((24, 8), Split(0)),
    **{f"decoder.layers.{layer}.input_layernorm.weight": ((8,), Replicated()) for layer in range(LAYERS)},
    **{f"decoder.layers.{layer}.mlp.linear_fc1.weight": ((12, 8), Fused(0, 2)) for layer in range(LAYERS)},
    **{f"decoder.layers.{layer}.mlp.linear_fc2.weight": ((8, 6), Split(1)) for layer in range(LAYERS)},
}


def random_states(seed: int) -> list[dict[str, Any]]:
    """As Megatron keeps them: Python, numpy and torch states side by side."""
    return [
        {
            "random_rng_state": (3, (seed, 2, 3), None),
            "np_rng_state": ("MT19937", np.arange(seed, seed + 4, dtype=np.uint32), 624, 0, 0.0),
            "torch_rng_state": torch.arange(8, dtype=torch.uint8),
            "rng_tracker_states": {},
        }
    ]


def build_content(seed: int = 0, *, dtype: torch.dtype = torch.bfloat16) -> CheckpointContent:
    """Parameters, Adam state and random states drawn from a seed."""
    generator = torch.Generator().manual_seed(seed)
    placements = {name: placement for name, (_, placement) in SHAPES.items()}
    parameters = {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, _) in SHAPES.items()}
    states = [
        LocalTensor(f"{state}.{name}", torch.randn(shape, generator=generator))
        for state in ("exp_avg", "exp_avg_sq", "fp32_param")
        for name, (shape, _) in SHAPES.items()
    ]
    named = [(name, tensor, placements[name]) for name, tensor in parameters.items()]
    group = {"wd_mult": 1.0, "lr": 1e-3, "betas": (0.9, 0.95), "fused": None}
    scaler = {"scale": 1024.0, "growth_tracker": 1, "hysteresis_tracker": 2}
    return CheckpointContent(
        chunks=model_chunks(named, dense(LAYERS)) + optimizer_chunks(states, placements, dense(LAYERS)),
        objects={rng_object_key(): random_states(seed), **dense(LAYERS).extra_state_objects()},
        common={
            "args": Namespace(num_layers=LAYERS, lr=1e-3, moe_router_topk=2, params_dtype=dtype, model_family="gpt"),
            "iteration": seed,
            "optimizer": optimizer_common([group], seed, scaler, "float16"),
        },
    )


@pytest.fixture(scope="session")
def make_content() -> Callable[..., CheckpointContent]:
    """Content of a seed; the same seed gives the same."""
    return build_content


def same(a: CheckpointContent, b: CheckpointContent) -> bool:
    """Whether two contents hold the same tensors, bit by bit."""
    pairs = list(zip(a.chunks, b.chunks, strict=True))
    assert pairs
    return all(x.key == y.key and torch.equal(x.tensor, y.tensor) for x, y in pairs)


@pytest.fixture
def same_tensors() -> Callable[[CheckpointContent, CheckpointContent], bool]:
    return same
