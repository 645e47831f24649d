"""Hugging Face's config.json and our `ModelConfig`, either way: one object a family, in a module of its own.

Reading is strict. Whatever a config.json asks for that the model here has not is an error that names it, and so is a
key that is not known, unless it asks for nothing (null, false, 0, empty): a model that is silently another one costs
more than a refusal (`huggingface_family`). Positions and windows are in `huggingface_positions`.

The names and shapes of the tensors are in `models.huggingface_tensors`. Neither touches a file or imports transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalith.config import ModelConfig
from megalith.config.run import all_settings
from megalith.errors import CheckpointError, OtherModelError
from megalith.models.families import HUGGING_FACE as FAMILIES
from megalith.models.huggingface_deepseek import NEXT
from megalith.models.huggingface_family import Family, Reading, words
from megalith.models.huggingface_tensors import OUTPUT_LAYER

DTYPES = ("float32", "bfloat16", "float16")
"""What weights may be stored in."""


@dataclass(frozen=True)
class HuggingFaceModel:
    """What a config.json says of a model; `vocab_size` counts the rows of its embedding."""

    family: Family
    model: ModelConfig
    vocab_size: int


def model_of_config(config: Any, where: str) -> HuggingFaceModel:
    """Read a config.json.

    Raises:
        CheckpointError: it describes no model of these families, or asks for what this version has not; lists it all.
    """
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{where} holds no JSON object")
    family = _family_of(config, where)
    reading = Reading(config, family.absent)
    model = family.read(reading)
    vocab_size = reading.size("vocab_size")
    problems = reading.problems or _misfits(model)
    problems += reading.unknown()
    if problems:
        head = f"{where} asks for what this version of Megalith does not have:"
        raise OtherModelError("\n  ".join([head, *problems]))
    return HuggingFaceModel(family, model, vocab_size)


def _family_of(config: Mapping[str, Any], where: str) -> Family:
    known = ", ".join(FAMILIES)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise OtherModelError(
            f"{where}: model_type {kind!r} is not among those that are read: {known}; give a folder of one of these"
        )
    family, named = FAMILIES[kind], config.get("architectures") or [FAMILIES[kind].architecture]
    if not {family.architecture, *family.others} & set(named):
        raise OtherModelError(
            f"{where}: architectures is {named!r}; of {kind} only {family.architecture} is read, a language model with "
            "its output layer; give a folder of that"
        )
    return family


def _misfits(model: ModelConfig) -> list[str]:
    """List sizes that do not divide; such a model cannot be built."""
    problems = []
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        problems.append(f"hidden size {model.hidden_size} does not divide into {model.num_attention_heads} heads")
    if model.num_attention_heads % model.query_groups:
        problems.append(f"{model.num_attention_heads} heads do not divide over {model.query_groups} key-value heads")
    if model.rotary_size % 2:
        problems.append(f"heads of {model.head_size} are odd, and rotary positions turn pairs")
    return problems


# --- writing ---


def family_for(model: ModelConfig, wanted: str | None = None) -> Family:
    """Return the family whose config.json can describe a model: `wanted` (a `model_type`), or the first that can.

    Raises:
        CheckpointError: the requested family, or every family of the model's kind, refuses it; with each reason.
    """
    if wanted is not None and wanted not in FAMILIES:
        raise CheckpointError(f"there is no family {wanted}; use one of {', '.join(FAMILIES)}")
    reasons = {
        kind: _unlike(model, family)
        for kind, family in FAMILIES.items()
        if (kind == wanted if wanted else family.model_family == model.model_family)
    }
    for kind, reason in reasons.items():
        if not reason:
            return FAMILIES[kind]
    lines = [f"{kind}: {'; '.join(reason)}" for kind, reason in reasons.items()]
    raise CheckpointError("\n  ".join(["no model of Hugging Face is like this one:", *lines]))


def _unlike(model: ModelConfig, family: Family) -> list[str]:
    """List what keeps a family from describing this model."""
    of_family, fits = family.unlike(model)
    wanted: dict[str, Any] = {
        "apply_layernorm_1p": False,
        "final_layernorm": True,
        "apply_residual_connection_post_layernorm": False,
        "attention_output_gate": False,
        "multi_latent_attention": False,
        "predictions": 0,
        "mixture": False,
        "softmax_type": "vanilla",
        "softmax_scale": None,
        "use_mup": False,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
        "model_family": family.model_family,
        **of_family,
    }
    unlike = [
        f"it has {name} {value}, the model {getattr(model, name)} ({_flags_of(name)})"
        for name, value in wanted.items()
        if getattr(model, name) != value
    ]
    return unlike + [f"it has {what}" for what, holds in fits.items() if not holds]


_DERIVED = {
    "mixture": "--num-experts",
    "predictions": "--mtp-num-layers",
    "gated": "--swiglu, --geglu, --quick-geglu",
    "activation": "--swiglu, --quick-geglu, --squared-relu, --relu, --onnx-safe, --openai-gelu",
    "qk_norm": "--qk-layernorm, --qk-l2-norm",
    "qkv_bias": "--add-qkv-bias, --disable-bias-linear",
}


def _flags_of(name: str) -> str:
    """Return the flags that decide a property of a model."""
    return _DERIVED.get(name) or all_settings()[name].flag


def config_of_model(
    family: Family,
    model: ModelConfig,
    vocab_size: int,
    dtype: str,
    *,
    eod: int | None = None,
    special: Mapping[str, int] | None = None,
    original: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the config.json of a model.

    Args:
        eod: the id that ends a document.
        special: ids of the tokenizer's special tokens, by role.
        original: the config.json that the model came with, kept where it still says the same of the model.
    """
    kept = _still_right(original, family, model)
    if kept is not None:
        name = "torch_dtype" if "torch_dtype" in kept and "dtype" not in kept else "dtype"
        ahead = {NEXT: model.predictions} if NEXT in kept else {}
        context = {"n_ctx": model.max_position_embeddings} if family.model_type == "gpt2" else {}
        return {**context, **kept, "vocab_size": vocab_size, name: dtype, **ahead}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "bos_token_id": None,
        "eos_token_id": eod,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": vocab_size,
        **family.config_of(model, eod, special or {}),
    }


