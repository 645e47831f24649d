"""GPT in GPT-2 and Llama style: one assembly, the style is configuration.

Reading order: `GPT.forward` -> `Block.forward` -> `nn.attention.SelfAttention` and `nn.feed_forward.FeedForward`.
Parameters carry Megatron's names, which its checkpoints and its users know. Activations are sequence first
[S, B, D]; tokens and losses are [B, S].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.models.attention_kernels import attention_kernel
from megalith.nn.attention import AttentionShape, SelfAttention
from megalith.nn.cache import KVCache, LayerCache
from megalith.nn.embedding import TokenEmbedding
from megalith.nn.feed_forward import FeedForward
from megalith.nn.loss import LogitsBuffer, OutputLayer, vocabulary_loss
from megalith.nn.norm import build_norm
from megalith.nn.placement import Placement
from megalith.nn.precision import matmul
from megalith.nn.region import Region, Solo
from megalith.nn.rope import Rotation, rotation
from megalith.nn.sink import GradientSink, attach_sink


def attention_shape(config: ModelConfig) -> AttentionShape:
    """The attention sizes that a configuration means."""
    return AttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_groups=config.query_groups,
        head_size=config.head_size,
        dropout=config.attention_dropout,
        rotary_interleaved=config.rotary_interleaved,
    )


class Block(nn.Module):
    """One pre-norm transformer layer (Xiong et al. 2020, arXiv:2002.04745). [S, B, D] -> [S, B, D]."""

    def __init__(self, config: ModelConfig, region: Region, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        norm = (config.normalization, config.hidden_size, config.norm_epsilon)
        self.input_layernorm = build_norm(*norm, dtype=dtype, device=device)
        self.self_attention = SelfAttention(
            attention_shape(config),
            region,
            attention_kernel(config),
            qkv_bias=config.qkv_bias,
            bias=config.add_bias_linear,
            dtype=dtype,
            device=device,
        )
        self.pre_mlp_layernorm = build_norm(*norm, dtype=dtype, device=device)
        self.mlp = FeedForward(
            config.hidden_size,
            config.ffn_size,
            config.activation,
            region,
            bias=config.add_bias_linear,
            dtype=dtype,
            device=device,
        )
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x_SBD: Tensor, turn: Rotation | None, cache: LayerCache | None = None) -> Tensor:
        x_SBD = x_SBD + self.dropout(self.self_attention(self.input_layernorm(x_SBD), turn, cache))
        return x_SBD + self.dropout(self.mlp(self.pre_mlp_layernorm(x_SBD)))


class Decoder(nn.Module):
    """The layers and the final norm."""

    def __init__(self, config: ModelConfig, region: Region, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config, region, dtype=dtype, device=device) for _ in range(config.num_layers))
        self.final_layernorm = build_norm(
            config.normalization, config.hidden_size, config.norm_epsilon, dtype=dtype, device=device
        )

    def forward(self, x_SBD: Tensor, turn: Rotation | None, cache: KVCache | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            x_SBD = layer(x_SBD, turn, None if cache is None else cache.layers[index])
        normed: Tensor = self.final_layernorm(x_SBD)
        return normed


class GPT(nn.Module):
    """A decoder-only language model.

    Args:
        config: The architecture.
        vocab_size: V, padded as the embedding table stores it.
        region: How the layers share their work with other ranks; alone by default.

    The weights are unset: `models.initialise` draws them, or a checkpoint fills them.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        region: Region | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        region, device = region or Solo(), torch.device(device)
        learned = config.position_embedding_type == "learned_absolute"
        self.config, self.vocab_size = config, vocab_size
        self.embedding = TokenEmbedding(
            region.shard(vocab_size).size,
            config.hidden_size,
            config.max_position_embeddings if learned else None,
            config.hidden_dropout,
            dtype=dtype,
            device=device,
        )
        self.decoder = Decoder(config, region, dtype=dtype, device=device)
        self.output_layer = (
            OutputLayer(region.shard(vocab_size).size, config.hidden_size, dtype=dtype, device=device)
            if config.untie_embeddings_and_output_weights
            else None
        )
        self.sink: GradientSink | None = None
        self._logits = LogitsBuffer()

    @property
    def output_weight(self) -> nn.Parameter:
        """The weight [V, D] that maps hidden states to logits: the word embedding where they are tied."""
        return self.embedding.word_embeddings.weight if self.output_layer is None else self.output_layer.weight

    def placements(self) -> dict[str, Placement]:
        """The placement table of the whole model: parameter name -> placement."""
        return {
            f"{prefix}.{name}": placement
            for prefix, module in self.named_modules()
            if module is not self and hasattr(module, "placements")
            for name, placement in module.placements().items()
        }

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """An empty key-value cache for `batch` sequences of up to `max_length` tokens."""
        first = self.decoder.layers[0]
        assert isinstance(first, Block)
        weight = self.output_weight
        return KVCache(
            self.config.num_layers,
            max_length,
            batch,
            first.self_attention.num_groups,
            self.config.head_size,
            dtype=weight.dtype,
            device=weight.device,
        )

    def forward(
        self,
        tokens_BS: Tensor,
        *,
        position_ids_BS: Tensor | None = None,
        labels_BS: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Predict each next token.

        Args:
            tokens_BS: Token ids [B, S]; with a cache only the new ones.
            position_ids_BS: Rows of the learned position table [B, S]; counted from the cache's length if absent.
            labels_BS: Targets [B, S].
            cache: Keys and values of earlier tokens, extended in place.

        Returns:
            With labels the loss of each token [B, S] in at least fp32, without the logits [B, S, V].
        """
        start = 0 if cache is None else cache.length
        positions_S = torch.arange(start, start + tokens_BS.shape[1], device=tokens_BS.device)
        if position_ids_BS is None:
            position_ids_BS = positions_S.expand_as(tokens_BS)
        hidden_SBD = self.decoder(self.embedding(tokens_BS, position_ids_BS), self._rotation(positions_S), cache)
        if labels_BS is None:
            return matmul(hidden_SBD, self.output_weight.t()).transpose(0, 1)
        loss_SB = vocabulary_loss(hidden_SBD, self.output_weight, labels_BS.t(), self.sink, self._logits)
        return loss_SB.t()

    def compile_blocks(self) -> None:
        """Compile each block with torch.compile; all blocks share one compilation.

        Their weight gradients come from autograd then: a compiled graph cannot write to a sink. Call it after the
        optimizer has attached its sink; the embedding and the loss keep theirs.
        """
        for block in self.decoder.layers:
            attach_sink(block, None)
            block.compile()

    def _rotation(self, positions_S: Tensor) -> Rotation | None:
        if self.config.rotary_size == 0:
            return None
        return rotation(
            positions_S,
            self.config.rotary_size,
            self.config.rotary_base,
            interleaved=self.config.rotary_interleaved,
            dtype=self.output_weight.dtype,
        )


def named_placements(model: GPT) -> Iterator[tuple[str, nn.Parameter, Placement]]:
    """Each parameter with its name and placement, in module order."""
    table = model.placements()
    for name, parameter in model.named_parameters():
        yield name, parameter, table[name]
