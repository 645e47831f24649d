"""Parameters of a whole model and of each rank of a layout: names, shapes, placements and Megatron's order.

Built from the architecture alone, on the meta device: what is in files plays no part. Names are those of the modules,
with global layer numbers (`models.gpt`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from torch.nn import Parameter

from megalith.checkpoint.formats.megatron_names import parse_name
from megalith.checkpoint.formats.torch_dist import Stacking, stacking_of
from megalith.config import ModelConfig
from megalith.config.foreign_args import model_of, parallel_of
from megalith.errors import CheckpointError, LayoutError
from megalith.layout import Stages, cut, split_layers
from megalith.models.families import model_class
from megalith.models.language_model import WORD_EMBEDDINGS
from megalith.models.saved import saved_tensors
from megalith.nn.placement import Placement, dim_of, local_pieces
from megalith.registry import EMPTY, Registry

OUTPUT_LAYER = "output_layer.weight"


Coordinates = tuple[int, int, int]
"""Tensor-parallel rank, pipeline stage and expert-parallel rank."""


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
    def ranks(self) -> list[Coordinates]:
        return list(product(range(self.tp), range(self.pp), range(self.ep)))

    def experts(self, expert: int, count: int) -> range:
        """Return the numbers of the experts, of `count`, that an expert-parallel rank has."""
        return range(*cut(count, self.ep, expert))

    def __str__(self) -> str:
        experts = f" x expert-parallel {self.ep}" if self.ep > 1 else ""
        return f"tensor-parallel {self.tp} x pipeline {self.pp}{experts}"


@dataclass(frozen=True)
class ModelSpace:
    """Names, shapes and placements of the parameters of a whole model."""

    model: ModelConfig  # its architecture
    vocab_size: int  # rows of the embedding, padding included
    shapes: dict[str, tuple[int, ...]]  # parameter name -> shape of the global tensor, in module order
    placements: dict[str, Placement]  # parameter name -> placement
    # names among these of what no optimizer moves; in fp32, whatever dtype the weights have
    buffers: frozenset[str] = frozenset()

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @cached_property
    def stacking(self) -> Stacking:
        """Keys under which its parameters stand."""
        return stacking_of(self.model)

    @property
    def tied(self) -> bool:
        """True where the word embedding is the output layer's weight as well."""
        return not self.model.untie_embeddings_and_output_weights

    @property
    def stacks(self) -> Mapping[str, int]:
        return self.model.stacks

    def layers_in(self, layers: range) -> range:
        """Return the layers, of any stack, of a virtual chunk that has `layers`; several stacks are whole there."""
        return layers if len(self.stacks) == 1 else range(max(self.stacks.values()))

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the stacked tensor that holds a parameter, leading axes included."""
        return (*self.stacking.slot(name).extents, *self.shapes[name])

    def stored_name(self, name: str) -> str:
        """Return the name in model space: the second copy of a tied embedding is that of the first."""
        return WORD_EMBEDDINGS if name == OUTPUT_LAYER and self.tied else name

    def local_shape(self, name: str, size: int, index: int) -> tuple[int, ...]:
        """Return the shape of a parameter on a rank of a tensor-parallel axis; a LayoutError if it does not divide."""
        stored = self.stored_name(name)
        shape, placement = self.shapes[stored], self.placements[stored]
        dim = dim_of(placement)
        rows = sum(piece.length for piece in local_pieces(placement, shape[dim], size, index))
        return (*shape[:dim], rows, *shape[dim + 1 :])

    def is_copy(self, name: str, stage: int) -> bool:
        """Return whether a pipeline stage holds, under this name, the second copy of the embedding (`names_of`)."""
        if self.model.predictions:
            return stage > 0 and name == WORD_EMBEDDINGS
        return self.tied and name == OUTPUT_LAYER

    def is_shared(self, name: str, stages: Stages, stage: int, chunk: int) -> bool:
        """Return whether a virtual chunk shares a parameter with another stage: the embedding, or its second copy."""
        if stage:
            return self.is_copy(name, stage)
        last = len(stages) == 1 and chunk == len(stages[0]) - 1
        return name == WORD_EMBEDDINGS and (self.tied or self.model.predictions > 0) and not last

    def names_of(self, division: ParallelLayout, stage: int, expert: int) -> list[list[str]]:
        """List the parameters of an expert-parallel rank of a stage, by virtual chunk, each in module order.

        The copy of a tied embedding that the last stage holds stands last, as `output_layer.weight`, which is no name
        of the model's own. With multi-token prediction the copy is there as what it is, tied or not.
        """
        experts = division.experts(expert, self.model.num_experts or 0)
        return [self._names(division.stages, stage, chunk, experts) for chunk in range(len(division.stages[stage]))]

    def _names(self, stages: Stages, stage: int, chunk: int, experts: range) -> list[str]:
        layers = set(stages[stage][chunk])
        first = stage == 0 and chunk == 0
        last = stage == len(stages) - 1 and chunk == len(stages[stage]) - 1
        names = []
        for name in self.shapes:
            found = parse_name(name)
            if first and last:
                held = True
            elif found.stack in self.stacks:
                held = found.layer in layers
            else:
                embeds = name.startswith("embedding.")
                held = first or (last and self.model.predictions > 0) if embeds else last
            if held and (found.expert is None or found.expert in experts):
                names.append(name)
        copied = self.tied and not self.model.predictions
        return [*names, OUTPUT_LAYER] if last and not first and copied else names


def model_space(model: ModelConfig, vocab_size: int) -> ModelSpace:
    """Build the model space of an architecture, on the meta device."""
    table = list(saved_tensors(model_class(model)(model, vocab_size, device="meta")))
    return ModelSpace(
        model,
        vocab_size,
        {name: tuple(tensor.shape) for name, tensor, _ in table},
        {name: placement for name, _, placement in table},
        frozenset(name for name, tensor, _ in table if not isinstance(tensor, Parameter)),
    )


def model_space_of(args: Mapping[str, Any], where: str, registry: Registry = EMPTY) -> ModelSpace:
    """Build the model space by the args of the run that wrote a checkpoint; `where` names it in errors."""
    try:
        return model_space(model_of(args, registry), int(args["padded_vocab_size"]))
    except KeyError as error:
        raise CheckpointError(f"{where}: the saved args lack {error}, so that its model cannot be known") from error
    except (LayoutError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: the saved args describe no model: {error}") from error


def parallel_layout(args: Mapping[str, Any], num_layers: int, where: str) -> ParallelLayout:
    """Return the layout of the run that wrote a checkpoint."""
    # Before checkpoint version 3 the tensor-parallel size had another name.
    tp = int(args.get("tensor_model_parallel_size") or args.get("model_parallel_size") or 1)
    return ParallelLayout(tp, int(args.get("expert_model_parallel_size") or 1), _stages_of(args, num_layers, where))


def _stages_of(args: Mapping[str, Any], num_layers: int, where: str) -> Stages:
    """Return the layers by [pipeline stage][virtual chunk] of the run that wrote a checkpoint."""
    if args.get("pipeline_model_parallel_layout"):
        raise CheckpointError(
            f"{where} was saved with --pipeline-model-parallel-layout, which this version does not read; convert it "
            "with Megatron's --ckpt-convert-format torch_dist"
        )
    parallel = parallel_of(args)
    try:
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
        raise CheckpointError(f"{where}: its layers do not divide as the saved args say: {error}") from error
