"""Which key of a torch_dist checkpoint a parameter stands under, and where in the tensor of that key.

Layers are stacked: `decoder.layers.3.mlp.linear_fc1.weight` of a model of L layers is row 3 of the key
`decoder.layers.mlp.linear_fc1.weight`, whose global shape has a leading axis of L. The experts of a layer are stacked
too: `decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight` is place [3, 5] of
`decoder.layers.mlp.experts.experts.linear_fc1.weight`, [L, E, ...]. Where Megatron says by `--moe-layer-freq` that the
layers are not alike, each has keys of its own, with its number in them, and only the experts are stacked. So it is with
layers of multi-token prediction. T5 has two stacks of layers, `encoder` and `decoder`.

Names are those of a whole model: the number of an expert counts through all ranks. The layer norms carry the names of
TransformerEngine's fused modules, whichever modules computed them. Source: docs/reference/checkpoints.md#keys.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from megalith.config import ModelConfig
from megalith.config.values import read_pattern
from megalith.errors import LayoutError

_LAYER_NAME = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)")
_PREDICTION_NAME = re.compile(r"(mtp\.layers\.(\d+)\.transformer_layer\.)(.+)")
_PREDICTION = "mtp.layers."
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_STACKED_LAYERS = re.compile(r"(encoder|decoder)\.layers\.(?!\d)")
_KEY_OF_LAYER = re.compile(r"(?:^|\.)(encoder|decoder|mtp)\.layers\.(?:(\d+)\.)?")
_STACKED_EXPERTS = ".mlp.experts.experts."
_FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_ACROSS = ("cross_attention.linear_proj", "cross_attention.linear_q", "cross_attention.linear_kv")
_OF_FEED_FORWARD = ("linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class Slot:
    """The place of a parameter.

    Attributes:
        key: of the tensor that it stands in.
        index: on the leading axes of that, which the parameter itself does not have.
        extents: of those axes.
    """

    key: str
    index: tuple[int, ...] = ()
    extents: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stacking:
    """How the parameters of a model are put together.

    Attributes:
        stacks: name -> experts of each layer, 0 where it is dense.
        apart: each layer has keys of its own.
        shared: whether mixtures have experts that take every token.
        predictions: experts of each layer of multi-token prediction, 0 where it is dense.
        attention: the linear modules of self-attention.
        latent: whether that makes its heads out of latent vectors.
        fused: whether files have the keys of TransformerEngine's modules rather than of Megatron's own.
        projected: whether mixtures have projections around their experts.
    """

    stacks: Mapping[str, tuple[int, ...]]
    apart: bool = False
    shared: bool = False
    predictions: tuple[int, ...] = ()
    attention: tuple[str, ...] = ("linear_proj", "linear_qkv")
    latent: bool = False
    fused: bool = False
    projected: bool = False

    def slot(self, name: str) -> Slot:
        """Where a parameter stands.

        Raises:
            LayoutError: it is of a layer that the model does not have.

        >>> dense(4).slot("decoder.layers.3.input_layernorm.weight").key
        'decoder.layers.self_attention.linear_qkv.layer_norm_weight'
        >>> Stacking({"decoder": (4, 4)}).slot("decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight").index
        (1, 2)
        """
        match = _LAYER_NAME.fullmatch(name) or _PREDICTION_NAME.fullmatch(name)
        if match is None:
            return Slot(name)
        stack, layer, rest = match[1], int(match[2]), match[3]
        ahead = stack.startswith(_PREDICTION)
        layers = self.predictions if ahead else self.stacks.get(stack, ())
        if layer >= len(layers):
            flag = "--mtp-num-layers" if ahead else "--num-layers"
            raise LayoutError(f"{name} is outside a model of {len(layers)} layers; pass the whole model's {flag}")
        for module, fused in _FUSED_NORMS.items():
            if rest.startswith(module):
                rest = fused + rest.removeprefix(module)
        prefix, index, extents = (stack, (), ()) if ahead else self._of_layer(stack, layer)
        if (expert := _EXPERT.fullmatch(rest)) is not None:
            rest = f"mlp.experts.experts.{expert[2]}"
            index, extents = (*index, int(expert[1])), (*extents, layers[layer])
        return Slot(prefix + rest, index, extents)

    def _of_layer(self, stack: str, layer: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """What the keys of a layer begin with, and its place on the axis of layers."""
        if self.apart:
            return f"{stack}.layers.{layer}.", (), ()
        return f"{stack}.layers.", (layer,), (len(self.stacks[stack]),)

    def written_keys(self, keys: Iterable[str]) -> dict[str, str]:
        """Key in model space, of an optimizer's state too -> key in a file of format torch_dist, where it is another.

        It is another for norms. Model space has those before attention and before the feed-forward layer as parts of
        the linear layer behind them, as TransformerEngine's fused modules do; but where latent vectors are made, and
        where experts are chosen, no such layer follows. Of Megatron's own modules only those of latent attention have
        norms under their own names.

        >>> dense(2).written_keys(["decoder.layers.mlp.linear_fc1.layer_norm_weight"])
        {}
        >>> mixture = Stacking({"decoder": (4, 4)}, fused=True)
        >>> mixture.written_keys(["decoder.layers.mlp.linear_fc1.layer_norm_weight"]).values()
        dict_values(['decoder.layers.pre_mlp_layernorm.weight'])
        """
        return {key: written for key in keys if (written := self._written_key(key)) != key}

    def _written_key(self, key: str) -> str:
        renamed = []
        if self.latent:
            renamed.append((".self_attention.linear_qkv.layer_norm_", ".input_layernorm."))
        if self.latent and self.fused:
            renamed += [(f".{part}_layernorm.", f".linear_{part}_up_proj.layer_norm_") for part in ("q", "kv")]
        if self._has_experts(key) if self.fused else self.latent:
            renamed.append((".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."))
        for ours, theirs in renamed:
            key = key.replace(ours, theirs)
        return key

    def _has_experts(self, key: str) -> bool:
        """Whether a key is of layers with experts."""
        if (match := _KEY_OF_LAYER.search(key)) is None:
            return False
        layers = self.predictions if match[1] == "mtp" else self.stacks.get(match[1], ())
        return any(layers) if match[2] is None else bool(layers[int(match[2])])

    def extra_state_objects(self, layers: Collection[int] | None = None) -> dict[str, None]:
        """The empty `_extra_state` entries that Megatron writes and asks for, one per linear.

        Args:
            layers: those to make entries for; all if None. The layers of prediction come with the last one.
        """
        keys = [
            key
            for stack, experts in self.stacks.items()
            for layer, number in enumerate(experts)
            if layers is None or layer in layers
            for key in self._extra_states(*self._of_layer(stack, layer), number, across=stack == "decoder")
        ]
        last = max(map(len, self.stacks.values())) - 1
        for layer, number in enumerate(self.predictions if layers is None or last in layers else ()):
            keys.append(_object_key(f"{_PREDICTION}{layer}.eh_proj", (), ()))
            keys += self._extra_states(f"{_PREDICTION}{layer}.transformer_layer.", (), (), number)
        return dict.fromkeys(keys)

    def _extra_states(
        self, prefix: str, index: tuple[int, ...], extents: tuple[int, ...], experts: int, *, across: bool = False
    ) -> Iterator[str]:
        own = (f"self_attention.{linear}" for linear in self.attention)
        for linear in (*own, *(_ACROSS if across and len(self.stacks) > 1 else ())):
            yield _object_key(prefix + linear, index, extents)
        for linear in _OF_FEED_FORWARD:
            if not experts:
                yield _object_key(f"{prefix}mlp.{linear}", index, extents)
            for expert in range(experts):
                name = f"{prefix}mlp.experts.experts.{linear}"
                yield _object_key(name, (*index, expert), (*extents, experts))
            if experts and self.projected:
                yield _object_key(f"{prefix}mlp.{linear.removeprefix('linear_')}_latent_proj", index, extents)
            if experts and self.shared:
                yield _object_key(f"{prefix}mlp.shared_experts.{linear}", index, extents)


def _object_key(module: str, index: tuple[int, ...], extents: tuple[int, ...]) -> str:
    at, of = (".".join(map(str, values)) for values in (index or (0,), extents or (1,)))
    return f"{module}._extra_state/shard_{at}_{of}"


def expert_of(name: str) -> int | None:
    """The number of the expert that a parameter belongs to; None if to none, or to one that takes every token."""
    match = _LAYER_NAME.fullmatch(name) or _PREDICTION_NAME.fullmatch(name)
    expert = _EXPERT.fullmatch(match[3]) if match else None
    return None if expert is None else int(expert[1])


def is_of_experts(key: str) -> bool:
    """Whether a key, of an optimizer's state too, is of the experts of layers; not of those that take every token."""
    return _STACKED_EXPERTS in key


