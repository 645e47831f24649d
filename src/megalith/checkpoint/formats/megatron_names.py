"""Parameter names in modules and in Megatron's files of every generation, and the keys of format torch_dist.

`parse_name` parses a name into layer, expert, and path of module and parameter; all other code asks these fields. A
parameter at a place that Megatron does not define has no special meaning, whatever its name contains.

In a file of format torch a name has no wrapper prefix, and layers are numbered from the first of the pipeline stage or
virtual chunk. Three generations are read:

    core, local modules          decoder.layers.0.input_layernorm.weight
    core, TransformerEngine      decoder.layers.0.self_attention.linear_qkv.layer_norm_weight
    before core (2019 to 2023)   language_model.encoder.layers.0.input_norm.weight, in nested dicts

Files are written with the names of core with local modules, which are also our own, or with those from before core
(`--saver legacy`), of either of the two generations in `LEGACY`.
Source: docs/reference/checkpoints.md#parameter-names and #torch_dist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from megalith.config.families import FAMILIES

EXTRA_STATE = "_extra_state"
OUTPUT_LAYER = "output_layer"
PREDICTION = "mtp"
"""The stack of the layers of multi-token prediction."""
HEAD_OF_T5 = "lm_head.output_layer."
"""The output layer of T5, which Megatron's model also holds, and so also writes, under `output_layer.`."""

_IN_LAYER = re.compile(r"((encoder|decoder)\.layers\.(?:(\d+)\.)?|mtp\.layers\.(\d+)\.(?:transformer_layer\.)?)(.+)")
_OF_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)|experts)\.(linear_fc[12]\..+)")
_GROUPED = re.compile(r"mlp\.experts\.weight([12])")


@dataclass(frozen=True)
class ParameterName:
    """Parsed name of a parameter, or parsed key of a weight in format torch_dist; `str` joins it.

    Attributes:
        path: Names of module and parameter within the expert, the layer or the model: `mlp.linear_fc1.weight`.
        prefix: Part before the path and the expert: `decoder.layers.3.`; empty outside layers.
        stack: encoder, decoder or `PREDICTION`; None outside layers.
        layer: Number of the layer; None outside layers, and in a key that stacks all layers.
        routed: Whether it belongs to routed experts; shared experts are not routed.
        expert: Number of the expert; None in a key that stacks all experts, and if `grouped`.
        grouped: Whether it holds all experts of a rank: `weight1` or `weight2` of Megatron's GroupedMLP.
    """

    path: str
    prefix: str = ""
    stack: str | None = None
    layer: int | None = None
    routed: bool = False
    expert: int | None = None
    grouped: bool = False

    def __str__(self) -> str:
        if self.grouped:
            return f"{self.prefix}mlp.experts.weight{self.path.removeprefix('linear_fc')[0]}"
        if self.routed:
            experts = "experts" if self.expert is None else f"local_experts.{self.expert}"
            return f"{self.prefix}mlp.experts.{experts}.{self.path}"
        return self.prefix + self.path

    @property
    def module(self) -> str:
        """Name of the module within the expert, the layer or the model."""
        return self.path.rpartition(".")[0]

    @property
    def stacked_axes(self) -> int:
        """Number of leading dimensions of the tensor of a torch_dist key that count layers and experts."""
        of_layers = self.stack is not None and self.layer is None
        return of_layers + (self.routed and self.expert is None and not self.grouped)


@lru_cache(2**16)
def parse_name(name: str) -> ParameterName:
    """Parse the name of a parameter in a module or in a file of core, or the torch_dist key of a weight.

    >>> parse_name("decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight").expert
    5
    >>> parse_name("decoder.layers.mlp.experts.experts.linear_fc1.weight").stacked_axes
    2
    >>> parse_name("my.decoder.layers.3.mlp.experts.experts.linear_fc1.weight").routed
    False
    """
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return ParameterName(name)
    number = match[3] or match[4]
    found = ParameterName(match[5], match[1], match[2] or PREDICTION, None if number is None else int(number))
    if expert := _OF_EXPERT.fullmatch(found.path):
        return replace(found, path=expert[2], routed=True, expert=None if expert[1] is None else int(expert[1]))
    if grouped := _GROUPED.fullmatch(found.path):
        return replace(found, path=f"linear_fc{grouped[1]}.weight", routed=True, grouped=True)
    return found


