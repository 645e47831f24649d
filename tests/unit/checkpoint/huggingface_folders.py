"""Small Hugging Face model folders with random weights, written without transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.huggingface import FAMILIES, config_of_model

VOCAB = 35
LLAMA = ModelConfig(
    2,
    16,
    4,
    32,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    group_query_attention=True,
    num_query_groups=2,
    ffn_hidden_size=24,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
GPT2 = ModelConfig(2, 16, 4, 32)


def random_weights(kind: str, model: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A tensor for each name of the family, in the order of its state_dict."""
    generator = torch.Generator().manual_seed(1)
    table = FAMILIES[kind].tensors(model, VOCAB)
    return {tensor.name: torch.randn(tensor.shape, generator=generator).to(dtype) for tensor in table}


def write_folder(
    folder: Path,
    kind: str = "llama",
    model: ModelConfig = LLAMA,
    *,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    weights: dict[str, Tensor] | None = None,
    **config: Any,
) -> dict[str, Tensor]:
    """Write one; returns the weights. `config` is added to config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = random_weights(kind, model, dtype) if weights is None else weights
    about = config_of_model(FAMILIES[kind], model, VOCAB, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps({**about, **config}))
    names = list(weights)
    if shards == 1:
        _save(weights, names, folder / "model.safetensors")
        return weights
    index = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number::shards]
        _save(weights, part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return weights


def _save(weights: dict[str, Tensor], names: Iterable[str], path: Path) -> None:
    save_file({name: weights[name].contiguous() for name in names}, path, metadata={"format": "pt"})


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 257 ids, of which the first ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=257, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
