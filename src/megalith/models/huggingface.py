"""Hugging Face's config.json and our `ModelConfig`, either way: GPT-2, Llama, Mistral, Qwen2, Qwen3, BERT (also
Megatron's), T5, Mixtral, Qwen3-MoE and DeepSeek-V3 (`huggingface_bert`, `huggingface_t5`, `huggingface_experts`,
`huggingface_deepseek`).

Reading is strict. Whatever a config.json asks for that the model here has not is an error that names it, and so is a
key that is not known, unless it asks for nothing (null, false, 0, empty): a model that is silently another one costs
more than a refusal (`huggingface_reading`). Positions and windows are in `huggingface_positions`.

The names and shapes of the tensors are in `models.huggingface_tensors`. Neither touches a file or imports transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megalith.config import ModelConfig
from megalith.errors import CheckpointError, OtherModelError
from megalith.models import huggingface_bert, huggingface_deepseek, huggingface_experts, huggingface_t5
from megalith.models.huggingface_deepseek import NEXT
from megalith.models.huggingface_positions import (
    WINDOWS_OF,
    fits_windows,
    rope_scaling,
    rotary,
    tokens_of_window,
    windows_of,
    windows_of_qwen,
)
from megalith.models.huggingface_reading import Reading, words

DTYPES = ("float32", "bfloat16", "float16")
"""What weights may be stored in."""

_SILU = ("silu", "swish")
_GELU_TANH, _GELU_ERF = ("gelu_new", "gelu_pytorch_tanh"), ("gelu",)
_WITH_HEAD_NORMS = ("qwen3", "qwen3_moe")
# Defaults of transformers' Qwen2Config and Qwen3Config.
_WINDOW_OF_QWEN = {"sliding_window": 4096, "max_window_layers": 28}


@dataclass(frozen=True)
class Family:
    """Models that share a class of transformers.

    Attributes:
        absent: what a key that is not in config.json means (the defaults of the class).
        others: classes of the same weights, with fewer heads.
    """

    model_type: str
    architecture: str
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    others: tuple[str, ...] = ()


# In the order in which `family_for` tries them.
FAMILIES = {
    family.model_type: family
    for family in (
        Family("gpt2", "GPT2LMHeadModel", {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5}),
        Family("llama", "LlamaForCausalLM"),
        Family("mistral", "MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}),
        Family("qwen2", "Qwen2ForCausalLM", {"num_key_value_heads": 32, **_WINDOW_OF_QWEN}),
        Family("qwen3", "Qwen3ForCausalLM", {"num_key_value_heads": 32, "head_dim": 128, **_WINDOW_OF_QWEN}),
        Family("mixtral", "MixtralForCausalLM", huggingface_experts.ABSENT["mixtral"]),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", huggingface_experts.ABSENT["qwen3_moe"]),
        Family(huggingface_deepseek.KIND, huggingface_deepseek.ARCHITECTURE, huggingface_deepseek.ABSENT),
        *(
            Family(kind, architecture, huggingface_bert.ABSENT, (huggingface_bert.MASKED_LM[kind],))
            for kind, architecture in huggingface_bert.ARCHITECTURES.items()
        ),
        *(Family(kind, huggingface_t5.ARCHITECTURES[kind], absent) for kind, absent in huggingface_t5.ABSENT.items()),
    )
}
"""By `model_type`."""


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
    model = _model(reading, family.model_type)
    vocab_size = reading.size("vocab_size")
    problems = reading.problems or _misfits(model)
    problems += reading.unknown()
    if problems:
        head = f"{where} asks for what this version of Megalith does not have:"
        raise OtherModelError("\n  ".join([head, *problems]))
    return HuggingFaceModel(family, model, vocab_size)


def _model(reading: Reading, kind: str) -> ModelConfig:
    if kind in huggingface_bert.ARCHITECTURES:
        dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        hidden, attention = (_probability(reading, key, 0.1) for key in dropouts)
        std = _probability(reading, "initializer_range", 0.02)
        model = huggingface_bert.read(reading, kind)
        return dataclasses.replace(model, hidden_dropout=hidden, attention_dropout=attention, init_method_std=std)
    if kind == huggingface_deepseek.KIND:
        model = huggingface_deepseek.read(reading)
        dropout, std = _probability(reading, "attention_dropout", 0.0), _probability(reading, "initializer_range", 0.02)
        return dataclasses.replace(model, attention_dropout=dropout, init_method_std=std)
    if kind in huggingface_t5.ABSENT:
        dropout = _probability(reading, "dropout_rate", 0.1)
        return dataclasses.replace(huggingface_t5.read(reading), hidden_dropout=dropout, attention_dropout=dropout)
    return _gpt2(reading) if kind == "gpt2" else _llama(reading, kind)


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
    """What does not divide; such a model cannot be built."""
    problems = []
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        problems.append(f"hidden size {model.hidden_size} does not divide into {model.num_attention_heads} heads")
    if model.num_attention_heads % model.query_groups:
        problems.append(f"{model.num_attention_heads} heads do not divide over {model.query_groups} key-value heads")
    if model.rotary_size % 2:
        problems.append(f"heads of {model.head_size} are odd, and rotary positions turn pairs")
    return problems


def _gpt2(reading: Reading) -> ModelConfig:
    hidden = reading.size("n_embd")
    activation = reading.get("activation_function", _GELU_TANH[0])
    if activation not in (*_GELU_TANH, *_GELU_ERF):
        reading.problems.append(
            f"activation_function is {activation!r}; this version has {', '.join((*_GELU_TANH, *_GELU_ERF))} for GPT-2"
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
        hidden_dropout=_probability(reading, "resid_pdrop", 0.1),
        attention_dropout=_probability(reading, "attn_pdrop", 0.1),
        init_method_std=_probability(reading, "initializer_range", 0.02),
    )


def _llama(reading: Reading, kind: str) -> ModelConfig:
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
        attention_dropout=_probability(reading, "attention_dropout", 0.0),
        init_method_std=_probability(reading, "initializer_range", 0.02),
        **windows,
        **scaling,
        **experts,
    )


def _probability(reading: Reading, key: str, default: float) -> float:
    """A number from 0 up to 1 that concerns training only: another value is the default."""
    value = reading.get(key, default)
    fine = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
    return float(value) if fine else default


def _all_biases(reading: Reading, kind: str) -> bool:
    """Whether all linear layers have biases; the model here has all, none, or those of Qwen2."""
    attention, mlp = reading.flag("attention_bias"), reading.flag("mlp_bias")
    if kind != "llama" and (attention or mlp):
        reading.problems.append(f"{'attention_bias' if attention else 'mlp_bias'} is true; {kind} is read without it")
    elif attention != mlp:
        has, lacks = ("attention_bias", "mlp_bias") if attention else ("mlp_bias", "attention_bias")
        reading.problems.append(f"{has} is true and {lacks} is not; this version has both or neither")
    return attention and mlp


# --- writing ---


def family_for(model: ModelConfig, wanted: str | None = None) -> Family:
    """Return the family whose config.json can describe a model: `wanted` (a `model_type`), or the first that can.

    Raises:
        CheckpointError: that one cannot, or none can; says why for each.
    """
    if wanted is not None and wanted not in FAMILIES:
        raise CheckpointError(f"there is no family {wanted}; use one of {', '.join(FAMILIES)}")
    reasons = {kind: _unlike(model, kind) for kind in FAMILIES if wanted in (None, kind)}
    for kind, reason in reasons.items():
        if not reason:
            return FAMILIES[kind]
    lines = [f"{kind}: {'; '.join(reason)}" for kind, reason in reasons.items()]
    raise CheckpointError("\n  ".join(["no model of Hugging Face is like this one:", *lines]))


def _family_here(kind: str) -> str:
    """The --model-family of a `model_type`."""
    return "bert" if kind in huggingface_bert.ARCHITECTURES else "t5" if kind in huggingface_t5.ABSENT else "gpt"


def _unlike(model: ModelConfig, kind: str) -> list[str]:
    """What keeps a family from being this model."""
    wanted: dict[str, Any] = {
        "apply_layernorm_1p": False,
        "final_layernorm": True,
        "apply_residual_connection_post_layernorm": False,
        "attention_output_gate": False,
        "multi_latent_attention": False,
        **({} if kind == huggingface_deepseek.KIND else {"predictions": 0}),
        "mixture": kind in huggingface_experts.ABSENT,
        "softmax_type": "vanilla",
        "softmax_scale": None,
        "use_mup": False,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
    }
    wanted["model_family"] = _family_here(kind)
    if kind in huggingface_bert.ARCHITECTURES:
        of_bert, fits = huggingface_bert.unlike(model, kind)
        wanted |= of_bert
    elif kind in huggingface_t5.ABSENT:
        of_t5, fits = huggingface_t5.unlike(model, kind)
        wanted |= of_t5
    elif kind == huggingface_deepseek.KIND:
        of_deepseek, fits = huggingface_deepseek.unlike(model)
        wanted |= of_deepseek
    elif kind == "gpt2":
        wanted |= {
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "gated": False,
            "add_bias_linear": True,
            "head_norm": "",
        }
        fits = {
            "one key and value head for each query head": model.query_groups == model.num_attention_heads,
            "GELU": model.activation in ("gelu_tanh", "gelu_erf"),
        }
    else:
        wanted |= {
            "rotary_interleaved": False,
            "normalization": "RMSNorm",
            "activation": "silu",
            "gated": True,
            "head_norm": "RMSNorm" if kind in _WITH_HEAD_NORMS else "",
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
    if kind in ("gpt2", "qwen2"):
        whole = model.head_size * model.num_attention_heads == model.hidden_size
        fits["heads that make up the hidden size"] = whole
    if kind in huggingface_experts.ABSENT:
        fits |= huggingface_experts.unlike(model, kind)
    if kind in WINDOWS_OF:
        fits[WINDOWS_OF[kind]] = fits_windows(model, kind)
    unlike = [
        f"it has {name} {value}, the model {getattr(model, name)}"
        for name, value in wanted.items()
        if getattr(model, name) != value
    ]
    return unlike + [f"it has {what}" for what, holds in fits.items() if not holds]


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
    """The config.json of a model.

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
    if family.model_type in huggingface_bert.ARCHITECTURES:
        described = huggingface_bert.config_of(model, family.model_type)
    elif family.model_type in huggingface_t5.ABSENT:
        roles = special or {}
        # T5 has no bos: its decoder starts with pad.
        described = huggingface_t5.config_of(model, roles.get("bos", roles.get("pad")))
        eod = roles.get("eos", eod)
    elif family.model_type == huggingface_deepseek.KIND:
        described = huggingface_deepseek.config_of(model)
    else:
        described = _gpt2_config(model) if family.model_type == "gpt2" else _llama_config(family, model)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **described,
        # One token of GPT-2, <|endoftext|>, both begins and ends texts.
        "bos_token_id": eod if family.model_type == "gpt2" else None,
        "eos_token_id": eod,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def _still_right(original: Mapping[str, Any] | None, family: Family, model: ModelConfig) -> Mapping[str, Any] | None:
    if original is None:
        return None
    try:
        was = model_of_config(original, "")
    except CheckpointError:
        return None
    described = was.model
    if was.family.model_type in huggingface_t5.ABSENT:
        described = huggingface_t5.with_own_output(described, own=model.untie_embeddings_and_output_weights)
    same = _meaning(described) == _meaning(model)
    return original if was.family == family and same else None


def _meaning(model: ModelConfig) -> dict[str, Any]:
    """What of a model decides its logits."""
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
    add_bias_linear qkv_bias untie_embeddings_and_output_weights head_norm gated glu_linear_offset
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


def _gpt2_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "activation_function": _GELU_TANH[0] if model.activation == "gelu_tanh" else _GELU_ERF[0],
        "attn_pdrop": model.attention_dropout,
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


def _llama_config(family: Family, model: ModelConfig) -> dict[str, Any]:
    only: dict[str, Callable[[], dict[str, Any]]] = {
        "llama": lambda: {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear},
        "mistral": lambda: {"sliding_window": tokens_of_window(model)},
        "qwen2": lambda: windows_of_qwen(model),
        "qwen3": lambda: {"attention_bias": False, **windows_of_qwen(model)},
        "mixtral": lambda: {"sliding_window": tokens_of_window(model)},
        "qwen3_moe": lambda: {"attention_bias": False},
    }
    # Qwen2Config has no head_dim: its heads always make up the hidden size.
    heads = {} if family.model_type == "qwen2" else {"head_dim": model.head_size}
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
        **only[family.model_type](),
        **(huggingface_experts.config_of(model, family.model_type) if model.mixture else {}),
    }