# --- keys of format torch_dist ----------------------------------------------------------------------------------------

_NORMS_WITHIN = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Norm of a layer -> its name as part of the linear layer that follows, as in TransformerEngine's fused modules."""
_LATENT_NORMS_WITHIN = {
    f"self_attention.{part}_layernorm.": f"self_attention.linear_{part}_up_proj.layer_norm_" for part in ("q", "kv")
}
"""The same of the norms of latent attention."""
_IN_MODEL_SPACE = _NORMS_WITHIN | {within: norm for norm, within in _LATENT_NORMS_WITHIN.items()}


def _moved(path: str, table: Mapping[str, str]) -> str:
    """Replace the beginning of a path by the table, if it is in there."""
    return next((new + path.removeprefix(old) for old, new in table.items() if path.startswith(old)), path)


def _inverse(table: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in table.items()}


def _moved_key(key: str, table: Mapping[str, str]) -> str:
    """Replace the beginning of the path in a key by the table; only in keys of layers."""
    name = parse_name(key)
    return key if name.stack is None or name.routed else name.prefix + _moved(name.path, table)


def model_space_key(key: str) -> str:
    """Return the model-space key of a weight's key in a file, where norms may belong to other modules.

    >>> model_space_key("decoder.layers.pre_mlp_layernorm.weight")
    'decoder.layers.mlp.linear_fc1.layer_norm_weight'
    >>> model_space_key("my.pre_mlp_layernorm.weight")
    'my.pre_mlp_layernorm.weight'
    """
    return _moved_key(key, _IN_MODEL_SPACE)


def file_key(key: str, *, latent: bool, fused: bool, has_experts: bool) -> str:
    """Return the key in Megatron's files of a weight's key in model space.

    Args:
        latent: Attention is computed from latent vectors.
        fused: The modules are TransformerEngine's.
        has_experts: The layers that the key belongs to are MoE layers.
    """
    before_attention, before_mlp = _inverse(_NORMS_WITHIN).items()
    table = dict([before_attention] * latent + [before_mlp] * (has_experts if fused else latent))
    return _moved_key(key, table | _LATENT_NORMS_WITHIN if latent and fused else table)


def has_latent_norm_within(key: str) -> bool:
    """Return whether a key is of a norm of latent attention that is fused with the linear layer that follows."""
    return _moved_key(key, _inverse(_LATENT_NORMS_WITHIN)) != key


def linear_behind(name: ParameterName, *, latent: bool) -> str | None:
    """Return the weight of the linear layer with which a norm's parameter is fused; None for any other parameter.

    `latent` says whether norms of latent attention are fused, too.
    """
    within = _moved_key(str(name), _NORMS_WITHIN | _LATENT_NORMS_WITHIN if latent else _NORMS_WITHIN)
    return None if within == str(name) else f"{within.rpartition('layer_norm_')[0]}weight"


# --- names in files of format torch -----------------------------------------------------------------------------------

