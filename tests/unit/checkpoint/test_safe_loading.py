"""Loading a checkpoint never runs code from it (F11): a canary in every file that holds a pickle."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import signal
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.checkpoint.files import dcp
from megalith.checkpoint.files import folder as folders
from megalith.checkpoint.files.safe_loading import dump_bytes, load_bytes, load_tensors_and_plain_data, read_metadata
from megalith.checkpoint.formats.torch_dist import rng_object_key
from megalith.errors import CheckpointError

MakeContent = Callable[..., CheckpointContent]


class Bomb:
    """Unpickling it creates the canary file."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def bombs(canary: Path) -> dict[str, Bomb]:
    return {
        "posix.system": Bomb(os.system, f"touch {canary}"),
        "exec": Bomb(exec, f"open({str(canary)!r}, 'w')"),
        "subprocess.Popen": Bomb(subprocess.Popen, ["touch", str(canary)]),
        "io.open": Bomb(io.open, str(canary), "w"),
        "getattr": Bomb(getattr, 1, "real"),
    }


BOMBS = sorted(bombs(Path()))


def torch_bytes(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "save")


def test_the_bombs_are_live(canary: Path) -> None:
    for name in ("posix.system", "exec", "io.open"):
        pickle.loads(pickle.dumps(bombs(canary)[name]))
        assert canary.exists(), name
        canary.unlink()


def check_refused(canary: Path, file: str, refused: str, load: Callable[[], object]) -> None:
    with pytest.raises(CheckpointError) as caught:
        load()
    assert not canary.exists()
    assert file in str(caught.value) and refused.rpartition(".")[2] in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", BOMBS)
def test_common(store: DirectoryStore, make_content: MakeContent, canary: Path, name: str) -> None:
    store.save(1, make_content(1), {})
    (store.folder(1) / "common.pt").write_bytes(torch_bytes({"args": bombs(canary)[name]}))
    check_refused(canary, "common.pt", name, lambda: store.common(1))
    check_refused(canary, "common.pt", name, lambda: store.load(1, make_content(1), verify=False))


@pytest.mark.parametrize("name", BOMBS)
def test_common_as_a_plain_pickle(store: DirectoryStore, make_content: MakeContent, canary: Path, name: str) -> None:
    store.save(1, make_content(1), {})
    (store.folder(1) / "common.pt").write_bytes(pickle.dumps({"args": bombs(canary)[name]}, protocol=2))
    with pytest.raises(CheckpointError, match=r"common\.pt"):
        store.common(1)
    assert not canary.exists()


@pytest.mark.parametrize("name", BOMBS)
def test_metadata(store: DirectoryStore, make_content: MakeContent, canary: Path, name: str) -> None:
    store.save(1, make_content(1), {})
    (store.folder(1) / ".metadata").write_bytes(pickle.dumps(bombs(canary)[name]))
    check_refused(canary, ".metadata", name, lambda: store.load(1, make_content(1), verify=False))
    check_refused(canary, ".metadata", name, lambda: store.contents(1))
    (store.folder(1) / "manifest.json").unlink()
    assert any(".metadata" in note for note in store.newest_verified()[1])
    assert not canary.exists()


@pytest.mark.parametrize("name", BOMBS)
def test_metadata_with_a_bomb_inside(store: DirectoryStore, make_content: MakeContent, canary: Path, name: str) -> None:
    store.save(1, make_content(1), {})
    path = store.folder(1) / ".metadata"
    metadata = read_metadata(path)
    metadata.planner_data = bombs(canary)[name]
    path.write_bytes(pickle.dumps(metadata))
    check_refused(canary, ".metadata", name, lambda: store.contents(1))


