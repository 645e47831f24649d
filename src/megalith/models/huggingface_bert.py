"""BERT in Hugging Face's config.json and in our `ModelConfig`, either way: as published, and as Megatron has it.

`bert` is BERT as published: a norm behind the embedding and behind each residual sum. With the residual branch taken
behind a norm (`--apply-residual-connection-post-layernorm`) the layers of Megatron are the same layers, and their norms
stand one place further on:

    embeddings.LayerNorm                       input_layernorm of the first layer
    layer l attention.output.LayerNorm         pre_mlp_layernorm of layer l
    layer l output.LayerNorm                   input_layernorm of layer l + 1; behind the last layer final_layernorm

`megatron-bert` is that of Megatron: the norms stand before the branches, and there is one behind the last layer.

`BertForPreTraining` has the head that tells two texts apart; `BertForMaskedLM` has the types of tokens and no such
head.
"""

from __future__ import annotations

from typing import Any

from megalith.config import ModelConfig
from megalith.models.huggingface_reading import Reading

ABSENT = {"tie_word_embeddings": True, "layer_norm_eps": 1e-12, "type_vocab_size": 2}
"""What a key that is not in config.json means."""
MEGATRON = "megatron-bert"
ARCHITECTURES = {"bert": "BertForPreTraining", MEGATRON: "MegatronBertForPreTraining"}
"""By `model_type`."""
MASKED_LM = {"bert": "BertForMaskedLM", MEGATRON: "MegatronBertForMaskedLM"}

_OF_THE_POOLER = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "classifier_dropout"),
)


def read(reading: Reading, kind: str) -> ModelConfig:
    """The architecture; with the head that tells two texts apart, of which a config.json says nothing."""
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
        apply_residual_connection_post_layernorm=kind == "bert",
    )


def unlike(model: ModelConfig, kind: str) -> tuple[dict[str, Any], dict[str, bool]]:
    """What a model must be to be one of theirs: settings with their values, and what is to hold."""
    wanted = {
        "apply_residual_connection_post_layernorm": kind == "bert",
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "gated": False,
        "add_bias_linear": True,
        "head_norm": "",
        "untie_embeddings_and_output_weights": False,
    }
    fits = {
        "one key and value head for each query head": model.query_groups == model.num_attention_heads,
        "the exact GELU": model.activation == "gelu_erf",
        "heads that make up the hidden size": model.head_size * model.num_attention_heads == model.hidden_size,
        "types of tokens": model.has_token_types,
    }
    return wanted, fits


def config_of(model: ModelConfig, kind: str) -> dict[str, Any]:
    """The keys of config.json that say what the model is."""
    return {
        **({} if model.bert_binary_head else {"architectures": [MASKED_LM[kind]]}),
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
