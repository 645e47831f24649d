"""Llama and those like it in Hugging Face's config.json and files, and in ours, either way: Mistral, Qwen2, Qwen3, and
with experts Mixtral and Qwen3-MoE (`huggingface_experts`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from megalith.config import ModelConfig
from megalith.models import huggingface_experts
from megalith.models import huggingface_tensors as tensors
from megalith.models.huggingface_experts import expert_tensors
from megalith.models.huggingface_family import Family, Reading
from megalith.models.huggingface_positions import (
    fits_windows,
    rope_scaling,
    rotary,
    tokens_of_window,
    windows_of,
    windows_of_qwen,
)
from megalith.models.huggingface_tensors import LLAMA_ENDS, LLAMA_LAYER, OUR_LAYER, TheirTensor

_SILU = ("silu", "swish")
_WITH_HEAD_NORMS = ("qwen3", "qwen3_moe")
# Defaults of transformers' Qwen2Config and Qwen3Config.
_WINDOW_OF_QWEN = {"sliding_window": 4096, "max_window_layers": 28}


class _Llama(Family):
    def read(self, reading: Reading) -> ModelConfig:
        kind = self.model_type
        heads, hidden = reading.size("num_attention_heads"), reading.size("hidden_size")
        groups = reading.size("num_key_value_heads", heads)
        head_size = reading.size("head_dim", max(1, hidden // heads))
        positions, layers = reading.size("max_position_embeddings", 2048), reading.size("num_hidden_layers")
        activation = reading.get("hidden_act", _SILU[0])
        if activation not in _SILU:
            reading.problems.append(f"hidden_act is {activation!r}; this version has silu with a gate for {kind}")
        experts = huggingface_experts.read(reading, kind, layers) if kind in huggingface_experts.ABSENT else {}
        windows = {} if kind == "qwen3_moe" else windows_of(reading, kind, positions, layers)
        scaling = rotary(reading, positions)
        return ModelConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            max_position_embeddings=positions,
            group_query_attention=groups != heads,
            num_query_groups=groups if groups != heads else 1,
            ffn_hidden_size=reading.size("intermediate_size"),
            kv_channels=None if head_size * heads == hidden else head_size,
            normalization="RMSNorm",
            norm_epsilon=reading.number("rms_norm_eps", 1e-6),
            swiglu=True,
            add_bias_linear=_all_biases(reading, kind),
            add_qkv_bias=kind == "qwen2",
            qk_layernorm=kind in _WITH_HEAD_NORMS,
            untie_embeddings_and_output_weights=not reading.flag("tie_word_embeddings"),
            hidden_dropout=0.0,
            attention_dropout=reading.probability("attention_dropout", 0.0),
            init_method_std=reading.probability("initializer_range", 0.02),
            **windows,
            **scaling,
            **experts,
        )

    def unlike(self, model: ModelConfig) -> tuple[dict[str, Any], dict[str, bool]]:
        kind = self.model_type
        wanted = {
            "mixture": kind in huggingface_experts.ABSENT,
            "rotary_interleaved": False,
            "normalization": "RMSNorm",
            "activation": "silu",
            "gated": True,
            "qk_norm": "RMSNorm" if kind in _WITH_HEAD_NORMS else "",
            "qkv_bias": kind == "qwen2" or (kind == "llama" and model.add_bias_linear),
            "add_bias_linear": kind == "llama" and model.add_bias_linear,
        }
        both = model.use_rope_scaling and model.rotary_seq_len_interpolation_factor is not None
        fits = {
            "rotary positions": model.position_embedding_type in ("rope", "yarn"),
            "heads that are rotated whole, in every layer": model.rotary_size == model.head_size
            and all(model.rotated_layers),
            "one scaling of rotary positions": model.position_embedding_type == "yarn" or not both,
        }
        if kind == "qwen2":
            whole = model.head_size * model.num_attention_heads == model.hidden_size
            fits["heads that make up the hidden size"] = whole
        if kind in huggingface_experts.ABSENT:
            fits |= huggingface_experts.unlike(model, kind)
        return wanted, fits | fits_windows(model, kind)

    def config_of(self, model: ModelConfig, eod: int | None, special: Mapping[str, int]) -> dict[str, Any]:
        only: dict[str, Callable[[], dict[str, Any]]] = {
            "llama": lambda: {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear},
            "mistral": lambda: {"sliding_window": tokens_of_window(model)},
            "qwen2": lambda: windows_of_qwen(model),
            "qwen3": lambda: {"attention_bias": False, **windows_of_qwen(model)},
            "mixtral": lambda: {"sliding_window": tokens_of_window(model)},
            "qwen3_moe": lambda: {"attention_bias": False},
        }
        # Qwen2Config has no head_dim: its heads always make up the hidden size.
        heads = {} if self.model_type == "qwen2" else {"head_dim": model.head_size}
        return {
            "attention_dropout": model.attention_dropout,
            **heads,
            "hidden_act": _SILU[0],
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_size,
            "max_position_embeddings": model.max_position_embeddings,
            "num_attention_heads": model.num_attention_heads,
            "num_hidden_layers": model.num_layers,
            "num_key_value_heads": model.query_groups,
            "rms_norm_eps": model.norm_epsilon,
            "rope_scaling": rope_scaling(model),
            "rope_theta": float(model.rotary_base),
            **only[self.model_type](),
            **(huggingface_experts.config_of(model, self.model_type) if model.mixture else {}),
        }

    def tensors(self, model: ModelConfig, vocab_size: int) -> Iterator[TheirTensor]:
        return tensors.of_decoder(model, vocab_size, LLAMA_ENDS, partial(_layer, self.model_type))


def _all_biases(reading: Reading, kind: str) -> bool:
    """Return whether all linear layers have biases; the model here has all, none, or those of Qwen2."""
    attention, mlp = reading.flag("attention_bias"), reading.flag("mlp_bias")
    if kind != "llama" and (attention or mlp):
        reading.problems.append(f"{'attention_bias' if attention else 'mlp_bias'} is true; {kind} is read without it")
    elif attention != mlp:
        has, lacks = ("attention_bias", "mlp_bias") if attention else ("mlp_bias", "attention_bias")
        reading.problems.append(f"{has} is true and {lacks} is not; this version has both or neither")
    return attention and mlp


def _layer(model_type: str, model: ModelConfig, layer: int) -> Iterator[TheirTensor]:
    theirs, ours, hidden = f"{LLAMA_LAYER}{layer}.", f"{OUR_LAYER}{layer}.", model.hidden_size
    attention, size = f"{ours}self_attention.", model.head_size

    def kinds(bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Return the tensors of a linear layer, each with its shape after the rows."""
        return iter([("weight", (hidden,)), ("bias", ())] if bias else [("weight", (hidden,))])

    for letter, heads in (("q", model.num_attention_heads), ("k", model.query_groups), ("v", model.query_groups)):
        for kind, columns in kinds(model.qkv_bias):
            parts = tensors.heads(model, letter, 0, f"{attention}linear_qkv.{kind}")
            yield TheirTensor(f"{theirs}self_attn.{letter}_proj.{kind}", (heads * size, *columns), parts)
    context = model.num_attention_heads * size
    yield from tensors.linear(
        f"{theirs}self_attn.o_proj", (hidden, context), f"{attention}linear_proj", model.add_bias_linear
    )
    if model.qk_layernorm:
        for letter in "qk":
            yield from tensors.norm(
                f"{theirs}self_attn.{letter}_norm", (size,), f"{attention}{letter}_layernorm", bias=False
            )
    if model.experts[layer]:
        yield from expert_tensors(model_type, model, layer)
    else:
        yield from tensors.gated(f"{theirs}mlp.", f"{ours}mlp.", model, model.ffn_size)
    yield from tensors.norm(f"{theirs}input_layernorm", (hidden,), f"{ours}input_layernorm", bias=False)
    yield from tensors.norm(f"{theirs}post_attention_layernorm", (hidden,), f"{ours}pre_mlp_layernorm", bias=False)


FAMILIES = (
    _Llama("llama", "LlamaForCausalLM"),
    _Llama("mistral", "MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}),
    _Llama("qwen2", "Qwen2ForCausalLM", {"num_key_value_heads": 32, **_WINDOW_OF_QWEN}),
    _Llama("qwen3", "Qwen3ForCausalLM", {"num_key_value_heads": 32, "head_dim": 128, **_WINDOW_OF_QWEN}),
    _Llama("mixtral", "MixtralForCausalLM", huggingface_experts.ABSENT["mixtral"]),
    _Llama("qwen3_moe", "Qwen3MoeForCausalLM", huggingface_experts.ABSENT["qwen3_moe"]),
)
