"""The base class of model families: the interface that training, checkpoints and sharding use.

A family (GPT, BERT, T5) is one class that assembles blocks of `nn/`. Code that trains, saves or shards a model names no
family: it calls `prepare` on a micro-batch, `forward_stage` on each pipeline stage but the last, there `losses`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig, check_groups
from megalith.errors import ConfigError
from megalith.layout import Recompute
from megalith.models.layer_options import lora, rotations
from megalith.nn.attention import ContextParallelAttention, LocalAttention
from megalith.nn.cache import KVCache
from megalith.nn.cross_attention import CrossAttention, Encoded
from megalith.nn.documents import Documents
from megalith.nn.embedding import Embedding, TokenEmbedding
from megalith.nn.lora import adapt
from megalith.nn.loss import LogitsBuffer, vocabulary_loss
from megalith.nn.moe.balance import Alone, Auxiliary, Peers
from megalith.nn.placement import Placement, Replicated
from megalith.nn.precision import FactoryKwargs, at_least_fp32
from megalith.nn.region import Region, Solo
from megalith.nn.sink import GradientSink
from megalith.registry import Registered

if TYPE_CHECKING:
    from megalith.models.transformer import Transformer

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Stage:
    """A pipeline stage, or one chunk of an interleaved one: layers by their global numbers.

    The first one has the embedding, the last one the final norm and the losses.
    """

    layers: Sequence[int]
    is_first: bool = True
    is_last: bool = True


@dataclass(frozen=True, eq=False)
class Inputs:
    """A micro-batch on the device, with the positions of this context-parallel rank.

    Attributes:
        tensors: by the names of the samples' fields.
        documents: those of the whole sequences, if attention stays inside of them.
    """

    tensors: Mapping[str, Tensor]
    documents: Documents | None = None


@dataclass(frozen=True, eq=False)
class Loss:
    """One of the losses of a micro-batch: the sum of its terms and their number, scalars.

    Training minimises the sum of all losses times their `weight`; reported is the mean of each without the weight.
    """

    summed: Tensor
    count: Tensor
    weight: float = 1.0


class LanguageModel(nn.Module, ABC):
    """A model, or one stage of it; parameters carry the same global names in either.

    The weights are unset: `models.initialise` draws them, or a checkpoint fills them.

    Args:
        config: the architecture.
        vocab_size: V, padded as the embedding table stores it.
        region: how layers are divided among ranks; undivided by default.
        mixer: how sequences are; undivided by default.
        peers: the ranks with other tokens, over which the load of experts is balanced; none by default.
        stage: the pipeline stage of this rank; the whole model by default.
        recompute: which layers recompute activations in the backward pass; none by default.

    Attributes:
        tokens_field: the field of a sample whose entries are counted as tokens.
        draws_own_weights: modules without placements keep the values of their constructors as initial weights.
        reports_means: the reported losses are means of those of micro-batches; otherwise all terms weigh alike.
        loss_names: names of the losses, the main one first.
        sink: receives weight gradients in place of autograd.
    """

    tokens_field: ClassVar[str] = "tokens"
    draws_own_weights: ClassVar[bool] = False
    reports_means: ClassVar[bool] = False

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        region: Region | None = None,
        mixer: ContextParallelAttention | None = None,
        peers: Peers | None = None,
        stage: Stage | None = None,
        recompute: Recompute | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        check_groups(config)
        self.config, self.vocab_size = config, vocab_size
        self.region, self.mixer = region or Solo(), mixer or LocalAttention()
        self.stage = stage or Stage(range(max(config.stacks.values())))
        self.dtype, self.device = dtype, torch.device(device)
        self.factory: FactoryKwargs = {"dtype": dtype, "device": self.device}
        self.auxiliary = Auxiliary(per_token=config.calculate_per_token_loss)
        self.sink: GradientSink | None = None
        self._rotations = rotations(config, dtype) if config.rotary_size else None
        self._build(peers or Alone(), recompute)
        if (chosen := lora(config)) is not None:
            adapt(self, *chosen, self.region)

    @abstractmethod
    def _build(self, peers: Peers, recompute: Recompute | None) -> None:
        """Construct the modules of this stage, in the order in which checkpoints and gradient buffers list them."""

    def _token_embedding(self, *, num_types: int = 0) -> TokenEmbedding:
        config = self.config
        return TokenEmbedding(
            self.vocab_size,
            config.hidden_size,
            self._position_embedding(),
            config.hidden_dropout,
            self.region,
            num_types=num_types,
            multiplier=config.embedding_multiplier,
            hidden_dtype=self.hidden_dtype,
            **self.factory,
        )

    def _position_embedding(self) -> nn.Module | None:
        """Return the module that maps positions [B, S] to added embeddings [B, S, D]; None without such."""
        config = self.config
        if not config.adds_position_embeddings:
            return None
        if isinstance(config.position_embedding_type, Registered):
            own: nn.Module = config.position_embedding_type(config, **self.factory)
            return own
        return Embedding(config.max_position_embeddings, config.hidden_size, Replicated(), **self.factory)

    def _token_losses(
        self,
        hidden: Tensor,
        weight: nn.Parameter,
        labels: Tensor,
        logits: LogitsBuffer,
        *,
        bias: nn.Parameter | None = None,
        absent: int | None = None,
    ) -> Tensor:
        """Return the loss of each token, with the configured label smoothing; arguments as of `vocabulary_loss`."""
        smoothing = self.config.label_smoothing if self.training else 0.0
        return vocabulary_loss(
            hidden,
            weight,
            labels,
            self.sink,
            logits,
            self.region,
            self.vocab_size,
            bias=bias,
            smoothing=smoothing,
            absent=absent,
        )

    @property
    def loss_names(self) -> tuple[str, ...]:
        return ("lm loss",)

    @abstractmethod
    def blocks(self) -> Iterator[nn.Module]:
        """Yield the layers of this stage in the order in which they are computed."""

    @abstractmethod
    def forward_stage(self, inputs: Inputs, hidden: Tensor | None) -> Tensor:
        """Return the hidden states for the next stage, in the shape of `activation_shape`; not on the last stage.

        `hidden` are those of the previous stage; None on the first.
        """

    @abstractmethod
    def losses(self, inputs: Inputs, hidden: Tensor | None) -> tuple[Loss, ...]:
        """Return the losses of a micro-batch in the order of `loss_names`, over the positions of this rank."""

    def prepare(self, batch: Mapping[str, Tensor]) -> Inputs:
        """Return the inputs of this rank from a micro-batch on the host."""
        fields = dict(batch)
        ids = fields.pop("document_ids", None)
        documents = None if ids is None else Documents.of(ids, self.device)
        tensors = {name: self.mixer.shard(tensor, 1) if tensor.ndim > 1 else tensor for name, tensor in fields.items()}
        return Inputs(tensors, documents)

    def activation_shape(self, inputs: Inputs) -> tuple[tuple[int, int, int], torch.dtype]:
        """Return shape [S, B, D] and dtype of the hidden states that go from stage to stage."""
        batch, length = inputs.tensors[self.tokens_field].shape
        return (self.rows_between_layers(length), batch, self.config.hidden_size), self.hidden_dtype

    @property
    def shared_weight(self) -> str | None:
        """Name of this stage's copy of the tied embedding, if another stage holds the other copy."""
        if self.config.untie_embeddings_and_output_weights or self.stage.is_first == self.stage.is_last:
            return None
        return WORD_EMBEDDINGS if self.stage.is_first else "output_layer.weight"

    @property
    def copied_weight(self) -> str | None:
        """Name of the `shared_weight` if it is the second copy, which norms, counts and checkpoints leave out."""
        return None if self.stage.is_first else self.shared_weight

    def placements(self) -> dict[str, Placement]:
        """Return the placement of every parameter by its name.

        Raises:
            ConfigError: A parameter of a registered layer has none, which tensor parallelism needs, or is a scalar.
        """
        table: dict[str, Placement] = {
            f"{prefix}.{name}": placement
            for prefix, module in self.named_modules()
            if module is not self and hasattr(module, "placements")
            for name, placement in module.placements().items()
        }
        lacking = [name for name, _ in self.named_parameters() if name not in table]
        if scalars := [name for name in lacking if self.get_parameter(name).ndim == 0]:
            raise ConfigError(f"the parameters {', '.join(scalars)} have no dimension; give them the shape [1]")
        if lacking and self.region.size > 1:
            raise ConfigError(
                f"--tensor-model-parallel-size {self.region.size}: no placement is declared for {', '.join(lacking)}; "
                "build the layer from megalith.api.Linear, or give its module a method placements()"
            )
        return table | dict.fromkeys(lacking, Replicated())

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Dtype of the hidden states between layers."""
        return at_least_fp32(self.dtype) if self.config.fp32_residual_connection else self.dtype

    def rows_between_layers(self, length: int) -> int:
        """Return the rows of the hidden states between layers for `length` tokens of each sequence on this rank."""
        return length // self.region.size if self.region.needs_grad_reduce else length

    def compile_blocks(self, *, documents: bool = False) -> None:
        """Compile each layer with torch.compile; layers that are alike share a compilation (models/compiled.py).

        Call it after the weights were sharded, if they are. `documents`: attention stays inside of documents.
        """
        from megalith.models.compiled import compile_block

        names = {module: name for name, module in self.named_modules()}
        for block in self.blocks():
            compile_block(block, names[block], self.region, self.device, documents=documents)


class _WithLogits(LanguageModel):
    @property
    @abstractmethod
    def output_weight(self) -> nn.Parameter:
        """Weight [V, D] that maps hidden states to logits: the word embedding if they are tied."""

    @property
    def output_bias(self) -> nn.Parameter | None:
        """Bias [V] of the logits, or None."""
        return None


class DenoisingModel(_WithLogits):
    """A model that is trained to find hidden tokens."""

    @abstractmethod
    def states_of_hidden_tokens(self, inputs: Inputs, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute the inputs of the heads at the hidden tokens; on the last stage only.

        Returns:
            States [T, D] of the positions [S, B] of `loss_mask` in a row, and the logits [B, 2] of the order of two
            runs of text, None where the model has no head for it.
        """


