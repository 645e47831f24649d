"""Reader of folders of Megatron's format `torch`: one file for each (tensor, pipeline, expert) rank.

    mp_rank_<tensor>[_<pipeline>][_<expert>]/
        model_optim_rng.pt    weights under the names of its modules, optimizer, random states
        distrib_optim.pt      the flat buffers of the distributed optimizer, where it was used

Files are memory-mapped: a tensor is read on first access, and the boxes of model space are views of it. Names and
layouts of all versions of Megatron: `formats.megatron_names`, `formats.megatron_optimizer`.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from megalith.checkpoint.content import CheckpointContent, Chunk, by_key, check_filled, fill
from megalith.checkpoint.files.safe_loading import map_tensors
from megalith.checkpoint.files.torch_archive import changed_records
from megalith.checkpoint.formats.megatron_names import (
    HEAD_OF_T5,
    flattened,
    grouped_experts,
    is_computed,
    is_legacy_qkv,
    module_name,
    parse_name,
    with_family,
)
from megalith.checkpoint.formats.megatron_optimizer import (
    UnreadableState,
    buffer_tensors,
    chunk_buffers,
    is_distributed,
    optimizers,
    scalars_common,
    state_tensors,
)
from megalith.checkpoint.formats.per_rank_layout import (
    BUFFER_FILE,
    MODEL_FILE,
    OWN_KEYS,
    check_expert_tensor_size,
    folder_name,
    model_key,
    of_experts,
)
from megalith.checkpoint.formats.torch_dist import (
    optimizer_chunks,
    optimizer_common,
    read_optimizer_common,
    rng_object_key,
    weight_chunks,
)
from megalith.checkpoint.global_parameters import GlobalParameters, ParallelLayout, RankCoordinates, parallel_layout
from megalith.checkpoint.sources.source import Contents, StoredTensor, listing
from megalith.errors import CheckpointError, LayoutError
from megalith.progress import advance

# As Megatron formats it: mp_rank_{tp:02d}, then _{pp:03d} and _{ep:03d} where these sizes are above 1.
_RANK_FOLDER = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")
# Keys of older versions -> today's (docs/reference/checkpoints.md#top-level-keys).
_SCHEDULER_KEYS = {
    "start_lr": "max_lr",
    "warmup_iter": "lr_warmup_steps",
    "warmup_steps": "lr_warmup_steps",
    "end_iter": "lr_decay_steps",
    "decay_steps": "lr_decay_steps",
    "decay_style": "lr_decay_style",
    "num_iters": "num_steps",
}


NamedTensors = dict[str, tuple[str, Tensor]]
"""Our name of a parameter -> its name in the file and the tensor, in the order of the file."""


@dataclass(frozen=True)
class _Box:
    """A view of a mapped tensor, as a box of a rank's local tensor (`formats.torch_dist.Box`)."""

    name: str
    tensor: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class PerRankSource:
    """A folder that holds `mp_rank_*` folders."""

    format = "torch"

    def __init__(self, path: Path) -> None:
        self.path = path

    # --- metadata of the files -------------------------------------------------------------------------------------

    @cached_property
    def _has_model_file(self) -> dict[str, bool]:
        """Name of each folder -> True if it has a model file."""
        return {
            folder.name: (folder / MODEL_FILE).is_file()
            for folder in sorted(self.path.iterdir())
            if _RANK_FOLDER.fullmatch(folder.name)
        }

    @cached_property
    def _first_body(self) -> Mapping[str, Any]:
        """Content of the first file that exists."""
        name = next((name for name, exists in self._has_model_file.items() if exists), None)
        if name is None:
            raise CheckpointError(
                f"{self.path} has the folders {', '.join(self._has_model_file)}, and none of them holds {MODEL_FILE}: "
                "the checkpoint was copied in part, or its save did not end; copy it again or load another iteration"
            )
        return _read(self.path / name / MODEL_FILE)

    @cached_property
    def _args(self) -> dict[str, Any]:
        args = self._first_body.get("args")
        if not isinstance(args, Namespace):
            raise CheckpointError(
                f"{self.path} holds no args, so that its model cannot be known; Megatron writes them since 2020"
            )
        return with_family(vars(args), self._weight_names)

    @property
    def _weight_names(self) -> Iterator[str]:
        """Names of the weights in the first and the last file, which hold both ends of the model."""
        last = [name for name, exists in self._has_model_file.items() if exists][-1]
        bodies = [self._first_body]
        with suppress(CheckpointError):  # `_files` raises it again
            bodies.append(_read(self.path / last / MODEL_FILE))
        for body in bodies:
            for key, part in body.items():
                if key.startswith("model") and isinstance(part, Mapping):
                    yield from (name for name, _ in flattened(part))

    @cached_property
    def _params(self) -> GlobalParameters:
        return GlobalParameters.from_args(self._args, str(self.path))

    @cached_property
    def _layout(self) -> ParallelLayout:
        check_expert_tensor_size(self._args, str(self.path))
        return parallel_layout(self._args, self._params.num_layers, str(self.path))

    @cached_property
    def _files(self) -> dict[RankCoordinates, Mapping[str, Any]]:
        """Content of each rank's file. Raises CheckpointError if one is missing or of another iteration."""
        layout = self._layout
        folder_of = {coords: folder_name(coords, layout) for coords in layout.ranks}
        lines = []
        for name in folder_of.values():
            if not self._has_model_file.get(name):
                lines.append(
                    f"{name}/{MODEL_FILE} is missing" + ("" if name in self._has_model_file else " with its folder")
                )
        others = [name for name in self._has_model_file if name not in folder_of.values()]
        if others:
            lines.append(f"not expected: {', '.join(others)}")
        if lines:
            raise CheckpointError(
                listing(
                    f"{self.path} is not whole: its args say {layout}, so that it has {len(folder_of)} folders "
                    f"{next(iter(folder_of.values()))} to {list(folder_of.values())[-1]}",
                    [*lines, "copy the folder again from where it was written, or load another iteration"],
                )
            )
        bodies = {coords: _read(self.path / name / MODEL_FILE) for coords, name in folder_of.items()}
        iterations = {folder_of[coords]: body.get("iteration") for coords, body in bodies.items()}
        if len(set(iterations.values())) > 1:
            raise CheckpointError(
                listing(
                    f"{self.path} holds files of different checkpoints; copy the folder again",
                    [f"{name} is of iteration {iteration}" for name, iteration in iterations.items()],
                )
            )
        return bodies

    # --- tensors in model space -----------------------------------------------------------------------------------

    @cached_property
    def _chunks(self) -> dict[str, list[Chunk]]:
        """Chunks of each global tensor by key, as views of the mapped files; each element once."""
        weights = [chunk for coords, named in self._weights.items() for chunk in self._weight_chunks(coords, named)]
        return by_key([*weights, *self._optimizer_chunks[0]])

    @cached_property
    def _optimizer_chunks(self) -> tuple[list[Chunk], tuple[str, ...]]:
        """Chunks of the optimizer state, and the reasons why it cannot be read."""
        if not self._has_optimizer:
            return [], ()
        try:
            return [chunk for coords, named in self._weights.items() for chunk in self._state_chunks(coords, named)], ()
        except UnreadableState as error:
            return [], (str(error),)

    @cached_property
    def _weights(self) -> dict[RankCoordinates, list[NamedTensors]]:
        stages = self._layout.stages
        return {
            coords: [self._weights_of_chunk(coords, body, chunk) for chunk in range(len(stages[coords.pp]))]
            for coords, body in self._files.items()
        }

    def _weights_of_chunk(self, coords: RankCoordinates, body: Mapping[str, Any], chunk: int) -> NamedTensors:
        """Return the weights of one model chunk. Raises CheckpointError if they are not those of the model."""
        (tp, pp, _), stages, params, where = coords, self._layout.stages, self._params, self._file(coords, MODEL_FILE)
        experts = self._experts(coords)
        key = model_key(chunk, len(stages[pp]))
        if not isinstance(body.get(key), Mapping):
            raise CheckpointError(f"{where} has no {key!r}; it holds {', '.join(map(str, body))}")
        layers, expected = (params.layers_in(stages[pp][chunk]), params.names_of(self._layout, pp, coords.ep)[chunk])
        named = (
            (module_name(name, layers, experts.start) or name, name, value) for name, value in flattened(body[key])
        )
        found = {name: (raw, value) for name, raw, value in named if name in expected or not is_computed(raw)}
        for name in expected:
            if name.startswith(HEAD_OF_T5) and name in found:  # written twice: under `output_layer.` too
                found.pop(name.removeprefix("lm_head."), None)
        # With grouped GEMM one tensor holds the parameters of several experts, which are expected by name.
        grouped = {name: grouped_experts(name, experts) for name in found}
        held = {one for name, several in grouped.items() for one in several or [name]}
        lines = [
            f"{name} is missing" for name in expected if name not in held and not params.is_embedding_copy(name, pp)
        ]
        known = set(expected)
        lines += [
            f"{raw} is not expected"
            for name, (raw, _) in found.items()
            if not known.issuperset(grouped[name] or [name])
        ]
        lines += [f"{raw} is not a tensor" for raw, value in found.values() if not isinstance(value, Tensor)]
        shapes = {name: self._shape(name, tp) for name in expected}
        for name, several in grouped.items():
            if known.issuperset(several) and several:
                rows, columns = shapes[several[0]]
                up = parse_name(name).module == "linear_fc1"
                shapes[name] = (columns, len(several) * rows) if up else (len(several) * columns, rows)
        lines += [
            f"{raw} has shape {list(value.shape)} instead of {list(shapes[name])}"
            for name, (raw, value) in found.items()
            if name in shapes and isinstance(value, Tensor) and tuple(value.shape) != shapes[name]
        ]
        if lines:
            raise CheckpointError(listing(f"{where} does not hold the model that its args describe", lines))
        return found

    def _experts(self, coords: RankCoordinates) -> range:
        return self._layout.experts(coords.ep, self._params.model.num_experts or 0)

    def _shape(self, name: str, tp: int) -> tuple[int, ...]:
        try:
            return self._params.local_shape(name, self._layout.tp, tp)
        except LayoutError as error:
            raise CheckpointError(f"{self.path}: {name} does not divide as the saved args say: {error}") from error

    def _weight_chunks(self, coords: RankCoordinates, weights: Sequence[NamedTensors]) -> list[Chunk]:
        found = (("", name, raw, tensor) for part in weights for name, (raw, tensor) in part.items())
        return self._to_chunks(weight_chunks, coords, found)

    def _state_chunks(self, coords: RankCoordinates, weights: Sequence[NamedTensors]) -> list[Chunk]:
        raw_of = {name: raw for part in weights for name, (raw, _) in part.items()}
        states = self._optimizer_tensors(coords, weights)
        return self._to_chunks(
            optimizer_chunks, coords, ((f"{kind}.", name, raw_of[name], x) for kind, name, x in states)
        )

    def _to_chunks(
        self,
        chunks_of: Callable[..., list[Chunk]],
        coords: RankCoordinates,
        found: Iterable[tuple[str, str, str, Tensor]],
    ) -> list[Chunk]:
        """Cut a rank's tensors (prefix, our name, name in the file, tensor) into chunks, each element once.

        The second copy of a tied embedding is left out, and all but the experts is read from the first expert-parallel
        rank only.
        """
        params, (tp, pp, ep) = self._params, coords
        boxes = [
            box
            for prefix, name, raw, tensor in found
            if not params.is_embedding_copy(name, pp) and (ep == 0 or parse_name(name).routed)
            for box in self._boxes(coords, prefix, name, raw, tensor)
        ]
        return chunks_of(boxes, params.placements, params.stacking, rank=tp, size=self._layout.tp, dedup=True)

    def _optimizer_tensors(
        self, coords: RankCoordinates, weights: Sequence[NamedTensors]
    ) -> Iterator[tuple[str, str, Tensor]]:
        """Yield kind, our name and tensor of a rank's optimizer state. Raises UnreadableState for an unknown form."""
        stored = [
            {name: tensor for name, (_, tensor) in part.items() if name not in self._params.buffers} for part in weights
        ]
        where = str(self._file(coords, MODEL_FILE))
        states = optimizers(self._files[coords]["optimizer"], self._num_optimizers, where)
        parts = [stored] if len(states) == 1 else [of_experts(stored, expert=expert) for expert in (False, True)]
        for number, (state, part) in enumerate(zip(states, parts, strict=True)):
            if not is_distributed(state):
                together = {name: tuple(tensor.shape) for one in part for name, tensor in one.items()}
                yield from state_tensors(state, together, self._args.get("decoupled_lr"), where)
            elif number or coords.ep == 0:  # only the first expert-parallel rank has the buffers of the dense part
                file = self._file(coords, BUFFER_FILE)
                body = map_tensors(file)
                body = body[number] if isinstance(body, list) and len(body) == len(states) else body
                for buffer, shapes in chunk_buffers(body, part, str(file)):
                    yield from buffer_tensors(buffer, shapes, str(file))

    @property
    def _num_optimizers(self) -> int:
        """Number of optimizers: under expert parallelism the experts have a second one."""
        return 2 if self._layout.ep > 1 else 1

    @cached_property
    def _has_optimizer(self) -> bool:
        """True if the files have optimizer state. Raises CheckpointError if only some do."""
        missing = []
        for coords, body in self._files.items():
            name, state = folder_name(coords, self._layout), body.get("optimizer")
            first = state[0] if isinstance(state, list) and state else state
            if state is None:
                missing.append(f"{name}/{MODEL_FILE} has no optimizer")
            elif isinstance(first, Mapping) and is_distributed(first) and not self._file(coords, BUFFER_FILE).is_file():
                missing.append(f"{name}/{BUFFER_FILE} is missing")
        if missing and len(missing) < len(self._files):
            raise CheckpointError(listing(f"{self.path} has the optimizer's state in some folders only", missing))
        return not missing

    def _file(self, coords: RankCoordinates, name: str) -> Path:
        return self.path / folder_name(coords, self._layout) / name

    def _boxes(self, coords: RankCoordinates, prefix: str, name: str, raw: str, tensor: Tensor) -> Iterator[_Box]:
        """Yield a parameter's tensor as boxes, with query, key and value rows in the order of checkpoint version 2.

        The rows of query, key and value are [3, heads, size] in version 0, [heads, size, 3] in version 1 and [heads, 3,
        size] since. Grouped experts follow each other in one tensor, each transposed, whatever the shape says.
        """
        if several := grouped_experts(name, self._experts(coords)):
            width = self._shape(several[0], coords.tp)[::-1]
            for one, matrix in zip(several, tensor.reshape(len(several), *width), strict=True):
                yield _Box(prefix + one, matrix.t(), (0, 0), width[::-1])
            return
        label, shape = prefix + name, tuple(tensor.shape)
        version = float(self._first_body.get("checkpoint_version", 0))
        if version >= 2 or not is_legacy_qkv(raw):
            yield _Box(label, tensor, (0,) * len(shape), shape)
            return
        size = self._params.model.head_size
        heads = shape[0] // (3 * size)
        for head, part in product(range(heads), range(3)):
            if version < 1:
                rows = tensor.view(3, heads, size, *shape[1:])[part, head]
            else:
                rows = tensor.view(heads, size, 3, *shape[1:])[head, :, part]
            yield _Box(label, rows, ((head * 3 + part) * size,) + (0,) * (len(shape) - 1), shape)

    # --- methods of `Source` --------------------------------------------------------------------------------------

    def contents(self) -> Contents:
        tensors = {
            key: StoredTensor(parts[0].global_shape, parts[0].tensor.dtype, len(parts))
            for key, parts in self._chunks.items()
        }
        return Contents(tensors, frozenset(self._random_states), self._optimizer_chunks[1])

    @cached_property
    def _random_states(self) -> dict[str, Any]:
        layout = self._layout
        return {
            rng_object_key(tp, layout.tp, pp, layout.pp, ep, layout.ep): body["rng_state"]
            for (tp, pp, ep), body in self._files.items()
            if "rng_state" in body
        }

    def common(self) -> dict[str, Any]:
        body = self._files[RankCoordinates(0, 0, 0)]
        common: dict[str, Any] = {
            "args": Namespace(**self._args),
            "checkpoint_version": float(body.get("checkpoint_version", 0)),
            "iteration": int(body.get("iteration", 0)),
            "num_floating_point_operations_so_far": float(body.get("num_floating_point_operations_so_far", 0.0)),
            **{key: value for key, value in body.items() if str(key).startswith(OWN_KEYS)},
        }
        schedule = body.get("opt_param_scheduler", body.get("lr_scheduler"))
        if schedule is not None:
            common["opt_param_scheduler"] = {_SCHEDULER_KEYS.get(key, key): value for key, value in schedule.items()}
        with suppress(UnreadableState):  # `contents` has the reason
            if "optimizer" in body:
                states = optimizers(body["optimizer"], self._num_optimizers, str(self.path))
                common["optimizer"] = self._optimizer_common(states)
        return common

    def _optimizer_common(self, states: Sequence[Mapping[str, Any]]) -> dict[Any, Any]:
        found = read_optimizer_common(dict(enumerate(map(scalars_common, states))))
        precision = "float16" if found.scaler else str(self._args.get("params_dtype", "float32"))
        return optimizer_common(found.param_groups, found.step, found.scaler, precision.removeprefix("torch."))

    def read(self, content: CheckpointContent) -> dict[str, Any]:
        for target in content.chunks:
            candidates = self._candidates(target)
            filled = fill(target, candidates)
            for part in candidates:
                self._mapped_files.release(part.tensor)
            check_filled(str(self.path), target, filled)
            advance("bytes read", target.nbytes)
        return {key: self._random_states[key] for key in content.objects}

    @cached_property
    def _mapped_files(self) -> MappedFolder:
        return MappedFolder(self.path)

    def _candidates(self, target: Chunk) -> list[Chunk]:
        """Return chunks of the target's key that may overlap it: those of its layer if the key stacks all layers."""
        if target.tensor.ndim == 0:
            return self._chunks.get(target.key, [])
        rows = range(target.offset[0], target.offset[0] + target.tensor.shape[0])
        by_row = self._by_row.get(target.key, {})
        if len(rows) == 1 and rows[0] in by_row and all(part.tensor.shape[0] == 1 for part in by_row[rows[0]]):
            return by_row[rows[0]]
        return self._chunks.get(target.key, [])

    @cached_property
    def _by_row(self) -> dict[str, dict[int, list[Chunk]]]:
        """Chunks by key and first row."""
        found: dict[str, dict[int, list[Chunk]]] = {}
        for key, parts in self._chunks.items():
            for part in parts:
                if part.tensor.ndim:
                    found.setdefault(key, {}).setdefault(part.offset[0], []).append(part)
        return found

    def problems(self) -> list[str]:
        self.contents()
        self.common()
        return []

    def changed(self, part: int = 0, parts: int = 1) -> list[str]:
        files = [self._file(coords, name) for coords in self._layout.ranks for name in (MODEL_FILE, BUFFER_FILE)]
        found = []
        for file in [file for file in files if file.is_file()][part::parts]:
            for record in changed_records(file):
                found.append(f"{file} has changed since it was saved: the checksum of {record} differs")
        return found


