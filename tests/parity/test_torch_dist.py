"""The torch_dist format against what the real Megatron wrote (F35; goldens `pretrain/*_torch_dist`).

The reference side reads the goldens with torch's own DCP reader over plain tensors and with `torch.load`, never with
the code under test.
"""

from __future__ import annotations

import io
import pickle
import re
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.checkpoint.content import Chunk
from megalith.checkpoint.files.safe_loading import read_metadata
from megalith.checkpoint.formats.torch_dist import (
    LocalTensor,
    dense,
    model_chunks,
    optimizer_chunks,
    optimizer_common,
    read_optimizer_common,
    rng_object_key,
)
from megalith.errors import CheckpointError
from megalith.nn.placement import Fused, Placement, Replicated, Split

LAYERS, HIDDEN, VOCABULARY, POSITIONS = 2, 16, 512, 32
NORM, ROWS, COLUMNS, GATED = Replicated(), Split(0), Split(1), Fused(0, 2)
Table = dict[str, tuple[tuple[int, ...], Placement]]


def gpt2_table() -> Table:
    """Module name -> (shape, placement) of the golden GPT-2 runs."""
    table: Table = {
        "embedding.word_embeddings.weight": ((VOCABULARY, HIDDEN), ROWS),
        "embedding.position_embeddings.weight": ((POSITIONS, HIDDEN), NORM),
    }
    for layer in range(LAYERS):
        name = f"decoder.layers.{layer}."
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            table |= {f"{name}{norm}.{kind}": ((HIDDEN,), NORM) for kind in ("weight", "bias")}
        table |= {
            f"{name}self_attention.linear_qkv.weight": ((3 * HIDDEN, HIDDEN), ROWS),
            f"{name}self_attention.linear_qkv.bias": ((3 * HIDDEN,), ROWS),
            f"{name}self_attention.linear_proj.weight": ((HIDDEN, HIDDEN), COLUMNS),
            f"{name}self_attention.linear_proj.bias": ((HIDDEN,), NORM),
            f"{name}mlp.linear_fc1.weight": ((4 * HIDDEN, HIDDEN), ROWS),
            f"{name}mlp.linear_fc1.bias": ((4 * HIDDEN,), ROWS),
            f"{name}mlp.linear_fc2.weight": ((HIDDEN, 4 * HIDDEN), COLUMNS),
            f"{name}mlp.linear_fc2.bias": ((HIDDEN,), NORM),
        }
    return table | {f"decoder.final_layernorm.{kind}": ((HIDDEN,), NORM) for kind in ("weight", "bias")}


def llama_table() -> Table:
    """The same of the golden Llama runs: 2 query groups for 4 heads, feed-forward size 48, untied."""
    table: Table = {"embedding.word_embeddings.weight": ((VOCABULARY, HIDDEN), ROWS)}
    for layer in range(LAYERS):
        name = f"decoder.layers.{layer}."
        table |= {
            f"{name}input_layernorm.weight": ((HIDDEN,), NORM),
            f"{name}pre_mlp_layernorm.weight": ((HIDDEN,), NORM),
            f"{name}self_attention.linear_qkv.weight": ((2 * HIDDEN, HIDDEN), ROWS),
            f"{name}self_attention.linear_proj.weight": ((HIDDEN, HIDDEN), COLUMNS),
            f"{name}mlp.linear_fc1.weight": ((2 * 48, HIDDEN), GATED),
            f"{name}mlp.linear_fc2.weight": ((HIDDEN, 48), COLUMNS),
        }
    return table | {
        "decoder.final_layernorm.weight": ((HIDDEN,), NORM),
        "output_layer.weight": ((VOCABULARY, HIDDEN), ROWS),
    }


CASES = {
    "gpt2_torch_dist": (gpt2_table(), torch.float32),
    "llama_torch_dist": (llama_table(), torch.float32),
    "llama_bf16_torch_dist": (llama_table(), torch.bfloat16),
}
PRECISIONS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@pytest.fixture(scope="module")
def golden(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Case name -> its unpacked save folder."""
    unpacked: dict[str, Path] = {}

    def unpack(case: str) -> Path:
        if case not in unpacked:
            folder = tmp_path_factory.mktemp(case)
            with tarfile.open(shared / "golden" / "pretrain" / case / "ckpt.tar.xz") as archive:
                archive.extractall(folder, filter="data")
            unpacked[case] = folder / "ckpt"
        return unpacked[case]

    return unpack


def local_shape(shape: tuple[int, ...], placement: Placement, size: int) -> tuple[int, ...]:
    if isinstance(placement, Replicated):
        return shape
    return tuple(extent // size if dim == placement.dim else extent for dim, extent in enumerate(shape))


def empty_state(table: Table, dtype: torch.dtype, size: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and optimizer state, filled with a value that no training gives."""
    parameters = {
        name: torch.full(local_shape(shape, placement, size), -7.0, dtype=dtype)
        for name, (shape, placement) in table.items()
    }
    states = ["exp_avg", "exp_avg_sq"] + (["fp32_param"] if dtype != torch.float32 else [])
    optimizer = {
        f"{state}.{name}": torch.full(tuple(tensor.shape), -7.0)
        for state in states
        for name, tensor in parameters.items()
    }
    return parameters, optimizer


def chunks_of(
    table: Table, parameters: dict[str, Tensor], optimizer: dict[str, Tensor], rank: int = 0, size: int = 1
) -> list[Chunk]:
    placements = {name: placement for name, (_, placement) in table.items()}
    named = [(name, tensor, placements[name]) for name, tensor in parameters.items()]
    boxes = [LocalTensor(name, tensor) for name, tensor in optimizer.items()]
    return model_chunks(named, dense(LAYERS), rank=rank, size=size) + optimizer_chunks(
        boxes, placements, dense(LAYERS), rank=rank, size=size
    )


def layout(metadata: Metadata) -> dict[str, Any]:
    """Everything of a `.metadata` that another reader depends on."""
    found: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            found[key] = "object"
        else:
            boxes = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks)
            found[key] = (tuple(stored.size), repr(stored.properties), boxes)
    return found


