"""Multi-token prediction is that of the real Megatron: losses, gradients, and the keys of its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megalith.checkpoint.formats.torch_dist import stacking_of
from megalith.config import ModelConfig
from megalith.config.flops import step_flops
from megalith.models.gpt import GPT

FIXTURES = Path(__file__).parent / "fixtures" / "prediction"
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"mtp_num_layers": 2},
    "mixture": {
        "mtp_num_layers": 1,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "num_experts": 4,
        "moe_ffn_hidden_size": 8,
        "moe_aux_loss_coeff": (0.05,),
        "moe_layer_freq": "[0,1]",
        "moe_shared_expert_intermediate_size": 6,
    },
}


def config_of(kind: str, **more: Any) -> ModelConfig:
    settings = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "ffn_hidden_size": 24,
        "add_bias_linear": False,
        "swiglu": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "mtp_loss_scaling_factor": 0.3,
    }
    return ModelConfig(**{**settings, **KINDS[kind], **more})


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_megatrons(kind: str) -> None:
    golden = load_file(FIXTURES / f"{kind}.safetensors")
    model = GPT(config_of(kind), 40)
    model.load_state_dict({name.removeprefix("weight."): x for name, x in golden.items() if name.startswith("weight.")})
    ids = golden["ids"]
    positions = torch.arange(16).expand(2, 16)
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions, "loss_mask": golden["mask"]}
    assert _relative(model(ids[:, :-1], labels_BS=ids[:, 1:]), golden["loss"]) < 1e-5
    losses = model.losses(model.prepare(batch), None)
    assert model.loss_names == ("lm loss", "mtp_1 loss", "mtp_2 loss")[: len(losses)]
    means = torch.stack([loss.summed / loss.count for loss in losses])
    assert _relative(means[1:], golden["mtp"]) < 1e-5
    (means * torch.tensor([loss.weight for loss in losses])).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert _relative(parameter.grad, golden[f"gradient.{name}"]) < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_the_keys_of_torch_dist_are_megatrons(kind: str) -> None:
    wanted = json.loads((FIXTURES / "keys.json").read_text())
    stacking = stacking_of(config_of(kind))
    ours = {name: stacking.slot(name).key for name in GPT(config_of(kind), 40, device="meta").state_dict()}
    theirs = {name: key for name, key in wanted["keys"][kind].items() if name.startswith("mtp.")}
    assert {name: key for name, key in ours.items() if name.startswith("mtp.")} == theirs
    states = sorted(key for key in stacking.extra_state_objects() if key.startswith("mtp."))
    assert states == wanted["extra_states"][kind]


def test_megatrons_count_of_operations() -> None:
    """Its formula: layers of prediction count as the last one, with 3 D + 2 D^2 and the logits once more for each."""
    more = step_flops(config_of("mixture"), 40, 16, 2)
    less = step_flops(config_of("mixture", mtp_num_layers=None), 40, 16, 2)
    attention, width = 16 * 16 * 4 + 16 * 16, (2 * 8 + 6) * 3 * 16
    assert more - less == pytest.approx(6 * 32 * (attention + width + 3 * 16 + 2 * 16 * 16 + 16 * 40))