@pytest.mark.parametrize("name", BOMBS)
def test_random_states(
    store: DirectoryStore, make_content: MakeContent, canary: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(objects: dict[str, Any]) -> dict[str, bytes]:
        return {key: torch_bytes([bombs(canary)[name]]) for key in objects}

    monkeypatch.setattr(folders, "encode_objects", encode)
    store.save(1, make_content(1), {})
    assert store.verify(1) == []
    check_refused(
        canary, rng_object_key(), name, lambda: store.load(1, CheckpointContent(objects={rng_object_key(): None}))
    )


@pytest.mark.parametrize("name", BOMBS)
def test_an_archive_in_place_of_a_tensor(
    store: DirectoryStore, make_content: MakeContent, canary: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swap(stream: Any, tensor: torch.Tensor) -> None:
        torch.save(bombs(canary)[name], stream)

    monkeypatch.setattr(dcp, "write_tensor_entry", swap)
    content = CheckpointContent(make_content(1).chunks)
    store.save(1, content, {})
    monkeypatch.undo()
    assert store.verify(1) == []
    with pytest.raises(CheckpointError, match=r"\.distcp"):
        store.load(1, content)
    assert not canary.exists()


def test_plain_values_and_random_states_pass() -> None:
    value = {
        "namespace": argparse.Namespace(a=1, signal=signal.SIGTERM, dtype=torch.bfloat16),
        "numpy": ("MT19937", np.arange(624, dtype=np.uint32), 3, 0, 0.0),
        "arrays": [np.zeros(2, dtype=code) for code in ("int64", "float32", "uint8", "bool")],
        "tensor": torch.arange(3),
        "nested": {1: [None, True, 1.5, "x", b"y", (1, 2)]},
    }
    found = load_bytes(io.BytesIO(dump_bytes(value, "value")), "value")
    assert found["namespace"] == value["namespace"] and found["nested"] == value["nested"]
    np.testing.assert_array_equal(found["numpy"][1], np.arange(624))
    assert [array.dtype for array in found["arrays"]] == ["int64", "float32", "uint8", "bool"]


def test_metadata_may_not_point_outside_its_folder(store: DirectoryStore, make_content: MakeContent) -> None:
    store.save(1, make_content(1), {})
    path = store.folder(1) / ".metadata"
    (store.path / "secret").write_bytes(bytes(10_000))
    metadata = read_metadata(path)
    next(iter(metadata.storage_data.values())).relative_path = "../secret"
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="points outside"):
        store.load(1, make_content(1), verify=False)


def test_a_gap_in_a_tensor_is_an_error(store: DirectoryStore, make_content: MakeContent) -> None:
    store.save(1, make_content(1), {})
    path = store.folder(1) / ".metadata"
    metadata = read_metadata(path)
    key = "decoder.layers.mlp.linear_fc1.weight"
    metadata.state_dict_metadata[key].chunks.pop()  # type: ignore[union-attr]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"{key} .*48"):
        store.load(1, make_content(1), verify=False)


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"PK\x03\x04 torn", b"not a pickle"])
@pytest.mark.parametrize("read", [read_metadata, load_tensors_and_plain_data])
def test_torn_files_are_named(tmp_path: Path, content: bytes, read: Callable[[Path], Any]) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'file'}"):
        read(tmp_path / "file")
    with pytest.raises(CheckpointError, match="is missing"):
        read(tmp_path / "none")


def rebuild(*arguments: object) -> bytes:
    """A `data.pkl` that calls torch's rebuilding function with any arguments."""
    call = b"ctorch._utils\n_rebuild_tensor_v2\n"
    return b"\x80\x02" + call + pickle.dumps(arguments, protocol=2)[2:-1] + b"R."


STORAGE = ("storage", torch.float32, "0", "cpu", 4)
CRAFTED = {
    "empty": b"",
    "no pickle": b"\xff\xfe not a pickle",
    "cut short": b"\x80\x02X\x04",
    "stack underflow": b"\x80\x02R.",
    "unknown protocol": b"\x80\x7fN.",
    "unknown memo": b"\x80\x02h\x07.",
    "text that is no UTF-8": b"\x80\x02X\x02\x00\x00\x00\xff\xff.",
    "calls a number": b"\x80\x02K\x01)R.",
    "too few arguments": rebuild(1, 2),
    "storage is no tuple": rebuild(5, 0, (4,), (1,), False, {}),
    "storage of other length": rebuild(("storage", 1), 0, (4,), (1,), False, {}),
    "dtype is a word": rebuild(("storage", "f4", "0", "cpu", 4), 0, (4,), (1,), False, {}),
    "size is a number": rebuild(STORAGE, 0, 4, (1,), False, {}),
    "size of words": rebuild(STORAGE, 0, ("a",), (1,), False, {}),
    "fewer strides than sizes": rebuild(STORAGE, 0, (2, 2), (1,), False, {}),
    "beyond all memory": rebuild(STORAGE, 0, (2**62, 2**62), (2**62, 1), False, {}),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_tensor_header_is_damage(
    store: DirectoryStore, make_content: MakeContent, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no manifest guards it, nothing but the error for damage comes out of a tensor's entry."""

    def swap(stream: Any, tensor: torch.Tensor) -> None:
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("archive/data.pkl", CRAFTED[case])
            archive.writestr("archive/data/0", bytes(16))

    monkeypatch.setattr(dcp, "write_tensor_entry", swap)
    store.save(1, make_content(1), {})
    (store.folder(1) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"__0_\d\.distcp"):
        store.load(1, make_content(1), verify=False)
