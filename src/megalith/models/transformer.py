"""The stack of layers that every family of models is built around.

Reading order: `Transformer.forward` -> `Block.forward` -> `nn.attention.SelfAttention`, `nn.feed_forward.FeedForward`.
Parameters carry Megatron's names, which its checkpoints and its users know. Activations are sequence first [S, B, D].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.layout import Group, Recompute
from megalith.models.attention_kernels import attention_kernel
from megalith.models.language_model import Stage
from megalith.models.layer_options import attention_rule, attention_shape, build_feed_forward, latent_shape, layer_norm
from megalith.nn.attend import AttentionRule, Mask
from megalith.nn.attention import ContextParallelAttention, SelfAttention
from megalith.nn.cache import KVCache, LayerCache
from megalith.nn.cross_attention import CrossAttention, Encoded, EncodedCache
from megalith.nn.documents import Documents
from megalith.nn.dropout import HiddenDropout
from megalith.nn.latent_attention import LatentAttention
from megalith.nn.moe.balance import Auxiliary, Peers
from megalith.nn.moe.layer import MoE
from megalith.nn.precision import FactoryKwargs
from megalith.nn.recompute import RecomputedNorm, recomputed
from megalith.nn.region import Region
from megalith.nn.registered_attention import RegisteredAttention
from megalith.nn.rope import Rotation
from megalith.registry import Registered

_Layer = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """One pre-norm transformer layer (Xiong et al. 2020, arXiv:2002.04745). [S, B, D] -> [S, B, D].

    Args:
        layer: its number in the whole model, from 0; one past the last has the options of the last.
        recompute: its parts that are recomputed in the backward pass.
        cross: it also attends to the output of an encoder, between its other two branches.
    """

    is_one_graph = False  # compiled, as a whole

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        region: Region,
        mixer: ContextParallelAttention,
        peers: Peers,
        auxiliary: Auxiliary,
        recompute: Collection[str] = (),
        *,
        causal: bool = True,
        cross: bool = False,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.region, self.auxiliary, self.recompute = region, auxiliary, frozenset(recompute)
        self.rotated = config.rotated_layers[min(layer, config.num_layers - 1)]
        self.residual_of_norm = config.apply_residual_connection_post_layernorm
        self.input_layernorm = layer_norm(config, **factory)
        rule = attention_rule(config, layer, causal=causal)
        self.self_attention: SelfAttention | LatentAttention | RegisteredAttention = (
            self._own_attention(config, config.attention, layer, rule, mixer, **factory)
            if isinstance(config.attention, Registered)
            else self._self_attention(config, rule, mixer, **factory)
        )
        if cross:
            self.pre_cross_attn_layernorm = layer_norm(config, **factory)
        self.cross_attention = self._cross_attention(config, layer, **factory) if cross else None
        self.pre_mlp_layernorm = layer_norm(config, **factory)
        whole = {"mlp", "moe"} & self.recompute  # an MoE layer that is recomputed as a whole, with all that is in it
        self.mlp = build_feed_forward(
            config, layer, region, peers, auxiliary, () if whole else self.recompute, **factory
        )
        self.feeds_again = bool(whole) if isinstance(self.mlp, MoE) else "mlp" in whole
        self.dropout = HiddenDropout(config.hidden_dropout, region)

    def _own_attention(
        self,
        config: ModelConfig,
        build: Registered,
        layer: int,
        rule: AttentionRule,
        mixer: ContextParallelAttention,
        **factory: Unpack[FactoryKwargs],
    ) -> RegisteredAttention:
        return RegisteredAttention(
            build(config, layer, region=self.region, **factory),
            config.attention_dropout,
            self.region,
            attention_kernel(config),
            rule,
            mixer,
            recompute_core="core_attn" in self.recompute,
            interleaved=config.rotary_interleaved,
            num_groups=self.region.shard(config.query_groups, share=True).size,
            head_size=config.head_size,
        )

    def _self_attention(
        self,
        config: ModelConfig,
        rule: AttentionRule,
        mixer: ContextParallelAttention,
        **factory: Unpack[FactoryKwargs],
    ) -> SelfAttention | LatentAttention:
        build = partial(
            partial(LatentAttention, latent_shape(config), recompute_heads="mla_up_proj" in self.recompute)
            if config.multi_latent_attention
            else partial(SelfAttention, attention_shape(config), qkv_bias=config.qkv_bias),
            self.region,
            attention_kernel(config),
        )
        return build(
            rule=rule, mixer=mixer, bias=config.add_bias_linear, recompute_core="core_attn" in self.recompute, **factory
        )

    def _cross_attention(self, config: ModelConfig, layer: int, **factory: Unpack[FactoryKwargs]) -> CrossAttention:
        return CrossAttention(
            attention_shape(config),
            self.region,
            attention_kernel(config),
            attention_rule(config, layer, causal=False),
            bias=config.add_bias_linear,
            recompute_core="core_attn" in self.recompute,
            **factory,
        )

    def forward(
        self,
        x_SBD: Tensor,
        rope: Rotation | None,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
        mask: Mask | None = None,
        encoded: Encoded | EncodedCache | None = None,
    ) -> Tensor:
        rope = rope if self.rotated else None
        attention = partial(self.self_attention, rope=rope, cache=cache, documents=documents, mask=mask)
        if self._recomputes_norms():
            x_SBD = self._branch(self.input_layernorm, attention, x_SBD)
        else:  # as there, by one function less on the way to the products
            normed_SBD = self.input_layernorm(x_SBD)
            x_SBD = self._added(x_SBD, normed_SBD, attention(normed_SBD))
        if self.cross_attention is not None:
            assert encoded is not None, "cross attention needs an encoder's output"
            x_SBD = self._branch(self.pre_cross_attn_layernorm, partial(self.cross_attention, encoded=encoded), x_SBD)
        if self.feeds_again and self._recomputes_norms() and not self.residual_of_norm:
            return x_SBD + self.dropout(self._again(self._normed_feed_forward, x_SBD))
        return self._branch(self.pre_mlp_layernorm, self._feed_forward, x_SBD)

    def _branch(self, norm: _Layer, layer: _Layer, x_SBD: Tensor) -> Tensor:
        """Return x + dropout(layer(norm(x))), in the dtype of x."""
        in_graph = self.is_one_graph and torch.compiler.is_compiling()
        if self._recomputes_norms() and not in_graph:
            again = RecomputedNorm(norm, x_SBD)
            normed_SBD = again.output
            with again.not_kept():
                found = layer(normed_SBD)
        else:
            normed_SBD = self._again(norm, x_SBD) if self._recomputes_norms() else norm(x_SBD)
            found = layer(normed_SBD)
        return self._added(x_SBD, normed_SBD, found)

    def _added(self, x_SBD: Tensor, normed_SBD: Tensor, found: Tensor) -> Tensor:
        if found.shape != x_SBD.shape:  # of a registered layer; some other shapes would be broadcast
            raise ConfigError(
                f"a layer of --attention or --mlp returns {list(found.shape)}; return [S, B, D] as it is called with, "
                f"{list(x_SBD.shape)}"
            )
        start = normed_SBD if self.residual_of_norm else x_SBD
        return start.to(x_SBD.dtype) + self.dropout(found)

    def _normed_feed_forward(self, x_SBD: Tensor) -> Tensor:
        found: Tensor = self.mlp(self.pre_mlp_layernorm(x_SBD))
        return found

    def _feed_forward(self, x_SBD: Tensor) -> Tensor:
        if self.feeds_again and self._backward_follows():
            return self._again(self.mlp, x_SBD)
        found: Tensor = self.mlp(x_SBD)
        return found

    def _again(self, compute: Callable[[Tensor], Tensor], x_SBD: Tensor) -> Tensor:
        again: Tensor = recomputed(
            compute, x_SBD, region=self.region, context_fn=self.auxiliary.repeated, in_graph=self.is_one_graph
        )
        return again

    def _recomputes_norms(self) -> bool:
        return "layernorm" in self.recompute and self._backward_follows()

    def _backward_follows(self) -> bool:
        return self.training and torch.is_grad_enabled()


class Transformer(nn.Module):
    """The layers of a stage, under their global numbers, and the final norm on the last stage.

    Arguments as of `Block`; `recompute` says which layers recompute activations.
    """

    def __init__(
        self,
        config: ModelConfig,
        stage: Stage,
        region: Region,
        mixer: ContextParallelAttention,
        peers: Peers,
        auxiliary: Auxiliary,
        recompute: Recompute | None,
        *,
        block_class: type[Block] = Block,
        causal: bool = True,
        cross: bool = False,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.region, self.auxiliary = region, auxiliary
        self._at_once = (Group(range(len(stage.layers)), again=False),)
        self._in_training = self._at_once if recompute is None else tuple(recompute.groups(len(stage.layers)))
        parts = () if recompute is None else recompute.parts
        block = partial(block_class, causal=causal, cross=cross, **factory)
        self.layers = nn.ModuleDict(
            {str(number): block(config, number, region, mixer, peers, auxiliary, parts) for number in stage.layers}
        )
        ends = stage.is_last and config.final_layernorm
        self.final_layernorm = layer_norm(config, **factory) if ends else None

    def forward(
        self,
        x_SBD: Tensor,
        rope: Rotation | None,
        cache: KVCache | None = None,
        documents: Documents | None = None,
        mask: Mask | None = None,
        encoded: Encoded | EncodedCache | None = None,
    ) -> Tensor:
        """Apply the layers of this stage. [S, B, D] -> [S, B, D].

        Args:
            x_SBD: Hidden states of the positions of this rank.
            rope: their rotary cosines and sines, or None.
            cache: Keys and values of earlier positions, for generation.
            documents: Those of the whole sequences, if attention stays inside of them.
            mask: Of the self-attention, or None.
            encoded: An encoder's output, for layers with cross attention.
        """
        options = {"rope": rope, "documents": documents, "mask": mask, "encoded": encoded}
        backward_follows = self.training and torch.is_grad_enabled() and cache is None
        blocks = tuple(self.layers.values())
        for group in self._in_training if backward_follows else self._at_once:
            if group.again:
                through = partial(self._through, blocks[group.layers.start : group.layers.stop], options)
                x_SBD = recomputed(through, x_SBD, region=self.region, context_fn=self.auxiliary.repeated)
                continue
            for index in group.layers:
                x_SBD = blocks[index](x_SBD, cache=None if cache is None else cache.layers[index], **options)
        return x_SBD if self.final_layernorm is None else self.final_layernorm(x_SBD)

    def _through(self, blocks: Sequence[nn.Module], options: Mapping[str, Any], x_SBD: Tensor) -> Tensor:
        for block in blocks:
            x_SBD = block(x_SBD, **options)
        return x_SBD
