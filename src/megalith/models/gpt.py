"""GPT in GPT-2 and Llama style: one assembly, the style is configuration.

Reading order: `GPT.forward` -> `Block.forward` -> `nn.attention.SelfAttention` and `nn.feed_forward.FeedForward`.
Parameters carry Megatron's names, which its checkpoints and its users know. Activations are sequence first
[S, B, D]; tokens and losses are [B, S].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.models.attention_kernels import attention_kernel
from megalith.models.feed_forwards import build_feed_forward
from megalith.models.layer_options import attention_rule, attention_shape, layer_norm, rotations
from megalith.nn.attention import LocalMixer, SelfAttention, SequenceMixer
from megalith.nn.cache import KVCache, LayerCache
from megalith.nn.documents import Documents
from megalith.nn.dropout import HiddenDropout
from megalith.nn.embedding import TokenEmbedding
from megalith.nn.loss import LogitsBuffer, OutputLayer, vocabulary_loss, whole_logits
from megalith.nn.moe.balance import Alone, Auxiliary, Peers
from megalith.nn.placement import Placement
from megalith.nn.precision import at_least_fp32
from megalith.nn.recompute import Group, OutputAgain, Recompute, recomputed
from megalith.nn.region import Region, Solo
from megalith.nn.rope import Rotation
from megalith.nn.sink import GradientSink, attach_sink


class Block(nn.Module):
    """One pre-norm transformer layer (Xiong et al. 2020, arXiv:2002.04745). [S, B, D] -> [S, B, D].

    Args:
        config: of the model.
        layer: its number in the whole model, from 0.
        region, mixer, peers: how it shares its work with other ranks.
        auxiliary: where the losses of experts join the backward pass.
        recompute: the parts of it that are computed again in the backward pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        region: Region,
        mixer: SequenceMixer,
        peers: Peers,
        auxiliary: Auxiliary,
        recompute: Collection[str] = (),
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.region, self.recompute = region, frozenset(recompute)
        self.rotated = config.rotated_layers[layer]
        self.residual_of_norm = config.apply_residual_connection_post_layernorm
        self.input_layernorm = layer_norm(config, dtype, device)
        self.self_attention = SelfAttention(
            attention_shape(config),
            region,
            attention_kernel(config),
            rule=attention_rule(config, layer),
            mixer=mixer,
            qkv_bias=config.qkv_bias,
            bias=config.add_bias_linear,
            recompute_core="core_attn" in self.recompute,
            dtype=dtype,
            device=device,
        )
        self.pre_mlp_layernorm = layer_norm(config, dtype, device)
        self.mlp = build_feed_forward(config, layer, region, peers, auxiliary, dtype=dtype, device=device)
        self.dropout = HiddenDropout(config.hidden_dropout, region)

    def forward(
        self,
        x_SBD: Tensor,
        turn: Rotation | None,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        turn = turn if self.rotated else None
        attention = partial(self.self_attention, turn=turn, cache=cache, documents=documents)
        x_SBD = self._branch(x_SBD, self.input_layernorm, attention)
        if {"mlp", "layernorm"} <= self.recompute and self._backward_follows() and not self.residual_of_norm:
            return x_SBD + self.dropout(recomputed(self._normed_feed_forward, x_SBD, region=self.region))
        return self._branch(x_SBD, self.pre_mlp_layernorm, self._feed_forward)

    def _normed_feed_forward(self, x_SBD: Tensor) -> Tensor:
        found: Tensor = self.mlp(self.pre_mlp_layernorm(x_SBD))
        return found

    def _branch(self, x_SBD: Tensor, norm: Callable[[Tensor], Tensor], layer: Callable[[Tensor], Tensor]) -> Tensor:
        """x + dropout(layer(norm(x))), in the dtype of x."""
        if "layernorm" in self.recompute and self._backward_follows():
            normed = OutputAgain(norm, x_SBD)
            with normed.not_kept():
                found = layer(normed.output)
            start = normed.output if self.residual_of_norm else x_SBD
        else:
            normed_SBD = norm(x_SBD)
            found = layer(normed_SBD)
            start = normed_SBD if self.residual_of_norm else x_SBD
        return start.to(x_SBD.dtype) + self.dropout(found)

    def _feed_forward(self, x_SBD: Tensor) -> Tensor:
        if "mlp" in self.recompute and self._backward_follows():
            return recomputed(self.mlp, x_SBD, region=self.region)
        found: Tensor = self.mlp(x_SBD)
        return found

    def _backward_follows(self) -> bool:
        return self.training and torch.is_grad_enabled()


@dataclass(frozen=True)
class Stage:
    """The part of a model that is computed in one place.

    Attributes:
        layers: global numbers of its layers.
        embeds: it begins with the embedding.
        predicts: it ends with the final norm and the logits.
    """

    layers: range
    embeds: bool = True
    predicts: bool = True


class Decoder(nn.Module):
    """The layers of a stage, under their global numbers, and the final norm where the stage predicts."""

    def __init__(
        self,
        config: ModelConfig,
        stage: Stage,
        region: Region,
        mixer: SequenceMixer,
        peers: Peers,
        auxiliary: Auxiliary,
        recompute: Recompute | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.region = region
        self._at_once = (Group(range(len(stage.layers)), again=False),)
        self._in_training = self._at_once if recompute is None else tuple(recompute.groups(len(stage.layers)))
        parts = () if recompute is None else recompute.parts
        self.layers = nn.ModuleDict(
            {
                str(number): Block(config, number, region, mixer, peers, auxiliary, parts, dtype=dtype, device=device)
                for number in stage.layers
            }
        )
        self.final_layernorm = layer_norm(config, dtype, device) if stage.predicts else None

    def forward(
        self,
        x_SBD: Tensor,
        turn: Rotation | None,
        cache: KVCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        backward_follows = self.training and torch.is_grad_enabled() and cache is None
        for group in self._in_training if backward_follows else self._at_once:
            through = partial(self._through, group.layers, turn=turn, cache=cache, documents=documents)
            x_SBD = recomputed(through, x_SBD, region=self.region) if group.again else through(x_SBD)
        return x_SBD if self.final_layernorm is None else self.final_layernorm(x_SBD)

    def _through(
        self,
        layers: range,
        x_SBD: Tensor,
        *,
        turn: Rotation | None,
        cache: KVCache | None,
        documents: Documents | None,
    ) -> Tensor:
        blocks = list(self.layers.values())
        for index in layers:
            x_SBD = blocks[index](x_SBD, turn, None if cache is None else cache.layers[index], documents)
        return x_SBD


class GPT(nn.Module):
    """A decoder-only language model, or one stage of it; parameters carry the same global names in either.

    Args:
        config: The architecture.
        vocab_size: V, padded as the embedding table stores it.
        region: How the layers share their work with other ranks; alone by default.
        mixer: How sequences are shared with other ranks; alone by default.
        peers: The ranks with other tokens, over which the load of experts is balanced; none by default.
        stage: The part that is computed here; all of it by default.
        recompute: Which layers keep no activations between the passes of a training step; none by default.

    The weights are unset: `models.initialise` draws them, or a checkpoint fills them.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        region: Region | None = None,
        mixer: SequenceMixer | None = None,
        peers: Peers | None = None,
        stage: Stage | None = None,
        recompute: Recompute | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        region, device = region or Solo(), torch.device(device)
        self.region, self.stage = region, stage or Stage(range(config.num_layers))
        self.mixer: SequenceMixer = mixer or LocalMixer()
        self.config, self.vocab_size = config, vocab_size
        self.dtype, self.device = dtype, device
        learned = config.position_embedding_type == "learned_absolute"
        self.embedding = (
            TokenEmbedding(
                vocab_size,
                config.hidden_size,
                config.max_position_embeddings if learned else None,
                config.hidden_dropout,
                region,
                hidden_dtype=self.hidden_dtype,
                dtype=dtype,
                device=device,
            )
            if self.stage.embeds
            else None
        )
        self.auxiliary = Auxiliary(per_token=config.calculate_per_token_loss)
        self.decoder = Decoder(
            config,
            self.stage,
            region,
            self.mixer,
            peers or Alone(),
            self.auxiliary,
            recompute,
            dtype=dtype,
            device=device,
        )
        own_output = config.untie_embeddings_and_output_weights or not self.stage.embeds
        self.output_layer = (
            OutputLayer(vocab_size, config.hidden_size, region, dtype=dtype, device=device)
            if self.stage.predicts and own_output
            else None
        )
        self.sink: GradientSink | None = None
        self._logits = LogitsBuffer()
        self._rotations = rotations(config, dtype) if config.rotary_size else None

    @property
    def output_weight(self) -> nn.Parameter:
        """The weight [V, D] that maps hidden states to logits: the word embedding where they are tied."""
        assert self.stage.predicts, "this stage has no logits"
        if self.output_layer is not None:
            return self.output_layer.weight
        assert self.embedding is not None
        return self.embedding.word_embeddings.weight

    @property
    def shared_weight(self) -> str | None:
        """The tied embedding of a stage that has the one of both its uses; another stage holds a copy of it."""
        if self.config.untie_embeddings_and_output_weights or self.stage.embeds == self.stage.predicts:
            return None
        return "embedding.word_embeddings.weight" if self.stage.embeds else "output_layer.weight"

    @property
    def copied_weight(self) -> str | None:
        """The `shared_weight` where it is the second copy, which norms, counts and checkpoints leave out."""
        return None if self.stage.embeds else self.shared_weight

    def placements(self) -> dict[str, Placement]:
        """The placement table of the whole model: parameter name -> placement."""
        return {
            f"{prefix}.{name}": placement
            for prefix, module in self.named_modules()
            if module is not self and hasattr(module, "placements")
            for name, placement in module.placements().items()
        }

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Of the hidden states between layers."""
        return at_least_fp32(self.dtype) if self.config.fp32_residual_connection else self.dtype

    def rows_between_layers(self, length: int) -> int:
        """Of `length` tokens of each sequence that are here, how many rows the hidden states between layers have."""
        return length // self.region.size if self.region.partial_gradients else length

    def forward(
        self,
        tokens_BS: Tensor,
        *,
        hidden_SBD: Tensor | None = None,
        position_ids_BS: Tensor | None = None,
        labels_BS: Tensor | None = None,
        cache: KVCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Predict each next token, or compute this stage's part of it.

        Args:
            tokens_BS: Token ids [B, S], those of each sequence that are here; with a cache only the new ones.
            hidden_SBD: What the stage before this one returned; a stage that embeds takes none.
            position_ids_BS: Rows of the learned position table [B, S]; those of the cache if absent.
            labels_BS: Targets [B, S].
            cache: Keys and values of earlier tokens, extended in place; B is 1, and S the new tokens of all sequences.
            documents: Those of the whole sequences, if attention stays inside of them; without a cache only.

        Returns:
            With labels the loss of each token [B, S] in at least fp32, without the logits [B, S, V]; where the stage
            does not predict, hidden states [S, B, D] for the next one.
        """
        hidden_SBD = self.hidden_states(
            tokens_BS, hidden_SBD=hidden_SBD, position_ids_BS=position_ids_BS, cache=cache, documents=documents
        )
        if not self.stage.predicts:
            return hidden_SBD
        if labels_BS is None:
            return whole_logits(hidden_SBD, self.output_weight, self.region, self.vocab_size).transpose(0, 1)
        loss_SB = vocabulary_loss(
            hidden_SBD,
            self.output_weight,
            labels_BS.t(),
            self.sink,
            self._logits,
            self.region,
            self.vocab_size,
            smoothing=self.config.label_smoothing if self.training else 0.0,
        )
        return loss_SB.t()

    def hidden_states(
        self,
        tokens_BS: Tensor,
        *,
        hidden_SBD: Tensor | None = None,
        position_ids_BS: Tensor | None = None,
        cache: KVCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """The hidden states [S, B, D] behind the last layer that is here, the final norm applied where it is.

        Arguments as of `forward`; for whoever wants the logits of a few positions only.
        """
        if cache is None:
            length = tokens_BS.shape[1] * self.mixer.parts
            positions_S = self.mixer.positions(length, tokens_BS.device)
        else:
            length, positions_S = cache.length, cache.positions_S
        if position_ids_BS is None:
            position_ids_BS = positions_S.expand_as(tokens_BS)
        if self.embedding is not None:
            hidden_SBD = self.embedding(tokens_BS, position_ids_BS)
        turn = None if self._rotations is None else self._rotations(positions_S, length)
        states_SBD: Tensor = self.decoder(hidden_SBD, turn, cache, documents)
        return states_SBD

    def compile_blocks(self) -> None:
        """Compile each block with torch.compile; all blocks share one compilation.

        Their weight gradients come from autograd then: a compiled graph cannot write to a sink. Call it after the
        optimizer has attached its sink; the embedding and the loss keep theirs.
        """
        for block in self.decoder.layers.values():
            attach_sink(block, None)
            block.compile()


def named_placements(model: GPT) -> Iterator[tuple[str, nn.Parameter, Placement]]:
    """Each parameter with its name and placement, in module order."""
    table = model.placements()
    for name, parameter in model.named_parameters():
        yield name, parameter, table[name]
