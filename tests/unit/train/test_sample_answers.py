"""Prompts of --sample-prompts that cannot be continued are refused; answers are those of inference."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.nn.moe.layer import MoE
from megalith.tokenizers.null import NullTokenizer
from megalith.train.sample_answers import greedy_answer, prompt_of


@pytest.mark.parametrize(
    ("text", "named"), [("once", "once"), ("5 99", "99"), ("5 -1", "-1"), ("1 2 3 4", "4 tokens"), ("", "0 tokens")]
)
def test_prompts_without_room_or_tokens_are_refused(text: str, named: str) -> None:
    nothing: Any = types.SimpleNamespace(encode=lambda text: [], vocab_size=99)
    with pytest.raises(ConfigError, match=f"--sample-prompts '{text}'.*{named}"):
        prompt_of(text, NullTokenizer(99, later=True) if text else nothing, 4)
    assert prompt_of("1 2 98", NullTokenizer(99, later=True), 4).tokens == (1, 2, 98)


@pytest.mark.parametrize(
    "training_only", [{"moe_expert_capacity_factor": 0.2}, {"moe_router_force_load_balancing": True}]
)
def test_answers_have_no_training_only_routing(training_only: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_experts": 4}
    models = []
    for changes in ({}, training_only):
        config = ModelConfig(**sizes, max_position_embeddings=32, init_method_std=0.5, **changes)
        models.append(GPT(config, 50, dtype=torch.float32))
        initialise(models[-1], 1)
    plain, trained = models
    before = [layer.settings for layer in trained.modules() if isinstance(layer, MoE)]
    answers = [greedy_answer(model, (5, 6, 7), set(), 32, 50) for model in (plain, trained)]
    assert answers[1] == answers[0] and len(set(answers[0])) > 1
    assert [layer.settings for layer in trained.modules() if isinstance(layer, MoE)] == before and trained.training