class GenerativeModel(_WithLogits):
    """A model whose decoder keeps keys and values of earlier tokens: it continues a text, or answers an encoder's."""

    decoder: Transformer

    @abstractmethod
    def hidden_states(
        self, tokens_BS: Tensor, *, hidden_SBD: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Return the hidden states [S, B, D] after the last layer of this stage, on the last stage the head's input.

        Args:
            tokens_BS: Token ids [B, S]; with a cache only the new ones.
            hidden_SBD: Hidden states of the previous stage; None on the first.
            cache: Keys and values of earlier tokens, which stores the new ones.
        """

    def cross_attentions(self) -> list[CrossAttention]:
        """Return the decoder's cross-attention layers, in order; a model with such has `encode`."""
        found = (block.cross_attention for block in self.decoder.layers.values())
        return [layer for layer in found if isinstance(layer, CrossAttention)]

    def encode(self, tokens_BE: Tensor) -> Encoded:
        """Return the encoder's output for the decoder's cross attention."""
        raise AssertionError("the model has no encoder")


def padding(found: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return the mask `name` of a prepared micro-batch, True at padding; None without such a field."""
    return found[name] == 0 if name in found else None


def named_placements(model: LanguageModel) -> Iterator[tuple[str, nn.Parameter, Placement]]:
    """Yield each parameter with its name and placement, in module order."""
    table = model.placements()
    for name, parameter in model.named_parameters():
        yield name, parameter, table[name]
