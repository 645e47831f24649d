"""Content of each file of Megatron's format `torch`, and where model space lies in it. Touches no file.

A checkpoint has one `RankFiles` for each (tensor, pipeline, expert) place. The bodies of its files are the dicts that
Megatron 0.16.1 saves, key for key in its order, with tensors on the meta device in them. `RankFiles.tensors` says for
each of these the boxes of model space that it is made of: `weight_chunks` of a meta tensor are views of it, and their
offsets and strides say where the elements of a box stand. What belongs in two places (a norm that every tensor-parallel
rank holds, the second copy of a tied embedding) has a box in both.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from megalith.checkpoint.content import Chunk
from megalith.checkpoint.files.torch_archive import tensors_in
from megalith.checkpoint.formats.megatron_names import CORE, entries, legacy_path, parse_name
from megalith.checkpoint.formats.megatron_optimizer import (
    BUFFERS,
    MAIN,
    MOMENTS,
    bucket_sizes,
    buffer_ranges,
    inner,
    members,
)
from megalith.checkpoint.formats.torch_dist import (
    CHECKPOINT_VERSION,
    OPTIMIZER_PREFIX,
    LocalTensor,
    rng_object_key,
    weight_chunks,
    weight_of,
)
from megalith.checkpoint.global_parameters import GlobalParameters, ParallelLayout, RankCoordinates, parallel_layout
from megalith.checkpoint.sources.source import listing
from megalith.errors import CheckpointError

T = TypeVar("T")

MODEL_FILE = "model_optim_rng.pt"
BUFFER_FILE = "distrib_optim.pt"
_ENTRY_OVERHEAD = 512  # bytes of an archive around one tensor
_FIXED_OVERHEAD = 2**17


def folder_name(coords: RankCoordinates, layout: ParallelLayout) -> str:
    """Return the name of a rank's folder; pipeline and experts count only where they are divided."""
    parts = [f"{coords.pp:03d}"] * (layout.pp > 1) + [f"{coords.ep:03d}"] * (layout.ep > 1)
    return "_".join([f"mp_rank_{coords.tp:02d}", *parts])


def model_key(chunk: int, num_chunks: int) -> str:
    """Return the key of a virtual chunk's model in a file."""
    return f"model{chunk}" if num_chunks > 1 else "model"


@dataclass(frozen=True)
class Target(ParallelLayout):
    """Model, layout and state of a checkpoint to be written."""

    params: GlobalParameters  # the model
    dtype: torch.dtype  # of the weights
    common: Mapping[str, Any]  # the state that all ranks share, as `common.pt` has it
    objects: Mapping[str, Any]  # key -> random states, of the places that have them here
    distributed: bool  # the optimizer's tensors go to flat buffers, as `--use-distributed-optimizer` wants them
    names: str = CORE  # of the weights, `CORE` or a generation of `LEGACY`

    @property
    def has_optimizer(self) -> bool:
        return "optimizer" in self.common

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of moments and main weights: fp32, and of a model in fp64 (`megalith prove`) its own."""
        return self.dtype if self.dtype.itemsize > 4 else torch.float32

    def chunks(self) -> Iterator[Chunk]:
        """Yield at least a part of every layer and expert of every tensor in model space that the files hold."""
        for stage, ep_rank in product(range(self.pp), range(self.ep)):
            for held in RankFiles(self, 0, stage, ep_rank).tensors:
                yield from held.chunks

    def ranks_holding(self, chunks: Iterable[Chunk]) -> list[RankCoordinates]:
        """Return the coordinates of the ranks whose files may hold something of given chunks."""
        rows = {layer_index_of(chunk) for chunk in chunks}
        held: dict[tuple[int, int], set[LayerIndex]] = {}
        for stage, ep_rank in product(range(self.pp), range(self.ep)):
            names = {name for part in self.params.names_of(self, stage, ep_rank) for name in part}
            slots = (self.params.stacking.slot(self.params.stored_name(name)) for name in names)
            held[stage, ep_rank] = {(slot.key, slot.index) for slot in slots}
        return [coords for coords in self.ranks if rows & held[coords.pp, coords.ep]]


LayerIndex = tuple[str, tuple[int, ...]]
"""The key of a weight, and the place on its leading axes of layers and experts."""


def layer_index_of(chunk: Chunk) -> LayerIndex:
    """Return the weight, layer and expert that a chunk belongs to, that of an optimizer's state too."""
    key = weight_of(chunk.key)
    return key, chunk.offset[: parse_name(key).stacked_axes]


def of_experts(parts: Sequence[Mapping[str, T]], *, expert: bool) -> list[dict[str, T]]:
    """Select the entries of routed experts, or all others, from dicts by parameter name of each virtual chunk."""
    return [{name: thing for name, thing in part.items() if parse_name(name).routed == expert} for part in parts]


