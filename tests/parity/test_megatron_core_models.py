"""Models of options drawn at random compute what the real Megatron's do: initial weights, losses, logits, gradients.

Never a dependency: runs where MEGALITH_MEGATRON_CORE names a folder with megatron-core 0.16.1 (`test_megatron_core`).
The goldens hold some twenty combinations of options, chosen by hand; here they meet each other.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.bert import Bert
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise_as_megatron_cpu
from megalith.models.t5 import T5
from megalith.train.moe import begin_step

from .megatron_core_models import DECODED, LENGTH, VOCABULARY, padding
from .test_megatron_core import core  # noqa: F401

CASES = 60
KINDS = ("gpt", "mixture", "bert", "t5")


class Draw:
    """Options for Megatron, of one seed.

    Attributes:
        fields: of its TransformerConfig.
        model: arguments of its models; what `megatron_core_models` makes of them is said there.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.random = random.Random(f"{kind} {seed}")
        self.fields: dict[str, Any] = {}
        self.model: dict[str, Any] = {}
        self._sizes()
        if kind in ("gpt", "mixture"):
            self._attention()
        if kind == "mixture":
            self._experts()
        elif kind == "bert":
            self.model["add_binary_head"] = self._now(0.6)
            self.model["token_types"] = 2 if self.model["add_binary_head"] else self._one(0, 2)
        elif kind == "t5":
            self.model["decoder_layers"] = self._one(1, 2, 3)
            self.fields.pop("num_query_groups", None)
            if self._now(0.2):
                self.model.pop("rotary_percent", None)
                self.model |= {
                    "position_embedding_type": "relative",
                    "relative_attention_num_buckets": self._one(8, 32),
                }
        if self._now(0.3):
            self.fields["embedding_init_method_std"] = 1.0

    def _now(self, probability: float) -> bool:
        return self.random.random() < probability

    def _one(self, *of: Any) -> Any:
        return self.random.choice(of)

    def _sizes(self) -> None:
        heads, width = self._one(2, 4), self._one(8, 12, 16)
        self.layers = self._one(1, 2, 3)
        self.fields |= {
            "num_layers": self.layers,
            "hidden_size": self._one(heads * width, 48),
            "num_attention_heads": heads,
            "ffn_hidden_size": self._one(24, 40, 64),
            "normalization": self._one("LayerNorm", "RMSNorm"),
            "add_bias_linear": self._now(0.5),
            "add_qkv_bias": self._now(0.3),
            "layernorm_epsilon": self._one(1e-5, 1e-5, 1e-6, 1e-3),
            "init_method_std": self._one(0.02, 0.02, 0.006, 0.1),
        }
        self.fields |= {"kv_channels": width} if self._now(0.3) else {}
        self.fields |= {"num_query_groups": self._one(1, 2, heads)} if self._now(0.5) else {}
        self.model |= {
            "activation": self._one("gelu", "swiglu", "geglu", "squared_relu"),
            "position_embedding_type": self._one("learned_absolute", "rope"),
            "share_embeddings_and_output_weights": self._now(0.5),
        }
        if self.model["position_embedding_type"] == "rope":
            self.model["rotary_percent"] = self._one(1.0, 0.5, 0.25)
            self.fields["rotary_interleaved"] = self._now(0.3)

    def _attention(self) -> None:
        """What only GPT has."""
        some = self._one(self.layers, [1] + [0] * (self.layers - 1))
        if self.model["position_embedding_type"] == "rope":
            self.model |= {
                "rotary_base": self._one(10000, 500000),
                "seq_len_interpolation_factor": self._one(None, 2.0),
            }
            self.model |= {"rope_scaling": True, "rope_scaling_factor": self._one(8.0, 32.0)} if self._now(0.3) else {}
            self.fields |= {"no_rope_freq": some} if self._now(0.3) else {}
        elif self._now(0.3):
            self.model["position_embedding_type"] = "none"
        if self._now(0.3):
            self.model["activation"] = "quick_geglu"
            self.fields |= {"glu_linear_offset": 1.0, "activation_func_clamp_value": self._one(None, 7.0, 0.05)}
        self.fields["attention_softmax_in_fp32"] = self._now(0.5)
        self.fields |= self._one({}, {"qk_layernorm": True}, {"apply_query_key_layer_scaling": True})
        if not self.fields.get("qk_layernorm") and self._now(0.2):
            self.model["qk_l2_norm"] = True
        self.fields |= {"window_size": self._one([4, 0], [9, 0])} if self._now(0.2) else {}
        self.fields |= {"window_attn_skip_freq": some} if "window_size" in self.fields and self._now(0.5) else {}
        self.fields |= {"softmax_type": self._one("off-by-one", "learnable")} if self._now(0.3) else {}
        self.fields |= self._one({}, {}, {"attention_output_gate": True}, {"embedding_init_method_std": 1.0})

    def _experts(self) -> None:
        experts, chosen = self._one(4, 8), self._one(1, 2, 3)
        kinds = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none", "sinkhorn", ["aux_loss", "seq_aux_loss"])
        balance = self._one(*kinds)
        self.fields |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": self._one(16, 24),
            "moe_router_topk": chosen,
            "moe_router_load_balancing_type": balance,
            "moe_aux_loss_coeff": [0.02, 0.01] if isinstance(balance, list) else 0.05 if "aux" in balance else 0.0,
            "moe_z_loss_coeff": self._one(None, 1e-2),
            "moe_router_dtype": self._one(None, "fp32", "fp64"),
            "moe_token_dispatcher_type": "alltoall",
            "moe_layer_freq": self._one(1, [0] * (self.layers > 1) + [1] * (self.layers - (self.layers > 1))),
        }
        self.fields |= {"moe_latent_size": self._one(8, 20)} if self._now(0.3) else {}
        if balance == "sinkhorn":
            return
        if self._now(0.5):
            self.fields |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": self._now(0.6)}
        if chosen == 1 and self._now(0.5):
            self.fields["moe_apply_probs_on_input"] = True
        self.fields["moe_router_pre_softmax"] = chosen == 1 or self._now(0.4)
        self.fields |= {"moe_router_topk_scaling_factor": 2.5} if self._now(0.3) else {}
        if chosen == 2 and self._now(0.5):
            self.fields |= {"moe_router_num_groups": 2, "moe_router_group_topk": self._one(1, 2)}
        if not self.fields["add_bias_linear"] and self._now(0.5):  # Megatron's shared experts have no biases
            self.fields |= {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": self._now(0.5)}
        if self._now(0.3):
            pads = self._now(0.4)
            self.fields |= {"moe_expert_capacity_factor": self._one(0.5, 1.0), "moe_pad_expert_input_to_capacity": pads}


OTHER_NAMES = {
    "layernorm_epsilon": "norm_epsilon",
    "num_moe_experts": "num_experts",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "rope_scaling": "use_rope_scaling",
    "add_binary_head": "bert_binary_head",
    "decoder_layers": "decoder_num_layers",
}
AS_TEXT = ("no_rope_freq", "window_attn_skip_freq", "moe_layer_freq")


def config_of(kind: str, draw: Draw) -> ModelConfig:
    """The same as our settings."""
    own = {OTHER_NAMES.get(name, name): value for name, value in {**draw.fields, **draw.model}.items()}
    activation = own.pop("activation")
    own |= {} if activation == "gelu" else {activation: True}
    own |= {name: str(own[name]) for name in AS_TEXT if name in own}
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        if name in own:
            own[name] = tuple(own[name]) if isinstance(own[name], list) else (own[name],)
    if "window_size" in own:
        own["window_size"] = "({},{})".format(*own["window_size"])
    if kind == "bert":
        own["bert_token_types"] = bool(own.pop("token_types"))
    own["untie_embeddings_and_output_weights"] = not own.pop("share_embeddings_and_output_weights")
    return ModelConfig(
        model_family=kind if kind in ("bert", "t5") else "gpt",
        max_position_embeddings=LENGTH,
        group_query_attention="num_query_groups" in own,
        final_layernorm=kind != "t5",  # Megatron's local T5 has none
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_gelu_fusion=False,
        transformer_impl="local",
        **own,
    )


def _close(found: Tensor, wanted: Tensor, what: str, least: float = 0.0) -> None:
    error = float((found.detach().double() - wanted.double()).abs().max())
    assert error <= 1e-4 * max(float(wanted.double().abs().max()), least), what


def _losses(model: GPT | Bert | T5, kept: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The losses of the tokens, without padding, and what is differentiated."""
    if isinstance(model, GPT):
        begin_step([model], 1.0)
        losses = model(kept["ids"], labels_BS=kept["labels"])
        return losses, losses.mean()
    if isinstance(model, T5):
        absent, behind = padding(LENGTH), padding(DECODED)
        losses = (
            model(kept["ids"], kept["answer"], padding_BE=absent, padding_BS=behind, labels_BS=kept["labels"]) * ~behind
        )
        return losses, losses.mean()
    told = {"padding_BS": padding(LENGTH)} | ({"types_BS": kept["types"]} if model.config.bert_token_types else {})
    losses = model(kept["ids"], labels_BS=kept["labels"], **told) * ~padding(LENGTH)
    if "order" not in kept:
        return losses, losses.mean()
    order = model.order_logits(model.hidden_states(kept["ids"], **told)).float()
    _close(order, kept["order"], "the order of the texts")
    return losses, losses.mean() + order.square().mean()


def compare(kind: str, draw: Draw, seed: int, kept: dict[str, Tensor]) -> None:
    config = config_of(kind, draw)
    model: GPT | Bert | T5 = {"bert": Bert, "t5": T5}.get(kind, GPT)(config, VOCABULARY)
    named = dict(model.train().named_parameters())
    initial = {name.removeprefix("initial."): value for name, value in kept.items() if name.startswith("initial.")}
    assert set(named) == set(initial)
    initialise_as_megatron_cpu(model, torch.Generator().manual_seed(seed))
    assert [name for name, parameter in named.items() if not torch.equal(parameter, initial[name])] == []
    if config.position_embedding_type == "relative":
        return
    for name, parameter in named.items():
        parameter.data.copy_(kept[f"weight.{name}"])
    losses, result = _losses(model, kept)
    _close(losses, kept["losses"], "losses")
    result.backward()
    if isinstance(model, GPT):
        with torch.no_grad():
            _close(model(kept["ids"]), kept["logits"], "logits")
    for name, parameter in named.items():
        wanted = kept.get(f"gradient.{name}", torch.zeros(1))
        # The bias of the norm of keys has none but for rounding: what is added to all keys alike moves no probability.
        least = 1e-3 if name.endswith("k_layernorm.bias") else 1e-6
        _close(parameter.grad if parameter.grad is not None else torch.zeros(1), wanted, name, least)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_options_drawn_at_random(core: Path, tmp_path: Path, kind: str) -> None:  # noqa: F811
    draws = [Draw(kind, seed) for seed in range(CASES)]
    family = kind if kind in ("bert", "t5") else "gpt"
    cases = [
        {"family": family, "seed": seed, "config": draw.fields, "model": draw.model} for seed, draw in enumerate(draws)
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("megatron_core_models.py")
    environ = {**os.environ, "PYTHONPATH": str(core), "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(script), str(tmp_path / "cases.json"), str(tmp_path)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    for seed, draw in enumerate(draws):
        try:
            compare(kind, draw, seed, load_file(tmp_path / f"{seed}.safetensors"))
        except Exception as error:
            raise AssertionError(f"case {seed}: {draw.fields} {draw.model}") from error
