"""What the families of models have in common, and what training asks of any of them.

A family (GPT, BERT, T5) is one class that assembles blocks of `nn/`. Whoever trains, saves or shards a model asks what
is here and names no family: `prepare` a micro-batch, `part` of the way through the pipeline, `losses` at its end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig, check_groups
from megalith.errors import ConfigError
from megalith.models.layer_options import rotations
from megalith.nn.attention import ContextParallelAttention, LocalAttention, SelfAttention
from megalith.nn.cache import KVCache
from megalith.nn.cross_attention import CrossAttention, Encoded
from megalith.nn.documents import Documents
from megalith.nn.embedding import Embedding, TokenEmbedding
from megalith.nn.latent_attention import LatentAttention
from megalith.nn.loss import LogitsBuffer, vocabulary_loss
from megalith.nn.moe.balance import Alone, Auxiliary, Peers
from megalith.nn.moe.layer import MoE
from megalith.nn.placement import Placement, Replicated
from megalith.nn.precision import FactoryKwargs, at_least_fp32
from megalith.nn.recompute import Recompute
from megalith.nn.region import Region, Solo
from megalith.nn.sink import GradientSink, attach_sink
from megalith.registry import Registered

if TYPE_CHECKING:
    from megalith.models.transformer import Transformer

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Stage:
    """The part of a model that is computed in one place.

    Its layers by their global numbers; whether it begins with the embedding, and ends with final norm and losses.
    """

    layers: range
    embeds: bool = True
    predicts: bool = True


@dataclass(frozen=True, eq=False)
class Inputs:
    """A micro-batch as the parts of a model here take it.

    Attributes:
        tensors: by the names of the samples' fields; of those with a sequence the positions that are here.
        documents: those of the whole sequences, if attention stays inside of them.
    """

    tensors: Mapping[str, Tensor]
    documents: Documents | None = None


@dataclass(frozen=True, eq=False)
class Loss:
    """One of the losses of a micro-batch: a sum of terms, and how many there are of them. Scalars.

    What is learned is the sum of all losses times their `weight`; what is reported is the mean of each without it.
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
        region, mixer: how layers and sequences are shared with other ranks; alone by default.
        peers: the ranks with other tokens, over which the load of experts is balanced; none by default.
        stage: the part that is computed here; all of it by default.
        recompute: which layers keep no activations between the passes of a training step; none by default.

    Attributes:
        tokens_field: the field of a sample whose entries are the tokens that speeds are counted in.
        draws_own_weights: modules without placements keep the values of their constructors as initial weights.
        reports_means: the reported losses are means of those of micro-batches; otherwise all terms weigh alike.
        loss_names: what the losses are called, the main one first.
        sink: where its weight gradients go, if not to autograd.
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

    @abstractmethod
    def _build(self, peers: Peers, recompute: Recompute | None) -> None:
        """Make the modules of this stage, in the order in which checkpoints and buffers list them."""

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
        """What maps positions [B, S] to what is added to the embeddings of tokens, [B, S, D]."""
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
        """The loss of each token, with the label smoothing of the configuration; arguments as of `vocabulary_loss`."""
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
        """The layers that are here, in the order in which they are computed."""

    @abstractmethod
    def part(self, inputs: Inputs, hidden: Tensor | None) -> Tensor:
        """Return the hidden states that a stage that does not predict passes on, in the shape of `activation_shape`.

        `hidden` is what the stage before passed on; None where this one embeds.
        """

    @abstractmethod
    def losses(self, inputs: Inputs, hidden: Tensor | None) -> tuple[Loss, ...]:
        """The losses of a micro-batch in the order of `loss_names`, those of the positions that are here."""

    def prepare(self, batch: Mapping[str, Tensor]) -> Inputs:
        """From a micro-batch on the host to what is taken of it here."""
        own = dict(batch)
        ids = own.pop("document_ids", None)
        documents = None if ids is None else Documents.of(ids, self.device)
        here = {name: self.mixer.own(tensor, 1) if tensor.ndim > 1 else tensor for name, tensor in own.items()}
        return Inputs(here, documents)

    def activation_shape(self, inputs: Inputs) -> tuple[tuple[int, int, int], torch.dtype]:
        """Shape [S, B, D] and dtype of the hidden states that go from stage to stage."""
        batch, length = inputs.tensors[self.tokens_field].shape
        return (self.rows_between_layers(length), batch, self.config.hidden_size), self.hidden_dtype

    @property
    def shared_weight(self) -> str | None:
        """The tied embedding of a stage that has the one of both its uses; another stage holds a copy of it."""
        if self.config.untie_embeddings_and_output_weights or self.stage.embeds == self.stage.predicts:
            return None
        return WORD_EMBEDDINGS if self.stage.embeds else "output_layer.weight"

    @property
    def copied_weight(self) -> str | None:
        """The `shared_weight` where it is the second copy, which norms, counts and checkpoints leave out."""
        return None if self.stage.embeds else self.shared_weight

    def placements(self) -> dict[str, Placement]:
        """The placement table of the whole model: parameter name -> placement.

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
        """Of the hidden states between layers."""
        return at_least_fp32(self.dtype) if self.config.fp32_residual_connection else self.dtype

    def rows_between_layers(self, length: int) -> int:
        """Of `length` tokens of each sequence that are here, how many rows the hidden states between layers have."""
        return length // self.region.size if self.region.needs_grad_reduce else length

    def compile_blocks(self, *, documents: bool = False) -> None:
        """Compile each block with torch.compile; blocks that are alike share a compilation.

        Their weight gradients come from autograd then: a compiled graph cannot write to a sink. Mixtures of experts,
        the embedding and the loss are not compiled and keep theirs. Call it after the optimizer has attached its sink.
        Graphs end where ranks communicate, and around attention that stays inside documents, whose lengths are others
        in each micro-batch.
        """
        for block in self.blocks():
            attach_sink(block, None)
            for module in block.modules():
                if isinstance(module, MoE):  # its experts have other numbers of rows in each step
                    attach_sink(module, self.sink)
                    module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
                elif documents and isinstance(module, SelfAttention | LatentAttention):
                    module.mixer = copy(module.mixer)
                    module.mixer.mix = torch.compiler.disable(module.mixer.mix)  # type: ignore[method-assign]
            block.compile(options=_compile_options(self.device))


class _WithLogits(LanguageModel):
    @property
    @abstractmethod
    def output_weight(self) -> nn.Parameter:
        """The weight [V, D] that maps hidden states to logits: the word embedding where they are tied."""

    @property
    def output_bias(self) -> nn.Parameter | None:
        """The bias [V] of the logits, where they have one."""
        return None


class DenoisingModel(_WithLogits):
    """A model that is trained to find hidden tokens."""

    @abstractmethod
    def states_of_hidden_tokens(self, inputs: Inputs, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute what the logits of the hidden tokens are made of, where the stage predicts.

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
        """The hidden states [S, B, D] behind the last layer that is here, from which logits are made.

        Args:
            tokens_BS: Token ids [B, S]; with a cache only the new ones.
            hidden_SBD: What the stage before this one returned; a stage that embeds takes none.
            cache: Keys and values of earlier tokens, which takes the new ones.
        """

    def cross_attentions(self) -> list[CrossAttention]:
        """The layers of the decoder that attend to an encoder's output, in order; such a model has `encode`."""
        found = (block.cross_attention for block in self.decoder.layers.values())
        return [layer for layer in found if isinstance(layer, CrossAttention)]

    def encode(self, tokens_BE: Tensor) -> Encoded:
        """What the decoder attends to."""
        raise AssertionError("the model has no encoder")


def padding(found: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Where a prepared micro-batch has padding by one of its masks; None where it has none."""
    return found[name] == 0 if name in found else None


_VECTOR_BITS = {"AVX2": 256, "AVX512": 512}


def _compile_options(device: torch.device) -> dict[str, str | int | bool | Callable[..., object]] | None:
    """Name the vector width to torch.compile, as its cache on disk does not tell processors apart.

    With torch 2.13 a graph that was compiled for AVX-512 gives NaN or corrupts the heap where the same cache is used
    with AVX2, as on a file system that nodes share. Options are part of the cache's key.
    """
    width = _VECTOR_BITS.get(torch.backends.cpu.get_cpu_capability()) if device.type == "cpu" else None
    return None if width is None else {"cpp.simdlen": width}


def named_placements(model: LanguageModel) -> Iterator[tuple[str, nn.Parameter, Placement]]:
    """Each parameter with its name and placement, in module order."""
    table = model.placements()
    for name, parameter in model.named_parameters():
        yield name, parameter, table[name]
