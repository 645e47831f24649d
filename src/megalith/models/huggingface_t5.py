"""T5 in Hugging Face's config.json and in our `ModelConfig`, either way: v1.0 (T5) and v1.1 (T5 v1.1, Flan-T5).

Theirs is T5 as published: no biases, RMSNorm, one table of relative positions for each stack, scores that are not
scaled. v1.0 has ReLU and the embedding for its output weight, and divides by sqrt(hidden size) what its logits are made
of; v1.1 has gated GELU and an output weight of its own, and divides nothing.

Which of the two it is, transformers 4 writes as `tie_word_embeddings`. Version 5 writes that as true always, and
`scale_decoder_outputs` beside it; there the output weight is the model's own if the files hold one.

mT5 is v1.1 under another name: it divides nothing, whatever `tie_word_embeddings` says, and counts no positions.

Source: Raffel et al. 2020, arXiv:1910.10683; Shazeer 2020, arXiv:2002.05202 for the gates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megalith.config import ModelConfig
from megalith.models import huggingface_tensors as tensors
from megalith.models.huggingface_family import Family, Reading
from megalith.models.huggingface_tensors import OUTPUT_LAYER, Part, TheirTensor

_ABSENT = {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu", "d_kv": 64}
_FEED_FORWARDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "relu": ("relu", {"relu": True}),
    "gelu": ("gelu", {"bias_gelu_fusion": False}),
    "gelu_new": ("gelu_new", {"openai_gelu": True}),
    "gated-gelu": ("gelu_new", {"geglu": True, "openai_gelu": True}),
    "gated-silu": ("silu", {"swiglu": True}),
}
"""feed_forward_proj -> dense_act_fn, and the settings here."""


class _T5(Family):
    model_family = "t5"

    def read(self, reading: Reading) -> ModelConfig:
        """Read the architecture, its output weight as `tie_word_embeddings` says."""
        heads, hidden, size = reading.size("num_heads"), reading.size("d_model"), reading.size("d_kv")
        tied = reading.flag("tie_word_embeddings")
        layers, dropout = reading.size("num_layers"), reading.probability("dropout_rate", 0.1)
        reading.only("is_decoder", False, default=False)
        reading.get("classifier_dropout")
        model = ModelConfig(
            model_family="t5",
            num_layers=layers,
            decoder_num_layers=reading.size("num_decoder_layers", layers),
            hidden_size=hidden,
            num_attention_heads=heads,
            max_position_embeddings=reading.size("n_positions", 512),
            ffn_hidden_size=reading.size("d_ff"),
            kv_channels=None if size * heads == hidden else size,
            position_embedding_type="relative",
            relative_attention_num_buckets=reading.size("relative_attention_num_buckets", 32),
            relative_attention_max_distance=reading.size("relative_attention_max_distance", 128),
            normalization="RMSNorm",
            norm_epsilon=reading.number("layer_norm_epsilon"),
            add_bias_linear=False,
            softmax_scale=1.0,
            t5_logits_bias=False,
            t5_scaled_logits=reading.flag("scale_decoder_outputs", default=tied),
            untie_embeddings_and_output_weights=not tied,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            **_feed_forward(reading),
        )
        _require_distances(reading, model)
        return model

    def unlike(self, model: ModelConfig) -> tuple[dict[str, Any], dict[str, bool]]:
        tied = not model.untie_embeddings_and_output_weights
        wanted = {
            "position_embedding_type": "relative",
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "qkv_bias": False,
            "qk_norm": "",
            "softmax_scale": 1.0,
            **({"t5_logits_bias": False} if tied else {}),
            **({} if tied and self.model_type == "t5" else {"t5_scaled_logits": False}),
        }
        return wanted, {f"one of {', '.join(_FEED_FORWARDS)} in its feed-forward layers": _kind_of(model) is not None}

    def config_of(self, model: ModelConfig, eod: int | None, special: Mapping[str, int]) -> dict[str, Any]:
        kind = _kind_of(model)
        assert kind is not None, "the family fits"
        return {
            "d_ff": model.ffn_size,
            "d_kv": model.head_size,
            "d_model": model.hidden_size,
            "decoder_start_token_id": special.get(
                "bos", special.get("pad")
            ),  # T5 has no bos: its decoder starts with pad
            "dense_act_fn": _FEED_FORWARDS[kind][0],
            "dropout_rate": model.hidden_dropout,
            "eos_token_id": special.get("eos", eod),
            "feed_forward_proj": kind,
            "is_encoder_decoder": True,
            "is_gated_act": model.gated,
            "layer_norm_epsilon": model.norm_epsilon,
            "n_positions": model.max_position_embeddings,
            "num_decoder_layers": model.num_decoder_layers,
            "num_heads": model.num_attention_heads,
            "num_layers": model.num_layers,
            "pad_token_id": 0,
            "relative_attention_max_distance": model.relative_attention_max_distance,
            "relative_attention_num_buckets": model.relative_attention_num_buckets,
            "scale_decoder_outputs": model.t5_scaled_logits,
        }

    def tensors(self, model: ModelConfig, vocab_size: int) -> Iterator[TheirTensor]:
        words, norm = (vocab_size, model.hidden_size), (model.hidden_size,)
        yield tensors.whole("shared.weight", words, "embedding.word_embeddings.weight")
        for stack, layers in model.stacks.items():
            for layer in range(layers):
                yield from _layer(model, stack, layer)
            yield from tensors.norm(f"{stack}.final_layer_norm", norm, f"{stack}.final_layernorm", bias=False)
        if model.untie_embeddings_and_output_weights:
            yield tensors.whole(OUTPUT_LAYER, words, "lm_head.output_layer.weight")

    def settled(self, model: ModelConfig, names: Collection[str]) -> ModelConfig:
        """Tie the output weight to the embedding if the files hold no output weight.

        Where config.json ties a scaled output layer to the embedding, it stays tied: old files store the weight twice.
        """
        return replace(model, untie_embeddings_and_output_weights=OUTPUT_LAYER in names and not model.t5_scaled_logits)


def _feed_forward(reading: Reading) -> dict[str, Any]:
    kind, function, gated = (reading.get(key) for key in ("feed_forward_proj", "dense_act_fn", "is_gated_act"))
    if kind not in _FEED_FORWARDS:
        reading.problems.append(f"feed_forward_proj is {kind!r}; this version has {', '.join(_FEED_FORWARDS)}")
        return {}
    known, settings = _FEED_FORWARDS[kind]
    for key, value, wanted in (
        ("dense_act_fn", function, known),
        ("is_gated_act", gated, kind.startswith("gated-")),
    ):
        if value not in (None, wanted):
            reading.problems.append(f"{key} is {value!r}; with feed_forward_proj {kind} this version has {wanted!r}")
    return settings


def _require_distances(reading: Reading, model: ModelConfig) -> None:
    count, most = model.relative_attention_num_buckets, model.relative_attention_max_distance
    if count % 2 or count < 4:
        reading.problems.append(f"relative_attention_num_buckets is {count}; this version has an even number from 4 on")
    elif most <= count // 2:
        reading.problems.append(f"relative_attention_max_distance is {most}; it must be above {count // 2}")


def _kind_of(model: ModelConfig) -> str | None:
    functions = {"relu": "relu", "gelu_erf": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
    found = functions.get(model.activation)
    if model.gated:
        found = {"gelu_new": "gated-gelu", "silu": "gated-silu"}.get(found or "")
    return found if found in _FEED_FORWARDS else None


def _layer(model: ModelConfig, stack: str, layer: int) -> Iterator[TheirTensor]:
    hidden, width, norm = model.hidden_size, model.num_attention_heads * model.head_size, (model.hidden_size,)
    theirs, ours = f"{stack}.block.{layer}.layer.", f"{stack}.layers.{layer}."
    for letter in "qkv":
        parts = tensors.heads(model, letter, 0, f"{ours}self_attention.linear_qkv.weight")
        yield TheirTensor(f"{theirs}0.SelfAttention.{letter}.weight", (width, hidden), parts)
    own = f"{ours}self_attention.linear_proj"
    yield from tensors.linear(f"{theirs}0.SelfAttention.o", (hidden, width), own, bias=False)
    if layer == 0:
        table = (model.relative_attention_num_buckets, model.num_attention_heads)
        bias = "relative_attention_bias.weight"
        yield tensors.whole(f"{theirs}0.SelfAttention.{bias}", table, f"{stack}_relative_pos_emb.{bias}")
    yield from tensors.norm(f"{theirs}0.layer_norm", norm, f"{ours}input_layernorm", bias=False)
    if stack == "decoder":
        yield from _across(model, f"{theirs}1.EncDecAttention.", f"{ours}cross_attention.")
        yield from tensors.norm(f"{theirs}1.layer_norm", norm, f"{ours}pre_cross_attn_layernorm", bias=False)
    last, ffn = f"{theirs}{2 if stack == 'decoder' else 1}.", model.ffn_size
    for number, name in enumerate(("wi_0", "wi_1") if model.gated else ("wi",)):
        part = Part(f"{ours}mlp.linear_fc1.weight", 0, number * ffn, ffn)
        yield TheirTensor(f"{last}DenseReluDense.{name}.weight", (ffn, hidden), (part,))
    yield from tensors.linear(f"{last}DenseReluDense.wo", (hidden, ffn), f"{ours}mlp.linear_fc2", bias=False)
    yield from tensors.norm(f"{last}layer_norm", norm, f"{ours}pre_mlp_layernorm", bias=False)


def _across(model: ModelConfig, theirs: str, ours: str) -> Iterator[TheirTensor]:
    """Yield cross-attention: one projection holds each head's key, then its value (`nn.cross_attention`)."""
    size, heads, hidden = model.head_size, model.num_attention_heads, model.hidden_size
    width = heads * size
    yield from tensors.linear(f"{theirs}q", (width, hidden), f"{ours}linear_q", bias=False)
    for inside, letter in enumerate("kv"):
        parts = tuple(
            Part(f"{ours}linear_kv.weight", head * size, (2 * head + inside) * size, size) for head in range(heads)
        )
        yield TheirTensor(f"{theirs}{letter}.weight", (width, hidden), parts)
    yield from tensors.linear(f"{theirs}o", (hidden, width), f"{ours}linear_proj", bias=False)


_OF_MT5 = {**_ABSENT, "feed_forward_proj": "gated-gelu", "scale_decoder_outputs": False}
FAMILIES = (
    _T5("t5", "T5ForConditionalGeneration", _ABSENT),
    _T5("mt5", "MT5ForConditionalGeneration", _OF_MT5),
)
