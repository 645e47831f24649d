"""T5 as Megatron builds it: an encoder and a decoder of pre-norm layers that share one embedding.

Reading order: `T5.forward` -> `T5.encode` and `T5.hidden_states` -> `transformer.Block.forward`. Parameters carry
Megatron's names. Activations are sequence first: encoder [E, B, D], decoder [S, B, D]; tokens and losses are [B, E] and
[B, S].

Padding is masked in the encoder's self-attention and in cross-attention. Under --transformer-impl local padding queries
see no key either, as in Megatron's local layers; no loss depends on that.

Source: Raffel et al. 2020, arXiv:1910.10683.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from megalith.config import ModelConfig
from megalith.layout import Recompute
from megalith.models.language_model import DenoisingModel, GenerativeModel, Inputs, Loss, Stage, padding
from megalith.models.transformer import Transformer
from megalith.nn.attend import Mask
from megalith.nn.cache import KVCache
from megalith.nn.cross_attention import Encoded, EncodedCache
from megalith.nn.loss import LogitsBuffer, OutputLayer, whole_logits
from megalith.nn.moe.balance import Peers
from megalith.nn.precision import FactoryKwargs
from megalith.nn.region import Region
from megalith.nn.relative_positions import RelativePositions

NO_LABEL = -1
"""The label of padding."""


class T5Head(nn.Module):
    """The output layer under Megatron's name: an optional bias to the tied word embedding, or an untied weight."""

    def __init__(self, vocab_size: int, config: ModelConfig, region: Region, **factory: Unpack[FactoryKwargs]) -> None:
        super().__init__()
        own = config.untie_embeddings_and_output_weights
        biased = config.t5_logits_bias and not own
        self.output_layer = OutputLayer(vocab_size, config.hidden_size, region, weight=own, bias=biased, **factory)