_WRAPPERS = ("module.", "model.")
_COMPUTED = (EXTRA_STATE, "inv_freq")
_LINEARS = (
    *("self_attention.linear_proj", "self_attention.linear_qkv", "eh_proj", "mlp.linear_fc1", "mlp.linear_fc2"),
    *("cross_attention.linear_proj", "cross_attention.linear_q", "cross_attention.linear_kv"),
    *("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
)
"""Modules of a layer that have an entry for FP8 state, besides those of experts."""
CORE = "core"
LEGACY = {
    "2023": ("input_layernorm", "post_attention_layernorm", "final_layernorm"),
    "0.12": ("input_norm", "post_attention_norm", "final_norm"),
}
"""Names of the norms in each generation from before core: Megatron-LM 23.06, and what `--use-legacy-models` read until
Megatron-Core 0.12."""
_LEGACY_PARTS = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
_RENAMED = {
    "language_model.encoder.": "decoder.",
    "language_model.transformer.": "decoder.",
    "language_model.": "",
    "word_embeddings_for_head.": "output_layer.",
}
"""Beginning of a name from before core -> that of core."""
_RENAMED_IN_LAYER = {
    **{f"{old}.": f"{new}." for new, old in _LEGACY_PARTS.items()},
    **{f"{norm}.": "input_layernorm." for norm, _, _ in LEGACY.values()},
    **{f"{norm}.": "pre_mlp_layernorm." for _, norm, _ in LEGACY.values()},
    **_inverse(_NORMS_WITHIN | _LATENT_NORMS_WITHIN),
}
"""Beginning of a path of any generation -> ours."""
_GROUPED_LINEAR = re.compile(r"mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)")
_FINAL_NORMS = ("encoder.final_layernorm.", "decoder.final_layernorm.")


def flattened(model: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of a model's dict and of dicts in it, in order; names are joined by dots.

    >>> list(flattened({"language_model": {"encoder": {"layers.0.mlp.bias": 1}}}))
    [('language_model.encoder.layers.0.mlp.bias', 1)]
    """
    for name, value in model.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def is_computed(name: str) -> bool:
    """Return whether an entry of a file is FP8 state or a table of rotary embedding, which are not parameters."""
    return name.rpartition(".")[2] in _COMPUTED


def _in_core(name: str) -> ParameterName:
    """Parse the name of a parameter in a file of any generation, translated to core's layer."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    found = parse_name(_moved(_moved(name, _RENAMED), {"decoder.final_norm.": "decoder.final_layernorm."}))
    return found if found.stack is None else replace(found, path=_moved(found.path, {"attention.": "self_attention."}))


def is_legacy_qkv(name: str) -> bool:
    """Return whether a name in a file is the query-key-value projection of the generations before core."""
    found = _in_core(name)
    return found.stack is not None and found.module == _LEGACY_PARTS["self_attention.linear_qkv"]


def module_name(name: str, layers: Sequence[int], first_expert: int = 0) -> str | None:
    """Return our name of a parameter in a file; None if the stage has no such layer.

    `layers` has the model's number of each layer of the stage or virtual chunk. Grouped experts (`grouped_experts`)
    keep their name.

    >>> module_name("language_model.encoder.layers.1.attention.query_key_value.weight", range(4, 6))
    'decoder.layers.5.self_attention.linear_qkv.weight'
    """
    found = _in_core(name)
    if found.stack is not None and not found.routed:
        if (expert := _GROUPED_LINEAR.fullmatch(found.path)) is not None:
            found = replace(found, path=expert[1], routed=True, expert=int(expert[2]))
        else:
            found = replace(found, path=_moved(found.path, _RENAMED_IN_LAYER))
    if found.stack in (None, PREDICTION) or found.layer is None:
        return _renumbered(found, None, first_expert)
    return _renumbered(found, layers[found.layer], first_expert) if found.layer < len(layers) else None


def _renumbered(name: ParameterName, layer: int | None, shift: int) -> str:
    """Return a name with another layer number (None: unchanged), and `shift` added to the expert number."""
    prefix = name.prefix if layer is None else f"{name.stack}.layers.{layer}."
    return str(replace(name, prefix=prefix, expert=None if name.expert is None else name.expert + shift))


def grouped_experts(name: str, experts: Iterable[int]) -> list[str]:
    """Return the parameters that `weight1` or `weight2` of Megatron's GroupedMLP holds; empty for any other name.

    >>> grouped_experts("decoder.layers.0.mlp.experts.weight1", range(2, 4))[0]
    'decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight'
    """
    found = parse_name(name)
    return [str(replace(found, grouped=False, expert=number)) for number in experts] if found.grouped else []


def entries(
    names: Iterable[str], layers: Sequence[int], first_expert: int = 0, *, last: bool
) -> Iterator[tuple[str, str | None]]:
    """Yield (name in the file, our name) of the entries that Megatron writes of a stage or virtual chunk, in its order.

    Our name is None for FP8 state, which follows each linear. `last`: whether the stage has the output layer.
    """
    names = list(names)
    for name, following in zip_longest(names, names[1:], fillvalue=""):
        local, owner = _local(name, layers, first_expert), name.rpartition(".")[0]
        yield local, name
        if following.rpartition(".")[0] != owner and _has_extra_state(name):
            yield f"{local.rpartition('.')[0]}.{EXTRA_STATE}", None
    for name in names:
        if name.startswith(HEAD_OF_T5):
            yield name.removeprefix("lm_head."), name
    if last:
        yield f"{OUTPUT_LAYER}.{EXTRA_STATE}", None


def _has_extra_state(name: str) -> bool:
    found = parse_name(name)
    return found.routed or (found.stack is not None and found.module in _LINEARS)


def _local(name: str, layers: Sequence[int], first_expert: int) -> str:
    """Return a name with layers counted from the first of the stage, and experts from the first of the rank."""
    found = parse_name(name)
    layer = None if found.stack in (None, PREDICTION) or found.layer is None else layers.index(found.layer)
    return _renumbered(found, layer, -first_expert)


def legacy_path(name: str, layers: Sequence[int], generation: str, *, tied: bool) -> tuple[str, ...] | None:
    """Return the keys of a parameter in the nested dicts from before core, from the outermost.

    Return None for a parameter that models had not then. `layers` as of `module_name`, `generation` is a key of
    `LEGACY`; `tied`: an output layer is the copy of the embedding in the last stage.

    >>> legacy_path("decoder.layers.5.pre_mlp_layernorm.weight", range(4, 6), "2023", tied=True)
    ('language_model', 'encoder', 'layers.1.post_attention_layernorm.weight')
    """
    before_attention, before_mlp, final = LEGACY[generation]
    parts = {**_LEGACY_PARTS, "input_layernorm": before_attention, "pre_mlp_layernorm": before_mlp}
    owner, _, kind = name.rpartition(".")
    if (found := parse_name(name)).stack == "decoder" and found.layer is not None:
        part = None if found.routed else parts.get(found.module)
        number = layers.index(found.layer)
        return None if part is None else ("language_model", "encoder", f"layers.{number}.{part}.{kind}")
    if owner == "decoder.final_layernorm":
        return "language_model", "encoder", f"{final}.{kind}"
    if owner == OUTPUT_LAYER:
        return ("word_embeddings_for_head", kind) if tied else ("language_model", OUTPUT_LAYER, kind)
    if owner in ("embedding.word_embeddings", "embedding.position_embeddings"):
        return "language_model", "embedding", owner.partition(".")[2], kind
    return None


def with_family(args: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Add the model family to the args of a checkpoint, derived from the names of its weights.

    Megatron's args do not contain it, and the tokenizer does not determine it: a GPT may have that of BERT. `names`
    are at least those of the first and the last stage, of any generation, with or without a wrapper's prefix.
    Args that have the family are returned unchanged.

    >>> with_family({}, ["decoder.layers.0.mlp.linear_fc1.weight"])["model_family"]
    'gpt'
    >>> with_family({}, ["embedding.tokentype_embeddings.weight", "encoder.final_layernorm.weight"])["model_family"]
    'bert'
    """
    if "model_family" in args:
        return dict(args)
    known = list(names)
    default, *others = FAMILIES
    marks = {name: re.compile(FAMILIES[name].weights) for name in reversed(others) if FAMILIES[name].weights}
    family = next((name for name, mark in marks.items() if any(map(mark.search, known))), default)
    if "encoder" not in FAMILIES[family].stacks:
        return {**args, "model_family": family}
    final_norm = any(_in_core(name).path.startswith(_FINAL_NORMS) for name in known)
    # Without TransformerEngine the stacks of Megatron's BERT and T5 end without a norm.
    return {**args, "model_family": family, "final_layernorm": final_norm}
