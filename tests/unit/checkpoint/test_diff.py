"""Differences of checkpoints: what is the same is said to be, and each kind of difference is measured."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megalith.checkpoint.diff import (
    TensorDifference,
    compared,
    difference,
    state_differences,
    tensor_differences,
    with_equal_precision,
)

from .memory_source import ARGS, GPT2, MemorySource, model_source

FC1, EMBEDDING = "decoder.layers.mlp.linear_fc1.weight", "embedding.word_embeddings.weight"


def found(one: MemorySource, other: MemorySource, *, weights: bool = False) -> list[TensorDifference]:
    pairs = tensor_differences(compared(one, weights=weights), compared(other, weights=weights))
    return [difference for difference in pairs if not difference.is_none]


def test_the_same_is_the_same() -> None:
    one, other = model_source(), model_source()
    everything = list(tensor_differences(compared(one, weights=False), compared(other, weights=False)))
    assert found(one, other) == []
    stacked = sum(key.startswith("decoder.layers.") for key in one.tensors)
    weights = sum(not key.startswith("optimizer.") for key in one.tensors)
    assert len(everything) == 3 * (stacked * 4 + weights - stacked)  # each layer by itself, weights and two moments
    assert sum(item.elements for item in everything) == sum(tensor.numel() for tensor in one.tensors.values())


def test_one_changed_element_is_found_named_and_measured() -> None:
    one, other = model_source(), model_source()
    one.tensors[FC1][2, 5, 3] = 2.0
    other.tensors[FC1][2, 5, 3] = 2.5
    (only,) = found(one, other)
    assert only.name == f"{FC1} of layer 2" and (only.differing, only.elements) == (1, 48 * 16)
    assert (only.absolute, only.relative) == (0.5, 0.2)
    assert all(part in str(only) for part in (only.name, "1 of 768", "0.5", "0.2"))


def test_the_optimizer_counts_unless_only_weights_are_asked_for() -> None:
    one, other = model_source(), model_source()
    key = f"optimizer.state.exp_avg.{EMBEDDING}"
    other.tensors[key][0, 0] += 1.0
    del other.tensors["optimizer.state.exp_avg_sq.output_layer.weight"]
    assert [item.name for item in found(one, other)] == [key, "optimizer.state.exp_avg_sq.output_layer.weight"]
    assert found(one, other, weights=True) == []
    first, second = str(found(one, other)[-1]), str(found(other, one)[-1])
    assert "first" in first and "second" in second


@pytest.mark.parametrize(
    ("one", "other", "differing"),
    [
        (math.nan, math.nan, 0),
        (0.0, -0.0, 1),
        (math.inf, math.inf, 0),
        (1.0, math.nan, 1),
        (1.0, math.inf, 1),
    ],
)
def test_bits_decide(one: float, other: float, differing: int) -> None:
    a, b = torch.tensor([1.0, one]), torch.tensor([1.0, other])
    result = difference("x", a, b)
    assert result.differing == differing
    if differing:
        assert result.absolute == (0.0 if one == 0.0 else math.inf)


def test_blocks_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.checkpoint.diff._BLOCK", 8)
    a, b = torch.zeros(30), torch.zeros(30)
    b[1], b[17], b[29] = 1.0, 3.0, 2.0
    result = difference("x", a, b)
    assert (result.differing, result.elements, result.absolute) == (3, 30, 3.0)


def test_another_dtype_is_said_and_its_values_compared() -> None:
    one = model_source(states=False)
    other = MemorySource({key: value.bfloat16() for key, value in one.tensors.items()}, one.common())
    text = str(next(item for item in found(one, other) if item.name == EMBEDDING))
    assert "float32" in text and "bfloat16" in text
    back = MemorySource({key: value.float() for key, value in other.tensors.items()}, one.common())
    assert found(back, other)[0].differing == 0 and "768" in str(found(back, other)[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("place", [0, 1])
def test_weights_in_fp32_are_compared_with_main_parameters(dtype: str, place: int) -> None:
    half = model_source({**ARGS, "params_dtype": dtype})
    main = "optimizer.state.fp32_param."
    weights = {key: half.tensors[main + key] for key in half.tensors if not key.startswith("optimizer.")}
    whole = MemorySource({key: tensor.clone() for key, tensor in weights.items()}, half.common())
    pair = [whole, whole]
    pair[place] = half

    def differing() -> list[str]:
        *sources, shown = with_equal_precision(*pair)
        assert shown == place
        one, other = (compared(source, weights=True) for source in sources)
        return [item.name for item in tensor_differences(one, other) if not item.is_none]

    assert differing() == []
    whole.tensors[FC1][2, 5, 3] += 1e-4  # less than the half precision tells
    assert differing() == [f"{FC1} of layer 2"]


def test_weights_of_one_precision_are_compared_as_they_are() -> None:
    half, bare = model_source({**ARGS, "params_dtype": "float16"}), model_source(states=False)
    rounded = model_source({**ARGS, "params_dtype": "float16"}, states=False)
    for one, other in ((half, half), (bare, bare), (bare, rounded)):
        assert with_equal_precision(one, other) == (one, other, None)


def test_another_padding_is_said_and_the_common_rows_compared() -> None:
    one, other = model_source(states=False), model_source(states=False)
    other.tensors[EMBEDDING] = torch.cat([one.tensors[EMBEDDING], torch.ones(8, 16)])
    (only,) = found(one, other)
    assert (only.name, only.differing) == (EMBEDDING, 0)
    assert all(part in str(only) for part in ("[48, 16]", "[56, 16]", "768"))


def test_another_shape_is_not_compared() -> None:
    one, other = model_source(states=False), model_source(states=False)
    other.tensors["decoder.final_layernorm.weight"] = torch.ones(17)
    assert str(found(one, other)[0]) == "decoder.final_layernorm.weight: shapes [16] and [17]"


def plain(args: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: args[name] for name in ("num_layers", "swiglu")}


def test_what_stands_beside_the_tensors() -> None:
    one, other = model_source().common(), model_source(GPT2).common()
    assert state_differences(one, one, plain, weights=False) == []
    assert [str(item) for item in state_differences(one, other, plain, weights=True)] == ["swiglu: True and False"]
    other = model_source(ARGS).common()
    other["iteration"] = 8
    other["opt_param_scheduler"] = {**other["opt_param_scheduler"], "num_steps": 32}
    other["optimizer"]["state"]["common_step"] = torch.tensor(8.0)
    other["optimizer"]["param_groups"][0]["lr"] = 0.5
    other["args"] = Namespace(**{**vars(other["args"]), "consumed_train_samples": 13})
    assert {item.name for item in state_differences(one, other, plain, weights=False)} == {
        "iteration",
        "consumed_train_samples",
        "scheduler num_steps",
        "optimizer step",
        "lr of the group with weight decay",
    }
    assert state_differences(one, other, plain, weights=True) == []


def test_the_state_of_a_run_that_megatron_does_not_know_is_compared() -> None:
    own = {"megalith_best_evaluation": {"loss": 2.0, "later": 1}, "megalith_step_check": {"norms": [1.0, 2.0]}}
    one = {**model_source().common(), **own, "megalith_wandb_run_id": "a"}
    other = {**one, "megalith_lr_scale": 0.5, "megalith_step_check": {"norms": [1.0, 3.0]}}
    other |= {"megalith_best_evaluation": {"loss": 2.5, "later": 1}, "megalith_wandb_run_id": "b"}
    found = {item.name: (item.one, item.other) for item in state_differences(one, other, plain, weights=False)}
    assert found == {
        "best evaluation loss": (2.0, 2.5),
        "step check norms 1": (2.0, 3.0),
        "lr scale": ("absent", 0.5),
    }
    assert state_differences(one, other, plain, weights=True) == []
