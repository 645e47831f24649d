"""Configuration as Megatron's flat `args`, which checkpoints hold and its tools read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from megalith.config.groups import LoraSettings, ModelConfig, ParallelConfig, PrecisionConfig, TokenizerConfig
from megalith.config.run import RunConfig, all_settings, group_types, plain
from megalith.config.values import read_pattern, read_window
from megalith.layout import predictions_last

# Constants here that Megatron's `--use-checkpoint-args` and converters require.
_CONSTANTS: dict[str, Any] = {
    "expert_model_parallel_size": 1,
    "iteration": 0,
    "use_dist_ckpt": True,
}

_EMPTY_LISTS = ("iterations_to_skip",)
"""Flags of several values whose default is an empty list rather than None."""


_OF_THE_PROGRAM = ("padded_vocab_size",)
"""Settings whose value only the running program knows."""


def megatron_args(run: RunConfig) -> dict[str, Any]:
    """Return Megatron's arguments for this run, including those that its argument check derives.

    The caller adds the values that only the running program knows: padded_vocab_size, consumed_train_samples,
    consumed_valid_samples and skipped_train_samples. `params_dtype` is the name of the dtype.
    """
    args = {name: _listed(name, value) for name, value in _flat({name: getattr(run, name) for name in group_types()})}
    return {**args, **_CONSTANTS, **_derived(run), **_registered(run)}


REGISTERED = "megalith_registered"
"""Key of registered objects in a checkpoint's args: names, settings by name, source hashes by module."""


def _registered(run: RunConfig) -> dict[str, Any]:
    used = run.registered
    if not used:
        return {}
    about = {
        "names": list(map(str, used)),
        "settings": {name: values for name, values in run.to_dict().items() if name in used},
        "imports": {one.name: one.sha256 for one in run.registry.imports},
    }
    return {REGISTERED: about}


def _flat(groups: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the settings of groups that Megatron knows, too."""
    for setting in all_settings().values():
        if setting.group in groups and not setting.about.ours and setting.name not in _OF_THE_PROGRAM:
            yield setting.name, getattr(groups[setting.group], setting.name)


def _listed(name: str, value: Any) -> Any:
    """Return a value as argparse stores it: lists, and None for most empty ones."""
    if not isinstance(value, tuple):
        return plain(value)
    return plain(value) if value or name in _EMPTY_LISTS else None


def weights_args(model: ModelConfig, precision: PrecisionConfig, tokenizer: TokenizerConfig) -> dict[str, Any]:
    """Return Megatron's arguments for weights that were not trained here: architecture and a single process.

    The caller adds padded_vocab_size.
    """
    groups = {"model": model, "precision": precision, "tokenizer": tokenizer, "parallel": ParallelConfig()}
    args = {name: list(value) if isinstance(value, tuple) else value for name, value in _flat(groups)}
    return {**args, **_CONSTANTS, **_derived_of_model(model), "params_dtype": precision.params_dtype}


YARN = {
    "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
    "yarn_rotary_scaling_factor": "rotary_scaling_factor",
}
"""Megatron's argument for YaRN -> setting, which is named like the flag."""


_OURS = (
    *("model_family", "bert_token_types", "final_layernorm", "geglu", "relu"),
    *("t5_logits_bias", "t5_scaled_logits"),
)
"""Settings that Megatron lacks and that determine the meaning of a model's weights."""
_LORA = tuple(field.name for field in fields(LoraSettings))
_REGISTERED = ("model", "attention", "mlp", "moe_router")


def lora_args(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of LoRA; none without adapters."""
    return {name: getattr(model, name) for name in _LORA} if model.lora_rank else {}


def _derived_of_model(model: ModelConfig) -> dict[str, Any]:
    return {
        "add_qkv_bias": model.qkv_bias,
        "attention_softmax_in_fp32": model.softmax_in_fp32,
        **{name: plain(getattr(model, name)) for name in _OURS},
        **lora_args(model),
        **{name: plain(value) for name in _REGISTERED if (value := getattr(model, name)) is not None},
        "encoder_num_layers": model.num_layers,
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.hidden_size // model.num_attention_heads
        if model.multi_latent_attention
        else model.head_size,
        "layernorm_epsilon": model.norm_epsilon,  # the name before core 0.8 and from 0.16 on
        "layernorm_zero_centered_gamma": model.apply_layernorm_1p,  # the name from core 0.16 on
        "moe_aux_loss_coeff": _one_or_all(model.moe_aux_loss_coeff),
        "moe_ffn_hidden_size": model.expert_size if model.mixture else model.moe_ffn_hidden_size,
        "moe_layer_freq": _pattern(model.moe_layer_freq),
        "moe_router_load_balancing_type": _one_or_all(model.moe_router_load_balancing_type),
        "no_rope_freq": _pattern(model.no_rope_freq),
        "onnx_safe": True if model.activation == "gelu_onnx" else None,
        "window_attn_skip_freq": _pattern(model.window_attn_skip_freq),
        "window_size": None if model.window_size is None else read_window(model.window_size),
        **(
            {name: getattr(model, ours) for name, ours in YARN.items()}
            if model.position_embedding_type == "yarn"
            else {}
        ),
    }


def _one_or_all(values: tuple[Any, ...]) -> Any:
    """Return a single value as itself, several as a list, as Megatron's argument check does."""
    return values[0] if len(values) == 1 else list(values)


def _pattern(text: str | None) -> int | list[int] | None:
    """Return the result of Megatron's evaluation of a layer pattern."""
    pattern = None if text is None else read_pattern(text)
    return list(pattern) if isinstance(pattern, tuple) else pattern


def _derived(run: RunConfig) -> dict[str, Any]:
    model, optimizer = run.model, run.optimizer
    virtual, layout = run.parallel.virtual_stages(model.num_layers), run.parallel.pipeline_model_parallel_layout
    constant = optimizer.weight_decay_incr_style == "constant"
    return {
        **_derived_of_model(model),
        "accumulate_allreduce_grads_in_fp32": run.precision.accumulate_allreduce_grads_in_fp32 or run.precision.bf16,
        "check_for_nan_in_loss_and_grad": run.precision.stop_on_nan,
        "cp_comm_type": [run.parallel.cp_comm_type],
        "data_parallel_size": run.data_parallel_size,
        "encoder_seq_length": run.data.seq_length,
        "expert_model_parallel_size": run.parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": run.layout.expert_tp,
        "end_weight_decay": optimizer.weight_decay if constant else optimizer.end_weight_decay,
        "global_batch_size": run.global_batch_size,
        "params_dtype": run.precision.params_dtype,
        "pipeline_model_parallel_layout": None if layout is None else predictions_last(layout),
        "sequence_parallel": run.parallel.sequence_parallel_here,
        "use_dist_ckpt": run.checkpoint.ckpt_format == "torch_dist",
        "start_weight_decay": optimizer.weight_decay if constant else optimizer.start_weight_decay,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
    }
