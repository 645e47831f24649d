"""config.json and `ModelConfig`: real configurations of the hub, what is refused, and there and back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from megalith.config import ModelConfig
from megalith.errors import CheckpointError
from megalith.models.huggingface import FAMILIES, config_of_model, family_for, model_of_config
from megalith.nn.rope import Yarn

GPT2: dict[str, Any] = {  # openai-community/gpt2
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
LLAMA_3_2: dict[str, Any] = {  # meta-llama/Llama-3.2-1B
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
MISTRAL: dict[str, Any] = {  # mistralai/Mistral-7B-v0.3
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 32768,
}
QWEN2: dict[str, Any] = {  # Qwen/Qwen2.5-0.5B
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3: dict[str, Any] = {  # Qwen/Qwen3-0.6B
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
BERT_BASE_CHINESE = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "directionality": "bidi",
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
    "type_vocab_size": 2,
    "vocab_size": 21128,
}
MEGATRON_BERT: dict[str, Any] = {  # the defaults of its class, which are those of the model of 345M
    "architectures": ["MegatronBertForPreTraining"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "megatron-bert",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": 29056,
}
MIXTRAL: dict[str, Any] = {  # mistralai/Mixtral-8x7B-v0.1
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_MOE: dict[str, Any] = {  # Qwen/Qwen3-30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DEEPSEEK_V3: dict[str, Any] = {  # deepseek-ai/DeepSeek-V3, without its fp8 (quantization_config)
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
FLAN_T5: dict[str, Any] = {  # google/flan-t5-small
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 1024,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "num_layers": 8,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "transformers_version": "4.23.1",
    "use_cache": True,
    "vocab_size": 32128,
}
MT5: dict[str, Any] = {  # google/mt5-small, which counts no positions
    **{key: value for key, value in FLAN_T5.items() if key not in ("n_positions", "output_past")},
    "architectures": ["MT5ForConditionalGeneration"],
    "model_type": "mt5",
    "tokenizer_class": "T5Tokenizer",
    "vocab_size": 250112,
}
ALL = {
    "t5": FLAN_T5,
    "mt5": MT5,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK_V3,
    "gpt2": GPT2,
    "llama": LLAMA_3_2,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "bert": BERT_BASE_CHINESE,
    "megatron-bert": MEGATRON_BERT,
}
OF_LLAMA = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False}

OF_T5_1_1 = {
    "model_family": "t5",
    "num_decoder_layers": 8,
    "head_size": 64,
    "ffn_size": 1024,
    "activation": "gelu_tanh",
    "gated": True,
    "position_embedding_type": "relative",
    "normalization": "RMSNorm",
    "softmax_scale": 1.0,
    "untie_embeddings_and_output_weights": True,
    "t5_scaled_logits": False,
}

WANTED: dict[str, dict[str, Any]] = {
    "t5": OF_T5_1_1,
    "mt5": OF_T5_1_1,
    "mixtral": {
        **OF_LLAMA,
        "experts": (8,) * 32,
        "expert_size": 14336,
        "moe_router_topk": 2,
        "moe_router_pre_softmax": False,
        "moe_aux_loss_coeff": (0.02,),
        "rotary_base": 1000000,
        "windows": (None,) * 32,
    },
    "qwen3_moe": {
        **OF_LLAMA,
        "qk_layernorm": True,
        "experts": (128,) * 48,
        "expert_size": 768,
        "moe_router_topk": 8,
        "moe_router_pre_softmax": False,
    },
    "deepseek_v3": {
        **OF_LLAMA,
        "experts": (0,) * 3 + (256,) * 58,
        "expert_size": 2048,
        "ffn_size": 18432,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_topk_scaling_factor": 2.5,
        "rotary_kind": "yarn",
        "rotary_scaling_factor": 40.0,
        "latent_query_size": 192,
        "q_lora_rank": 1536,
    },
    "bert": {
        "model_family": "bert",
        "num_layers": 12,
        "hidden_size": 768,
        "ffn_size": 3072,
        "activation": "gelu_erf",
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-12,
        "apply_residual_connection_post_layernorm": True,
        "max_position_embeddings": 512,
        "qkv_bias": True,
        "untie_embeddings_and_output_weights": False,
    },
    "megatron-bert": {
        "model_family": "bert",
        "num_layers": 24,
        "hidden_size": 1024,
        "activation": "gelu_erf",
        "norm_epsilon": 1e-12,
        "final_layernorm": True,
        "apply_residual_connection_post_layernorm": False,
        "untie_embeddings_and_output_weights": False,
    },
    "gpt2": {
        "num_layers": 12,
        "hidden_size": 768,
        "head_size": 64,
        "ffn_size": 3072,
        "activation": "gelu_tanh",
        "normalization": "LayerNorm",
        "max_position_embeddings": 1024,
        "qkv_bias": True,
        "untie_embeddings_and_output_weights": False,
    },
    "llama": {
        **OF_LLAMA,
        "num_layers": 16,
        "query_groups": 8,
        "rotary_base": 500000,
        "use_rope_scaling": True,
        "rope_scaling_factor": 32.0,
        "untie_embeddings_and_output_weights": False,
    },
    "mistral": {**OF_LLAMA, "ffn_size": 14336, "head_size": 128, "untie_embeddings_and_output_weights": True},
    "qwen2": {**OF_LLAMA, "qkv_bias": True, "query_groups": 2, "head_size": 64, "qk_layernorm": False},
    "qwen3": {**OF_LLAMA, "qkv_bias": False, "qk_layernorm": True, "head_size": 128, "norm_epsilon": 1e-6},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_configurations_of_the_hub(kind: str) -> None:
    found = model_of_config(ALL[kind], "config.json")
    assert found.family.model_type == kind and found.vocab_size == ALL[kind]["vocab_size"]
    assert {name: getattr(found.model, name) for name in WANTED[kind]} == WANTED[kind]


def test_transformers_5_writes_rope_otherwise() -> None:
    old = {key: value for key, value in LLAMA_3_2.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")}
    new = {
        **old,
        "dtype": "bfloat16",
        "rope_parameters": {**LLAMA_3_2["rope_scaling"], "rope_theta": LLAMA_3_2["rope_theta"]},
    }
    assert model_of_config(new, "").model == model_of_config(LLAMA_3_2, "").model


# What is changed in a configuration -> what the message contains.
REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("llama", {"model_type": "gemma2"}, ("model_type 'gemma2'", "gpt2, llama, mistral, qwen2, qwen3")),
    ("llama", {"model_type": None}, ("model_type None",)),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, ("ForSequenceClassification", "LlamaForCausalLM")),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ("rope_type 'longrope'", "llama3 and yarn")),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}, ("factor of a linear rope is 2.5",)),
    ("llama", {"rope_scaling": {"rope_type": "yarn"}}, ("the yarn rope is", "factor?")),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "ramp": 1}}, ("the yarn rope is", "ramp?")),
    (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 2.0}},
        ("attention_factor of the yarn rope is 2.0, and its factor is 1",),
    ),
    ("llama", {"rope_scaling": {**LLAMA_3_2["rope_scaling"], "low_freq_factor": 2.0}}, ("low_freq_factor", "2.0", "1")),
    ("llama", {"rope_scaling": {**LLAMA_3_2["rope_scaling"], "factor": "big"}}, ("factor", "'big'")),
    ("llama", {"rope_theta": 10000.5}, ("rope_theta is 10000.5", "whole number")),
    ("llama", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor is 0.5",)),
    ("llama", {"hidden_act": "relu"}, ("hidden_act is 'relu'",)),
    ("llama", {"attention_bias": True}, ("attention_bias is true and mlp_bias is not",)),
    ("llama", {"mlp_bias": True}, ("mlp_bias is true and attention_bias is not",)),
    ("llama", {"num_hidden_layers": 0}, ("num_hidden_layers is 0",)),
    ("llama", {"num_hidden_layers": True}, ("num_hidden_layers is True",)),
    ("llama", {"hidden_size": "2048"}, ("hidden_size is '2048'",)),
    ("llama", {"vocab_size": None}, ("vocab_size is missing",)),
    ("llama", {"num_key_value_heads": 5}, ("32 heads do not divide over 5",)),
    ("llama", {"quantization_config": {"bits": 4}}, ("quantization_config", "is not known")),
    ("mistral", {"attention_bias": True}, ("attention_bias is true", "mistral")),
    ("qwen3", {"layer_types": ["linear_attention"] * 28}, ("layer_types", "full_attention or sliding_attention")),
    ("qwen3", {"attention_bias": True}, ("attention_bias is true", "qwen3")),
    ("qwen3", {"num_experts": 8}, ("num_experts (8) is not known",)),
    ("gpt2", {"activation_function": "relu"}, ("activation_function is 'relu'", "gelu_new")),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx is True",)),
    ("gpt2", {"scale_attn_weights": False}, ("scale_attn_weights is False",)),
    ("gpt2", {"n_head": 11}, ("768 does not divide into 11 heads",)),
]


def test_windows_become_settings() -> None:
    mistral = model_of_config({**ALL["mistral"], "sliding_window": 4096}, "").model
    assert set(mistral.windows) == {4095}
    change = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}
    qwen = model_of_config({**ALL["qwen2"], **change}, "").model
    assert qwen.windows[:4] == (None, None, 4095, 4095)
    types = ["sliding_attention", "full_attention"] * 14
    mixed = {"layer_types": types, "use_sliding_window": True, "sliding_window": 9}
    assert model_of_config({**ALL["qwen3"], **mixed}, "").model.windows[:3] == (8, None, 8)


@pytest.mark.parametrize("factor", [1.0, 1.3, None])
def test_the_length_of_heads_under_yarn_comes_back(factor: float | None) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "attention_factor": factor}
    model = model_of_config({**ALL["llama"], "rope_scaling": scaling}, "").model
    amplitude = Yarn(4.0, 1, 1.0, mscale=model.mscale, mscale_all_dim=model.mscale_all_dim).amplitude
    assert amplitude == pytest.approx(1 + 0.1 * math.log(4) if factor is None else factor)
    written = config_of_model(family_for(model, "llama"), model, 64, "float32")
    assert model_of_config(written, "").model.mscale == pytest.approx(model.mscale)


def test_the_length_before_yarn_is_written_where_megatron_assumes_it() -> None:
    model = dataclasses.replace(
        model_of_config(ALL["deepseek_v3"], "").model, yarn_original_max_position_embeddings=None
    )
    written = config_of_model(family_for(model), model, 64, "float32")
    assert written["rope_scaling"]["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(("kind", "change", "expected"), REFUSED, ids=[f"{k}-{'-'.join(c)}" for k, c, _ in REFUSED])
def test_what_is_lacking_here_is_named(kind: str, change: dict[str, Any], expected: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_of_config({**ALL[kind], **change}, "DIR/config.json")
    for fragment in ("DIR/config.json", *expected):
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3_moe", {"mlp_only_layers": list(range(48))}, "leave no layer with experts"),
        ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("deepseek_v3", {"topk_group": 8}, "num_experts_per_tok 8 with topk_group 8"),
        ("deepseek_v3", {"num_experts_per_tok": 1}, "the weight of a single expert"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
        ("deepseek_v3", {"num_key_value_heads": 8}, "num_key_value_heads is not num_attention_heads"),
        ("deepseek_v3", {"first_k_dense_replace": 61}, "first_k_dense_replace is 61"),
        ("deepseek_v3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "or with that of yarn"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_mixtures_that_are_lacking_here_are_named(kind: str, change: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_of_config({**ALL[kind], **change}, "")
    assert expected in str(caught.value)


def test_everything_is_said_at_once() -> None:
    wrong = {"hidden_act": "relu", "rope_theta": "x", "num_hidden_layers": 0, "surprise": 1}
    with pytest.raises(CheckpointError) as caught:
        model_of_config({**MISTRAL, **wrong}, "")
    assert len(str(caught.value).splitlines()) == 1 + len(wrong)


@pytest.mark.parametrize("config", [[], "x", None, 3])
def test_no_object(config: Any) -> None:
    with pytest.raises(CheckpointError, match="no JSON object"):
        model_of_config(config, "DIR/config.json")


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4096}),  # no layer is above max_window_layers
        ("mistral", {"sliding_window": 32768}),
        ("qwen3", {"layer_types": ["full_attention"] * 28, "use_sliding_window": True, "sliding_window": 4}),
        ("llama", {"quantization_config": None, "some_new_option": False, "another": []}),
    ],
)
def test_what_is_not_in_use_asks_for_nothing(kind: str, change: dict[str, Any]) -> None:
    assert model_of_config({**ALL[kind], **change}, "").model == model_of_config(ALL[kind], "").model


@pytest.mark.parametrize("kind", FAMILIES)
def test_there_and_back(kind: str) -> None:
    found = model_of_config(ALL[kind], "")
    assert family_for(found.model, kind) == found.family
    written = config_of_model(found.family, found.model, found.vocab_size, "bfloat16", eod=7)
    again = model_of_config(written, "")
    assert again.vocab_size == found.vocab_size and written["eos_token_id"] == 7
    assert dataclasses.replace(again.model, ffn_hidden_size=found.model.ffn_size) == found.model


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_original_stays_as_it_was(kind: str) -> None:
    found = model_of_config(ALL[kind], "")
    # As a training run has it: derived settings filled in, others of training.
    model = dataclasses.replace(found.model, kv_channels=found.model.head_size, hidden_dropout=0.5)
    rows = found.vocab_size
    written = config_of_model(found.family, model, rows, "bfloat16", original=ALL[kind])
    added = {} if "torch_dtype" in ALL[kind] else {"dtype": "bfloat16"}
    assert written == {**ALL[kind], **added}
    deeper = dataclasses.replace(model, num_layers=4)
    written = config_of_model(found.family, deeper, rows, "bfloat16", original=ALL[kind])
    assert model_of_config(written, "").model.num_layers == 4 and "transformers_version" not in written


def test_all_biases_of_llama() -> None:
    found = model_of_config({**LLAMA_3_2, "attention_bias": True, "mlp_bias": True}, "")
    assert found.model.add_bias_linear
    written = config_of_model(family_for(found.model), found.model, found.vocab_size, "float32")
    assert (written["attention_bias"], written["mlp_bias"]) == (True, True)


def test_the_family_that_fits() -> None:
    kinds = {kind: family_for(model_of_config(config, "").model).model_type for kind, config in ALL.items()}
    assert kinds == {**{kind: kind for kind in ALL}, "mistral": "llama", "mt5": "t5"}  # without its window; by its form


@pytest.mark.parametrize(
    ("model", "fragments"),
    [
        (ModelConfig(2, 16, 4, 32, position_embedding_type="rope"), ("gpt2: it has position_embedding_type learned",)),
        (ModelConfig(2, 16, 4, 32, swiglu=True), ("it has rotary positions",)),
        (
            ModelConfig(2, 16, 4, 32, group_query_attention=True, num_query_groups=2),
            ("one key and value head for each query head",),
        ),
        (
            ModelConfig(2, 16, 4, 32, position_embedding_type="rope", rotary_interleaved=True),
            ("--rotary-interleaved", "--normalization", "--swiglu", "--disable-bias-linear"),
        ),
    ],
)
def test_what_no_family_is(model: ModelConfig, fragments: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        family_for(model)
    for fragment in (*fragments, "qwen3: it has"):
        assert fragment in str(caught.value)


def test_a_family_that_is_asked_for() -> None:
    with pytest.raises(CheckpointError, match="bloom"):
        family_for(model_of_config(GPT2, "").model, "bloom")
    with pytest.raises(CheckpointError, match="llama"):
        family_for(model_of_config(GPT2, "").model, "llama")


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"moe_latent_size": 64}, "it has experts of hidden states"),
        (
            {"moe_router_load_balancing_type": ("quantile_balancing",)},
            "it has (a choice by|weights that are a softmax)",
        ),
    ],
)
def test_mixtures_that_a_family_does_not_have(kind: str, changes: dict[str, Any], said: str) -> None:
    model = model_of_config(ALL[kind], "").model
    assert family_for(model, kind).model_type == kind
    with pytest.raises(CheckpointError, match=said):
        family_for(dataclasses.replace(model, **changes), kind)