def _read(path: Path) -> Mapping[str, Any]:
    body = map_tensors(path)
    if not isinstance(body, Mapping):
        raise CheckpointError(f"{path} is damaged: it holds a {type(body).__name__}")
    return body


_MAPS = Path("/proc/self/maps")
_DONTNEED = 4  # MADV_DONTNEED of Linux; torch's mapping is no `mmap.mmap`, which has `madvise`


class MappedFolder:
    """Files of a folder that are mapped into this process, as listed by Linux; none on other systems.

    Pages that were read stay in the resident memory of the process until the system needs it: without `release` reading
    a checkpoint would count its whole size, also against a memory limit.
    """

    def __init__(self, folder: Path) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._libc = ctypes.CDLL(None)
        inside = f"{folder.resolve()}/"
        for line in _MAPS.read_text().splitlines() if _MAPS.exists() else ():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(inside):
                start, _, stop = fields[0].partition("-")
                self._starts.append(int(start, 16))
                self._stops.append(int(stop, 16))

    def release(self, tensor: Tensor) -> None:
        """Free the whole pages of a tensor that was read and not written; the next read maps them again."""
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        stop = (tensor.data_ptr() + span * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
        number = bisect.bisect_right(self._starts, start) - 1
        if start < stop and number >= 0 and stop <= self._stops[number]:
            self._libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED)
