"""GPT in GPT-2 and Llama style: one assembly, the style is configuration.

Reading order: `GPT.forward` -> `transformer.Transformer.forward` -> `transformer.Block.forward`.
Parameters carry Megatron's names, which its checkpoints and its users know. Activations are sequence first
[S, B, D]; tokens and losses are [B, S].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megalith.layout import Recompute
from megalith.models.frozen import FrozenLayers
from megalith.models.language_model import WORD_EMBEDDINGS, GenerativeModel, Inputs, Loss
from megalith.models.prediction import Ahead, Prediction, PredictionLayer, ahead, shifted
from megalith.models.transformer import Block, Transformer
from megalith.nn.cache import KVCache
from megalith.nn.documents import Documents
from megalith.nn.loss import LogitsBuffer, OutputLayer, whole_logits
from megalith.nn.moe.balance import Peers
from megalith.nn.registered_loss import registered_loss
from megalith.nn.rope import Rotation
from megalith.registry import Registered


class GPT(GenerativeModel):
    """A decoder-only language model, or one stage of it; arguments as of `LanguageModel`."""

    block_class: ClassVar[type[Block]] = Block  # families with other residual connections override it

    def _build(self, peers: Peers, recompute: Recompute | None) -> None:
        config, stage = self.config, self.stage
        predicts_ahead = stage.is_last and config.predictions > 0
        self.embedding = self._token_embedding() if stage.is_first or predicts_ahead else None
        shared = (self.region, self.mixer, peers, self.auxiliary, recompute)
        self.decoder = Transformer(config, stage, *shared, block_class=self.block_class, **self.factory)
        self.mtp = (
            Prediction(PredictionLayer(config, depth, *shared, **self.factory) for depth in range(config.predictions))
            if predicts_ahead
            else None
        )
        own_output = config.untie_embeddings_and_output_weights or self.embedding is None
        self.output_layer = (
            OutputLayer(self.vocab_size, config.hidden_size, self.region, **self.factory)
            if stage.is_last and own_output
            else None
        )
        self._logits = [LogitsBuffer() for _ in range(1 + config.predictions)]

    @property
    def output_weight(self) -> nn.Parameter:
        assert self.stage.is_last, "this stage has no logits"
        if self.output_layer is not None and self.output_layer.weight is not None:
            return self.output_layer.weight
        assert self.embedding is not None
        return self.embedding.word_embeddings.weight

    @property
    def loss_names(self) -> tuple[str, ...]:
        return ("lm loss", *(f"mtp_{number} loss" for number in range(1, self.config.predictions + 1)))

    @property
    def shared_weight(self) -> str | None:
        if self.config.predictions and self.stage.is_first != self.stage.is_last:
            return WORD_EMBEDDINGS if self.embedding is not None else None
        return super().shared_weight

    def blocks(self) -> Iterator[nn.Module]:
        return chain(self.decoder.layers.values(), () if self.mtp is None else self.mtp.layers)

    def prepare(self, batch: Mapping[str, Tensor]) -> Inputs:
        return super().prepare({**batch, **shifted(batch, self.config.predictions)})

    def forward_stage(self, inputs: Inputs, hidden: Tensor | None) -> Tensor:
        result: Tensor = self(
            inputs.tensors["tokens"],
            hidden_SBD=hidden,
            position_ids_BS=inputs.tensors["position_ids"],
            documents=inputs.documents,
        )
        return result

    def losses(self, inputs: Inputs, hidden: Tensor | None) -> tuple[Loss, ...]:
        tensors, depths = inputs.tensors, self.config.predictions
        further = ahead(tensors, depths)
        losses = self(
            tensors["tokens"],
            hidden_SBD=hidden,
            position_ids_BS=tensors["position_ids"],
            labels_BS=tensors["labels"],
            mask_BS=tensors["loss_mask"],
            documents=inputs.documents,
            ahead=further,
        )
        masks = [tensors["loss_mask"], *(seen.mask_BS for seen in further)]
        weights = [1.0, *(self.config.mtp_loss_scaling_factor / depths for _ in further)]
        return tuple(
            Loss(torch.sum(losses_BS.reshape(-1) * mask.reshape(-1)), mask.sum(), weight)
            for losses_BS, mask, weight in zip(losses if further else (losses,), masks, weights, strict=True)
        )

    def forward(
        self,
        tokens_BS: Tensor,
        *,
        hidden_SBD: Tensor | None = None,
        position_ids_BS: Tensor | None = None,
        labels_BS: Tensor | None = None,
        mask_BS: Tensor | None = None,
        cache: KVCache | None = None,
        documents: Documents | None = None,
        ahead: Sequence[Ahead] = (),
        layers: FrozenLayers | None = None,
        apply_head: bool = True,
    ) -> Tensor:
        """Compute logits, losses or the hidden states of this stage.

        Args:
            tokens_BS: Token ids [B, S] of this context-parallel rank; with a cache only the new ones.
            hidden_SBD: Hidden states of the previous stage; None on the first.
            position_ids_BS: Rows of the learned position table [B, S]; those of the cache if absent.
            labels_BS: Targets [B, S].
            mask_BS: Loss mask [B, S] for a registered loss; all ones if absent.
            cache: Keys and values of earlier tokens, extended in place; B is 1, and S the new tokens of all sequences.
            documents: Those of the whole sequences, if attention stays inside of them; without a cache only.
            ahead: Inputs of the layers of multi-token prediction, by depth; with labels.
            layers: With a cache, in place of those of the decoder.
            apply_head: Whether to compute logits or losses from the hidden states of the last layer.

        Returns:
            With labels the loss of each token [B, S] in at least fp32, without labels the logits [B, S, V]; on a stage
            that is not the last, hidden states [S, B, D] for the next. With `ahead` the losses of this and all further
            depths [1 + depths, B, S]. Without `apply_head` the `head_input` [S, B, D].
        """
        positions_S, rope = self._positions(tokens_BS, cache)
        if self.stage.is_first:
            assert self.embedding is not None
            places_BS = positions_S.expand_as(tokens_BS) if position_ids_BS is None else position_ids_BS
            hidden_SBD = self.embedding(tokens_BS, places_BS)
        if layers is None or cache is None:
            states_SBD: Tensor = self.decoder(hidden_SBD, rope, cache, documents)
        else:
            assert hidden_SBD is not None and documents is None
            states_SBD = layers(hidden_SBD, rope, cache)
        if not self.stage.is_last:
            return states_SBD
        states_SBD = self.head_input(states_SBD)
        if not apply_head:
            return states_SBD
        if labels_BS is None:
            return whole_logits(states_SBD, self.output_weight, self.region, self.vocab_size).transpose(0, 1)
        loss_BS = self._loss(states_SBD, labels_BS, mask_BS, self._logits[0])
        return self._losses_ahead(loss_BS, states_SBD, ahead, rope, documents) if ahead else loss_BS

    def hidden_states(self, tokens_BS: Tensor, **options: Any) -> Tensor:
        """Compute the `head_input` [S, B, D] alone; arguments as of `forward`."""
        return self.forward(tokens_BS, apply_head=False, **options)

    def head_input(self, states_SBD: Tensor) -> Tensor:
        """Return the input [S, B, D] of the output layer for the output [S, B, D] of the final norm.

        muP multiplies it. Override it to put layers in front of the output layer.
        """
        multiplier = self.config.logits_multiplier
        return states_SBD if multiplier == 1.0 else states_SBD * multiplier

    def _losses_ahead(
        self,
        loss_BS: Tensor,
        states_SBD: Tensor,
        ahead: Sequence[Ahead],
        rope: Rotation | None,
        documents: Documents | None,
    ) -> Tensor:
        """Stack the loss of the next token and those of the layers of multi-token prediction: [1 + depths, B, S]."""
        assert self.mtp is not None and self.embedding is not None, "only layers of prediction look ahead"
        losses = [loss_BS]
        for layer, seen, logits in zip(self.mtp.layers, ahead, self._logits[1:], strict=True):
            embedded_SBD = self.embedding(seen.tokens_BS, seen.position_ids_BS)
            states_SBD = layer(states_SBD, embedded_SBD, rope, documents)
            losses.append(self._loss(states_SBD, seen.labels_BS, seen.mask_BS, logits))
        return torch.stack(losses)

    def _loss(self, states_SBD: Tensor, labels_BS: Tensor, mask_BS: Tensor | None, logits: LogitsBuffer) -> Tensor:
        """Return the loss of each token [B, S], a registered one if --loss names it."""
        if isinstance(self.config.loss, Registered):
            mask_BS = torch.ones_like(labels_BS, dtype=torch.float32) if mask_BS is None else mask_BS
            weight, vocab_size = self.output_weight, self.vocab_size
            return registered_loss(
                self.config.loss, states_SBD, weight, labels_BS, mask_BS, self.sink, self.region, vocab_size
            )
        loss_SB = self._token_losses(states_SBD, self.output_weight, labels_BS.t(), logits)
        return loss_SB.t()

    def _positions(self, tokens_BS: Tensor, cache: KVCache | None) -> tuple[Tensor, Rotation | None]:
        """Return the positions [S] of the tokens and their rotary cosines and sines."""
        if cache is None:
            length = tokens_BS.shape[1] * self.mixer.parts
            positions_S = self.mixer.positions(length, tokens_BS.device)
        else:
            length, positions_S = cache.length, cache.positions_S
        return positions_S, None if self._rotations is None else self._rotations(positions_S, length)