def plain_tensors(folder: Path) -> dict[str, Tensor]:
    """All global tensors of a checkpoint, assembled by torch's own reader."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    tensors = {
        key: torch.full(stored.size, -9.0, dtype=stored.properties.dtype)
        for key, stored in metadata.state_dict_metadata.items()
        if not isinstance(stored, BytesStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def object_bytes(folder: Path, metadata: Metadata, key: str) -> bytes:
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
    return (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_what_is_written_equals_what_megatron_wrote(case: str, golden: Any, tmp_path: Path) -> None:
    table, dtype = CASES[case]
    theirs = DirectoryStore(golden(case))
    content = CheckpointContent(chunks_of(table, *empty_state(table, dtype)), {rng_object_key(): None})
    loaded = theirs.load(10, content)
    assert loaded.unexpected == ()

    rewritten = CheckpointContent(
        content.chunks, {**loaded.objects, **dense(LAYERS).extra_state_objects()}, {"iteration": 10}
    )
    ours = DirectoryStore(tmp_path)
    ours.save(10, rewritten, {})

    theirs_metadata = read_metadata(theirs.folder(10) / ".metadata")
    ours_metadata = read_metadata(ours.folder(10) / ".metadata")
    assert layout(ours_metadata) == layout(theirs_metadata)
    expected, found = plain_tensors(theirs.folder(10)), plain_tensors(ours.folder(10))
    assert found.keys() == expected.keys()
    different = [key for key in expected if not torch.equal(found[key], expected[key])]
    assert not different
    assert not any((tensor == -9.0).any() or (tensor == -7.0).any() for tensor in found.values())


def test_files_and_tracker_are_those_of_megatron(case: str, golden: Any, tmp_path: Path) -> None:
    table, dtype = CASES[case]
    theirs, ours = golden(case), DirectoryStore(tmp_path)
    ours.save(10, CheckpointContent(chunks_of(table, *empty_state(table, dtype)), {}, {}), {})
    names = {path.name for path in (theirs / "iter_0000010").iterdir()}
    assert {path.name for path in ours.folder(10).iterdir()} == names | {"manifest.json"}
    for name in ("latest_checkpointed_iteration.txt", "iter_0000010/metadata.json"):
        assert (tmp_path / name).read_bytes() == (theirs / name).read_bytes()


def test_objects_are_wrapped_as_megatron_wraps_them(golden: Any, tmp_path: Path) -> None:
    theirs = golden("gpt2_torch_dist") / "iter_0000010"
    ours = DirectoryStore(tmp_path)
    random_states = [{"random_rng_state": (3, (1, 2), None)}]
    ours.save(1, CheckpointContent([], {rng_object_key(): random_states, **dense(LAYERS).extra_state_objects()}), {})
    ours_metadata = read_metadata(ours.folder(1) / ".metadata")
    theirs_metadata = read_metadata(theirs / ".metadata")
    extra = {key for key, kind in layout(theirs_metadata).items() if kind == "object" and "_extra_state" in key}
    assert extra == set(dense(LAYERS).extra_state_objects())
    for key in extra:
        for folder, metadata in ((ours.folder(1), ours_metadata), (theirs, theirs_metadata)):
            assert torch.load(io.BytesIO(object_bytes(folder, metadata, key)), weights_only=True) == [None]
    key = rng_object_key()
    stored = torch.load(io.BytesIO(object_bytes(ours.folder(1), ours_metadata, key)), weights_only=True)
    assert stored == [random_states]
    assert set(layout(theirs_metadata)) >= {key}


def test_random_states_of_megatron_are_read(golden: Any) -> None:
    loaded = DirectoryStore(golden("gpt2_torch_dist")).load(10, CheckpointContent(objects={rng_object_key(): None}))
    (states,) = loaded.objects[rng_object_key()]
    assert set(states) == {
        "random_rng_state",
        "np_rng_state",
        "torch_rng_state",
        "cuda_rng_state",
        "rng_tracker_states",
    }
    name, words, *_ = states["np_rng_state"]
    assert (name, words.dtype.name, words.shape) == ("MT19937", "uint32", (624,))
    assert states["torch_rng_state"].dtype == torch.uint8


def test_common_state_of_megatron_is_read(case: str, golden: Any) -> None:
    common = DirectoryStore(golden(case)).common(10)
    assert common["checkpoint_version"] == 3.0
    assert common["iteration"] == 10
    assert common["args"].num_layers == LAYERS
    assert common["args"].consumed_train_samples == 40
    assert repr(common["args"].model_type) == "ModelType(1)"


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


def test_common_optimizer_state_is_rebuilt_exactly(case: str, golden: Any) -> None:
    state = DirectoryStore(golden(case)).common(10)["optimizer"]
    scalars = read_optimizer_common(state)
    assert (scalars.step, scalars.scaler, len(scalars.param_groups)) == (10, None, 2)
    with_parameters = [{**group, "params": [0], "step": 10} for group in scalars.param_groups]
    rebuilt = optimizer_common(with_parameters, scalars.step, None, PRECISIONS[CASES[case][1]])
    assert equal(rebuilt, state)


def test_a_wrong_model_is_refused_with_every_difference(golden: Any) -> None:
    table, _ = CASES["llama_torch_dist"]
    parameters, optimizer = empty_state(table, torch.bfloat16)
    parameters["output_layer.weight"] = torch.full((640, HIDDEN), -7.0)
    content = CheckpointContent(chunks_of(table, parameters, optimizer))
    with pytest.raises(CheckpointError) as caught:
        DirectoryStore(golden("llama_torch_dist")).load(10, content)
    lines = str(caught.value).splitlines()
    # Everything else is another precision of the same.
    assert len(lines) == 2 and re.search(r"output_layer\.weight .*\[512, 16\].*\[640, 16\]", lines[1])
    assert all((tensor == -7.0).all() for tensor in parameters.values()), "a refused load changed the model"


def test_cutting_for_two_ranks_equals_megatrons_cut(golden: Any) -> None:
    """What later tensor-parallel work relies on: rank and size alone give Megatron's chunks."""
    table = llama_table()
    store = DirectoryStore(golden("llama_tp2_torch_dist"))
    boxes: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for rank in range(2):
        parameters, optimizer = empty_state(table, torch.float32, size=2)
        chunks = chunks_of(table, parameters, optimizer, rank=rank, size=2)
        for chunk in chunks:
            boxes.setdefault(chunk.key, set()).add((chunk.offset, tuple(chunk.tensor.shape)))
        store.load(10, CheckpointContent(chunks))
        whole = plain_tensors(store.folder(10))
        gate_and_up = whole["decoder.layers.mlp.linear_fc1.weight"][1]
        half = slice(24 * rank, 24 * rank + 24)
        expected = torch.cat([gate_and_up[:48][half], gate_and_up[48:][half]])
        assert torch.equal(parameters["decoder.layers.1.mlp.linear_fc1.weight"], expected)
        projection = whole["decoder.layers.self_attention.linear_proj.weight"][0]
        expected = projection[:, 8 * rank : 8 * rank + 8]
        assert torch.equal(parameters["decoder.layers.0.self_attention.linear_proj.weight"], expected)
    stored = {
        key: set(value[2])
        for key, value in layout(read_metadata(store.folder(10) / ".metadata")).items()
        if value != "object"
    }
    assert boxes == stored


