"""The parameters of each (tensor, pipeline) rank, as Megatron prints them; no memory is taken.

Source: docs/reference/checkpoints.md#megatron-core, from logs of Megatron-LM.
"""

from __future__ import annotations

import pytest
import torch

from megalith.assemble.model import build_chunks
from megalith.config import from_values
from megalith.distributed.context import JOINED, Axis, ParallelContext
from megalith.distributed.rng import Stream
from megalith.layout import AXES, FOLDED, Layout
from megalith.tokenizers.protocol import padded_vocab_size

GPT2 = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 512}
MEDIUM = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024}


def _place(layout: Layout, rank: int) -> ParallelContext:
    """A place in a layout without processes, on the device that has shapes only."""
    names = [*((axis,) for axis in (*AXES, *FOLDED)), *JOINED]
    groups = {frozenset(axes): [own for own in layout.groups(*axes) if rank in own][0] for axes in names}
    axes = {names: Axis("+".join(names), ranks, ranks.index(rank)) for names, ranks in groups.items()}
    return ParallelContext(layout, rank, torch.device("meta"), axes)


@pytest.mark.parametrize(
    ("size", "tp", "pp", "padded", "expected"),
    [
        (GPT2, 1, 1, 50304, [124082688]),
        (MEDIUM, 1, 1, 50304, [354871296]),
        (MEDIUM, 4, 1, 50688, [89714688] * 4),
        (MEDIUM, 2, 2, 50432, [102483968, 102483968, 101437440, 101437440]),
    ],
)
def test_counts_are_those_of_megatron(size: dict[str, int], tp: int, pp: int, padded: int, expected: list[int]) -> None:
    data = {"mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": 1, "micro_batch_size": 1}
    layout = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    values = {**size, **data, **layout, "max_position_embeddings": size["seq_length"], "train_iters": 1, "lr": 1e-4}
    run = from_values(values, environ={"RANK": "0", "WORLD_SIZE": str(tp * pp)})
    assert padded_vocab_size(50257, run.model.make_vocab_size_divisible_by, tp) == padded
    counts = []
    for rank in range(tp * pp):
        chunks = build_chunks(run, padded, _place(run.layout, rank), Stream(1))
        counts.append(sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters()))
    assert counts == expected
