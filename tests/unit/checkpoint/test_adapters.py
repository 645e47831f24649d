"""Sources presented otherwise: each law on a small model of random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint import CheckpointContent, Chunk
from megalith.checkpoint.formats.torch_dist import read_optimizer_common
from megalith.checkpoint.sources.adapters import InPrecision, Repadded, WeightsOnly, has_vocabulary_rows
from megalith.checkpoint.sources.source import Source

from .memory_source import ARGS, GPT2, model_source

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def whole(source: Source, key: str, *, rows: slice = slice(None)) -> Tensor:
    """A tensor, or some rows of it, as the source presents it; memory is dirty before."""
    stored = source.contents().tensors[key]
    start, stop, _ = rows.indices(stored.shape[0])
    tensor = torch.full((stop - start, *stored.shape[1:]), -7.0, dtype=stored.dtype)
    offset = (start,) + (0,) * (tensor.ndim - 1)
    source.read(CheckpointContent([Chunk(key, tensor, offset, stored.shape)]))
    return tensor


def test_weights_only() -> None:
    source = WeightsOnly(model_source())
    assert not [key for key in source.contents().tensors if key.startswith("optimizer.")]
    assert set(source.common()) == {"args", "checkpoint_version", "iteration"}


@pytest.mark.parametrize("rows", [40, 48, 56])
@pytest.mark.parametrize("key", [EMBEDDING, OUTPUT, f"optimizer.state.exp_avg.{EMBEDDING}"])
def test_another_padding_keeps_the_rows_that_are_there_and_fills_with_zeros(rows: int, key: str) -> None:
    held = model_source()
    source = Repadded(held, rows)
    found, kept = whole(source, key), min(rows, 48)
    assert found.shape == (rows, 16)
    assert torch.equal(found[:kept], held.tensors[key][:kept])
    assert not found[kept:].any()
    assert vars(source.common()["args"])["padded_vocab_size"] == rows


def test_a_part_beyond_the_stored_rows_is_zero_without_a_read() -> None:
    held = model_source()
    source = Repadded(held, 64)
    assert not whole(source, EMBEDDING, rows=slice(48, 64)).any()
    assert held.largest_read == 0
    middle = whole(source, EMBEDDING, rows=slice(40, 56))
    assert torch.equal(middle[:8], held.tensors[EMBEDDING][40:48]) and not middle[8:].any()


def test_other_tensors_are_not_padded() -> None:
    held = model_source()
    source = Repadded(held, 64)
    for key, stored in source.contents().tensors.items():
        if not has_vocabulary_rows(key):
            assert stored == held.contents().tensors[key]
    assert [key for key in held.tensors if has_vocabulary_rows(key)] == [
        *(prefix + name for prefix in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.") for name in _BOTH)
    ]


@pytest.mark.parametrize("key", ["output_layer.bias", "lm_head.output_layer.bias", "lm_head.output_layer.weight"])
def test_output_layers_of_bert_and_t5_have_the_rows_of_the_vocabulary(key: str) -> None:
    assert has_vocabulary_rows(key) and has_vocabulary_rows(f"optimizer.state.exp_avg.{key}")


_BOTH = (EMBEDDING, OUTPUT)


def half(precision: str, **changes: Any) -> dict[str, Any]:
    return {**ARGS, "params_dtype": precision, **changes}


def test_half_precision_becomes_fp32_from_the_main_parameters() -> None:
    held = model_source(half("bfloat16"))
    source = InPrecision(held, torch.float32)
    tensors = source.contents().tensors
    assert not [key for key in tensors if "fp32_param" in key]
    assert torch.equal(whole(source, OUTPUT), held.tensors[f"optimizer.state.fp32_param.{OUTPUT}"])
    args = vars(source.common()["args"])
    assert (args["params_dtype"], args["fp16"], args["bf16"]) == ("float32", False, False)
    assert "param_groups" in source.common()["optimizer"]  # fp32 keeps the state without a nesting
    assert read_optimizer_common(source.common()["optimizer"]).step == 7


def test_fp32_becomes_half_precision_with_main_parameters() -> None:
    held = model_source(GPT2)
    source = InPrecision(held, torch.float16)
    assert torch.equal(whole(source, EMBEDDING), held.tensors[EMBEDDING].half())
    assert torch.equal(whole(source, f"optimizer.state.fp32_param.{EMBEDDING}"), held.tensors[EMBEDDING])
    assert set(source.common()["optimizer"]) == {"optimizer"}
    assert vars(source.common()["args"])["fp16"] is True


def test_weights_alone_get_no_main_parameters() -> None:
    source = InPrecision(model_source(half("bfloat16"), states=False))
    assert not [key for key in source.contents().tensors if key.startswith("optimizer.")]


def test_main_parameters_that_only_repeat_fp32_weights_are_not_presented() -> None:
    held = model_source()
    held.tensors[f"optimizer.state.fp32_param.{OUTPUT}"] = held.tensors[OUTPUT].clone()
    assert not [key for key in InPrecision(held).contents().tensors if "fp32_param" in key]


def test_there_and_back_in_precision_is_the_identity_with_an_optimizer() -> None:
    held = model_source(half("bfloat16"))
    source = InPrecision(InPrecision(held, torch.float32), torch.bfloat16)
    assert source.contents().tensors == held.contents().tensors
    for key, tensor in held.tensors.items():
        assert torch.equal(whole(source, key), tensor), key
