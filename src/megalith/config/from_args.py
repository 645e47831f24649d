"""Groups of a configuration from the arguments in a Megatron checkpoint.

The inverse of `saved_args`, for checkpoints of any version: a missing argument takes the value in effect before it
existed; one without a setting here must have the value that means "not used". `settings_from` selects those that
`--use-checkpoint-args` takes, as Megatron does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from megalith.config.fields import Setting, settings_of
from megalith.config.groups import LoraSettings, ModelConfig, ParallelConfig, PrecisionConfig, TokenizerConfig
from megalith.config.run import group_types, resolved
from megalith.config.saved_args import REGISTERED, YARN
from megalith.errors import CheckpointError
from megalith.registry import EMPTY, IMPORT_FLAG, Registered, Registry

Group = TypeVar("Group")

_NOT_USED: tuple[Any, ...] = (None, False, 0, 0.0, 1.0, "", "none", [])
# Arguments that change the architecture and have no setting here -> flag.
_UNKNOWN_HERE = {
    "hybrid_override_pattern": "--hybrid-override-pattern",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
}


def model_from_args(args: Mapping[str, Any], registry: Registry = EMPTY) -> ModelConfig:
    """Return the architecture, including registered parts.

    Raises:
        KeyError: a required argument is missing.
        CheckpointError: the model has a part that is not implemented or not registered.
    """
    used = [
        f"{flag} ({name} {args[name]})"
        for name, flag in _UNKNOWN_HERE.items()
        if name in args and not any(args[name] is value or args[name] == value for value in _NOT_USED)
    ]
    if used:
        raise CheckpointError(
            f"the checkpoint's model was made with {', '.join(used)}, which this version does not have"
        )
    known = {**_FORMER, **args}
    if "norm_epsilon" not in args and "layernorm_epsilon" in args:
        known["norm_epsilon"] = args["layernorm_epsilon"]
    if known.get("add_bias_linear"):
        known["add_qkv_bias"] = False  # Megatron sets it then; it says nothing of its own
    if not args.get("group_query_attention", False):
        known["num_query_groups"] = 1
    if args.get("layernorm_zero_centered_gamma"):
        known["apply_layernorm_1p"] = True
    known |= {name: _text(args[name]) for name in _TEXTS if name in args}
    if args.get("multi_latent_attention"):
        known["kv_channels"] = None  # Megatron fills it in and does not use it
    elif known["position_embedding_type"] == "yarn":
        known |= {ours: args[name] for name, ours in YARN.items() if args.get(name) is not None}
    else:  # Megatron has these with other defaults, for other layers
        known = {name: value for name, value in known.items() if name not in ("mscale", "mscale_all_dim")}
    return _group("model", ModelConfig, known, registry)


_TEXTS = ("moe_layer_freq", "no_rope_freq", "onnx_safe", "window_attn_skip_freq", "window_size")


def _text(value: Any) -> str | None:
    """Return an evaluated argument of Megatron as text for the command line."""
    if value is None or value is False or value == [] or value == ():
        return None
    if value is True:
        return "true"
    items = isinstance(value, tuple | list)
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(list(value) if items else value)


# Values in effect before an argument existed.
_FORMER: dict[str, Any] = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "transformer_impl": "local",
}


def refuse_registered_parts(args: Mapping[str, Any], where: str, why: str, *, group: str = "model") -> None:
    """Refuse parts that users have registered for settings of a group; CheckpointError names their flags, and `why`."""
    names = (args.get(REGISTERED) or {}).get("names", ())
    parts = [
        f"{setting.positive_flag} {args[setting.name]}"
        for setting in settings_of(group, group_types()[group])
        if setting.about.registers and args.get(setting.name) in names
    ]
    if parts:
        raise CheckpointError(f"{where} was made with registered parts ({', '.join(parts)}): {why}")


def parallel_from_args(args: Mapping[str, Any]) -> ParallelConfig:
    """Return the parallel layout."""
    return _group("parallel", ParallelConfig, args)


def precision_from_args(args: Mapping[str, Any]) -> PrecisionConfig:
    """Return the precision of the weights."""
    return _group("precision", PrecisionConfig, args)


def tokenizer_from_args(args: Mapping[str, Any], registry: Registry = EMPTY) -> TokenizerConfig:
    """Return the tokenizer; file paths are those of the machine that wrote the checkpoint.

    The number of embedding rows follows from the layout, unless --padded-vocab-size is given.
    """
    own = {name: value for name, value in args.items() if name != "padded_vocab_size"}
    return _group("tokenizer", TokenizerConfig, own, registry)


def _group(name: str, kind: type[Group], args: Mapping[str, Any], registry: Registry = EMPTY) -> Group:
    assert group_types()[name] is kind
    values = {}
    about: Mapping[str, Any] = args.get(REGISTERED) or {}
    own = {key: value for section in about.get("settings", {}).values() for key, value in section.items()}
    args = resolved(args, registry, own)
    for setting in settings_of(name, cast("type", kind)):
        if setting.name in args or setting.required:
            value = args[setting.name]
            if value is not None or setting.optional:
                values[setting.name] = _value(setting, value, about)
    return cast("Any", kind)(**values)


def _value(setting: Setting, value: Any, registered: Mapping[str, Any]) -> Any:
    """Convert a saved value to the type of the setting; an enumeration member to its value or the default."""
    about = setting.about
    if value is None or isinstance(value, Registered):
        return value
    if setting.many:
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    if setting.kind is str and not isinstance(value, str):
        return setting.default
    if about.registers and value in registered.get("names", ()):
        needed = " ".join(registered["imports"])
        raise CheckpointError(
            f"the checkpoint was made with {setting.positive_flag} {value}, which one of its modules registers; give "
            f"{IMPORT_FLAG} {needed}"
        )
    if about.choices and value not in about.choices:
        if setting.group == "model" and setting.name not in ("attention_backend", "transformer_impl"):
            raise CheckpointError(
                f"the checkpoint's model has {setting.name} {value}, which this version does not have; "
                f"it has {', '.join(about.choices)}"
            )
        return setting.default
    return setting.kind(value)


def changed_sources(args: Mapping[str, Any], registry: Registry) -> tuple[str, ...]:
    """Return a warning for each imported module whose source is not the one that a checkpoint was trained with."""
    was: Mapping[str, str] = (args.get(REGISTERED) or {}).get("imports", {})
    return tuple(
        f"{IMPORT_FLAG} {one.name}: its source is not that of the checkpoint (sha256 {was[one.name][:12]} then, "
        f"{one.sha256[:12]} now)"
        for one in registry.imports
        if was.get(one.name, one.sha256) != one.sha256
    )


_OF_THE_RUN = (
    *("moe_router_force_load_balancing", "moe_router_dtype", "moe_router_load_balancing_type"),
    *("moe_router_quantile_balancing_ema", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
    *("moe_input_jitter_eps", "moe_expert_capacity_factor", "moe_token_drop_policy"),
    *("moe_pad_expert_input_to_capacity", "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_permute_fusion"),
    *("moe_router_fusion", "mtp_loss_scaling_factor", "mup_width_mult", "add_position_embedding"),
    *("fp32_residual_connection", "hidden_dropout", "attention_dropout", "attention_softmax_in_fp32"),
    *("label_smoothing", "calculate_per_token_loss", "apply_query_key_layer_scaling", "init_method_std"),
    *("embedding_init_method_std", "init_method_xavier_uniform", "use_cpu_initialization", "attention_backend"),
    *("transformer_impl", "loss"),
)
LORA_SETTINGS = tuple(setting.name for setting in settings_of("model", LoraSettings))
MODEL_SETTINGS = tuple(
    setting.name for setting in settings_of("model", ModelConfig) if setting.name not in (*_OF_THE_RUN, *LORA_SETTINGS)
)
"""Settings that decide what the weights of a model mean, or how many there are."""
DROPOUT = ("hidden_dropout", "attention_dropout")
TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")
"""Settings that name files of a tokenizer, or its folder."""
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def settings_from(args: Mapping[str, Any], registry: Registry = EMPTY, *, layout: bool) -> dict[str, Any]:
    """Return the settings that a checkpoint determines, name -> value; with `layout` also tensor and pipeline sizes.

    Raises:
        CheckpointError: its model has a part that this version has not.
        KeyError: a required argument is missing.
    """
    model, tokenizer = model_from_args(args, registry), tokenizer_from_args(args, registry)
    values = {name: getattr(model, name) for name in MODEL_SETTINGS}
    if model.apply_query_key_layer_scaling:  # of fp16 runs of 2023, whose scores may overflow without it
        values["apply_query_key_layer_scaling"] = True
    if model.chooses_by == "quantile_balancing":  # whose offsets decide the choice; losses are the run's own matter
        values["moe_router_load_balancing_type"] = model.moe_router_load_balancing_type
    if model.moe_router_dtype:  # logits in half precision choose other experts
        values["moe_router_dtype"] = model.moe_router_dtype
    values |= {name: getattr(model, name) for name in DROPOUT if name in args}
    if model.lora_rank is not None:
        values |= {name: getattr(model, name) for name in LORA_SETTINGS}
    if args.get("seq_length"):
        values["seq_length"] = int(args["seq_length"])
    if tokenizer.tokenizer_type and "tokenizer_type" in args:
        values["tokenizer_type"] = tokenizer.tokenizer_type
        files = {name: getattr(tokenizer, name) for name in TOKENIZER_FILES}
        values |= {name: path for name, path in files.items() if path and Path(path).exists()}
    if layout:
        parallel = parallel_from_args(args)
        values |= {name: getattr(parallel, name) for name in _LAYOUT}
    return values
