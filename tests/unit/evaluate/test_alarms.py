"""Results that cannot be right are called out, with the likeliest cause; sound ones are not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.config import ModelConfig
from megalith.distributed.context import ParallelContext
from megalith.errors import DataError
from megalith.evaluate.alarms import (
    Evidence,
    alarms_of,
    never_trained,
    require_measured,
    size_difference,
    training_loss,
)
from megalith.evaluate.benchmark import BenchmarkResult
from megalith.evaluate.masked import MaskedResult, Predictions
from megalith.evaluate.text import Accuracy, TextLoss
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise

GPT2 = 50257


def cloze(correct: int, total: int = 5153, loss: float = 4.0, skipped: int = 0) -> Accuracy:
    return Accuracy(correct, total, loss, skipped, 0, total / GPT2)


def text(mean: float, num_tokens: int = 1000) -> TextLoss:
    return TextLoss(mean * num_tokens, num_tokens, num_words=500)


def evidence(**changes: Any) -> Evidence:
    return Evidence(**{"vocab_size": GPT2, "iteration": 5000, **changes})


def test_none_of_5153_is_called_out() -> None:
    (alarm,) = alarms_of(cloze(0), evidence())
    assert "0 of 5153" in alarm.what and alarm.cause


@pytest.mark.parametrize("correct", [1, 400, 5153])
def test_more_than_chance_is_no_alarm(correct: int) -> None:
    assert alarms_of(cloze(correct), evidence()) == []


def test_a_perplexity_above_the_vocabulary_is_called_out() -> None:
    (alarm,) = alarms_of(text(math.log(GPT2) + 0.01), evidence())
    assert "50257" in alarm.what and "tokenizer" in alarm.cause
    assert alarms_of(text(math.log(GPT2) - 0.01), evidence()) == []


@pytest.mark.parametrize(
    ("loss", "more", "cause"),
    [
        (12.0, {}, "surer of wrong tokens"),
        (9.5, {}, "hardly learnt yet (5000 iterations)"),
        (4.0, {}, "not this"),
        (
            12.0,
            {"training_loss": 2.5},
            "surer of wrong tokens than of right ones (the loss here is 12.00, guessing",
        ),
        (
            9.5,
            {"training_loss": 2.5},
            "but not this (the loss here is 9.50, guessing gives 10.82, the training ended at 2.50",
        ),
        (12.0, {"training_loss": 10.5}, "hardly learnt yet (5000 iterations)"),
        (4.0, {"never_trained": True}, "weights are random"),
        (4.0, {"other_tokenizer": "vocab.json differ in content"}, "tokenizer is not the one"),
    ],
)
def test_the_cause_follows_the_evidence(loss: float, more: dict[str, Any], cause: str) -> None:
    assert cause in alarms_of(cloze(0, loss=loss), evidence(**more))[0].cause


@pytest.mark.parametrize(
    "nothing",
    [
        cloze(0, total=0, loss=math.nan, skipped=7),
        TextLoss(0.0, 0, skipped=3),
        MaskedResult(0, Predictions()),
        MaskedResult(3, Predictions(), Predictions(3, 1, 2.0)),
    ],
)
def test_a_score_of_nothing_is_an_error(nothing: Accuracy | TextLoss | MaskedResult) -> None:
    with pytest.raises(DataError, match="held-out.txt"):
        require_measured(nothing, Path("held-out.txt"))
    require_measured(cloze(0, total=1), Path("held-out.txt"))


def test_not_a_number() -> None:
    assert "diverged" in alarms_of(text(math.nan), evidence())[0].cause
    assert "diverged" in alarms_of(cloze(0, loss=math.nan), evidence())[0].cause


def test_a_good_result_of_a_wrong_tokenizer_or_of_random_weights_is_called_out_too() -> None:
    found = alarms_of(cloze(2000), evidence(other_tokenizer="vocab.json differ in content", never_trained=True))
    tokenizer, weights = (alarm.what.split(":")[0] for alarm in found)
    assert "tokenizer" in tokenizer and "random" in weights


def test_the_loss_of_the_training(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    events = [{"event": "start", "iteration": 0}]
    events += [{"event": "step", "iteration": number, "loss": float(number)} for number in range(1, 301)]
    events += [{"event": "save", "iteration": 300}, {"event": "step", "iteration": 301, "loss": None}]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert training_loss(tmp_path, 300) == sum(range(281, 301)) / 20
    assert training_loss(tmp_path, 40) == sum(range(37, 41)) / 4  # a short run falls too fast for more
    assert training_loss(tmp_path, 2) == 2.0
    assert training_loss(tmp_path, 0) is None
    assert training_loss(tmp_path / "absent", 50) is None


@pytest.mark.parametrize(("tokens", "rows", "tp", "fits"), [(50257, 50304, 1, True), (50257, 50432, 2, False)])
def test_the_table_of_another_vocabulary(tokens: int, rows: int, tp: int, fits: bool) -> None:
    args = {"padded_vocab_size": rows, "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 1}
    assert (size_difference(args, tokens) is None) is fits
    assert size_difference({**args, "tensor_model_parallel_size": 2}, tokens) is None or tp == 1
    assert size_difference({}, tokens) is None


@pytest.mark.parametrize(
    ("style", "initial"),
    [
        ({}, 1.0),
        ({"normalization": "RMSNorm", "add_bias_linear": False}, 1.0),
        ({"apply_layernorm_1p": True}, 0.0),
    ],
)
def test_random_weights_are_known_until_the_first_update(style: dict[str, Any], initial: float) -> None:
    config = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, max_position_embeddings=8, **style)
    model = GPT(config, 20)
    initialise(model, 1)
    solo = ParallelContext.solo()
    assert never_trained(model, solo)
    with torch.no_grad():
        norm = model.get_parameter("decoder.layers.1.input_layernorm.weight")
        assert bool((norm == initial).all())
        norm[3] += 1e-6
    assert not never_trained(model, solo)


def test_half_precision_without_biases_tells_too_little() -> None:
    config = ModelConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        max_position_embeddings=8,
        add_bias_linear=False,
        normalization="RMSNorm",
    )
    model = GPT(config, 20, dtype=torch.bfloat16)
    initialise(model, 1)
    assert not never_trained(model, ParallelContext.solo())


def _masked(correct: int, loss: float, orders: int | None = None, swapped: int = 50) -> MaskedResult:
    """100 tokens, and of 100 orders so many right ones."""
    told = None if orders is None else Predictions(100, orders, 69.0)
    return MaskedResult(100, Predictions(100, correct, 100 * loss), told, swapped)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (_masked(40, 3.0), []),
        (_masked(40, 3.0, 70), []),
        (_masked(0, 3.0), ["0 of 100 hidden tokens found"]),
        (_masked(40, 9.0), ["no better than guessing among 1000 tokens"]),
        (_masked(40, math.nan), ["the loss is not a number"]),
        (_masked(40, 3.0, 50), ["the order of two texts is predicted right 50 of 100 times"]),
        (_masked(40, 3.0, 60, swapped=30), ["always giving the more frequent answer (0.7)"]),
        (_masked(40, 3.0, 100, swapped=100), []),
        (_masked(0, 9.0, 10), ["0 of 100 hidden tokens", "predicted right 10 of 100"]),
    ],
)
def test_hidden_tokens_at_chance(result: MaskedResult, said: list[str]) -> None:
    found = alarms_of(result, Evidence(vocab_size=1000, iteration=5))
    assert len(found) == len(said)
    for alarm, part in zip(found, said, strict=True):
        assert part in alarm.what and alarm.cause


def benchmark(**changes: Any) -> BenchmarkResult:
    """Of 40 questions with four choices, 20 right."""
    facts = {"total": 40, "correct": 20, "by_chance": 10.0, "answers": {0: 12, 1: 8, 2: 10, 3: 10}, "right_answers": 4}
    return BenchmarkResult(**{"scores": {}, **facts, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"correct": 11, "answers": {0: 39, 1: 1}}, []),
        ({"correct": 10}, ["chance"]),
        ({"correct": 16, "answers": {1: 40}}, ["number 2"]),
        ({"correct": 40, "answers": {1: 40}, "right_answers": 1}, []),
        ({"total": 5, "correct": 2, "by_chance": 1.2, "answers": {1: 5}}, []),
        ({"finite": False}, ["not a number"]),
        ({"asked": 160, "shortened": 3, "context_length": 512}, ["3 of 160 prompts"]),
        ({"by_chance": 0.0, "correct": 0, "answers": {"": 30, "4": 10}}, ["0 of 40", "30 of 40"]),
        ({"by_chance": 0.0, "correct": 3, "answers": {"": 20, "4": 20}}, []),
        ({"by_chance": 0.0, "correct": 3, "answers": {"The answer is 4.": 40}}, ["The answer is 4."]),
    ],
)
def test_scores_that_cannot_be_right(changes: dict[str, Any], said: list[str]) -> None:
    found = alarms_of(benchmark(**changes), evidence())
    assert len(found) == len(said)
    assert all(words in alarm.what for words, alarm in zip(said, found, strict=True))


def test_the_cause_of_guesses_follows_the_evidence() -> None:
    causes = [
        alarms_of(benchmark(correct=9), evidence(**more))[0].cause
        for more in ({}, {"never_trained": True}, {"other_tokenizer": "larger"}, {"training_loss": 10.0})
    ]
    for cause, words in zip(causes, ("--apply-chat-template", "random", "tokenizer", "hardly"), strict=True):
        assert words in cause
