"""Files of torch.save that are laid out first and filled later."""

from __future__ import annotations

import argparse
import os
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.files.safe_loading import load_tensors_and_plain_data, map_tensors
from megalith.checkpoint.files.torch_archive import (
    changed_records,
    preallocate,
    tensor_offsets,
    tensors_in,
    write_at,
    write_checksums,
)

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "float": ((3, 4), torch.float32),
    "bfloat": ((5, 7), torch.bfloat16),
    "half": ((9,), torch.float16),
    "whole": ((2, 2, 2), torch.int64),
    "scalar": ((), torch.float32),
    "empty": ((0, 4), torch.float32),
}


def values() -> dict[str, Tensor]:
    made = {}
    for name, (shape, dtype) in SHAPES.items():
        numbers = torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape)
        made[name] = numbers.to(dtype)
    return made


def body() -> dict[str, Any]:
    """Room for the tensors, nested as in a checkpoint, among values that are written at once."""
    blank = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in SHAPES.items()}
    return {
        "args": argparse.Namespace(size=3),
        "model": OrderedDict(blank),
        "states": [torch.arange(6.0)[2:4], {"step": torch.tensor(7.0)}],
        "text": "plain",
    }


def filled(path: Path) -> dict[str, Tensor]:
    value = body()
    preallocate(path, value)
    fd = os.open(path, os.O_RDWR)
    for tensor, start, name in zip(tensors_in(value), tensor_offsets(path), SHAPES, strict=False):
        write_at(fd, start, tensor, values()[name])
    os.close(fd)
    return values()


@pytest.mark.parametrize("load", [load_tensors_and_plain_data, map_tensors])
def test_what_is_filled_later_is_read_as_if_it_had_been_saved(tmp_path: Path, load: Any) -> None:
    expected = filled(tmp_path / "file.pt")
    loaded = load(tmp_path / "file.pt")
    assert isinstance(loaded["model"], OrderedDict)
    assert list(loaded["model"]) == list(SHAPES)
    for name, tensor in expected.items():
        assert loaded["model"][name].dtype == tensor.dtype
        assert torch.equal(loaded["model"][name], tensor), name
    assert loaded["states"][0].tolist() == [2.0, 3.0]
    assert loaded["states"][0].untyped_storage().nbytes() == 8 or load is map_tensors
    assert float(loaded["states"][1]["step"]) == 7.0
    assert (loaded["args"].size, loaded["text"]) == (3, "plain")


def test_the_records_are_those_of_an_ordinary_save(tmp_path: Path) -> None:
    expected = filled(tmp_path / "file.pt")
    write_checksums(tmp_path / "file.pt")
    (tmp_path / "plain").mkdir()
    torch.save({**body(), "model": OrderedDict(expected)}, tmp_path / "plain/file.pt")
    with zipfile.ZipFile(tmp_path / "file.pt") as ours, zipfile.ZipFile(tmp_path / "plain/file.pt") as theirs:
        assert ours.namelist() == theirs.namelist()
        # A view is saved with its whole storage by torch, and alone by us: that record and what follows from it differ.
        differ = [name for name in ours.namelist() if ours.read(name) != theirs.read(name)]
        assert differ == ["file/data.pkl", "file/data/6", "file/.data/serialization_id"]


def test_a_sealed_file_is_a_sound_archive_and_an_open_one_is_not(tmp_path: Path) -> None:
    filled(tmp_path / "file.pt")
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert archive.testzip() == "file/data/0"
    write_checksums(tmp_path / "file.pt")
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert archive.testzip() is None
    assert torch.equal(map_tensors(tmp_path / "file.pt")["model"]["half"], values()["half"])


def test_checksums_tell_what_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    filled(path)
    assert changed_records(path) == []  # without checksums nothing can be said
    write_checksums(path)
    assert changed_records(path) == []
    data = bytearray(path.read_bytes())
    data[tensor_offsets(path)[3]] ^= 1
    path.write_bytes(data)
    assert changed_records(path) == ["file/data/3"]
    (tmp_path / "other.pt").write_bytes(b"of before torch 1.6")
    assert changed_records(tmp_path / "other.pt") == []


def test_parts_of_a_tensor_are_written_by_their_place(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    whole = torch.empty(4, 6, device="meta")
    preallocate(path, {"whole": whole})
    numbers = torch.arange(24.0).view(4, 6)
    fd = os.open(path, os.O_RDWR)
    for rows, columns in (
        (slice(0, 1), slice(0, 6)),
        (slice(1, 4), slice(0, 2)),
        (slice(1, 3), slice(2, 6)),
        (slice(3, 4), slice(2, 6)),
    ):
        write_at(fd, tensor_offsets(path)[0], whole[rows, columns], numbers[rows, columns].double())
    os.close(fd)
    assert torch.equal(load_tensors_and_plain_data(path)["whole"], numbers)


def test_room_takes_neither_memory_nor_time(tmp_path: Path) -> None:
    """A layout of 2 GiB: the file has its space, and nothing of it was in memory."""
    path = tmp_path / "file.pt"
    try:
        preallocate(path, {"large": torch.empty(2**29, device="meta"), "last": torch.empty(1, device="meta")})
    except OSError:
        pytest.skip("no 2 GiB of disk space here")
    assert path.stat().st_blocks * 512 >= 2**31
    assert tensor_offsets(path)[1] > 2**31
    path.unlink()  # pytest keeps the folders of its last runs


def test_a_full_disk_is_an_error_before_anything_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        preallocate(tmp_path / "file.pt", {"tensor": torch.empty(4, device="meta")})
