"""GPT-2 in Hugging Face's config.json and files, and in ours, either way. Its linear layers are stored transposed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megalith.config import ModelConfig
from megalith.models import huggingface_tensors as tensors
from megalith.models.huggingface_family import Family, Reading
from megalith.models.huggingface_positions import fits_windows
from megalith.models.huggingface_tensors import OUR_LAYER, Part, TheirTensor

PREFIX = "transformer."
"""Before the names of its tensors; files written by the bare model, as the first on the hub, are without it."""

_GELU_TANH, _GELU_ERF = ("gelu_new", "gelu_pytorch_tanh"), ("gelu",)
_ENDS = {"words": f"{PREFIX}wte.weight", "positions": f"{PREFIX}wpe.weight", "norm": f"{PREFIX}ln_f"}


class _GPT2(Family):
    def read(self, reading: Reading) -> ModelConfig:
        hidden = reading.size("n_embd")
        activation, known = reading.get("activation_function", _GELU_TANH[0]), (*_GELU_TANH, *_GELU_ERF)
        if activation not in known:
            reading.problems.append(
                f"activation_function is {activation!r}; this version has {', '.join(known)} for GPT-2"
            )
        reading.only("scale_attn_weights", True, default=True)
        reading.only("scale_attn_by_inverse_layer_idx", False, default=False)
        reading.only("add_cross_attention", False, default=False)
        return ModelConfig(
            num_layers=reading.size("n_layer"),
            hidden_size=hidden,
            num_attention_heads=reading.size("n_head"),
            max_position_embeddings=reading.size("n_positions"),
            ffn_hidden_size=reading.size("n_inner", 4 * hidden),
            norm_epsilon=reading.number("layer_norm_epsilon"),
            bias_gelu_fusion=activation in _GELU_TANH,
            untie_embeddings_and_output_weights=not reading.flag("tie_word_embeddings"),
            hidden_dropout=reading.probability("resid_pdrop", 0.1),
            attention_dropout=reading.probability("attn_pdrop", 0.1),
            init_method_std=reading.probability("initializer_range", 0.02),
        )

    def unlike(self, model: ModelConfig) -> tuple[dict[str, Any], dict[str, bool]]:
        wanted, fits = self.unlike_gpt2(model)
        fits["GELU"] = model.activation in ("gelu_tanh", "gelu_erf")
        return wanted, fits | fits_windows(model, self.model_type)

    def config_of(self, model: ModelConfig, eod: int | None, special: Mapping[str, int]) -> dict[str, Any]:
        return {
            "activation_function": _GELU_TANH[0] if model.activation == "gelu_tanh" else _GELU_ERF[0],
            "attn_pdrop": model.attention_dropout,
            "bos_token_id": eod,  # one token, <|endoftext|>, both begins and ends texts
            "embd_pdrop": model.hidden_dropout,
            "layer_norm_epsilon": model.norm_epsilon,
            "n_ctx": model.max_position_embeddings,  # llama.cpp's converter asks for it
            "n_embd": model.hidden_size,
            "n_head": model.num_attention_heads,
            "n_inner": model.ffn_size,
            "n_layer": model.num_layers,
            "n_positions": model.max_position_embeddings,
            "resid_pdrop": model.hidden_dropout,
        }

    def tensors(self, model: ModelConfig, vocab_size: int) -> Iterator[TheirTensor]:
        return tensors.of_decoder(model, vocab_size, _ENDS, _layer)


def _layer(model: ModelConfig, layer: int) -> Iterator[TheirTensor]:
    theirs, ours, hidden = f"{PREFIX}h.{layer}.", f"{OUR_LAYER}{layer}.", model.hidden_size

    def linear(name: str, parameter: str, inputs: int, outputs: int) -> Iterator[TheirTensor]:
        yield tensors.whole(f"{theirs}{name}.weight", (inputs, outputs), f"{ours}{parameter}.weight", transposed=True)
        yield tensors.whole(f"{theirs}{name}.bias", (outputs,), f"{ours}{parameter}.bias")

    yield from tensors.norm(f"{theirs}ln_1", (hidden,), f"{ours}input_layernorm", bias=True)
    qkv = f"{ours}self_attention.linear_qkv"
    yield TheirTensor(f"{theirs}attn.c_attn.weight", (hidden, 3 * hidden), _all_heads(model, f"{qkv}.weight"), True)
    yield TheirTensor(f"{theirs}attn.c_attn.bias", (3 * hidden,), _all_heads(model, f"{qkv}.bias"))
    yield from linear("attn.c_proj", "self_attention.linear_proj", hidden, hidden)
    yield from tensors.norm(f"{theirs}ln_2", (hidden,), f"{ours}pre_mlp_layernorm", bias=True)
    yield from linear("mlp.c_fc", "mlp.linear_fc1", hidden, model.ffn_size)
    yield from linear("mlp.c_proj", "mlp.linear_fc2", model.ffn_size, hidden)


def _all_heads(model: ModelConfig, parameter: str) -> tuple[Part, ...]:
    """Return the parts of the fused projection: all queries, all keys, all values."""
    parts = (tensors.heads(model, letter, n * model.hidden_size, parameter) for n, letter in enumerate("qkv"))
    return tuple(part for of_kind in parts for part in of_kind)


FAMILIES = (_GPT2("gpt2", "GPT2LMHeadModel", {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5}),)