class T5(DenoisingModel, GenerativeModel):
    """An encoder-decoder model, whole on each tensor-parallel rank; arguments as of `LanguageModel`."""

    tokens_field = "text_enc"

    def _build(self, peers: Peers, recompute: Recompute | None) -> None:
        assert self.stage.is_first and self.stage.is_last and self.mixer.parts == 1, "a rule of the configuration"
        config = self.config
        self.stage = Stage(range(max(config.stacks.values())))  # numbers of layers of either stack
        self.embedding = self._token_embedding()
        relative = config.position_embedding_type == "relative"
        self.encoder_relative_pos_emb = self._relative_positions(both_ways=True) if relative else None
        self.decoder_relative_pos_emb = self._relative_positions(both_ways=False) if relative else None
        self.encoder = self._stack(config.num_layers, peers, recompute, causal=False)
        self.decoder = self._stack(config.num_decoder_layers, peers, recompute, causal=True)
        self.lm_head = T5Head(self.vocab_size, config, self.region, **self.factory)
        self._logits = LogitsBuffer()
        self._logits_scale = config.hidden_size**-0.5 if config.t5_scaled_logits else 1.0

    def _stack(self, layers: int, peers: Peers, recompute: Recompute | None, *, causal: bool) -> Transformer:
        """Build the decoder (`causal`, with cross-attention) or the encoder."""
        config, shared = replace(self.config, num_layers=layers), (self.region, self.mixer, peers, self.auxiliary)
        return Transformer(
            config, Stage(range(layers)), *shared, recompute, causal=causal, cross=causal, **self.factory
        )

    def _relative_positions(self, *, both_ways: bool) -> RelativePositions:
        return RelativePositions(
            self.config.relative_attention_num_buckets,
            self.config.relative_attention_max_distance,
            self.config.num_attention_heads,
            self.region,
            both_ways=both_ways,
            **self.factory,
        )

    @property
    def output_weight(self) -> nn.Parameter:
        own = self.lm_head.output_layer.weight
        return self.embedding.word_embeddings.weight if own is None else own

    @property
    def output_bias(self) -> nn.Parameter | None:
        """Bias [V] of the logits; None if the output weight is not tied, or T5 is as published."""
        return self.lm_head.output_layer.bias

    def blocks(self) -> Iterator[nn.Module]:
        yield from self.encoder.layers.values()
        yield from self.decoder.layers.values()

    def forward_stage(self, inputs: Inputs, hidden: Tensor | None) -> Tensor:
        raise AssertionError("T5 is whole on each rank: a rule of the configuration")

    def prepare(self, batch: Mapping[str, Tensor]) -> Inputs:
        """Return the inputs as `LanguageModel.prepare` does, without padding masks if there is no padding."""
        masks = ("enc_mask", "dec_mask")
        return super().prepare(
            {name: tensor for name, tensor in batch.items() if name not in masks or not bool(tensor.all())}
        )

    def losses(self, inputs: Inputs, hidden: Tensor | None) -> tuple[Loss, ...]:
        found = inputs.tensors
        losses_BS: Tensor = self(
            found["text_enc"],
            found["text_dec"],
            padding_BE=padding(found, "enc_mask"),
            padding_BS=padding(found, "dec_mask"),
            labels_BS=found["labels"],
        )
        mask = found["loss_mask"].reshape(-1).to(losses_BS.dtype)
        return (Loss(torch.sum(losses_BS.reshape(-1) * mask), mask.sum()),)

    def states_of_hidden_tokens(self, inputs: Inputs, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        found = inputs.tensors
        padding_BE, padding_BS = (padding(found, name) for name in ("enc_mask", "dec_mask"))
        encoded = self.encode(found["text_enc"], padding_BE, padding_BS)
        states_SBD = self.hidden_states(found["text_dec"], encoded=encoded, padding_BS=padding_BS)
        return states_SBD[found["loss_mask"].t() > 0], None

    def forward(
        self,
        encoder_tokens_BE: Tensor,
        decoder_tokens_BS: Tensor,
        *,
        padding_BE: Tensor | None = None,
        padding_BS: Tensor | None = None,
        labels_BS: Tensor | None = None,
    ) -> Tensor:
        """Predict each next token of the decoder.

        Args:
            encoder_tokens_BE: Token ids [B, E].
            decoder_tokens_BS: Token ids [B, S].
            padding_BE, padding_BS: True where they are padding; none is if absent. Every sequence has a token.
            labels_BS: Targets [B, S], `NO_LABEL` where there is none.

        Returns:
            With labels the loss of each token [B, S] in at least fp32, else the logits [B, S, V].
        """
        encoded = self.encode(encoder_tokens_BE, padding_BE, padding_BS)
        hidden_SBD = self.hidden_states(decoder_tokens_BS, encoded=encoded, padding_BS=padding_BS)
        if labels_BS is None:
            return self.logits(hidden_SBD).transpose(0, 1)
        loss_SB = self._token_losses(
            hidden_SBD, self.output_weight, labels_BS.t(), self._logits, bias=self.output_bias, absent=NO_LABEL
        )
        return loss_SB.t()

    def logits(self, hidden_SBD: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary. [S, B, D] -> [S, B, V]."""
        return whole_logits(hidden_SBD, self.output_weight, self.region, self.vocab_size, self.output_bias)

    def encode(self, tokens_BE: Tensor, padding_BE: Tensor | None = None, padding_BS: Tensor | None = None) -> Encoded:
        """Return the encoder's output for cross attention; `padding_BS` is the decoder's."""
        length = tokens_BE.shape[1]
        positions_E = torch.arange(length, device=tokens_BE.device)
        states_EBD: Tensor = self.encoder(
            self.embedding(tokens_BE, positions_E.expand_as(tokens_BE)),
            None if self._rotations is None else self._rotations(positions_E, length),
            mask=self._mask(
                self._hidden(padding_BE, padding_BE),
                None if self.encoder_relative_pos_emb is None else self.encoder_relative_pos_emb(range(length), length),
            ),
        )
        return Encoded(states_EBD, self._mask(self._hidden(padding_BS, padding_BE)))

    def hidden_states(
        self,
        tokens_BS: Tensor,
        *,
        hidden_SBD: Tensor | None = None,
        cache: KVCache | None = None,
        encoded: Encoded | EncodedCache | None = None,
        padding_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [S, B, D] of the decoder; arguments as of `GenerativeModel`.

        Args:
            encoded: What `encode` gave, or with a cache the keys and values of it.
            padding_BS: True where tokens are padding; without a cache only.
        """
        if cache is None:
            length, positions_S = tokens_BS.shape[1], torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        else:
            length, positions_S = cache.length, cache.positions_S
        # Padding is at the end, which causal attention does not read.
        hidden = None if self.config.fused_attention else self._hidden(padding_BS, padding_BS)
        states_SBD: Tensor = self.decoder(
            self.embedding(tokens_BS, positions_S.expand_as(tokens_BS)),
            None if self._rotations is None else self._rotations(positions_S, length),
            cache,
            mask=self._mask(hidden, self._bias(None if cache is None else positions_S, length)),
            encoded=encoded,
        )
        return states_SBD if self._logits_scale == 1.0 else states_SBD * self._logits_scale

    def _bias(self, positions_S: Tensor | None, length: int) -> Tensor | None:
        """Return the relative position bias of the decoder's scores, [H, S, length], or None.

        Args:
            positions_S: Of the queries in their sequences, in any order; all positions if None.
            length: Number of keys; keys after a query, which are masked, get the bias of distance 0.
        """
        relative = self.decoder_relative_pos_emb
        if relative is None or positions_S is None:
            return None if relative is None else relative(range(length), length)
        of_last = relative(range(length - 1, length), length).squeeze(1)
        keys = torch.arange(length, device=positions_S.device)
        return of_last[:, (keys - positions_S[:, None] + length - 1).clamp(max=length - 1)]

    def _mask(self, hidden_BQS: Tensor | None, bias_HQS: Tensor | None = None) -> Mask | None:
        """Return the mask that all layers of a stack share, combined once if the kernel takes one tensor."""
        if hidden_BQS is None and bias_HQS is None:
            return None
        if hidden_BQS is None or bias_HQS is None or not self.config.fused_attention:
            return Mask(hidden_BQS, bias_HQS)
        return Mask(None, bias_HQS[None].masked_fill(hidden_BQS[:, None], -torch.inf))

    def _hidden(self, queries_BQ: Tensor | None, keys_BS: Tensor | None) -> Tensor | None:
        """Return the padding mask, True where a key is masked, [B, 1 or Q, S]."""
        if keys_BS is None:
            return None
        if self.config.fused_attention or queries_BQ is None:
            return keys_BS[:, None, :]
        return keys_BS[:, None, :] | queries_BQ[:, :, None]
