"""Parameter names of Megatron's per-rank files, of every generation, and the modules' own.

A name here has no prefix of a wrapper and a layer number that counts from the first layer of its pipeline stage or
virtual chunk. Three generations are read:

    core, local modules          decoder.layers.0.input_layernorm.weight
    core, TransformerEngine      decoder.layers.0.self_attention.linear_qkv.layer_norm_weight
    before core (2019 to 2023)   language_model.encoder.layers.0.input_norm.weight, in nested dicts

Written are the names of core with local modules, which are our own, or where a converter is told to (`--saver legacy`)
those from before core, of either of the two generations in `LEGACY`.
Source: docs/reference/checkpoints.md#parameter-names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megalith.config.families import FAMILIES

EXTRA_STATE = "_extra_state"
OUTPUT_LAYER = "output_layer"
LINEARS = (
    *("self_attention.linear_proj", "self_attention.linear_qkv", ".linear_fc1", ".linear_fc2"),
    *("cross_attention.linear_proj", "cross_attention.linear_q", "cross_attention.linear_kv", ".eh_proj"),
)
"""The modules of a layer that have an entry for the state of FP8."""

HEAD_OF_T5 = "lm_head.output_layer."
"""The output layer of T5, which Megatron's model holds, and so writes, under `output_layer.` a second time."""

_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)")
_PREDICTION = re.compile(r"mtp\.layers\.\d+\..+")
_EXPERT = re.compile(r"(mlp\.experts\.local_experts\.)(\d+)\.")
_GROUPED = re.compile(r"(.+\.mlp\.experts\.)weight([12])")
_WRAPPERS = ("module.", "model.")

