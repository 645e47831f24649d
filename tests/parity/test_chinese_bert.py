"""A vocabulary of the size of bert-base-chinese: the tokenizer beside that of transformers, a model there and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalith.assemble.trained import load_trained
from megalith.checkpoint.convert import ConversionOptions, convert
from megalith.checkpoint.writers.huggingface import ExportOptions, export
from megalith.cli.main import main
from megalith.models.bert import Bert
from megalith.tokenizers.word_piece import WordPieceTokenizer

from ..chinese import SIZE, documents, write_vocabulary
from ..e2e.warm import WarmProcess

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with the vocabulary, as the hub's cache has it: a snapshot of links."""
    folder = tmp_path_factory.mktemp("hub") / "models--bert-base-chinese"
    blobs, found = folder / "blobs", folder / "snapshots" / "8f23c25"
    found.mkdir(parents=True)
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=SIZE, max_position_embeddings=32, **sizes)
    transformers.BertForPreTraining(config).save_pretrained(blobs)
    write_vocabulary(blobs / "vocab.txt")
    (blobs / "tokenizer_config.json").write_text('{"do_lower_case": false, "model_max_length": 32}')
    for file in blobs.iterdir():
        (found / file.name).symlink_to(file)
    return found


def test_ids_are_those_of_transformers(snapshot: Path) -> None:
    ours = WordPieceTokenizer(snapshot / "vocab.txt", lower_case=False)
    theirs = transformers.BertTokenizer(str(snapshot / "vocab.txt"), do_lower_case=False)
    assert ours.vocab_size == SIZE + 2 and ours.special["mask"] == 103 == theirs.mask_token_id
    for text in (*documents(40), "bert \u4e00\u4e01, THE end"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert len(set(ours.encode("".join(documents(40))))) > 60


def test_there_and_back_and_on_with_the_training(snapshot: Path, warm: WarmProcess, tmp_path: Path) -> None:
    made = convert(snapshot, tmp_path / "ours", ConversionOptions(release=True)).path
    trained = load_trained(tmp_path / "ours", torch.device("cpu"))
    assert isinstance(trained.model, Bert) and trained.tokenizer.vocab_size == SIZE + 2
    assert trained.model.vocab_size == 21248, "the multiple of 128 above both"
    back = export(made, tmp_path / "back", ExportOptions()).path
    for name in ("model.safetensors", "config.json", "vocab.txt"):
        assert (back / name).read_bytes() == (snapshot / name).read_bytes()
    (tmp_path / "text.txt").write_text("\n\n".join(documents(30)), encoding="utf-8")
    prepared = ["--input", str(tmp_path / "text.txt"), "--output-prefix", str(tmp_path / "text"), "--split-sentences"]
    words = ["--tokenizer-type", "BertWordPieceCase", "--vocab-file", str(snapshot / "vocab.txt"), "--workers", "1"]
    assert main(["preprocess", *prepared, "--sentence-splitter", "marks", *words]) == 0
    run = "--seq-length 32 --micro-batch-size 4 --lr 1e-3 --train-iters 3 --save-interval 3 --log-interval 1"
    run += " --eval-iters 0 --num-workers 0"
    flags = ["--model-family", "bert", "--use-checkpoint-args", "--load", snapshot, *run.split(), "--split", "100,0,0"]
    data = ["--data-path", tmp_path / "text_text_sentence", "--save", tmp_path / "C", "--vocab-file", words[3]]
    done = warm.run([*flags, *data], tmp_path)
    assert done.code == 0, done.text
    assert "iteration        3/" in done.text
