"""T5 of Hugging Face: the same logits, and the same bytes there and back."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalith.assemble.huggingface import compare_logits
from megalith.checkpoint.convert import ConversionOptions, convert
from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.checkpoint.sources.adapters import args_of
from megalith.checkpoint.sources.source import open_source
from megalith.checkpoint.writers.huggingface import ExportOptions, Weights, export
from megalith.config import ModelConfig
from megalith.errors import CheckpointError
from megalith.models.huggingface import config_of_model, family_for, model_of_config
from megalith.models.saved import saved_tensors
from megalith.models.t5 import T5
from megalith.serve.engine import Engine, Limits
from megalith.serve.model_runner import DecoderPrompt, ModelRunner
from megalith.serve.request import Request, Sampling, Token

transformers = pytest.importorskip("transformers")

ROWS = 40
V1_1: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def _folder(
    path: Path, *, own_output: bool = False, written_by_4: bool = False, kind: str = "T5", **changes: Any
) -> Path:
    """A model as `save_pretrained` writes it, with an output layer of its own where that is asked."""
    sizes = {"d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(vocab_size=ROWS, **{**sizes, **buckets, **changes})
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(path)
    if own_output:
        tensors = load_file(path / "model.safetensors")
        tensors["lm_head.weight"] = torch.randn(ROWS, 16)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if written_by_4:
        config = json.loads((path / "config.json").read_text())
        config.pop("scale_decoder_outputs", None)
        config["tie_word_embeddings"] = changes.get("tie_word_embeddings", True)
        (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return path


def _difference(folder: Path, made: Path) -> tuple[float, GlobalParameters]:
    source = open_source(made)
    params = GlobalParameters.from_args(args_of(source.common()), str(made))
    difference = compare_logits(folder, Weights(source), params, ROWS).difference
    assert difference is not None
    return difference, params


@pytest.mark.parametrize(
    ("options", "own_output", "scaled"),
    [
        ({}, False, True),
        ({"written_by_4": True}, False, True),
        (V1_1, False, False),
        ({**V1_1, "own_output": True}, True, False),
        ({**V1_1, "own_output": True, "written_by_4": True}, True, False),
        ({"feed_forward_proj": "gated-silu", "d_kv": 4}, False, True),
        ({"feed_forward_proj": "gelu_new"}, False, True),
        ({"feed_forward_proj": "gelu"}, False, True),
        ({"kind": "MT5"}, False, False),
        ({"kind": "MT5", "own_output": True}, True, False),
        ({"kind": "MT5", "own_output": True, "written_by_4": True, "tie_word_embeddings": False}, True, False),
    ],
    ids=["v1.0", "v1.0-by-4", "v1.1-tied", "v1.1", "v1.1-by-4", "silu", "tanh", "erf", "mt5-tied", "mt5", "mt5-by-4"],
)
def test_there_and_back(tmp_path: Path, options: dict[str, Any], own_output: bool, scaled: bool) -> None:
    folder = _folder(tmp_path / "theirs", **options)
    made = convert(folder, tmp_path / "ours", ConversionOptions(release=True)).path
    difference, params = _difference(folder, made)
    assert difference <= 1e-5
    assert (params.model.untie_embeddings_and_output_weights, params.model.t5_scaled_logits) == (own_output, scaled)
    back = export(made, tmp_path / "back", ExportOptions(max_shard_size="20KB"))
    assert back.architecture == f"{options.get('kind', 'T5')}ForConditionalGeneration" and back.shards > 1
    assert (back.path / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    again = export(made, tmp_path / "again", ExportOptions())
    assert (again.path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("options", [{}, {**V1_1, "own_output": True}], ids=["v1.0", "v1.1"])
def test_a_config_of_our_own_is_read_alike_by_both(tmp_path: Path, options: dict[str, Any]) -> None:
    """Without the original the config.json is written anew; transformers computes the same from it."""
    folder = _folder(tmp_path / "theirs", **options)
    made = convert(folder, tmp_path / "ours", ConversionOptions(release=True)).path
    model = GlobalParameters.from_args(args_of(open_source(made).common()), str(made)).model
    config = config_of_model(family_for(model), model, ROWS, "float32", special={"pad": 0, "eos": 1})
    assert (config["decoder_start_token_id"], config["eos_token_id"]) == (0, 1)
    (folder / "config.json").write_text(json.dumps(config))
    assert _difference(folder, made)[0] <= 1e-5
    assert model_of_config(config, "").model.t5_scaled_logits == model.t5_scaled_logits


def test_old_files_hold_the_embedding_again(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors["shared.weight"].clone()
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.randn(8, 4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    made = convert(folder, tmp_path / "ours", ConversionOptions(release=True)).path
    assert _difference(folder, made)[0] <= 1e-5
    tensors["lm_head.weight"] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight\b.*\bshared\.weight"):
        convert(folder, tmp_path / "other", ConversionOptions(release=True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"feed_forward_proj": "gated-relu"}, "feed_forward_proj is 'gated-relu'"),
        ({"dense_act_fn": "gelu"}, "dense_act_fn is 'gelu'; with feed_forward_proj relu this version has 'relu'"),
        ({"is_gated_act": True}, "is_gated_act is True"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"relative_attention_num_buckets": 7}, "relative_attention_num_buckets is 7"),
        ({"relative_attention_max_distance": 3}, "relative_attention_max_distance is 3"),
        ({"model_type": "umt5"}, "model_type 'umt5' is not among those that are read"),
        ({"architectures": ["T5EncoderModel"]}, "architectures is ['T5EncoderModel']"),
        ({"num_experts": 8}, "num_experts (8) is not known"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    folder = _folder(tmp_path / "theirs")
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    with pytest.raises(CheckpointError) as caught:
        model_of_config(config, "config.json")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "it has position_embedding_type relative, the model learned_absolute"),
        ({"position_embedding_type": "relative"}, "it has t5_logits_bias False, the model True"),
        (
            {"untie_embeddings_and_output_weights": True, "t5_scaled_logits": True},
            "it has t5_scaled_logits False, the model True",
        ),
        ({"squared_relu": True}, "in its feed-forward layers"),
    ],
)
def test_a_t5_of_megatron_is_none_of_theirs(changes: dict[str, Any], said: str) -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 8}
    with pytest.raises(CheckpointError) as caught:
        family_for(ModelConfig(model_family="t5", **sizes, **changes))
    assert said in str(caught.value)


@pytest.mark.parametrize("options", [{}, {**V1_1, "own_output": True}], ids=["v1.0", "v1.1"])
def test_answers_are_those_of_generate(tmp_path: Path, options: dict[str, Any]) -> None:
    """Greedy, of texts of several lengths in one batch."""
    folder = _folder(tmp_path / "theirs", **options)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval().double()
    made = convert(folder, tmp_path / "ours", ConversionOptions(release=True)).path
    source = open_source(made)
    params = GlobalParameters.from_args(args_of(source.common()), str(made))
    ours = T5(params.model, params.vocab_size, dtype=torch.float64)
    with torch.no_grad():
        for name, tensor, _ in saved_tensors(ours):
            tensor.copy_(Weights(source).read(name, tensor.shape, params))
    tokenizer = SimpleNamespace(vocab_size=ROWS, eod=1, decode=lambda ids: "".join(f"<{token}>" for token in ids))
    engine = Engine(
        ModelRunner(ours, 60, 4),
        cast("Any", tokenizer),
        Limits(max_num_batched_tokens=9),
        decoder_prompt=DecoderPrompt(0, 1),
    )
    texts = [[5, 9, 30, 2, 7, 1], [3, 1], [8] * 11 + [1], [4, 4, 21, 17, 1]]
    requests = [Request(tuple(text), 10, Sampling(0.0)) for text in texts]
    handles = [engine.submit(request) for request in requests]
    said: dict[Any, list[int]] = {handle: [] for handle in handles}
    while engine.has_work:
        for handle, event in engine.step():
            if isinstance(event, Token):
                said[handle].append(event.id)
    for handle in handles:
        text = torch.tensor([handle.request.prompt])
        roles = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
        # Their cache has no room for a decoder of more layers than the encoder (transformers 5.23).
        (expected,) = theirs.generate(text, max_new_tokens=10, do_sample=False, use_cache=False, **roles).tolist()
        assert [0, *said[handle]] == expected
