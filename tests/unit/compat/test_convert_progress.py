"""What the conversion tools say of the parts of a model."""

from __future__ import annotations

import pytest
import torch

from megalith.checkpoint.content import Chunk
from megalith.compat.megatron.convert import TOOLS, Progress, _parser, _without_effect, run_tool
from megalith.errors import ConfigError


def test_parts_of_bert_and_of_layers_that_stand_apart() -> None:
    said: list[str] = []
    progress = Progress(said.append)
    for key, place in (
        ("embedding.tokentype_embeddings.weight", 0),
        ("encoder.layers.mlp.linear_fc1.weight", 1),
        ("decoder.layers.3.mlp.linear_fc1.weight", 0),
        ("encoder.final_layernorm.weight", 0),
        ("lm_head.dense.weight", 0),
    ):
        progress(Chunk(key, torch.empty(1, 1), (place, 0), (4, 1)))
    progress.finish()
    parts = ("embeddings", "transformer layer 1", "transformer layer 3", "final layernorm", "output layer")
    assert said == [f"{verb} {part}" for part in parts for verb in ("sending", "received")]


TYPED = ("--model-type", "GPT", "--loader", "core", "--load-dir", "A", "--save-dir", "B")


def test_flags_of_plugins_that_are_not_here_are_refused_all_at_once() -> None:
    words = [
        "--saver",
        "llama2_hf",
        "--hf-tokenizer-path",
        "T",
        "--save-dtype",
        "bfloat16",
        "--vit-dummy-head-count",
        "7",
    ]
    with pytest.raises(ConfigError) as caught:
        run_tool("convert.py", [*TYPED, *words])
    saver, tokenizer, dtype, heads = caught.value.violations
    assert saver.startswith("--saver llama2_hf: `megalith checkpoint export")
    assert tokenizer.startswith("--hf-tokenizer-path T: `megalith checkpoint export")
    assert dtype.startswith("--save-dtype bfloat16: ") and "--dtype" in dtype
    assert heads.startswith("--vit-dummy-head-count 7: models of images")


def test_saving_one_place_after_the_other_needs_nothing() -> None:
    options = _parser(TOOLS["convert.py"]).parse_args([*TYPED, "--saver", "core", "--sequential-save"])
    (line,) = _without_effect(options)
    assert line.startswith("--sequential-save is not needed: ")
