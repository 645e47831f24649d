"""The layers of a model whose weights no longer change, for generation: the same operations in fewer calls.

A token of one sequence costs a pass over all weights, which empties the caches of the processor: the code and the
objects of every call between two products come from memory again. `Transformer.forward` makes some 180 calls for a
layer, because it also serves training, ranks that share a layer and every option. Here what does not change between
tokens is decided once, and what a layer has that is not known here is left to the layer itself.

Shapes: S new tokens of all sequences, D hidden, G key-value heads, K head size. There is no batch dimension inside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from megalith.kernels.cpu.products import Packing, min_rows
from megalith.kernels.torch_private import onednn_linear
from megalith.models.transformer import Block, Transformer
from megalith.nn.attention import LocalAttention, SelfAttention
from megalith.nn.cache import KVCache, LayerCache
from megalith.nn.feed_forward import ACTIVATIONS, FeedForward
from megalith.nn.linear import Linear, linear
from megalith.nn.norm import LayerNorm
from megalith.nn.precision import product_dtype
from megalith.nn.region import SOLO
from megalith.nn.rope import Rotation, rotate

_Map = Callable[[Tensor], Tensor]
_Step = Callable[[Tensor, Rotation | None, LayerCache], Tensor]


class FrozenLayers:
    """The layers of a `Transformer` in evaluation, without a gradient; equal to rounding.

    The weights of `decoder` stay where they are, and may be changed in place, unless `packing` moves them into
    the layout of a faster product (`kernels.cpu.products`), one after the other: then `decoder` has them no more.
    """

    def __init__(self, decoder: Transformer, packing: Packing | None = None) -> None:
        self._layers = [_layer(cast("Block", block), packing) for block in decoder.layers.values()]
        self._norm = None if decoder.final_layernorm is None else _norm(decoder.final_layernorm)

    def __call__(self, x_S1D: Tensor, rope: Rotation | None, cache: KVCache) -> Tensor:
        """Apply the layers, [S, 1, D] -> [S, 1, D]; other arguments as of `Transformer.forward`."""
        x_SD, caches = x_S1D.squeeze(1), cache.layers
        for layer, own in zip(self._layers, caches, strict=True):
            x_SD = layer(x_SD, rope, own)
        return (x_SD if self._norm is None else self._norm(x_SD)).unsqueeze(1)


def frozen(decoder: Transformer, packing: Packing | None = None) -> FrozenLayers | None:
    """Return the layers in fewer calls; None if ranks share them, whose layers communicate."""
    return FrozenLayers(decoder, packing) if decoder.region.size == 1 else None


def _layer(block: Block, packing: Packing | None) -> _Step:
    if type(block) is not Block or block.residual_of_norm or block.cross_attention is not None:
        return lambda x_SD, rope, cache: cast("Tensor", block(x_SD.unsqueeze(1), rope, cache).squeeze(1))
    first, attention = _norm(block.input_layernorm), _attention(block.self_attention, packing)
    second, feed = _norm(block.pre_mlp_layernorm), _feed_forward(block.mlp, packing)
    rotated = block.rotated

    def through(x_SD: Tensor, rope: Rotation | None, cache: LayerCache) -> Tensor:
        x_SD = x_SD + attention(first(x_SD), rope if rotated else None, cache)
        return x_SD + feed(second(x_SD))

    return through


def _linear(layer: Linear, packing: Packing | None) -> _Map:
    product, beside = _product(layer, packing), layer.adapter
    return product if beside is None else lambda x: beside.row(product(x), x, SOLO)


def _product(layer: Linear, packing: Packing | None) -> _Map:
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    packed = None if packing is None else packing.product(weight, bias, product_dtype(weight))
    if packed is not None:
        layer.weight.data = weight.new_empty(0)
        return packed
    if weight.dtype in (torch.float16, torch.bfloat16):  # two roundings
        return partial(linear, weight=weight, bias=bias, sink=None)
    transposed, least = weight.t(), min_rows(weight) or sys.maxsize

    def product(x: Tensor) -> Tensor:
        if x.shape[0] >= least:
            return onednn_linear(x, weight, bias)
        return torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)

    return product


def _norm(norm: nn.Module) -> _Map:
    if not isinstance(norm, LayerNorm) or norm.around_one:
        return norm
    weight, bias, shape, epsilon = norm.weight.detach(), norm.bias.detach(), norm.weight.shape, norm.epsilon
    # An input of a wider dtype, the fp32 residual stream, is the module's affair.
    return lambda x: torch.layer_norm(x, shape, weight, bias, epsilon) if x.dtype == weight.dtype else norm(x)


def _attention(layer: nn.Module, packing: Packing | None) -> _Step:
    if not isinstance(layer, SelfAttention) or not _is_plain(layer):
        return lambda x_SD, rope, cache: cast("Tensor", layer(x_SD.unsqueeze(1), rope, cache).squeeze(1))
    project, back = _linear(layer.linear_qkv, packing), _linear(layer.linear_proj, packing)
    groups, size, queries = layer.num_groups, layer.shape.head_size, layer.num_heads // layer.num_groups
    constant = layer.rule if layer.shape.softmax_type == "vanilla" else None
    turned = partial(rotate, interleaved=layer.shape.rotary_interleaved)

    def heads(qkv_SE: Tensor) -> Sequence[Tensor]:
        """Split into heads: [S, E] -> q [S, 1, G * queries, K], k and v [S, 1, G, K]."""
        parts = qkv_SE.view(qkv_SE.shape[0], 1, groups, queries + 2, size)
        if queries == 1:
            return parts.unbind(3)
        q, k, v = parts.split_with_sizes((queries, 1, 1), 3)
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)

    def attend(x_SD: Tensor, rope: Rotation | None, cache: LayerCache) -> Tensor:
        q, k, v = heads(project(x_SD))
        if rope is not None:
            q, k = turned(q, rope), turned(k, rope)
        return back(cache.attend(q, k, v, constant or layer.rule_for(q)).flatten(1))

    return attend


def _is_plain(layer: SelfAttention) -> bool:
    return isinstance(layer.mixer, LocalAttention) and layer.q_layernorm is None and not layer.shape.output_gate


def _feed_forward(layer: nn.Module, packing: Packing | None) -> _Map:
    if not isinstance(layer, FeedForward):
        return lambda x_SD: cast("Tensor", layer(x_SD.unsqueeze(1)).squeeze(1))
    up, down = _linear(layer.linear_fc1, packing), _linear(layer.linear_fc2, packing)
    activation = layer.activation if layer.activation.gated else ACTIVATIONS[layer.activation.kind]
    return lambda x_SD: down(activation(up(x_SD)))
