"""Megatron's args do not say which family a model is of: its weights do, whatever its tokenizer is."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.assemble.reading import saved_args
from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.checkpoint.formats.megatron_names import with_family
from megalith.checkpoint.formats.torch_dist import model_chunks, stacking_of
from megalith.config import ModelConfig, PrecisionConfig, TokenizerConfig
from megalith.config.families import FAMILIES, Family
from megalith.config.from_args import model_from_args
from megalith.config.saved_args import weights_args
from megalith.models.families import model_class
from megalith.models.initialise import initialise
from megalith.models.language_model import LanguageModel, named_placements

ROWS = 24
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 16}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "bert": {"model_family": "bert"},
    "bert-without-head": {"model_family": "bert", "bert_binary_head": False},
    "bert-of-local-layers": {"model_family": "bert", "final_layernorm": False},
    "t5": {"model_family": "t5", "decoder_num_layers": 1},
    "t5-of-local-layers": {"model_family": "t5", "final_layernorm": False},
}


def _args(config: ModelConfig) -> Namespace:
    """As Megatron writes them: of a run with BERT's tokenizer, and without any setting that is ours."""
    args = weights_args(config, PrecisionConfig(), TokenizerConfig("BertWordPieceCase", vocab_file="vocab.txt"))
    for ours in ("model_family", "final_layernorm", "bert_token_types", "relu", "t5_logits_bias", "t5_scaled_logits"):
        del args[ours]
    return Namespace(**args, padded_vocab_size=ROWS)


def _save_torch_dist(folder: Path, model: LanguageModel) -> None:
    content = CheckpointContent(
        chunks=model_chunks(named_placements(model), stacking_of(model.config)),
        common={"args": _args(model.config), "iteration": 1, "checkpoint_version": 3.0},
    )
    DirectoryStore(folder).save(1, content, {})


def _save_per_rank(folder: Path, model: LanguageModel) -> None:
    place = folder / "iter_0000001" / "mp_rank_00"
    place.mkdir(parents=True)
    body = {"args": _args(model.config), "iteration": 1, "checkpoint_version": 3.0, "model": model.state_dict()}
    torch.save(body, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


def test_a_family_without_a_mark_takes_no_checkpoint_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    families = {**FAMILIES, "late": Family("Late", "causal", ("decoder",))}
    monkeypatch.setattr("megalith.checkpoint.formats.megatron_names.FAMILIES", families)
    assert with_family({}, ["decoder.layers.0.mlp.linear_fc1.weight"])["model_family"] == "gpt"
    assert with_family({}, ["encoder.layers.0.mlp.linear_fc1.weight"])["model_family"] == "bert"


@pytest.mark.parametrize("save", [_save_torch_dist, _save_per_rank])
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_say_it(tmp_path: Path, kind: str, save: Any) -> None:
    config = ModelConfig(**SIZES, **KINDS[kind])
    model = model_class(config)(config, ROWS)
    initialise(model, 1)
    save(tmp_path, model)
    found = model_from_args(saved_args(tmp_path))
    assert found.model_family == config.model_family
    assert found.final_layernorm == config.final_layernorm
    assert found.stacks == config.stacks


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("module.language_model.encoder.layers.0.self_attention.query_key_value.weight", "gpt"),
        ("language_model.transformer.layers.0.attention.dense.weight", "gpt"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", "gpt"),
        ("language_model.embedding.tokentype_embeddings.weight", "bert"),
        ("language_model.pooler.dense.weight", "bert"),
        ("module.lm_head.dense.weight", "bert"),
        ("encoder.layers.self_attention.linear_qkv.weight", "bert"),
        ("language_model.decoder.layers.0.inter_attention.query.weight", "t5"),
        ("decoder.layers.cross_attention.linear_q.weight", "t5"),
    ],
)
def test_names_of_every_generation(name: str, family: str) -> None:
    assert with_family({"num_layers": 1}, [name])["model_family"] == family
    assert with_family({"model_family": "gpt"}, [name]) == {"model_family": "gpt"}
