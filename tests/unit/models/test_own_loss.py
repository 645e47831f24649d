"""Registered losses: what their functions see, and what they return; over ranks in tests/distributed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.models.families import model_class
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.models.language_model import Inputs, LanguageModel
from megalith.registry import Entry, Registered

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    max_position_embeddings=12,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
ROWS = 21


def own(thing: Any, on: str = "logits") -> Registered:
    return Registered(Entry("loss", "mine", thing, options={"on": on}))


def z_loss(logits: Tensor, labels: Tensor, mask: Tensor, vocabulary: Any) -> Tensor:
    penalty: Tensor = vocabulary.cross_entropy(logits, labels) + 0.1 * vocabulary.log_sum_exp(logits) ** 2
    return penalty


def hidden_z_loss(hidden: Tensor, labels: Tensor, mask: Tensor, vocabulary: Any) -> Tensor:
    return z_loss(vocabulary.logits(hidden), labels, mask, vocabulary) + 0.01 * hidden.square().sum(-1)


def batch() -> Inputs:
    tokens = torch.randint(0, ROWS, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 8)
    mask[1, 3:] = 0.0
    positions = torch.arange(8).expand(2, 8)
    return Inputs({"tokens": tokens, "labels": tokens.roll(1, 1), "loss_mask": mask, "position_ids": positions})


def gradients(config: ModelConfig) -> tuple[float, dict[str, Tensor]]:
    model = GPT(config, ROWS)
    initialise(model, 3)
    loss, *further = model.losses(model.prepare(batch().tensors), None)
    (loss.summed / loss.count + sum(one.summed for one in further)).backward()
    return float(loss.summed.detach()), {name: one.grad for name, one in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize("depths", [None, 1])
def test_cross_entropy_by_hand_is_that_of_gpt(depths: int | None) -> None:
    def loss(logits: Tensor, labels: Tensor, mask: Tensor, vocabulary: Any) -> Tensor:
        assert mask.shape == labels.shape == logits.shape[:2]
        return vocabulary.cross_entropy(logits, labels)  # type: ignore[no-any-return]

    config = replace(CONFIG, mtp_num_layers=depths, position_embedding_type="rope")
    wanted, of_ours = gradients(config)
    for on, thing in (
        ("logits", loss),
        ("hidden", lambda h, labels, mask, vocabulary: loss(vocabulary.logits(h), labels, mask, vocabulary)),
    ):
        found, of_own = gradients(replace(config, loss=own(thing, on)))
        assert found == pytest.approx(wanted, rel=1e-5)
        for name, gradient in of_ours.items():
            torch.testing.assert_close(of_own[name], gradient, msg=name)


@pytest.mark.parametrize(("on", "thing"), [("logits", z_loss), ("hidden", hidden_z_loss)])
def test_it_sees_logits_or_hidden_states_of_each_token(on: str, thing: Any) -> None:
    model = GPT(replace(CONFIG, loss=own(thing, on)), ROWS)
    initialise(model, 3)
    tensors = batch().tensors
    logits, hidden = model(tensors["tokens"]), model.hidden_states(tensors["tokens"]).transpose(0, 1)
    lse = logits.logsumexp(-1)
    wanted = lse - logits.gather(-1, tensors["labels"][..., None]).squeeze(-1) + 0.1 * lse**2
    if on == "hidden":
        wanted = wanted + 0.01 * hidden.square().sum(-1)
    (loss,) = model.losses(batch(), None)
    torch.testing.assert_close(loss.summed, (wanted * tensors["loss_mask"]).sum())


class Table(nn.Module):
    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)  # type: ignore[no-any-return]


def plain(loss: Registered) -> LanguageModel:
    config = replace(CONFIG, model=Registered(Entry("model", "table", Table)), loss=loss)
    return model_class(config)(config, ROWS)


def test_a_plain_module_has_logits_alone() -> None:
    (loss,) = plain(own(z_loss)).losses(batch(), None)
    assert float(loss.summed.detach()) > 0 and float(loss.count) == 11.0
    with pytest.raises(ConfigError, match="--loss mine"):
        plain(own(hidden_z_loss, "hidden"))


def test_the_loss_of_each_token_is_returned() -> None:
    model = GPT(replace(CONFIG, loss=own(lambda logits, labels, mask, vocabulary: logits.mean())), ROWS)
    with pytest.raises(ConfigError, match=r"--loss mine.*\[2, 8\]"):
        model.losses(batch(), None)


def test_a_loss_without_a_gradient_is_refused_in_training_alone() -> None:
    def detached(logits: Tensor, labels: Tensor, mask: Tensor, vocabulary: Any) -> Tensor:
        return vocabulary.cross_entropy(logits.detach(), labels)

    model = GPT(replace(CONFIG, loss=own(detached)), ROWS)
    with pytest.raises(ConfigError, match="--loss mine.*gradient"):
        model.losses(batch(), None)
    with torch.no_grad():
        assert float(model.losses(batch(), None)[0].count) == 11.0