def _still_right(original: Mapping[str, Any] | None, family: Family, model: ModelConfig) -> Mapping[str, Any] | None:
    if original is None:
        return None
    try:
        was = model_of_config(original, "")
    except CheckpointError:
        return None
    described = was.family.settled(was.model, [OUTPUT_LAYER] if model.untie_embeddings_and_output_weights else [])
    same = _meaning(described) == _meaning(model)
    return original if was.family == family and same else None


def _meaning(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of a model that decide its logits."""
    factor = model.rope_scaling_factor if model.use_rope_scaling else None
    found = {**{name: getattr(model, name) for name in _DECIDES_LOGITS}, "rope_scaling_factor": factor}
    yarn = model.rotary_kind == "yarn"
    return {**found, "yarn": [getattr(model, name) for name in _DECIDES_YARN] if yarn else None}


_DECIDES_YARN = words(
    """
    rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
    yarn_correction_range_round_to_int mscale mscale_all_dim
    """
)


_DECIDES_LOGITS = words(
    """
    model_family num_layers hidden_size num_attention_heads query_groups head_size ffn_size max_position_embeddings
    position_embedding_type rotary_base rotary_percent rotary_interleaved normalization norm_epsilon activation
    add_bias_linear qkv_bias untie_embeddings_and_output_weights qk_norm gated glu_linear_offset
    activation_func_clamp_value apply_layernorm_1p final_layernorm apply_residual_connection_post_layernorm
    attention_output_gate softmax_type softmax_scale windows rotated_layers rotary_size
    rotary_seq_len_interpolation_factor experts expert_size moe_router_topk moe_router_pre_softmax
    moe_router_score_function moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor
    moe_shared_expert_intermediate_size moe_shared_expert_gate moe_latent_size moe_expert_capacity_factor
    moe_router_enable_expert_bias chooses_by moe_apply_probs_on_input multi_latent_attention q_lora_rank kv_lora_rank
    qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_kind t5_scaled_logits num_decoder_layers
    relative_attention_num_buckets relative_attention_max_distance
    """
)
