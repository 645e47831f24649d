"""BERT in Hugging Face's config.json and in our `ModelConfig`, either way: as published, and as Megatron has it.

`bert` is BERT as published: a norm after the embedding and after each residual sum. With residual branches that start
after the norm (`--apply-residual-connection-post-layernorm`) Megatron computes the same; its norms are named by the
layer that follows:

    embeddings.LayerNorm                       input_layernorm of the first layer
    layer l attention.output.LayerNorm         pre_mlp_layernorm of layer l
    layer l output.LayerNorm                   input_layernorm of layer l + 1; final_layernorm for the last

`megatron-bert` is Megatron's default: norms before the branches, and one after the last layer.

`BertForPreTraining` has the head for the order of two texts; `BertForMaskedLM` has token types without that head.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megalith.config import ModelConfig
from megalith.models import huggingface_tensors as tensors
from megalith.models.huggingface_family import Family, Reading
from megalith.models.huggingface_tensors import TheirTensor

_ABSENT = {"tie_word_embeddings": True, "layer_norm_eps": 1e-12, "type_vocab_size": 2}
_ORDER_HEAD = "cls.seq_relationship"
_IDS_MORE = 2  # [BOS] and [EOS] of Megatron's BertWordPieceTokenizer
_DIVISIBLE_BY = 128  # --make-vocab-size-divisible-by

_OF_THE_POOLER = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "classifier_dropout"),
)


class _Bert(Family):
    model_family = "bert"

    @property
    def published(self) -> bool:
        """True if the norms come after the residual sums."""
        return self.model_type == "bert"

    def read(self, reading: Reading) -> ModelConfig:
        """Read the architecture; the head for the order of two texts is assumed, as config.json does not mention it."""
        for key in _OF_THE_POOLER:
            reading.get(key)
        reading.only("hidden_act", "gelu", default="gelu")  # theirs is in the head too, where Megatron has this one
        reading.only("position_embedding_type", "absolute", default="absolute")
        reading.only("tie_word_embeddings", True, default=True)
        reading.only("type_vocab_size", 2, default=2)
        reading.only("is_decoder", False, default=False)
        reading.only("add_cross_attention", False, default=False)
        return ModelConfig(
            model_family="bert",
            num_layers=reading.size("num_hidden_layers"),
            hidden_size=reading.size("hidden_size"),
            num_attention_heads=reading.size("num_attention_heads"),
            max_position_embeddings=reading.size("max_position_embeddings", 512),
            ffn_hidden_size=reading.size("intermediate_size"),
            norm_epsilon=reading.number("layer_norm_eps"),
            bias_gelu_fusion=False,
            apply_residual_connection_post_layernorm=self.published,
            hidden_dropout=reading.probability("hidden_dropout_prob", 0.1),
            attention_dropout=reading.probability("attention_probs_dropout_prob", 0.1),
            init_method_std=reading.probability("initializer_range", 0.02),
        )

    def unlike(self, model: ModelConfig) -> tuple[dict[str, Any], dict[str, bool]]:
        wanted, fits = self.unlike_gpt2(model)
        wanted["apply_residual_connection_post_layernorm"] = self.published
        wanted["untie_embeddings_and_output_weights"] = False
        fits["the exact GELU"] = model.activation == "gelu_erf"
        fits["types of tokens"] = model.has_token_types
        return wanted, fits

    def config_of(self, model: ModelConfig, eod: int | None, special: Mapping[str, int]) -> dict[str, Any]:
        return {
            **({} if model.bert_binary_head else {"architectures": list(self.others)}),
            "attention_probs_dropout_prob": model.attention_dropout,
            "hidden_act": "gelu",
            "hidden_dropout_prob": model.hidden_dropout,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_size,
            "layer_norm_eps": model.norm_epsilon,
            "max_position_embeddings": model.max_position_embeddings,
            "num_attention_heads": model.num_attention_heads,
            "num_hidden_layers": model.num_layers,
            "pad_token_id": 0,
            "type_vocab_size": 2,
        }

    def tensors(self, model: ModelConfig, vocab_size: int) -> Iterator[TheirTensor]:
        hidden, layers = model.hidden_size, model.num_layers
        words, embeddings = (vocab_size, hidden), "bert.embeddings."
        yield tensors.whole(f"{embeddings}word_embeddings.weight", words, "embedding.word_embeddings.weight")
        positions = (model.max_position_embeddings, hidden)
        yield tensors.whole(
            f"{embeddings}position_embeddings.weight", positions, "embedding.position_embeddings.weight"
        )
        yield tensors.whole(
            f"{embeddings}token_type_embeddings.weight", (2, hidden), "embedding.tokentype_embeddings.weight"
        )
        if self.published:
            yield from tensors.norm(f"{embeddings}LayerNorm", (hidden,), "encoder.layers.0.input_layernorm", bias=True)
        for layer in range(layers):
            yield from _layer(model, layer, published=self.published)
        if not self.published:
            yield from tensors.norm("bert.encoder.ln", (hidden,), "encoder.final_layernorm", bias=True)
        if model.bert_binary_head:
            yield from tensors.linear("bert.pooler.dense", (hidden, hidden), "pooler.dense", bias=True)
        yield tensors.whole("cls.predictions.bias", (vocab_size,), "output_layer.bias")
        yield from tensors.linear("cls.predictions.transform.dense", (hidden, hidden), "lm_head.dense", bias=True)
        yield from tensors.norm("cls.predictions.transform.LayerNorm", (hidden,), "lm_head.layer_norm", bias=True)
        if model.bert_binary_head:
            yield from tensors.linear(_ORDER_HEAD, (2, hidden), "binary_head", bias=True)

    def settled(self, model: ModelConfig, names: Collection[str]) -> ModelConfig:
        """Set `bert_binary_head` by the tensors of the files: config.json does not say whether BERT has it."""
        if f"{_ORDER_HEAD}.weight" in names:
            return model
        return replace(model, bert_binary_head=False, bert_token_types=True)

    def rows(self, vocab_size: int) -> int:
        """Return the rows of the embedding; BERT's tokenizer has two more ids than its files, as in Megatron."""
        return -(-(vocab_size + _IDS_MORE) // _DIVISIBLE_BY) * _DIVISIBLE_BY


def _layer(model: ModelConfig, layer: int, *, published: bool) -> Iterator[TheirTensor]:
    """Yield the tensors of a layer; published BERT has post-norm layers, Megatron's BERT pre-norm layers."""
    theirs, ours, hidden = f"bert.encoder.layer.{layer}.", f"encoder.layers.{layer}.", model.hidden_size
    last, behind = layer == model.num_layers - 1, f"encoder.layers.{layer + 1}.input_layernorm"
    if not published:
        yield from tensors.norm(f"{theirs}attention.ln", (hidden,), f"{ours}input_layernorm", bias=True)
    for letter, name in (("q", "query"), ("k", "key"), ("v", "value")):
        for kind, columns in (("weight", (hidden,)), ("bias", ())):
            parts = tensors.heads(model, letter, 0, f"{ours}self_attention.linear_qkv.{kind}")
            yield TheirTensor(f"{theirs}attention.self.{name}.{kind}", (hidden, *columns), parts)
    attention, square = f"{theirs}attention.output.", (hidden, hidden)
    yield from tensors.linear(f"{attention}dense", square, f"{ours}self_attention.linear_proj", bias=True)
    norm = f"{attention}LayerNorm" if published else f"{theirs}ln"
    yield from tensors.norm(norm, (hidden,), f"{ours}pre_mlp_layernorm", bias=True)
    ffn = model.ffn_size
    yield from tensors.linear(f"{theirs}intermediate.dense", (ffn, hidden), f"{ours}mlp.linear_fc1", bias=True)
    yield from tensors.linear(f"{theirs}output.dense", (hidden, ffn), f"{ours}mlp.linear_fc2", bias=True)
    if published:
        norm = "encoder.final_layernorm" if last else behind
        yield from tensors.norm(f"{theirs}output.LayerNorm", (hidden,), norm, bias=True)


FAMILIES = (
    _Bert("bert", "BertForPreTraining", _ABSENT, ("BertForMaskedLM",)),
    _Bert("megatron-bert", "MegatronBertForPreTraining", _ABSENT, ("MegatronBertForMaskedLM",)),
)
