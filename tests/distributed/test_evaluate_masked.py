"""What BERT and T5 find of hidden tokens is the same on several ranks as on one process, in fp64."""

from __future__ import annotations

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
from megalith.errors import DataError
from megalith.evaluate.masked import MaskedResult, MaskedScorer, SampleLengths, open_samples
from megalith.layout import Layout
from megalith.models.bert import Bert
from megalith.models.families import model_class
from megalith.models.initialise import initialise
from megalith.models.language_model import named_placements
from megalith.models.t5 import T5

from .conftest import Ranks

ROWS = 131  # of the vocabulary; does not divide over two ranks
WORDS = [chr(97 + first) + chr(97 + second) for first in range(5) for second in range(5)]
SIZES: dict[str, Any] = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"model_family": "bert"},
    "bert-without-head": {"model_family": "bert", "bert_binary_head": False},
    "t5": {"model_family": "t5", "decoder_num_layers": 2},
    "t5-published": {
        **{"model_family": "t5", "position_embedding_type": "relative", "t5_scaled_logits": True, "relu": True},
        **{"t5_logits_bias": False, "normalization": "RMSNorm", "add_bias_linear": False, "softmax_scale": 1.0},
    },
}


def save(folder: Path, name: str) -> Path:
    """A checkpoint of random weights, far from uniform, and a text of the tokenizer's words."""
    folder.mkdir()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *WORDS]) + "\n")
    tokenizer = TokenizerConfig("BertWordPieceCase", vocab_file=str(folder / "vocab.txt"), vocab_extra_ids=20)
    config = ModelConfig(**SIZES, **MODELS[name])
    model = model_class(config)(config, ROWS)
    initialise(model, 5)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    args = weights_args(config, PrecisionConfig(), tokenizer)
    content = CheckpointContent(
        chunks=model_chunks(named_placements(model), stacking_of(config)),
        common={"args": Namespace(**args, padded_vocab_size=ROWS), "iteration": 1, "checkpoint_version": 3.0},
    )
    DirectoryStore(folder / "C").save(1, content, {})
    random = np.random.default_rng(1)
    documents = ["\n".join(" ".join(random.choice(WORDS, 6)) for _ in range(12)) for _ in range(5)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    return folder


def asked(folder: str, layout: Layout, scratch: str, count: int | None = None) -> tuple[MaskedResult, list[int]]:
    context = ParallelContext.solo() if layout == Layout() else ParallelContext.create(layout, torch.device("cpu"))
    trained = load_trained(Path(folder) / "C", context.device, context=context, dtype=torch.float64)
    assert isinstance(trained.model, Bert | T5)
    own = Path(scratch) / str(context.rank)
    own.mkdir(parents=True)
    cut = SampleLengths(24, 20)
    config = trained.model.config
    samples, _ = open_samples(Path(folder) / "text.txt", config, trained.args, trained.tokenizer, cut, own)
    told: list[int] = []
    result = MaskedScorer(trained.model, context, batch_size=3)(samples, count, told.append)
    return result, told


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("bert", Layout(tp=2)),
        ("bert", Layout(pp=2)),
        ("bert", Layout(dp=2)),
        ("bert", Layout(tp=2, pp=2)),
        ("bert-without-head", Layout(pp=3)),
        ("t5", Layout(tp=2)),
        ("t5", Layout(tp=2, dp=2)),
        ("t5-published", Layout(tp=2)),
        ("t5-published", Layout(dp=2)),
    ],
    ids=str,
)
def test_every_rank_has_the_result_of_one_process(ranks: Ranks, tmp_path: Path, name: str, layout: Layout) -> None:
    folder = save(tmp_path / "saved", name)
    alone, batches = asked(str(folder), Layout(), str(tmp_path / "alone"))
    assert alone.samples > 9 and alone.tokens.total > 20 and len(batches) == -(-alone.samples // 3)
    assert (alone.orders is not None) == (name == "bert")
    if alone.orders is not None:
        assert alone.orders.total == alone.samples and 0 < alone.swapped < alone.samples
    for result, told in ranks.run(layout.world_size, asked, str(folder), layout, str(tmp_path / "ranks")):
        assert len(told) < len(batches) if layout.dp == 2 else told == batches
        for ours, theirs in ((result.tokens, alone.tokens), (result.orders, alone.orders)):
            if ours is None or theirs is None:
                assert ours is theirs
                continue
            assert (ours.total, ours.correct) == (theirs.total, theirs.correct)
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-10)
        assert (result.samples, result.swapped) == (alone.samples, alone.swapped)


def test_the_loss_is_that_of_training(tmp_path: Path) -> None:
    """The sums over the first batch are those that the model itself computes of it."""
    for name in ("bert", "t5", "t5-published"):
        folder = save(tmp_path / name, name)
        result, _ = asked(str(folder), Layout(), str(tmp_path / name / "scratch"), 3)
        trained = load_trained(folder / "C", torch.device("cpu"), dtype=torch.float64)
        model, cut = trained.model, SampleLengths(24, 20)
        (tmp_path / name / "other").mkdir()
        samples, _ = open_samples(
            folder / "text.txt", model.config, trained.args, trained.tokenizer, cut, tmp_path / name / "other"
        )
        rows = [samples[item] for item in range(3)]
        batch = {field: torch.from_numpy(np.stack([row[field] for row in rows])) for field in rows[0]}
        with torch.no_grad():
            losses = model.losses(model.prepare(batch), None)
        measured = [found for found in (result.tokens, result.orders) if found is not None]
        for loss, found in zip(losses, measured, strict=True):
            assert (found.total, found.loss) == (int(loss.count), pytest.approx(float(loss.summed), rel=1e-10))


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_the_samples_do_not_depend_on_the_shares_of_the_training(tmp_path: Path, name: str) -> None:
    """A checkpoint records --mask-prob and --short-seq-prob, its export to Hugging Face does not."""
    folder = save(tmp_path / "saved", name)
    trained = load_trained(folder / "C", torch.device("cpu"))
    samples = []
    for number, shares in enumerate(({}, {"mask_prob": 0.4, "short_seq_prob": 0.9})):
        own = tmp_path / str(number)
        own.mkdir()
        args = {**trained.args, **shares}
        config = trained.model.config
        opened, _ = open_samples(folder / "text.txt", config, args, trained.tokenizer, SampleLengths(24, 20), own)
        samples.append([{field: values.tolist() for field, values in opened[item].items()} for item in range(5)])
    assert samples[0] == samples[1]


def with_other_texts(folder: str, scratch: str) -> str:
    context = ParallelContext.create(Layout(dp=2), torch.device("cpu"))
    trained = load_trained(Path(folder) / "C", context.device, context=context)
    assert isinstance(trained.model, Bert)
    own = Path(scratch) / str(context.rank)
    own.mkdir(parents=True)
    (own / "text.txt").write_text(f"aa bb\ncc dd\naa {'bb' if context.rank else 'cc'}\ndd aa\n" * 9)
    config = trained.model.config
    samples, _ = open_samples(own / "text.txt", config, trained.args, trained.tokenizer, SampleLengths(16), own)
    with pytest.raises(DataError) as caught:
        MaskedScorer(trained.model, context)(samples)
    return str(caught.value)


def test_ranks_that_read_different_texts_say_so(ranks: Ranks, tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", "bert")
    said = ranks.run(2, with_other_texts, str(folder), str(tmp_path / "scratch"))
    assert all("tokenizer" in text for text in said)
