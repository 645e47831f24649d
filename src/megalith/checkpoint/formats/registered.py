"""In which order the modules that wrote a checkpoint had their parameters: that of the buffers of its optimizer.

Names are ours, which are those of Megatron's own modules. TransformerEngine's have others within a layer:
- a norm that is one module with the linear layer behind it has its weight and bias before those of the linear layer
  (`LayerNormLinear`), where Megatron has them at the head of the layer, or after all linear layers of latent attention;
- with `--moe-grouped-gemm` the first linear layers of all experts come before the second ones (`GroupedLinear`: weight
  and bias of an expert, then those of the next), where Megatron has expert after expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.weight",
    "pre_mlp_layernorm.": "mlp.linear_fc1.weight",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.weight",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.weight",
}
"""A norm of a layer and what follows it where the two are one module."""
_LATENT = re.compile(r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_")
_IN_LAYER = re.compile(r"((?:(?:encoder|decoder)\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer)\.)(.+)")
_OF_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\..+")


def registered(names: Sequence[str], *, fused: bool, grouped: bool, keys: Iterable[str]) -> list[str]:
    """Put parameters in order.

    Args:
        names: of the parameters of a virtual chunk, in the order of Megatron's own modules.
        fused: the modules are TransformerEngine's.
        grouped: these have one module for all experts of a layer.
        keys: of the weights in the files, which tell whether the norms of latent attention are modules of their own.

    >>> layer = [f"decoder.layers.0.{name}.weight" for name in ("input_layernorm", "self_attention.linear_proj",
    ...          "self_attention.linear_qkv")]
    >>> [name.split(".")[-2] for name in registered(layer, fused=True, grouped=False, keys=())]
    ['linear_proj', 'input_layernorm', 'linear_qkv']
    """
    if not fused:
        return list(names)
    within = {f"self_attention.{match[1]}_layernorm." for key in keys if (match := _LATENT.search(key))}
    apart = {norm for norm in _NORMS if norm.startswith("self_attention.")} - within
    place = {name: number for number, name in enumerate(names)}
    first_expert: dict[str, int] = {}

    def rank(name: str) -> tuple[int, int, int, int]:
        at = place[name]
        if (match := _IN_LAYER.fullmatch(name)) is None:
            return at, 0, 0, at
        layer, rest = match[1], match[2]
        if grouped and (expert := _OF_EXPERT.fullmatch(rest)) is not None:
            return first_expert.setdefault(layer, at), int(expert[2]), int(expert[1]), at
        norm = next((norm for norm in _NORMS if rest.startswith(norm) and norm not in apart), "")
        linear = place.get(layer + _NORMS[norm]) if norm else None
        return (at, 0, 0, at) if linear is None else (linear, -1, 0, at)

    return sorted(names, key={name: rank(name) for name in names}.__getitem__)
