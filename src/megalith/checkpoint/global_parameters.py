"""Global parameters of a model, and those of each rank of a layout: names, shapes, placements and Megatron's order.

Built from the architecture alone, on the meta device; checkpoint files are not read. Names are those of the modules,
with global layer numbers (`models.gpt`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product, starmap
from typing import Any, NamedTuple

from torch.nn import Parameter

from megalith.checkpoint.formats.megatron_names import parse_name
from megalith.checkpoint.formats.torch_dist import Stacking, stacking_of
from megalith.config import ModelConfig
from megalith.config.from_args import model_from_args, parallel_from_args
from megalith.errors import CheckpointError, LayoutError
from megalith.layout import Stages, read_parts, shard_range, split_as_given, split_layers
from megalith.models.families import model_class
from megalith.models.language_model import WORD_EMBEDDINGS
from megalith.models.saved import saved_tensors
from megalith.nn.placement import Placement, dim_of, local_pieces
from megalith.registry import EMPTY, Registry

OUTPUT_LAYER = "output_layer.weight"


class RankCoordinates(NamedTuple):
    """Tensor-parallel rank, pipeline stage and expert-parallel rank."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class ParallelLayout:
    """Tensor, pipeline and expert parallelism of the ranks that write a checkpoint."""

    tp: int
    ep: int
    stages: Stages  # layers by [stage][virtual chunk]

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def ranks(self) -> list[RankCoordinates]:
        return list(starmap(RankCoordinates, product(range(self.tp), range(self.pp), range(self.ep))))

    def experts(self, ep_rank: int, num_experts: int) -> range:
        """Return the indices of the experts that an expert-parallel rank holds."""
        return range(*shard_range(num_experts, self.ep, ep_rank))

    def __str__(self) -> str:
        experts = f" x expert-parallel {self.ep}" if self.ep > 1 else ""
        return f"tensor-parallel {self.tp} x pipeline {self.pp}{experts}"


