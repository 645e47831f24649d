"""Checkpoints that the real Megatron writes of BERT and T5 are read: every weight under its name.

Never a dependency: runs where MEGALITH_MEGATRON_CORE names a folder with megatron-core 0.16.1 (`test_megatron_core`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.checkpoint.sources.adapters import args_of
from megalith.checkpoint.sources.source import open_source
from megalith.checkpoint.writers.huggingface import Weights
from megalith.models.bert import Bert
from megalith.models.saved import saved_tensors
from megalith.models.t5 import T5

from .megatron_core_models import LENGTH, VOCABULARY
from .test_megatron_core import core  # noqa: F401

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 32, "add_bias_linear": True}
LEARNED = {"position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": True}
UNTIED = {"share_embeddings_and_output_weights": False}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("bert", {**LEARNED, "add_binary_head": True, "token_types": 2}),
    ("bert", {**LEARNED, **UNTIED, "add_binary_head": False, "token_types": 0}),
    ("t5", {**LEARNED, "decoder_layers": 2}),
    ("t5", {**LEARNED, **UNTIED, "decoder_layers": 3}),
    ("t5", {**LEARNED, "decoder_layers": 2, "position_embedding_type": "relative"}),
]


def _args(family: str, model: dict[str, Any]) -> dict[str, Any]:
    """What Megatron's programs keep of a run, so far as it describes the model."""
    args = {
        **SIZES,
        "max_position_embeddings": LENGTH,
        "seq_length": LENGTH,
        "padded_vocab_size": VOCABULARY,
        "position_embedding_type": model["position_embedding_type"],
        "untie_embeddings_and_output_weights": not model["share_embeddings_and_output_weights"],
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "transformer_impl": "local",
    }
    if family == "bert":
        return {**args, "bert_binary_head": model["add_binary_head"]}
    depth = {"encoder_num_layers": SIZES["num_layers"], "decoder_num_layers": model["decoder_layers"]}
    return {**args, **depth, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}


@pytest.mark.full
def test_every_weight_is_found(core: Path, tmp_path: Path) -> None:  # noqa: F811
    cases = [
        {"family": family, "seed": 1, "config": SIZES, "model": {**model, "activation": "gelu"}}
        | {"args": _args(family, model)}
        for family, model in CASES
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("megatron_core_families.py")
    environ = {**os.environ, "PYTHONPATH": str(core), "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(script), str(tmp_path / "cases.json"), str(tmp_path)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for number, (family, options) in enumerate(CASES):
        place = tmp_path / str(number) / "iter_0000005"
        source = open_source(place)
        params = GlobalParameters.from_args(args_of(source.common()), str(place))
        assert params.model.model_family == family and params.vocab_size == VOCABULARY
        model = (Bert if family == "bert" else T5)(params.model, params.vocab_size)
        wanted = load_file(tmp_path / f"{number}.safetensors")
        assert {name for name, _, _ in saved_tensors(model)} == set(wanted), options
        for name, tensor, _ in saved_tensors(model):
            assert torch.equal(Weights(source).read(name, tensor.shape, params), wanted[name]), (number, name)