def target_of(
    common: Mapping[str, Any], objects: Mapping[str, Any], dtype: torch.dtype, where: str, names: str = CORE
) -> Target:
    """Return the layout and model of a checkpoint to be written by its args; `where` names it in errors."""
    args = vars(common["args"])
    params = GlobalParameters.from_args(args, where)
    check_expert_tensor_size(args, where)
    if names != CORE:
        _check_legacy(params, names, where)
    layout, distributed = parallel_layout(args, params.num_layers, where), bool(args.get("use_distributed_optimizer"))
    return Target(layout.tp, layout.ep, layout.stages, params, dtype, common, objects, distributed, names)


OWN_KEYS = "megalith_"
"""How keys of the common state begin that Megatron does not know and passes over."""


def check_expert_tensor_size(args: Mapping[str, Any], where: str) -> None:
    """Refuse experts that are divided over other tensor-parallel ranks than the rest of the model."""
    tp = int(args.get("tensor_model_parallel_size") or 1)
    of_experts = int(args.get("expert_tensor_parallel_size") or tp)
    if args.get("num_experts") and of_experts != tp:
        raise CheckpointError(
            f"{where}: --expert-tensor-parallel-size {of_experts} beside --tensor-model-parallel-size {tp} is not in "
            "format torch here; use torch_dist (Megatron: --ckpt-convert-format torch_dist)"
        )


def _check_legacy(params: GlobalParameters, generation: str, where: str) -> None:
    """Refuse a model that was not before core."""
    layers = range(params.num_layers)
    unknown = [name for name in params.shapes if legacy_path(name, layers, generation, tied=params.tied) is None]
    if unknown:
        raise CheckpointError(
            listing(
                f"{where}: --saver legacy has no names for these, which models of that time had not; use core", unknown
            )
        )


@dataclass(frozen=True)
class FileTensor:
    """Tensor of a file and the boxes of model space in it."""

    tensor: Tensor  # on the meta device; it is in the body of the file
    chunks: list[Chunk]  # views of it


