"""Scores on several ranks are those of one process, in fp64, whatever the layout."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalith.assemble.trained import load_trained
from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.checkpoint.formats.torch_dist import model_chunks, stacking_of
from megalith.config import ModelConfig, PrecisionConfig, TokenizerConfig
from megalith.config.saved_args import weights_args
from megalith.distributed.context import ParallelContext
from megalith.errors import DataError, LayoutError
from megalith.evaluate.alarms import never_trained
from megalith.evaluate.score import Sample, Scorer
from megalith.evaluate.text import Windows, score_texts
from megalith.layout import Layout
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.models.language_model import named_placements

from .conftest import Ranks

CONTEXT, VOCABULARY = 16, 43  # a vocabulary that does not divide over two ranks
SIZES: dict[str, Any] = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": 16}
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 24,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}


def save(folder: Path, style: dict[str, Any]) -> Path:
    """A checkpoint of random weights, large enough that predictions are far from uniform."""
    config = ModelConfig(**SIZES, **style)
    model = GPT(config, VOCABULARY)
    initialise(model, 5)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    args = weights_args(config, PrecisionConfig(), TokenizerConfig("NullTokenizer", vocab_size=VOCABULARY - 1))
    content = CheckpointContent(
        chunks=model_chunks(named_placements(model), stacking_of(config)),
        common={"args": Namespace(**args, padded_vocab_size=VOCABULARY), "iteration": 1, "checkpoint_version": 3.0},
    )
    DirectoryStore(folder).save(1, content, {})
    return folder


def samples() -> list[Sample]:
    """Seven of different lengths: neither two replicas nor batches of two divide them."""
    generator = np.random.default_rng(1)
    return [
        Sample(generator.integers(0, VOCABULARY, length).tolist(), targets)
        for length, targets in ((5, 1), (17, 16), (2, 1), (9, 4), (17, 3), (6, 5), (3, 2))
    ]


def scored(folder: str, layout: Layout) -> tuple[list[list[float]], list[list[bool]], list[int], list[float]]:
    """What a rank has: log-probabilities, greedy, the batches that it was told of, and those of a long text."""
    context = ParallelContext.solo() if layout == Layout() else ParallelContext.create(layout, torch.device("cpu"))
    trained = load_trained(Path(folder), context.device, context=context, dtype=torch.float64)
    scorer = Scorer(trained.model, context, batch_size=2)
    told: list[int] = []
    scores = scorer(samples(), told.append)
    text = np.random.default_rng(2).integers(0, VOCABULARY, 50)
    (of_text,) = score_texts(scorer, [text], Windows(CONTEXT, 3))
    assert not never_trained(trained.model, context)
    return [s.logprobs.tolist() for s in scores], [s.greedy.tolist() for s in scores], told, of_text.tolist()


# In training these experts would be chosen at random, and drop tokens by what else is in the batch.
EXPERTS = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 8, "moe_expert_capacity_factor": 0.5}
EXPERTS["moe_router_force_load_balancing"] = True
EXPERTS["moe_pad_expert_input_to_capacity"] = True
LAYOUTS = (Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(tp=2, pp=2))
ROWS = [*((style, layout) for style in ({}, LLAMA) for layout in LAYOUTS), (EXPERTS, Layout(dp=2))]


@pytest.mark.parametrize(("style", "layout"), ROWS)
def test_every_rank_has_the_scores_of_one_process(
    ranks: Ranks, tmp_path: Path, layout: Layout, style: dict[str, Any]
) -> None:
    folder = save(tmp_path / "saved", style)
    alone = scored(str(folder), Layout())
    assert alone[2] == [0, 1, 2, 3]
    for logprobs, greedy, told, of_text in ranks.run(layout.world_size, scored, str(folder), layout):
        for ours, theirs in zip(logprobs, alone[0], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10)
        assert greedy == alone[1]
        np.testing.assert_allclose(of_text, alone[3], rtol=1e-10)
        assert len(told) == (2 if layout.dp == 2 else 4)


def scored_without_padding(folder: str, layout: Layout) -> list[list[float]]:
    """Of a table of which more than half is padding: with two ranks one of them has no token at all."""
    context = ParallelContext.solo() if layout == Layout() else ParallelContext.create(layout, torch.device("cpu"))
    trained = load_trained(Path(folder), context.device, context=context, dtype=torch.float64)
    scorer = Scorer(trained.model, context, batch_size=2, num_tokens=VOCABULARY // 3)
    few = [Sample([number % (VOCABULARY // 3) for number in sample.ids], sample.num_targets) for sample in samples()]
    return [score.logprobs.tolist() for score in scorer(few)]


def test_a_rank_whose_rows_are_all_padding(ranks: Ranks, tmp_path: Path) -> None:
    folder, layout = save(tmp_path / "saved", {}), Layout(tp=2)
    alone = scored_without_padding(str(folder), Layout())
    for found in ranks.run(layout.world_size, scored_without_padding, str(folder), layout):
        for ours, theirs in zip(found, alone, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10)


def with_other_data(folder: str) -> str:
    context = ParallelContext.create(Layout(tp=2), torch.device("cpu"))
    trained = load_trained(Path(folder), context.device, context=context)
    with pytest.raises(DataError) as caught:
        Scorer(trained.model, context)([Sample([1, 2, context.rank], 1)])
    return str(caught.value)


def test_ranks_that_read_different_texts_say_so(ranks: Ranks, tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", {})
    assert all("tokenizer" in text for text in ranks.run(2, with_other_data, str(folder)))


def with_too_many_stages(folder: str) -> str:
    context = ParallelContext.create(Layout(pp=4), torch.device("cpu"))
    with pytest.raises(LayoutError) as caught:
        load_trained(Path(folder), context.device, context=context)
    return str(caught.value)


def test_more_stages_than_layers(ranks: Ranks, tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", {})
    assert re.search(r"\b3 layers\b.*\b4\b", ranks.run(4, with_too_many_stages, str(folder))[0])
