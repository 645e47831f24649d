"""`--recompute-granularity selective` saves the weights of attention wherever they are kept."""

from __future__ import annotations

import pytest
import torch

from megalith.assemble.model import build_chunks
from megalith.config import load
from megalith.distributed.context import ParallelContext
from megalith.models.bert import Bert
from megalith.models.initialise import initialise
from megalith.models.t5 import T5

HEADS, LENGTH, BATCH = 4, 24, 2
BASE = (
    f"--num-layers 2 --hidden-size 16 --num-attention-heads {HEADS} --seq-length {LENGTH} --max-position-embeddings 24 "
    f"--decoder-seq-length {LENGTH} --micro-batch-size {BATCH} --train-iters 1 --lr 1e-3 --vocab-file v "
    "--vocab-extra-ids 9 --data-path p --attention-dropout 0.1 --hidden-dropout 0"
)


def _passes(words: str) -> tuple[int, list[torch.Tensor]]:
    """How many tensors as large as all scores of a layer are kept, and the gradients."""
    run = load([*BASE.split(), *words.split()], {}, files=False)
    (model,) = build_chunks(run, 40, ParallelContext.solo(torch.device("cpu")))
    initialise(model, 3)
    torch.manual_seed(5)
    tokens_BS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 40
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.shape == (BATCH, HEADS, LENGTH, LENGTH)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if isinstance(model, T5):
            logits = model(tokens_BS, tokens_BS)
        else:
            assert isinstance(model, Bert)
            logits = model(tokens_BS, types_BS=torch.zeros_like(tokens_BS))
    logits.square().mean().backward()
    return kept, [x.grad for x in model.parameters() if x.grad is not None]


@pytest.mark.parametrize(
    ("family", "layers"),
    [("bert", 2), ("t5", 4), ("t5 --position-embedding-type relative --relative-attention-num-buckets 8", 6)],
)
def test_the_weights_of_attention_are_not_kept(family: str, layers: int) -> None:
    """Of encoders, of what attends across, and of decoders whose positions are a bias that learns."""
    words = f"--model-family {family}"
    (plain, wanted), (left, found) = _passes(words), _passes(f"{words} --recompute-granularity selective")
    assert (plain, left) == (layers, 0)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