class RankFiles:
    """Files of one model-parallel rank of a checkpoint to be written."""

    def __init__(self, target: Target, tp: int, pp: int, ep: int) -> None:
        self._target, self.tp, self.pp, self.ep = target, tp, pp, ep
        self.tensors: list[FileTensor] = []
        self._first_expert = target.experts(ep, target.params.model.num_experts or 0).start
        self._names = target.params.names_of(target, pp, ep)
        moved = [[name for name in names if name not in target.params.buffers] for names in self._names]
        self._shapes = [{name: self._shape(name) for name in names} for names in moved]
        self.bodies: dict[str, Any] = {MODEL_FILE: self._model_body()}
        if target.has_optimizer and target.distributed:
            self.bodies[BUFFER_FILE] = self._buffer_file()

    @property
    def folder(self) -> str:
        return folder_name(RankCoordinates(self.tp, self.pp, self.ep), self._target)

    @property
    def names(self) -> list[str]:
        """Paths of the files below the folder of the checkpoint."""
        return [f"{self.folder}/{name}" for name in self.bodies]

    @property
    def nbytes(self) -> int:
        """Bytes of the files, rounded up."""
        tensors = [tensor for body in self.bodies.values() for tensor in tensors_in(body)]
        return sum(tensor.numel() * tensor.element_size() + _ENTRY_OVERHEAD for tensor in tensors) + _FIXED_OVERHEAD

    def _shape(self, name: str) -> tuple[int, ...]:
        params = self._target.params
        return params.local_shape(name, self._target.tp, self.tp)

    def _tensor(self, name: str, dtype: torch.dtype, prefix: str = "") -> Tensor:
        """Add an empty tensor of the local shape of a parameter; `prefix` is prepended to its key."""
        tensor = torch.empty(self._shape(name), dtype=dtype, device="meta")
        self._add(name, tensor, tensor, prefix)
        return tensor

    def _add(self, name: str, tensor: Tensor, view: Tensor, prefix: str) -> None:
        """Record that `view` of `tensor` holds what this rank has of a parameter, or of its state."""
        params = self._target.params
        box = LocalTensor(params.stored_name(name), view)
        found = weight_chunks([box], params.placements, params.stacking, rank=self.tp, size=self._target.tp)
        chunks = [Chunk(prefix + part.key, part.tensor, part.offset, part.global_shape) for part in found]
        self.tensors.append(FileTensor(tensor, chunks))

    # --- model_optim_rng.pt ---------------------------------------------------------------------------------------

    def _model_body(self) -> dict[Any, Any]:
        target = self._target
        common = target.common
        body: dict[Any, Any] = {
            "args": Namespace(**vars(common["args"])),
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": common.get("iteration", 0),
        }
        for chunk in range(len(self._names)):
            model = self._model(chunk) if target.names == CORE else self._legacy_model(chunk)
            body[model_key(chunk, len(self._names))] = model
        if target.has_optimizer:
            body["optimizer"] = self._optimizers(common["optimizer"])
            if "opt_param_scheduler" in common:
                body["opt_param_scheduler"] = common["opt_param_scheduler"]
        rng = rng_object_key(self.tp, target.tp, self.pp, target.pp, self.ep, target.ep)
        if rng in target.objects:
            body["rng_state"] = target.objects[rng]
        body["num_floating_point_operations_so_far"] = common.get("num_floating_point_operations_so_far", 0.0)
        return {**body, **{key: value for key, value in common.items() if str(key).startswith(OWN_KEYS)}}

    def _model(self, chunk: int) -> dict[str, Tensor | None]:
        stages, target = self._target.stages, self._target
        last = self.pp == len(stages) - 1 and chunk == len(stages[self.pp]) - 1
        dtypes = dict.fromkeys(target.params.buffers, target.wide)
        layers = target.params.layers_in(stages[self.pp][chunk])
        return OrderedDict(
            (raw, None if name is None else self._tensor(name, dtypes.get(name, target.dtype)))
            for raw, name in entries(self._names[chunk], layers, self._first_expert, last=last)
        )

    def _legacy_model(self, chunk: int) -> dict[str, Any]:
        target, model = self._target, dict[str, Any]()
        for name in self._names[chunk]:
            path = legacy_path(name, target.stages[self.pp][chunk], target.names, tied=target.params.tied)
            assert path is not None, f"{name} was to be refused before"
            inside = model
            for key in path[:-1]:
                inside = inside.setdefault(key, OrderedDict())
            inside[path[-1]] = self._tensor(name, target.dtype)
        return model

    def _optimizers(self, state: Mapping[Any, Any]) -> Any:
        """Return the state of the one optimizer, or a list: of all but experts, and of experts."""
        if self._target.ep == 1:
            return self._optimizer(state, self._shapes)
        return [
            self._optimizer(state[number], of_experts(self._shapes, expert=expert))
            for number, expert in enumerate((False, True))
        ]

    def _optimizer(self, state: Mapping[str, Any], parts: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[str, Any]:
        body = inner(state)
        groups, step = body["param_groups"], body["state"]["common_step"]
        scaler = {"grad_scaler": state["grad_scaler"]} if state.get("grad_scaler") else {}
        if self._target.distributed:
            return {"optimizer": {"param_groups": [{**group, "step": float(step)} for group in groups]}, **scaler}
        shapes = {name: shape for part in parts for name, shape in part.items()}
        # Megatron pairs the groups in these files by position: the one without weight decay is its last.
        groups = sorted(groups, key=lambda group: not group.get("wd_mult", group.get("weight_decay", 0.0)))
        names = members(groups, shapes, vars(self._target.common["args"]).get("decoupled_lr"))
        if sum(map(len, names)) > len({name for part in names for name in part}):
            raise CheckpointError(
                "files of format torch tell groups apart by their weight decay and --decoupled-lr alone, and the "
                "optimizer has more (--use-mup makes them); use --format torch_dist, or --no-optim"
            )
        states = [self._state(name, step) for part in names for name in part]
        half = self._target.dtype != self._target.wide
        first, numbered = 0, []
        for group, part in zip(groups, names, strict=True):
            # Apex and TransformerEngine, which half precision is trained with, count steps by group.
            counted = {"step": int(step)} if half else {}
            numbered.append({**group, **counted, "params": list(range(first, first + len(part)))})
            first += len(part)
        plain = {"state": dict(enumerate(states)), "param_groups": numbered}
        if not half:
            return plain
        main = [[self._tensor(name, self._target.wide, _prefix(MAIN)) for name in part] for part in names]
        return {"optimizer": plain, **scaler, "fp32_from_fp16_params": main}

    def _state(self, name: str, step: Tensor) -> dict[str, Tensor]:
        count = torch.tensor(float(step), dtype=torch.float32)
        return {"step": count, **{kind: self._tensor(name, self._target.wide, _prefix(kind)) for kind in MOMENTS}}

    # --- distrib_optim.pt -----------------------------------------------------------------------------------------

    def _buffer_file(self) -> Any:
        """Return the buffers of the one optimizer, or a list as of `_optimizers`.

        Of the ranks that share the dense part, the first has its buffers.
        """
        if self._target.ep == 1:
            return self._buffer_body(self._shapes)
        dense = None if self.ep else self._buffer_body(of_experts(self._shapes, expert=False))
        return [dense, self._buffer_body(of_experts(self._shapes, expert=True))]

    def _buffer_body(self, parts: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[Any, Any]:
        args = vars(self._target.common["args"])
        wide = self._target.dtype == self._target.wide or args.get("accumulate_allreduce_grads_in_fp32", True)
        kind = (self._target.dtype, self._target.wide if wide else self._target.dtype)
        chunks = {chunk: {kind: self._buffers(shapes)} for chunk, shapes in enumerate(parts)}
        return {"buckets_coalesced": True, **chunks}

    def _buffers(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        size = sum(bucket_sizes(shapes, limit=None))
        where = buffer_ranges(shapes, [size], self.folder)
        found: dict[str, Any] = {}
        for label, kind in BUFFERS.items():
            found[label] = torch.empty(size, dtype=self._target.wide, device="meta")
            # Weights in fp32 are the master weights.
            prefix = "" if kind == MAIN and self._target.dtype == self._target.wide else _prefix(kind)
            for name, place in where.items():
                self._add(name, found[label], found[label][place.start : place.stop].view(place.shape), prefix)
        return {**found, "numel_unpadded": size}


def _prefix(kind: str) -> str:
    return f"{OPTIMIZER_PREFIX}{kind}."
