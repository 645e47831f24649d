"""Compiled layers of several ranks: one graph each, whose losses and gradients are those of uncompiled layers, and
whose dropout is drawn where theirs is.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from ..front_end import front_end, graphs
from .test_recompute import PP2, TP2, TP2_SP, UNIFORM, _run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="--compile needs a C++ compiler on a CPU")

NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
LLAMA = (
    "--swiglu --ffn-hidden-size 48 --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
)
LATENT = (
    "--position-embedding-type rope --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 4"
)
SELECTED = "--recompute-granularity selective --recompute-modules"
ONE_GRAPH = {
    "tp2-sp": f"{TP2_SP} {LLAMA} {NO_DROPOUT}",
    "tp2": f"{TP2} {NO_DROPOUT}",
    "tp2-sp-latent": f"{TP2_SP} {LATENT} {NO_DROPOUT} {SELECTED} mla_up_proj",
    "tp2-sp-recomputed-parts": f"{TP2_SP} {NO_DROPOUT} {SELECTED} layernorm mlp",
    "tp2-sp-recomputed": f"{TP2_SP} {NO_DROPOUT} --recompute-granularity full {UNIFORM} 2",
    "dp2-zero1": f"--use-distributed-optimizer {NO_DROPOUT}",
    "dp2-zero3": f"--use-torch-fsdp2 {LLAMA} {NO_DROPOUT}",
    "pp2-zb-h1": f"{PP2} --pipeline-schedule zb-h1 {NO_DROPOUT}",
    "tp2-sp-dropout": f"{TP2_SP} --hidden-dropout 0.2 --attention-dropout 0",
}
FIRST = ("tp2-sp", "pp2-zb-h1")


def _both(flags: str) -> tuple[list[torch.Tensor], list[torch.Tensor], int, dict[str, int]]:
    """What is seen without and with compilation by the front end alone, the number of graphs, and why they break."""
    plain, _ = _run(flags, 2)
    with front_end() as breaks:
        compiled, _ = _run(f"{flags} --compile", 2)
        return plain[:2], compiled[:2], graphs(), dict(breaks)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.full) for name in ONE_GRAPH]
)
def test_layers_are_one_graph(ranks: Any, name: str) -> None:
    for plain, compiled, count, breaks in ranks.run(2, _both, ONE_GRAPH[name], seconds=600.0):
        assert (count, breaks) == (1, {})
        for seen, wanted in zip(compiled, plain, strict=True):
            if "dropout" not in name:
                torch.testing.assert_close(seen, wanted, rtol=1e-4, atol=1e-6)


def _streams(flags: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The weights after two steps, and what torch's stream and that of this rank alone give then."""
    torch._dynamo.reset()
    seen, _ = _run(f"{flags} --compile", 2)
    *rest, shared, own = seen
    return [weight for weight in rest[4:] if weight.dim() == 1], shared, own


@pytest.mark.full
@pytest.mark.parametrize("layout", [TP2, TP2_SP])
def test_ranks_agree_in_what_they_hold_alike(ranks: Any, layout: str) -> None:
    """The weights of norms, which both ranks have, would go apart with masks that differ."""
    (weights, shared, own), (others, as_shared, not_own) = ranks.run(2, _streams, layout, seconds=600.0)
    norms = [number for number, weight in enumerate(weights) if weight.shape == (16,)]
    assert len(norms) >= 16
    assert all(torch.equal(weights[number], others[number]) for number in norms)
    assert torch.equal(shared, as_shared)
    assert not torch.equal(own, not_own)