def test_a_checkpoint_of_megatron_is_taken_and_said_to_be_unverified(golden: Any) -> None:
    store = DirectoryStore(golden("gpt2_torch_dist"))
    assert store.iterations() == [5, 10]
    iteration, notes = store.newest_verified()
    assert iteration == 10
    assert len(notes) == 1 and "manifest.json" in notes[0]


class NameRecorder(pickle.Unpickler):
    """Unpickles a file of our own or of the goldens and notes every type that it names."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.names: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.names.add(f"{module}.{name}")
        return super().find_class(module, name)


def types_named_in(path: Path) -> set[str]:
    recorder = NameRecorder(path.read_bytes())
    recorder.load()
    return recorder.names


def test_metadata_written_here_names_no_type_that_megatrons_does_not(golden: Any, tmp_path: Path) -> None:
    table, dtype = CASES["gpt2_torch_dist"]
    store = DirectoryStore(tmp_path)
    objects = {rng_object_key(): None}
    store.save(1, CheckpointContent(chunks_of(table, *empty_state(table, dtype)), objects, {}), {})
    ours = types_named_in(store.folder(1) / ".metadata")
    theirs = types_named_in(golden("gpt2_torch_dist") / "iter_0000010" / ".metadata")
    assert "torch.distributed.checkpoint.metadata.Metadata" in ours
    assert ours <= theirs