@dataclass(frozen=True)
class GlobalParameters:
    """Names, shapes and placements of the parameters of a whole model.

    A stack is a group of layers (`encoder`, `decoder`); a stacked tensor holds one parameter of all layers of a stack,
    with leading dimensions for layer and expert, as torch_dist checkpoints do (`formats.torch_dist`).
    """

    model: ModelConfig  # its architecture
    vocab_size: int  # rows of the embedding, padding included
    shapes: dict[str, tuple[int, ...]]  # parameter name -> shape of the global tensor, in module order
    placements: dict[str, Placement]  # parameter name -> placement
    # names of buffers (not optimized), always kept in fp32
    buffers: frozenset[str] = frozenset()

    @classmethod
    def from_config(cls, model: ModelConfig, vocab_size: int) -> GlobalParameters:
        """Build a model on the meta device and list its parameters."""
        table = list(saved_tensors(model_class(model)(model, vocab_size, device="meta")))
        return cls(
            model,
            vocab_size,
            {name: tuple(tensor.shape) for name, tensor, _ in table},
            {name: placement for name, _, placement in table},
            frozenset(name for name, tensor, _ in table if not isinstance(tensor, Parameter)),
        )

    @classmethod
    def from_args(cls, args: Mapping[str, Any], checkpoint_name: str, registry: Registry = EMPTY) -> GlobalParameters:
        """List the parameters of the model that a checkpoint's args describe; errors name `checkpoint_name`."""
        try:
            return cls.from_config(model_from_args(args, registry), int(args["padded_vocab_size"]))
        except KeyError as error:
            message = f"{checkpoint_name}: the saved args lack {error}, so that its model cannot be known"
            raise CheckpointError(message) from error
        except (LayoutError, TypeError, ValueError) as error:
            raise CheckpointError(f"{checkpoint_name}: the saved args describe no model: {error}") from error

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @cached_property
    def stacking(self) -> Stacking:
        """Checkpoint key of each parameter, and its index in the stacked tensor."""
        return stacking_of(self.model)

    @property
    def tied(self) -> bool:
        """True where the word embedding is the output layer's weight as well."""
        return not self.model.untie_embeddings_and_output_weights

    @property
    def has_mtp(self) -> bool:
        return self.model.predictions > 0

    def layers_in(self, layers: range) -> range:
        """Return the layer numbers that a virtual chunk of `layers` holds.

        A model with several stacks is not pipelined, so the chunk holds every layer of each.
        """
        stacks = self.model.stacks
        return layers if len(stacks) == 1 else range(max(stacks.values()))

    def stacked_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the stacked tensor that holds a parameter, leading dimensions included."""
        return (*self.stacking.slot(name).leading_dims, *self.shapes[name])

    def stored_name(self, name: str) -> str:
        """Return the name in `shapes`: of a tied output layer, that of the word embedding."""
        return WORD_EMBEDDINGS if name == OUTPUT_LAYER and self.tied else name

    def local_shape(self, name: str, tp_size: int, tp_rank: int) -> tuple[int, ...]:
        """Return the shape of a parameter on a tensor-parallel rank; a LayoutError if it does not divide."""
        stored = self.stored_name(name)
        shape, placement = self.shapes[stored], self.placements[stored]
        dim = dim_of(placement)
        local_size = sum(piece.length for piece in local_pieces(placement, shape[dim], tp_size, tp_rank))
        return (*shape[:dim], local_size, *shape[dim + 1 :])

    def is_embedding_copy(self, name: str, stage: int) -> bool:
        """Return whether this name, on a pipeline stage, is the second copy of the word embedding (`names_of`)."""
        if self.has_mtp:
            return stage > 0 and name == WORD_EMBEDDINGS
        return self.tied and name == OUTPUT_LAYER

    def is_shared(self, name: str, stages: Stages, stage: int, chunk: int) -> bool:
        """Return whether a virtual chunk shares a parameter with another stage: the word embedding or its copy."""
        if stage:
            return self.is_embedding_copy(name, stage)
        last = len(stages) == 1 and chunk == len(stages[0]) - 1
        return name == WORD_EMBEDDINGS and (self.tied or self.has_mtp) and not last

    def names_of(self, layout: ParallelLayout, stage: int, ep_rank: int) -> list[list[str]]:
        """List the parameters of an expert-parallel rank of a stage, by virtual chunk, each in module order.

        The last stage's copy of a tied embedding comes last, as `output_layer.weight`, a name that is not in `shapes`.
        With multi-token prediction the last stage holds the embedding under its own name, whether or not it is tied.
        """
        experts = layout.experts(ep_rank, self.model.num_experts or 0)
        return [self._names(layout.stages, stage, chunk, experts) for chunk in range(len(layout.stages[stage]))]

    def _names(self, stages: Stages, stage: int, chunk: int, experts: range) -> list[str]:
        layers = set(stages[stage][chunk])
        first = stage == 0 and chunk == 0
        last = stage == len(stages) - 1 and chunk == len(stages[stage]) - 1
        names = []
        for name in self.shapes:
            parsed = parse_name(name)
            if first and last:
                on_this_chunk = True
            elif parsed.stack in self.model.stacks:
                on_this_chunk = parsed.layer in layers
            else:
                is_embedding = name.startswith("embedding.")
                on_this_chunk = first or (last and self.has_mtp) if is_embedding else last
            if on_this_chunk and (parsed.expert is None or parsed.expert in experts):
                names.append(name)
        copied = self.tied and not self.has_mtp
        return [*names, OUTPUT_LAYER] if last and not first and copied else names


def parallel_layout(args: Mapping[str, Any], num_layers: int, checkpoint_name: str) -> ParallelLayout:
    """Return the layout of the run that wrote a checkpoint."""
    # Before checkpoint version 3 the tensor-parallel size had another name.
    tp = int(args.get("tensor_model_parallel_size") or args.get("model_parallel_size") or 1)
    ep = int(args.get("expert_model_parallel_size") or 1)
    return ParallelLayout(tp, ep, _stages_from_args(args, num_layers, checkpoint_name))


def _stages_from_args(args: Mapping[str, Any], num_layers: int, checkpoint_name: str) -> Stages:
    """Return the layers by [pipeline stage][virtual chunk] of the run that wrote a checkpoint."""
    parallel, text = parallel_from_args(args), args.get("pipeline_model_parallel_layout")
    try:
        if text:
            parts, predictions = read_parts(str(text)), int(args.get("mtp_num_layers") or 0)
            if any("m" in part for part in parts[:-1]):
                raise LayoutError(f"{text} has layers of multi-token prediction in a stage without the loss")
            return split_as_given(num_layers, parallel.pipeline_model_parallel_size, parts, predictions)
        return split_layers(
            num_layers,
            parallel.pipeline_model_parallel_size,
            int(args.get("virtual_pipeline_model_parallel_size") or 1),
            first=parallel.decoder_first_pipeline_num_layers,
            last=parallel.decoder_last_pipeline_num_layers,
            embedding_counts=parallel.account_for_embedding_in_pipeline_split,
            loss_counts=parallel.account_for_loss_in_pipeline_split,
        )
    except LayoutError as error:
        raise CheckpointError(f"{checkpoint_name}: its layers do not divide as the saved args say: {error}") from error
