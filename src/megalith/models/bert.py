"""BERT: an encoder with bidirectional attention, a masked-LM head, and a head for the order of two texts.

As in Megatron: pre-norm layers, a final norm, and for masked words a linear layer with GELU and norm before the word
embedding (Devlin et al. 2018, arXiv:1810.04805, section 3.1). With
`--apply-residual-connection-post-layernorm` the same parameters compute BERT as published, with norms after the
residual sums (`models.huggingface_bert` maps the names).

Activations are sequence first [S, B, D]; tokens and losses are [B, S]. Source: Megatron-LM `BertModel`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from megalith.config import ModelConfig
from megalith.layout import Recompute
from megalith.models.language_model import DenoisingModel, Inputs, Loss, padding
from megalith.models.layer_options import layer_norm
from megalith.models.transformer import Transformer
from megalith.nn.attend import Mask
from megalith.nn.feed_forward import gelu_erf
from megalith.nn.linear import Linear
from megalith.nn.loss import LogitsBuffer, OutputLayer, whole_logits
from megalith.nn.moe.balance import Peers
from megalith.nn.placement import Replicated
from megalith.nn.precision import FactoryKwargs, at_least_fp32
from megalith.nn.region import Region

NO_LABEL = -1
"""The label of a position where no word is hidden."""


class LMHead(nn.Module):
    """Transform of hidden states before the product with the word embeddings. [..., D] -> [..., D]."""

    def __init__(self, config: ModelConfig, **factory: Unpack[FactoryKwargs]) -> None:
        super().__init__()
        size = config.hidden_size
        self.dense = Linear(size, size, Replicated(), bias=True, **factory)
        self.layer_norm = layer_norm(config, **factory)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.layer_norm(gelu_erf(self.dense(hidden)))
        return found


class Pooler(nn.Module):
    """A linear layer and tanh on the first position. [S, B, D] -> [B, D]."""

    def __init__(self, hidden_size: int, **factory: Unpack[FactoryKwargs]) -> None:
        super().__init__()
        self.dense = Linear(hidden_size, hidden_size, Replicated(), bias=True, **factory)

    def forward(self, hidden_SBD: Tensor) -> Tensor:
        return torch.tanh(self.dense(hidden_SBD[0]))


def of_first_position(x: Tensor, region: Region) -> Tensor:
    """Return the entries of the first position on all ranks; only the rank that has it gets a gradient.

    Where the region holds parts of the sequence the others have computed something else, of their first position.
    """
    if not region.needs_grad_reduce:
        return x
    return region.all_reduce_sum(x if region.index == 0 else torch.zeros_like(x) * x)


class Bert(DenoisingModel):
    """A BERT, or one stage of it; arguments as of `LanguageModel`, and whole sequences are on each rank."""

    tokens_field = "text"
    reports_means = True

    def _build(self, peers: Peers, recompute: Recompute | None) -> None:
        assert self.mixer.parts == 1, "a rule of the configuration"
        config, stage, size = self.config, self.stage, self.config.hidden_size
        self.embedding = self._token_embedding(num_types=2 if config.has_token_types else 0) if stage.is_first else None
        shared = (self.region, self.mixer, peers, self.auxiliary, recompute)
        self.encoder = Transformer(config, stage, *shared, causal=False, **self.factory)
        self.lm_head = LMHead(config, **self.factory) if stage.is_last else None
        own = config.untie_embeddings_and_output_weights or not stage.is_first
        self.output_layer = (
            OutputLayer(self.vocab_size, size, self.region, weight=own, bias=True, **self.factory)
            if stage.is_last
            else None
        )
        heads = stage.is_last and config.bert_binary_head
        self.binary_head = Linear(size, 2, Replicated(), bias=True, **self.factory) if heads else None
        self.pooler = Pooler(size, **self.factory) if heads else None
        self._logits = LogitsBuffer()

    @property
    def loss_names(self) -> tuple[str, ...]:
        return ("lm loss", "sop loss") if self.config.bert_binary_head else ("lm loss",)

    @property
    def output_weight(self) -> nn.Parameter:
        if self.output_layer is not None and self.output_layer.weight is not None:
            return self.output_layer.weight
        assert self.embedding is not None, "this stage has no logits"
        return self.embedding.word_embeddings.weight

    @property
    def output_bias(self) -> nn.Parameter:
        """Bias [V] of the logits."""
        assert self.output_layer is not None and self.output_layer.bias is not None, "this stage has no logits"
        return self.output_layer.bias

    def blocks(self) -> Iterator[nn.Module]:
        return iter(self.encoder.layers.values())

    def prepare(self, batch: Mapping[str, Tensor]) -> Inputs:
        """Return the inputs as `LanguageModel.prepare` does, without a padding mask if there is no padding.

        `hidden_at` is added: the indices, in [S, B] flattened, of the hidden words. They are found here, on the host,
        so that no device waits for them.
        """
        own = dict(batch)
        if bool(own["padding_mask"].all()):
            del own["padding_mask"]
        own["hidden_at"] = own["loss_mask"].t().reshape(-1).nonzero().squeeze(1)
        return super().prepare(own)

    def forward_stage(self, inputs: Inputs, hidden: Tensor | None) -> Tensor:
        states_SBD: Tensor = self(**_arguments(inputs, hidden))
        return states_SBD

    def losses(self, inputs: Inputs, hidden: Tensor | None) -> tuple[Loss, ...]:
        """Return the losses; the output layer is computed at hidden words only, a seventh of the positions.

        Under sequence parallelism it is computed at all positions: it gathers the sequence.
        """
        found = inputs.tensors
        orders_B = found["is_random"] if self.binary_head is not None else None
        mask_T, at_T = found["loss_mask"].t().reshape(-1), found["hidden_at"]
        if self.region.needs_grad_reduce:
            at_T = torch.arange(len(mask_T), device=mask_T.device)
        elif not len(at_T):
            at_T = at_T.new_zeros(1)
        arguments = _arguments(inputs, hidden)
        losses: Tensor = self(**arguments, labels_BS=found["labels"], orders_B=orders_B, at_T=at_T)
        mask_T = mask_T[at_T].to(losses.dtype)
        words = Loss(torch.sum(losses[: len(at_T)] * mask_T), mask_T.sum())
        if orders_B is None:
            return (words,)
        return words, Loss(losses[len(at_T) :].sum(), (orders_B >= 0).sum().to(losses.dtype))

    def states_of_hidden_tokens(self, inputs: Inputs, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        states_SBD = self.hidden_states(**_arguments(inputs, hidden))
        assert self.lm_head is not None, "this stage has no logits"
        states_TD: Tensor = self.lm_head(states_SBD[inputs.tensors["loss_mask"].t() > 0])
        return states_TD, None if self.binary_head is None else self.order_logits(states_SBD)

    def forward(
        self,
        tokens_BS: Tensor,
        *,
        hidden_SBD: Tensor | None = None,
        types_BS: Tensor | None = None,
        padding_BS: Tensor | None = None,
        labels_BS: Tensor | None = None,
        orders_B: Tensor | None = None,
        at_T: Tensor | None = None,
    ) -> Tensor:
        """Find hidden words, or compute this stage's part of it.

        Args:
            tokens_BS: Token ids [B, S].
            hidden_SBD: What the stage before this one returned; a stage that embeds takes none.
            types_BS: Which run of text each token is of, 0 or 1; of no effect in a model without types.
            padding_BS: True where tokens are padding; none is if absent. Every sequence has a token.
            labels_BS: The hidden words [B, S], `NO_LABEL` elsewhere.
            orders_B: 1 where the two runs of text have changed places, 0 where not, -1 where it does not count.
            at_T: With labels, of the positions [S, B] in a row those whose losses are wanted; all of them where the
                ranks hold parts of the sequence.

        Returns:
            With labels the loss of each token [B, S] in at least fp32, and with orders in a column more that of the
            order of each sample [B, S + 1]; with positions these losses in a row, [T] or [T + B]. Without labels the
            logits [B, S, V]. Where the stage does not predict, hidden states [S, B, D] for the next one.
        """
        hidden_SBD = self.hidden_states(tokens_BS, hidden_SBD=hidden_SBD, types_BS=types_BS, padding_BS=padding_BS)
        if not self.stage.is_last:
            return hidden_SBD
        if labels_BS is None:
            return self.logits(hidden_SBD).transpose(0, 1)
        if at_T is None:
            losses = self._word_losses(hidden_SBD, labels_BS.t()).t()
        elif self.region.needs_grad_reduce:
            losses = self._word_losses(hidden_SBD, labels_BS.t()).reshape(-1)
        else:
            losses = self._word_losses(hidden_SBD.flatten(0, 1)[at_T], labels_BS.t().reshape(-1)[at_T])
        if orders_B is None:
            return losses
        orders = self._order_losses(hidden_SBD, orders_B).to(losses.dtype)
        return torch.cat((losses, orders[:, None] if at_T is None else orders), dim=-1)

    def _word_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each position: [..., D], labels [...] or `NO_LABEL` -> [...] in at least fp32."""
        assert self.lm_head is not None
        return self._token_losses(
            self.lm_head(hidden), self.output_weight, labels, self._logits, bias=self.output_bias, absent=NO_LABEL
        )

    def _order_losses(self, hidden_SBD: Tensor, orders_B: Tensor) -> Tensor:
        """Return the loss of the sentence-order prediction, [B] in at least fp32."""
        logits_B2 = self.order_logits(hidden_SBD)
        logits_B2 = logits_B2.to(at_least_fp32(logits_B2.dtype))
        return nn.functional.cross_entropy(logits_B2, orders_B, ignore_index=-1, reduction="none")

    def hidden_states(
        self,
        tokens_BS: Tensor,
        *,
        hidden_SBD: Tensor | None = None,
        types_BS: Tensor | None = None,
        padding_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [S, B, D] after the last layer of this stage; arguments as of `forward`."""
        length = tokens_BS.shape[1]
        positions_S = torch.arange(length, device=tokens_BS.device)
        if self.embedding is not None:
            types_BS = types_BS if self.config.has_token_types else None
            hidden_SBD = self.embedding(tokens_BS, positions_S.expand_as(tokens_BS), types_BS)
        rope = None if self._rotations is None else self._rotations(positions_S, length)
        states_SBD: Tensor = self.encoder(hidden_SBD, rope, mask=self._mask(padding_BS))
        return states_SBD

    def _mask(self, padding_BS: Tensor | None) -> Mask | None:
        """Return the mask that hides padding from all queries; None without padding.

        In Megatron's unfused kernel padding queries see no key either: they average all values.
        """
        if padding_BS is None:
            return None
        if self.config.fused_attention:
            return Mask(padding_BS[:, None, :])
        return Mask(padding_BS[:, None, :] | padding_BS[:, :, None])

    def logits(self, hidden_SBD: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary. [S, B, D] -> [S, B, V]."""
        assert self.lm_head is not None
        return whole_logits(
            self.lm_head(hidden_SBD), self.output_weight, self.region, self.vocab_size, self.output_bias
        )

    def order_logits(self, hidden_SBD: Tensor) -> Tensor:
        """Return the logits of the two runs of text being in order, or not. [S, B, D] -> [B, 2]."""
        assert self.pooler is not None and self.binary_head is not None
        logits_B2: Tensor = self.binary_head(self.pooler(hidden_SBD))
        return of_first_position(logits_B2, self.region)


def _arguments(inputs: Inputs, hidden_SBD: Tensor | None) -> dict[str, Any]:
    """Return a micro-batch as arguments of `Bert.forward` and `Bert.hidden_states`."""
    found = inputs.tensors
    padding_BS = padding(found, "padding_mask")
    return {"tokens_BS": found["text"], "hidden_SBD": hidden_SBD, "types_BS": found["types"], "padding_BS": padding_BS}