# Applied in this order, each everywhere in the name.
_RENAMED = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^language_model\.(encoder|transformer)\.", "decoder."),
        (r"^language_model\.", ""),
        (r"^word_embeddings_for_head\.", "output_layer."),
        (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
        (r"\.attention\.", ".self_attention."),
        (r"\.query_key_value\.", ".linear_qkv."),
        (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.dense_h_to_4h\.", ".linear_fc1."),
        (r"\.dense_4h_to_h\.", ".linear_fc2."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.post_attention_(layernorm|norm)\.", ".pre_mlp_layernorm."),
        (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
        (r"\.linear_(q|kv)_up_proj\.layer_norm_", r".\1_layernorm."),
        (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
        (r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".mlp.experts.local_experts.\3.\1.\2"),
    )
]


CORE = "core"
LEGACY = {
    "2023": ("input_layernorm", "post_attention_layernorm", "final_layernorm"),
    "0.12": ("input_norm", "post_attention_norm", "final_norm"),
}
"""Generation of the names from before core -> what it calls the norms. The earlier is that of Megatron-LM 23.06, the
later what `--use-legacy-models` read until Megatron-Core 0.12."""

_LEGACY_PARTS = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}


def flattened(model: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of a model's dict with those of dicts in it, in order; names are joined by dots.

    >>> list(flattened({"language_model": {"encoder": {"layers.0.mlp.bias": 1}}}))
    [('language_model.encoder.layers.0.mlp.bias', 1)]
    """
    for name, value in model.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def is_parameter(name: str) -> bool:
    """Whether an entry is more than the state of FP8, or a table that is computed anew."""
    return not name.endswith((EXTRA_STATE, "inv_freq"))


def module_name(name: str, layers: Sequence[int], first_expert: int = 0) -> str | None:
    """Our name of a parameter; None if it is in a layer that the stage does not have.

    `layers` has the model's number of each layer of the stage or virtual chunk. The experts of a layer in one tensor
    (`grouped_experts`) keep their name.

    >>> module_name("language_model.encoder.layers.1.attention.query_key_value.weight", range(4, 6))
    'decoder.layers.5.self_attention.linear_qkv.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    match = _LAYER.fullmatch(name)
    if match is None and _PREDICTION.fullmatch(name) is None:
        return name
    name = _EXPERT.sub(lambda expert: f"{expert[1]}{first_expert + int(expert[2])}.", name)
    if match is None:
        return name
    local, rest = int(match[2]), name.split(".", 3)[3]
    return f"{match[1]}.layers.{layers[local]}.{rest}" if local < len(layers) else None


def grouped_experts(name: str, experts: Iterable[int]) -> list[str]:
    """The parameters in one tensor of the local experts, `weight1` or `weight2` of Megatron's GroupedMLP, if any.

    >>> grouped_experts("decoder.layers.0.mlp.experts.weight1", range(2, 4))[0]
    'decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight'
    """
    match = _GROUPED.fullmatch(name)
    return [] if match is None else [f"{match[1]}local_experts.{at}.linear_fc{match[2]}.weight" for at in experts]


def entries(
    names: Iterable[str], layers: Sequence[int], first_expert: int = 0, *, last: bool
) -> Iterator[tuple[str, str | None]]:
    """The entries, name in the file and ours, of the dict that Megatron writes of a stage or virtual chunk, in its
    order.

    Ours is None for the state of FP8, which stands after each linear. `last`: whether the output layer is here.
    """
    names, previous = list(names), ""
    for name in [*names, ""]:
        owner, _, _ = name.rpartition(".")
        if previous and owner != previous and previous.endswith(LINEARS):
            yield f"{_local(previous, layers, first_expert)}.{EXTRA_STATE}", None
        if name:
            yield _local(name, layers, first_expert), name
        previous = owner
    for name in names:
        if name.startswith(HEAD_OF_T5):
            yield name.removeprefix("lm_head."), name
    if last:
        yield f"{OUTPUT_LAYER}.{EXTRA_STATE}", None


def _local(name: str, layers: Sequence[int], first_expert: int) -> str:
    """A name with the layer counted from the first of the stage, and the expert from the first that is there."""
    name = _EXPERT.sub(lambda expert: f"{expert[1]}{int(expert[2]) - first_expert}.", name)
    match = _LAYER.match(name)
    return name if match is None else f"{match[1]}.layers.{layers.index(int(match[2]))}.{match[3]}"


def legacy_path(name: str, layers: Sequence[int], generation: str, *, tied: bool) -> tuple[str, ...] | None:
    """Where a parameter stands in the nested dicts from before core: their keys from the outermost.

    None for a parameter that the models of that time had not. `layers` as of `module_name`, `generation` is a key of
    `LEGACY`; `tied`: an output layer is the copy of the embedding in the last stage.

    >>> legacy_path("decoder.layers.5.pre_mlp_layernorm.weight", range(4, 6), "2023", tied=True)
    ('language_model', 'encoder', 'layers.1.post_attention_layernorm.weight')
    """
    before_attention, before_mlp, final = LEGACY[generation]
    parts = {**_LEGACY_PARTS, "input_layernorm": before_attention, "pre_mlp_layernorm": before_mlp}
    owner, _, kind = name.rpartition(".")
    if (match := _LAYER.fullmatch(owner)) is not None and match[1] == "decoder":
        part = parts.get(match[3])
        return (
            None
            if part is None
            else ("language_model", "encoder", f"layers.{layers.index(int(match[2]))}.{part}.{kind}")
        )
    if owner == "decoder.final_layernorm":
        return "language_model", "encoder", f"{final}.{kind}"
    if owner == OUTPUT_LAYER:
        return ("word_embeddings_for_head", kind) if tied else ("language_model", OUTPUT_LAYER, kind)
    if owner in ("embedding.word_embeddings", "embedding.position_embeddings"):
        return "language_model", "embedding", owner.partition(".")[2], kind
    return None


_FINAL_NORM = re.compile(r"\.final_(layernorm|norm)\.")


def with_family(args: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The args of a checkpoint with those that say the family; as they are where they say it.

    Megatron's args are the same whatever its program trained. The tokenizer does not tell either: a GPT may have that
    of BERT. The names of the weights do (those of the first and the last stage at least), of any generation, with or
    without the prefix of a wrapper.

    >>> with_family({}, ["decoder.layers.0.mlp.linear_fc1.weight"])["model_family"]
    'gpt'
    >>> with_family({}, ["embedding.tokentype_embeddings.weight", "encoder.final_layernorm.weight"])["model_family"]
    'bert'
    """
    if "model_family" in args:
        return dict(args)
    known = list(names)
    family = next(
        name
        for name, family in reversed(tuple(FAMILIES.items()))
        if not family.weights or any(map(re.compile(family.weights).search, known))
    )
    if "encoder" not in FAMILIES[family].stacks:
        return {**args, "model_family": family}
    # Without TransformerEngine the stacks of Megatron's BERT and T5 end without a norm.
    return {**args, "model_family": family, "final_layernorm": any(map(_FINAL_NORM.search, known))}
