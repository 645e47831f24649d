"""BERT of Hugging Face: the same logits of words and of the order of texts, and the same bytes there and back."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalith.assemble.huggingface import compare_logits
from megalith.assemble.trained import load_trained
from megalith.checkpoint.convert import ConversionOptions, convert
from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.checkpoint.sources.adapters import args_of
from megalith.checkpoint.sources.source import open_source
from megalith.checkpoint.writers.huggingface import ExportOptions, Weights, export
from megalith.config import ModelConfig
from megalith.errors import CheckpointError, DataError
from megalith.evaluate.fill_mask import fill_masks
from megalith.models.bert import Bert
from megalith.models.huggingface import config_of_model, family_for, model_of_config

transformers = pytest.importorskip("transformers")

# As bert-base-chinese has it: special tokens, characters, pieces that go on a word.
VOCABULARY = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(0x4E00, 0x4E10)), "the", "##s"]


def _hub_folder(path: Path, kind: str, **changes: Any) -> tuple[Path, Any]:
    """A model as the cache of the hub has it, whose files are links; and the model."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24}
    of_kind = transformers.MegatronBertConfig if kind.startswith("Megatron") else transformers.BertConfig
    config = of_kind(vocab_size=len(VOCABULARY), max_position_embeddings=12, **sizes, **changes)
    torch.manual_seed(1)
    model = getattr(transformers, kind)(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    blobs, snapshot = path / "blobs", path / "snapshots" / "8d2a91f"
    snapshot.mkdir(parents=True)
    model.save_pretrained(blobs)
    (blobs / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    (blobs / "tokenizer_config.json").write_text('{"do_lower_case": false, "model_max_length": 12}')
    for file in blobs.iterdir():
        os.symlink(file, snapshot / file.name)
    return snapshot, model


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("BertForPreTraining", {}),
        ("BertForMaskedLM", {}),
        ("MegatronBertForPreTraining", {}),
        ("MegatronBertForMaskedLM", {"layer_norm_eps": 1e-5}),
    ],
)
def test_there_and_back(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    snapshot, theirs = _hub_folder(tmp_path / "models--bert", kind, **changes)
    made = convert(snapshot, tmp_path / "ours", ConversionOptions(release=True)).path
    trained = load_trained(tmp_path / "ours", torch.device("cpu"))
    assert isinstance(trained.model, Bert) and trained.tokenizer.encode("\u4e00\u4e05s") == [6, 11, 2]
    tokens = torch.arange(24).reshape(2, 12) % len(VOCABULARY)
    types, padding = (torch.arange(12) > 5).long().expand(2, 12), torch.arange(12) > torch.tensor([[11], [8]])
    with torch.no_grad():
        wanted = theirs(tokens, token_type_ids=types, attention_mask=(~padding).long())
        hidden = trained.model.hidden_states(tokens, types_BS=types, padding_BS=padding)
        logits = trained.model.logits(hidden).transpose(0, 1)[..., : len(VOCABULARY)]
    words = wanted.logits if kind.endswith("MaskedLM") else wanted.prediction_logits
    torch.testing.assert_close(logits[~padding], words[~padding], rtol=1e-5, atol=1e-5)
    if kind.endswith("PreTraining"):
        orders = trained.model.order_logits(hidden)
        torch.testing.assert_close(orders, wanted.seq_relationship_logits, rtol=1e-5, atol=1e-5)
    source = open_source(made)
    params = GlobalParameters.from_args(args_of(source.common()), str(made))
    difference = compare_logits(snapshot, Weights(source), params, len(VOCABULARY)).difference
    assert difference is not None and difference <= 1e-5
    back = export(made, tmp_path / "back", ExportOptions())
    assert back.architecture == kind and back.vocab_size == len(VOCABULARY)
    assert (back.path / "model.safetensors").read_bytes() == (snapshot / "model.safetensors").read_bytes()
    assert (back.path / "vocab.txt").read_bytes() == (snapshot / "vocab.txt").read_bytes()


def test_the_names_of_tensorflow_are_read(tmp_path: Path) -> None:
    """The first models on the hub call the parameters of norms gamma and beta, and hold the tied weights twice."""
    snapshot, _ = _hub_folder(tmp_path / "models--bert", "BertForPreTraining")
    file = snapshot / "model.safetensors"
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(file).items()
    }
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    save_file(tensors, file.resolve(), metadata={"format": "pt"})
    made = convert(snapshot, tmp_path / "ours", ConversionOptions(release=True)).path
    source = open_source(made)
    params = GlobalParameters.from_args(args_of(source.common()), str(made))
    assert params.vocab_size == 128, "two tokens more than in the files, and padding"
    bias = Weights(source).read("output_layer.bias", (128,), params)
    assert (bias[len(VOCABULARY) :] == -1e4).all(), "what is no token takes no part in the loss"
    save_file(load_file(file), file.resolve(), metadata={"format": "pt"})
    difference = compare_logits(snapshot, Weights(source), params, len(VOCABULARY)).difference
    assert difference is not None and difference <= 1e-5


def test_where_the_norms_stand_decides_which_of_theirs_it_is() -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 8}
    model = ModelConfig(model_family="bert", **sizes)
    with pytest.raises(CheckpointError) as caught:
        family_for(model)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert [line for line in lines if line.startswith("bert: ") and "apply_residual_connection_post_layernorm" in line]
    assert [line for line in lines if line.startswith("megatron-bert: ") and "GELU" in line]
    assert {line.partition(":")[0] for line in lines[1:]} == {"bert", "megatron-bert"}, "a GPT or T5 is none of them"
    for published, found in ((False, "megatron-bert"), (True, "bert")):
        exact = replace(model, bias_gelu_fusion=False, apply_residual_connection_post_layernorm=published)
        assert family_for(exact).model_type == found
        for head, name in ((True, "ForPreTraining"), (False, "ForMaskedLM")):
            own = replace(exact, bert_binary_head=head, bert_token_types=not head)
            config = config_of_model(family_for(own), own, 24, "float32")
            assert config["architectures"][0].endswith(f"Bert{name}")
            assert model_of_config(config, "").family.model_type == found


def test_masks_are_filled_as_theirs(tmp_path: Path) -> None:
    snapshot, theirs = _hub_folder(tmp_path / "models--bert", "BertForMaskedLM")
    convert(snapshot, tmp_path / "ours", ConversionOptions(release=True))
    for folder in (tmp_path / "ours", snapshot):
        trained = load_trained(folder, torch.device("cpu"))
        assert isinstance(trained.model, Bert)
        filled = fill_masks(trained.model, trained.tokenizer, "\u4e00[MASK] the[MASK]", 4)
        with torch.no_grad():
            logits = theirs(torch.tensor([[3, 6, 5, VOCABULARY.index("the"), 5, 4]])).logits[0, [2, 4]]
        best = logits.softmax(-1).topk(4)
        assert [[found.token for found in row] for row in filled.masks] == best.indices.tolist()
        values = torch.tensor([[found.probability for found in row] for row in filled.masks])
        torch.testing.assert_close(values, best.values, rtol=1e-5, atol=1e-6)
        first, second = (VOCABULARY[row[0].token] for row in filled.masks)
        assert filled.text == f"\u4e00{first} the{second.removeprefix('##')}"
    for text, said in (("\u4e00", "has no .MASK."), ("[MASK]" * 11, "13 tokens.* 12 positions")):
        with pytest.raises(DataError, match=said):
            fill_masks(trained.model, trained.tokenizer, text)
