"""BERT computes what Megatron's BertModel computes: losses, the order of the texts, and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.bert import Bert
from megalith.models.initialise import initialise_as_megatron_cpu

from .goldens import Goldens

CASE = "model_bert"


def _golden(golden: Goldens, part: str) -> dict[str, Tensor]:
    return load_file(golden.path(f"bert_t5/{CASE}_{part}.safetensors"))


def _model(case: dict[str, Any], implementation: str = "local") -> Bert:
    sizes = case["config"]
    config = ModelConfig(
        model_family="bert",
        num_layers=sizes["num_layers"],
        hidden_size=sizes["hidden_size"],
        num_attention_heads=sizes["heads"],
        max_position_embeddings=sizes["seq"],
        bert_binary_head=sizes["binary_head"],
        norm_epsilon=sizes["layernorm_epsilon"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_gelu_fusion=False,
        transformer_impl=implementation,
    )
    return Bert(config, sizes["vocab"])


def test_initial_weights(golden: Goldens) -> None:
    """Those of --use-cpu-initialization, bit for bit."""
    model = _model(golden.case("bert_t5", CASE))
    initialise_as_megatron_cpu(model, torch.Generator().manual_seed(1234))
    wanted = _golden(golden, "weights")
    assert [name for name, parameter in model.named_parameters() if not torch.equal(parameter, wanted[name])] == []


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_forward_and_every_gradient(golden: Goldens, implementation: str) -> None:
    """The unfused kernel and SDPA give the same; padding is seen by nobody in either."""
    case: dict[str, Any] = golden.case("bert_t5", CASE)
    wanted, model = _golden(golden, "io"), _model(case, implementation)
    model.load_state_dict(_golden(golden, "weights"))
    inputs = model.prepare({name: tensor for name, tensor in wanted.items() if name in _FIELDS})
    words, order = model.losses(inputs, None)
    lm_loss, sop_loss = words.summed / words.count, order.summed / order.count
    assert lm_loss.item() == pytest.approx(case["lm_loss"], rel=1e-5)
    assert sop_loss.item() == pytest.approx(case["sop_loss"], rel=1e-5)
    assert case["loss"] == pytest.approx((lm_loss + sop_loss).item(), rel=1e-5)
    (lm_loss + sop_loss).backward()
    gradients = _golden(golden, "grads")
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        size = float(gradients[name].abs().max())
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-5 * size, msg=name)
    told = {"types_BS": wanted["types"], "padding_BS": wanted["padding_mask"] == 0}
    with torch.no_grad():
        losses = model(wanted["text"], labels_BS=wanted["labels"], **told)
        orders = model.order_logits(model.hidden_states(wanted["text"], **told))
    hidden = wanted["labels"] >= 0
    torch.testing.assert_close(losses[hidden], wanted["per_token_loss"][hidden], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(orders, wanted["sop_logits"], rtol=1e-5, atol=1e-5)


_FIELDS = ("text", "types", "labels", "is_random", "padding_mask", "loss_mask")
