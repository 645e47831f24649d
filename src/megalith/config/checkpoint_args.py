"""`--use-checkpoint-args`: the settings that a run takes from the checkpoint that it loads.

Those that Megatron takes, by its names; here a checkpoint's value counts, whatever the command line says, and every one
is said. A tokenizer that the command line names is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalith.config.foreign_args import model_of, parallel_of, tokenizer_of

MODEL_SETTINGS = (
    "model_family",
    "bert_binary_head",
    "bert_token_types",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "mtp_num_layers",
    "ffn_hidden_size",
    "max_position_embeddings",
    "position_embedding_type",
    "decoder_num_layers",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "t5_logits_bias",
    "t5_scaled_logits",
    "final_layernorm",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "no_rope_freq",
    "rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_correction_range_round_to_int",
    "mscale",
    "mscale_all_dim",
    "use_rope_scaling",
    "rope_scaling_factor",
    "normalization",
    "norm_epsilon",
    "apply_layernorm_1p",
    "apply_residual_connection_post_layernorm",
    "swiglu",
    "geglu",
    "quick_geglu",
    "squared_relu",
    "relu",
    "openai_gelu",
    "onnx_safe",
    "glu_linear_offset",
    "activation_func_clamp_value",
    "bias_gelu_fusion",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "qk_l2_norm",
    "attention_output_gate",
    "softmax_type",
    "softmax_scale",
    "use_mup",
    "mup_base_hidden_size",
    "mup_base_head_dim",
    "mup_attn_scale_power",
    "mup_embedding_mult",
    "mup_output_mult",
    "window_size",
    "window_attn_skip_freq",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_latent_size",
    "moe_apply_probs_on_input",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "untie_embeddings_and_output_weights",
    "make_vocab_size_divisible_by",
)
"""Settings that decide what the weights of a model mean, or how many there are."""
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_per_virtual_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def settings_from(args: Mapping[str, Any], *, layout: bool) -> dict[str, Any]:
    """The settings that a checkpoint decides, name -> value.

    Args:
        args: Megatron's arguments of the run that wrote it.
        layout: whether it decides the tensor and pipeline sizes too.

    Raises:
        CheckpointError: its model has a part that this version has not.
        KeyError: an argument that no model is without is missing.
    """
    model, tokenizer = model_of(args), tokenizer_of(args)
    values = {name: getattr(model, name) for name in MODEL_SETTINGS}
    if model.apply_query_key_layer_scaling:  # of fp16 runs of 2023, whose scores may overflow without it
        values["apply_query_key_layer_scaling"] = True
    if model.chooses_by == "quantile_balancing":  # whose offsets decide the choice; losses are the run's own matter
        values["moe_router_load_balancing_type"] = model.moe_router_load_balancing_type
    if args.get("seq_length"):
        values["seq_length"] = int(args["seq_length"])
    if tokenizer.tokenizer_type and "tokenizer_type" in args:
        values["tokenizer_type"] = tokenizer.tokenizer_type
    if tokenizer.tokenizer_type == "HuggingFaceTokenizer" and Path(tokenizer.tokenizer_model or "").is_dir():
        values["tokenizer_model"] = tokenizer.tokenizer_model  # of a Hugging Face folder, the folder itself
    if layout:
        parallel = parallel_of(args)
        values |= {name: getattr(parallel, name) for name in _LAYOUT}
    return values
