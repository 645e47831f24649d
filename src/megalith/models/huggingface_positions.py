"""Positions in a config.json of Hugging Face: rotary scalings and sliding windows, either way.

A window of W tokens there is the token itself and W - 1 before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megalith.config import ModelConfig
from megalith.models.huggingface_family import NOTHING, Reading, short
from megalith.models.layer_options import length_before_yarn
from megalith.nn.rope import LongContext, Yarn

_LLAMA3 = LongContext(factor=8.0)


def windows_of(reading: Reading, kind: str, positions: int, layers: int) -> dict[str, Any]:
    """Return the settings of sliding-window attention; none where the window holds the longest sequence.

    A window of W tokens is the token itself and W - 1 before it.
    """
    window = reading.get("sliding_window")
    used = reading.flag("use_sliding_window") if kind in ("qwen2", "qwen3") else True
    first = reading.get("max_window_layers", layers)
    marked_layers = reading.get("layer_types")
    if marked_layers is not None:
        right = (
            isinstance(marked_layers, list) and len(marked_layers) == layers and set(marked_layers) <= set(_LAYER_TYPES)
        )
        if not right:
            reading.problems.append(
                f"layer_types is {short(marked_layers)}; it must be {' or '.join(_LAYER_TYPES)} each"
            )
        sliding = [kind == "sliding_attention" for kind in marked_layers] if right else []
    elif kind in ("qwen2", "qwen3"):
        sliding = [isinstance(first, int) and layer >= first for layer in range(layers)]
    else:
        sliding = [kind in ("mistral", "mixtral")] * layers
    if not (used and any(sliding) and isinstance(window, int) and 0 < window < positions):
        return {}
    pattern = None if all(sliding) else str([int(slides) for slides in sliding])
    return {"window_size": f"{window - 1},0", "window_attn_skip_freq": pattern}


_LAYER_TYPES = ("full_attention", "sliding_attention")


def rotary(reading: Reading, positions: int) -> dict[str, Any]:
    """Read the settings of rotary positions, from `rope_parameters` or, before transformers 5, from two keys."""
    found = reading.get("rope_parameters") or reading.get("rope_scaling") or {}
    reading.get("rope_scaling")
    if not isinstance(found, Mapping):
        reading.problems.append(f"rope_scaling is {short(found)}; it must be an object or null")
        found = {}
    base = found.get("rope_theta", reading.get("rope_theta", 10000.0))
    if not isinstance(base, int | float) or isinstance(base, bool) or base < 1 or base != int(base):
        reading.problems.append(f"rope_theta is {base!r}; it must be a whole number of at least 1 (--rotary-base)")
        base = 10000
    partial = found.get("partial_rotary_factor", reading.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        reading.problems.append(f"partial_rotary_factor is {partial!r}; heads are rotated whole in these families")
    kind = found.get("rope_type", found.get("type", "default"))
    settings: dict[str, Any] = {"rotary_base": int(base), "position_embedding_type": "rope"}
    if kind == "llama3":
        settings |= _llama3(reading, found)
    elif kind == "linear":
        settings |= _linear(reading, found)
    elif kind == "yarn":
        settings |= _yarn(reading, found, positions)
    elif kind != "default":
        reading.problems.append(
            f"the rope_type {kind!r} is not in this version, which has default, linear, llama3 and yarn"
        )
    return settings


def _linear(reading: Reading, found: Mapping[str, Any]) -> dict[str, Any]:
    factor = found.get("factor")
    if not isinstance(factor, int | float) or factor < 1 or factor != int(factor):
        reading.problems.append(f"factor of a linear rope is {factor!r}; it must be a whole number of at least 1")
        return {}
    return {"rotary_seq_len_interpolation_factor": int(factor)}


def _yarn(reading: Reading, found: Mapping[str, Any], positions: int) -> dict[str, Any]:
    known = {"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", *_YARN}
    strange = [key for key, value in found.items() if key not in known and value not in NOTHING]
    numbers: dict[str, Any] = {
        key: found.get(key) for key in (*_YARN, "factor") if key != "truncate" and found.get(key) is not None
    }
    wrong = [key for key, value in numbers.items() if not isinstance(value, int | float) or isinstance(value, bool)]
    if "factor" not in numbers or strange or wrong:
        reading.problems.append(f"the yarn rope is {short(dict(found))}; {', '.join(strange + wrong) or 'factor'}?")
        return {}
    both = found.get("mscale") and found.get("mscale_all_dim")  # transformers passes one alone over
    scaling = Yarn(
        numbers["factor"],
        int(numbers.get("original_max_position_embeddings", positions)),
        1.0,
        mscale=numbers["mscale"] if both else 1.0,
        mscale_all_dim=numbers["mscale_all_dim"] if both else 0.0,
    )
    wanted = numbers.get("attention_factor", scaling.amplitude)
    if abs(wanted - scaling.amplitude) > 1e-6 and scaling.factor > 1:
        scaling = replace(scaling, mscale=(wanted - 1) / (0.1 * math.log(scaling.factor)), mscale_all_dim=0.0)
    elif wanted != scaling.amplitude:
        reading.problems.append(f"attention_factor of the yarn rope is {wanted!r}, and its factor is 1")
    return {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": float(scaling.factor),
        "yarn_original_max_position_embeddings": scaling.original,
        "yarn_beta_fast": float(numbers.get("beta_fast", 32.0)),
        "yarn_beta_slow": float(numbers.get("beta_slow", 1.0)),
        "yarn_correction_range_round_to_int": found.get("truncate") is not False,
        "mscale": float(scaling.mscale),
        "mscale_all_dim": float(scaling.mscale_all_dim),
    }


_YARN = (
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)


def _llama3(reading: Reading, found: Mapping[str, Any]) -> dict[str, Any]:
    wanted = {
        "low_freq_factor": _LLAMA3.low,
        "high_freq_factor": _LLAMA3.high,
        "original_max_position_embeddings": _LLAMA3.original,
    }
    for key, value in wanted.items():
        if found.get(key) != value:
            reading.problems.append(f"{key} of llama3's rope is {found.get(key)!r}; this version has {value:g} only")
    factor = found.get("factor")
    if not isinstance(factor, int | float) or factor < 1:
        reading.problems.append(f"factor of llama3's rope is {factor!r}; it must be a number of at least 1")
        factor = 1.0
    return {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}


# --- writing ---


_WHOLE = ("attention to the whole sequence", lambda slides: not any(slides))
_ALIKE = ("the same window in all layers", lambda slides: all(slides) or not any(slides))
_LAST = ("windows in the last layers", lambda slides: slides == sorted(slides))
_WINDOWS: dict[str, tuple[str, Callable[[list[bool]], bool]]] = {
    **{"gpt2": _WHOLE, "llama": _WHOLE, "qwen3_moe": _WHOLE},
    **{"mistral": _ALIKE, "mixtral": _ALIKE, "qwen2": _LAST, "qwen3": _LAST},
}


def fits_windows(model: ModelConfig, kind: str) -> dict[str, bool]:
    """Return the windows of a family, in words -> whether a model has them too."""
    words, fits = _WINDOWS[kind]
    return {words: fits([window is not None for window in model.windows])}


def rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """Return the `rope_scaling` of a model, or None."""
    scaling: dict[str, Any] | None = None
    if model.rotary_kind == "yarn":
        scaling = _yarn_config(model)
    elif model.rotary_seq_len_interpolation_factor is not None:
        scaling = {"rope_type": "linear", "factor": float(model.rotary_seq_len_interpolation_factor)}
    elif model.use_rope_scaling:
        scaling = {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": _LLAMA3.low,
            "high_freq_factor": _LLAMA3.high,
            "original_max_position_embeddings": _LLAMA3.original,
        }
    return scaling


def _yarn_config(model: ModelConfig) -> dict[str, Any]:
    """Return the YaRN scaling without the defaults."""
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": model.rotary_scaling_factor,
        "original_max_position_embeddings": length_before_yarn(model),
    }
    fast, slow = model.yarn_beta_fast or 32.0, model.yarn_beta_slow or 1.0
    scaling |= {"beta_fast": fast} if fast != 32.0 else {}
    scaling |= {"beta_slow": slow} if slow != 1.0 else {}
    scaling |= {} if model.yarn_correction_range_round_to_int else {"truncate": False}
    if model.mscale_all_dim:
        return {**scaling, "mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
    if model.mscale != 1.0:
        amplitude = Yarn(model.rotary_scaling_factor, 1, 1.0, mscale=model.mscale).amplitude
        return {**scaling, "attention_factor": amplitude}
    return scaling


def tokens_of_window(model: ModelConfig) -> int | None:
    """Return the `sliding_window` of a model, or None."""
    return next((window + 1 for window in model.windows if window is not None), None)


def windows_of_qwen(model: ModelConfig) -> dict[str, Any]:
    """Return Qwen's keys of sliding windows."""
    window = tokens_of_window(model)
    if window is None:
        return {"use_sliding_window": False}
    first = next(layer for layer, left in enumerate(model.windows) if left is not None)
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": first}