def stays_fp32(key: str) -> bool:
    """Whether a weight's key is of what has fp32 in a model of any dtype: what is added for the choice of experts."""
    return key.endswith((".mlp.router.expert_bias", ".mlp.router.qb_beta"))


def dense(num_layers: int) -> Stacking:
    """Of a decoder without experts."""
    return Stacking({"decoder": (0,) * num_layers})


def stacking_of(model: ModelConfig) -> Stacking:
    """Of an architecture: as Megatron, which goes by what `--moe-layer-freq` says and not by what it comes to."""
    apart = model.mixture and read_pattern(model.moe_layer_freq) != 1
    stacks = {name: model.experts_of(layers) for name, layers in model.stacks.items()}
    predictions = (model.experts[-1],) * model.predictions
    return Stacking(
        stacks,
        apart,
        model.moe_shared_expert_intermediate_size is not None,
        predictions,
        _linears_of_attention(model),
        model.multi_latent_attention,
        model.transformer_impl != "local",
        model.moe_latent_size is not None,
    )


def _linears_of_attention(model: ModelConfig) -> tuple[str, ...]:
    if not model.multi_latent_attention:
        return "linear_proj", "linear_qkv"
    queries = ("linear_q_proj",) if model.q_lora_rank is None else ("linear_q_down_proj", "linear_q_up_proj")
    return "linear_proj", *queries, "linear_kv_down_proj", "linear_kv_up_proj"


def stacked_axes(key: str) -> int:
    """How many leading axes of the tensor of a weight's key count layers and experts.

    >>> stacked_axes("decoder.layers.mlp.experts.experts.linear_fc1.weight")
    2
    """
    return (_STACKED_LAYERS.match(key) is not None) + (_STACKED_EXPERTS in key)
