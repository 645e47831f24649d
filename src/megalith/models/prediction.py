"""Multi-token prediction: layers after the last one, each of which predicts one token further ahead.

At position i the k-th layer reads the hidden state h of the layer before it after its final norm (the first layer: that
of the model), and the embedding e of token i + k:

    x = eh_proj [enorm(e); hnorm(h)]                    [S, B, 2 D] -> [S, B, D]
    h' = final_layernorm(transformer_layer(x))          which the output layer maps to logits of token i + k + 1

Embedding and output layer are those of the model. Sequences are extended by token 0 at position 0, which no loss
counts. As in Megatron, documents are not separated: the token after the last of a document is the first of the next.

The mean of the losses of these layers, times a factor, is added to the loss of the model. Only training
computes them; generation, serving and `megalith evaluate` do not.

Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2; the order of the concatenation is that of Megatron and of the
published weights. Gloeckle et al. 2024, arXiv:2404.19737.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from megalith.config import ModelConfig
from megalith.layout import Recompute
from megalith.models.layer_options import layer_norm
from megalith.models.transformer import Block
from megalith.nn.attention import ContextParallelAttention
from megalith.nn.documents import Documents
from megalith.nn.linear import Linear, column
from megalith.nn.moe.balance import Auxiliary, Peers
from megalith.nn.placement import Split
from megalith.nn.precision import FactoryKwargs
from megalith.nn.recompute import recomputed
from megalith.nn.region import Region, leave
from megalith.nn.rope import Rotation

_SHIFTED = ("tokens", "position_ids", "labels", "loss_mask")


@dataclass(frozen=True, eq=False)
class Ahead:
    """The tokens and positions that a layer sees, the labels that it predicts and their loss mask; [B, S], of here."""

    tokens_BS: Tensor
    position_ids_BS: Tensor
    labels_BS: Tensor
    mask_BS: Tensor


def _name(field: str, depth: int) -> str:
    return f"{field} + {depth}"


def shifted(batch: Mapping[str, Tensor], depths: int) -> dict[str, Tensor]:
    """Return the fields of whole sequences [B, S] for depths 1, 2, ...: shifted left by 1, 2, ..., then zeros."""
    found = {}
    for depth in range(1, depths + 1):
        for field in _SHIFTED:
            found[_name(field, depth)] = nn.functional.pad(batch[field][:, depth:], (0, depth))
    return found


def ahead(tensors: Mapping[str, Tensor], depths: int) -> list[Ahead]:
    """Return the inputs of each depth that `shifted` has put into a micro-batch."""
    return [Ahead(*(tensors[_name(field, depth)] for field in _SHIFTED)) for depth in range(1, depths + 1)]


class PredictionLayer(nn.Module):
    """The layer of one depth (from 0), [S, B, D] -> [S, B, D]; other arguments as of `Transformer`.

    With the recomputation method uniform each is one group.
    """

    def __init__(
        self,
        config: ModelConfig,
        depth: int,
        region: Region,
        mixer: ContextParallelAttention,
        peers: Peers,
        auxiliary: Auxiliary,
        recompute: Recompute | None,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        size, parts = config.hidden_size, () if recompute is None else recompute.parts
        self.region, self.auxiliary = region, auxiliary
        self.size, self.part = size, region.shard(size)
        self.again = recompute is not None and recompute.method == "uniform"
        self.enorm = layer_norm(config, **factory)
        self.hnorm = layer_norm(config, **factory)
        self.eh_proj = Linear(2 * size, self.part.size, Split(0), bias=False, **factory)
        self.transformer_layer = Block(
            config, config.num_layers + depth, region, mixer, peers, auxiliary, parts, **factory
        )
        self.final_layernorm = layer_norm(config, **factory)

    def forward(
        self, hidden_SBD: Tensor, embedded_SBD: Tensor, rope: Rotation | None, documents: Documents | None
    ) -> Tensor:
        """Compute one depth further: from the normed output of the depth before and the embedding of its label."""

        def through(hidden_SBD: Tensor, embedded_SBD: Tensor) -> Tensor:
            x_SBD: Tensor = self.transformer_layer(
                self._joined(hidden_SBD, embedded_SBD), rope=rope, documents=documents
            )
            return x_SBD

        if self.again and self.training and torch.is_grad_enabled():
            x_SBD = recomputed(
                through, hidden_SBD, embedded_SBD, region=self.region, context_fn=self.auxiliary.repeated
            )
        else:
            x_SBD = through(hidden_SBD, embedded_SBD)
        state_SBD: Tensor = self.final_layernorm(x_SBD)
        return state_SBD

    def _joined(self, hidden_SBD: Tensor, embedded_SBD: Tensor) -> Tensor:
        """Apply `eh_proj`, whose output is sharded: each rank pads its columns with zeros, and they are summed."""
        both_SBE = torch.cat((self.enorm(embedded_SBD), self.hnorm(hidden_SBD)), dim=-1)
        (x_SBD,) = column(both_SBE, self.region, self.eh_proj)
        if self.part.size < self.size:
            others = (self.part.start, self.size - self.part.stop)
            x_SBD = leave(nn.functional.pad(x_SBD, others), self.region)
        return x_SBD.to(embedded_SBD.dtype)


class Prediction(nn.Module):
    """The layers of all depths, in their order. They are called one by one, by the model."""

    def __init__(self, layers: Iterable[PredictionLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
