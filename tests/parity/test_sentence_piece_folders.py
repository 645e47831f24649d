"""Folders with a SentencePiece model only, as Llama 2 was distributed: the tokenizer goes along, and means the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megalith.assemble.trained import load_trained
from megalith.checkpoint import DirectoryStore
from megalith.checkpoint.convert import ConversionOptions, convert
from megalith.checkpoint.writers.huggingface import ExportOptions, export
from megalith.cli.main import main
from megalith.tokenizers.sentence_piece import Llama2Tokenizer

from .goldens import Goldens

transformers = pytest.importorskip("transformers", reason="the outside truth needs the hf extra (transformers)")
pytest.importorskip("sentencepiece", reason="the tokenizer needs the data extra (sentencepiece)")

TEXTS = ["Hello, world!", "  two spaces\nand a line", "gr\u00fc\u00dfe 123", "the king of France"]


@pytest.fixture
def folder(golden: Goldens, tmp_path: Path) -> Path:
    """A small random Llama whose folder has tokenizer.model and nothing else of a tokenizer."""
    model = golden.path("tokenizers/sp.model")
    size = Llama2Tokenizer(model).vocab_size
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "meta")
    shutil.copy(model, tmp_path / "meta/tokenizer.model")
    return tmp_path / "meta"


def test_the_tokenizer_goes_along(folder: Path, golden: Goldens, tmp_path: Path) -> None:
    reference = Llama2Tokenizer(golden.path("tokenizers/sp.model"))
    made = convert(folder, tmp_path / "save", ConversionOptions(release=True))
    assert (made.path / "tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()
    for place in (folder, tmp_path / "save"):
        trained = load_trained(place, torch.device("cpu"))
        assert isinstance(trained.tokenizer, Llama2Tokenizer)
        assert [trained.tokenizer.encode(text) for text in TEXTS] == [reference.encode(text) for text in TEXTS]


def test_an_export_says_how_the_model_is_to_be_read(folder: Path, tmp_path: Path) -> None:
    """transformers and we read from it the ids that the training had."""
    convert(folder, tmp_path / "save", ConversionOptions(release=True))
    export(tmp_path / "save", tmp_path / "out", ExportOptions())
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "LlamaTokenizer" and settings["add_bos_token"] is True
    ours = load_trained(tmp_path / "out", torch.device("cpu")).tokenizer
    reference = Llama2Tokenizer(folder / "tokenizer.model")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", legacy=False)
    for text in TEXTS:
        assert ours.encode(text) == reference.encode(text)
        if "  " not in text:  # transformers passes over what the model says of spaces; that of Llama says nothing
            assert theirs.encode(text) == reference.encode(text), text


def test_a_damaged_model_is_told(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "tokenizer.model").write_bytes(b"no model at all, though long enough to be one")
    assert main(["checkpoint", "import", str(folder), str(tmp_path / "save"), "--no-compare"]) == 0
    assert main(["checkpoint", "export", str(tmp_path / "save"), str(tmp_path / "out"), "--no-compare"]) != 0
    assert "tokenizer.model" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_weights_under_an_iteration(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """For programs that know no release: a checkpoint as any other, without an optimizer."""
    save = tmp_path / "save"
    assert main(["checkpoint", "import", str(folder), str(save), "--no-compare", "--iteration", "7"]) == 0
    assert f"--load {save} --finetune" in capfd.readouterr().out
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "7" and (save / "iter_0000007").is_dir()
    store = DirectoryStore(save)
    assert store.verify(7) == [] and store.common(7)["iteration"] == 7 and not store.weights_only(7)
    assert load_trained(save, torch.device("cpu")).iteration == 7
    assert main(["checkpoint", "import", str(folder), str(save), "--no-compare", "--iteration", "-1"]) == 2
