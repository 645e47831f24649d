"""T5 of the real Megatron: losses of tokens, every gradient and the samples of its dataset (golden `bert_t5`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megalith.config import ModelConfig
from megalith.data.indexed import IndexedDataset
from megalith.data.masked.dataset import MaskedOptions, Masking
from megalith.data.masked.t5 import T5DatasetFactory
from megalith.data.samples import SplitRatios, SplitSpec
from megalith.models.language_model import Inputs
from megalith.models.t5 import T5
from megalith.tokenizers.word_piece import WordPieceTokenizer

from .goldens import Goldens


def _config(case: dict[str, Any], **changes: Any) -> ModelConfig:
    sizes = case["config"]
    values: dict[str, Any] = {
        "model_family": "t5",
        "num_layers": sizes["enc_layers"],
        "decoder_num_layers": sizes["num_layers"],
        "hidden_size": sizes["hidden_size"],
        "num_attention_heads": sizes["heads"],
        "max_position_embeddings": sizes["max_pos"],
        "norm_epsilon": sizes["layernorm_epsilon"],
        "bias_gelu_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "final_layernorm": False,  # the golden was made without TransformerEngine
        "transformer_impl": "local",
    }
    return ModelConfig(**{**values, **changes})


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_losses_and_gradients(golden: Goldens, implementation: str) -> None:
    case = golden.case("bert_t5", "model_t5")
    weights, io, grads = (
        load_file(golden.path(f"bert_t5/model_t5_{part}.safetensors")) for part in ("weights", "io", "grads")
    )
    model = T5(_config(case, transformer_impl=implementation), case["config"]["vocab"])
    assert set(weights) == {name for name, _ in model.named_parameters()}
    model.load_state_dict(weights)
    tensors = {name: io[name] for name in ("text_enc", "text_dec", "labels", "loss_mask")}
    tensors |= {"enc_mask": (io["text_enc"] != 0).long(), "dec_mask": (io["text_dec"] != 0).long()}
    each = model(
        io["text_enc"],
        io["text_dec"],
        padding_BE=io["text_enc"] == 0,
        padding_BS=io["text_dec"] == 0,
        labels_BS=io["labels"],
    )
    counted = io["loss_mask"]  # elsewhere Megatron takes the largest logit for the label's
    torch.testing.assert_close(each * counted, io["per_token_loss"] * counted, rtol=1e-5, atol=1e-5)
    (loss,) = model.train().losses(Inputs(tensors), None)
    mean = loss.summed / loss.count
    assert mean.item() == pytest.approx(case["loss"], abs=1e-6)
    mean.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-5, atol=1e-7, msg=name)


def test_samples(golden: Goldens, tmp_path: Path) -> None:
    case, folder = golden.case("bert_t5", "t5"), golden.path("bert_t5/data")
    config, expected = case["config"], np.load(golden.path("bert_t5/t5.npz"))
    tokenizer = WordPieceTokenizer(folder / "vocab.txt", lower_case=True, vocab_extra_ids=100)
    assert tokenizer.vocab_size == case["vocab_size"]
    masking = Masking(config["masking_probability"], config["masking_max_ngram"], geometric=True)
    options = MaskedOptions(config["sequence_length"], config["random_seed"], masking)
    samples = T5DatasetFactory(options, tokenizer, config["sequence_length_decoder"])
    documents, shares = IndexedDataset(str(folder / "bert_text_sentence")), SplitRatios.parse("90,5,5")
    for split, (name, requested) in enumerate(zip(("train", "valid", "test"), case["sizes"], strict=True)):
        dataset = samples.build(
            documents,
            SplitSpec(split, requested, shares, "data/bert_text_sentence", tmp_path),
        )
        assert np.array_equal(dataset.sample_index, expected[f"{name}/sample_index"])
        assert len(dataset) == case["info"][name]["len"]
        for item in range(8):
            ours = dataset[item]
            for field in ("text_enc", "text_dec", "labels", "loss_mask", "truncated", "enc_mask", "dec_mask"):
                assert np.array_equal(ours[field], expected[f"{name}/{item}/{field}"]), (name, item, field)
