"""Tensors are written as `torch.save` writes them, without it; sums over them are right."""

from __future__ import annotations

import io
import random
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from megalith.checkpoint.files import torch_archive
from megalith.checkpoint.files.hashing import FileReader, HashedFile, crc32_combine, hash_files
from megalith.checkpoint.files.torch_archive import read_tensor_entry, write_tensor_entry

TENSORS = {
    "matrix": torch.randn(3, 5),
    "scalar": torch.tensor(4),
    "empty": torch.zeros(0, 4),
    "over two blocks": torch.randn(1500, 999).bfloat16(),
    "transposed": torch.randn(4, 6).t(),
    "part": torch.randn(200, 90)[:, :3],
    "flags": torch.ones(3, dtype=torch.bool),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "float8": torch.ones(2, dtype=torch.float8_e4m3fn),
}


def test_sums_of_parts_join() -> None:
    draw = random.Random(0)
    for _ in range(50):
        first, second = draw.randbytes(draw.randrange(300)), draw.randbytes(draw.randrange(70_000))
        assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def written(path: Path, tensors: list[torch.Tensor]) -> list[bytes]:
    """The entries of a file that these tensors are written to, one behind the other."""
    raw, ends = HashedFile(path), [0]
    with io.BufferedWriter(raw) as stream:
        for tensor in tensors:
            write_tensor_entry(stream, tensor)
            ends.append(stream.tell())
        stream.flush()
        assert raw.record() == hash_files([path])[path.name]
    data = path.read_bytes()
    assert len(data) == ends[-1]
    return [data[start:end] for start, end in zip(ends, ends[1:], strict=False)]


def record(archive: bytes, name: str) -> bytes:
    return zipfile.ZipFile(io.BytesIO(archive)).read(f"archive/{name}")


def test_entries_are_what_torch_writes(tmp_path: Path) -> None:
    entries = written(tmp_path / "file", list(TENSORS.values()))
    for (name, tensor), entry in zip(TENSORS.items(), entries, strict=True):
        assert zipfile.ZipFile(io.BytesIO(entry)).testzip() is None, name
        loaded = torch.load(io.BytesIO(entry), weights_only=True)
        assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape, name
        assert torch.equal(loaded.float(), tensor.float()), name
        theirs = io.BytesIO()
        torch.save(tensor.contiguous().clone(), theirs)
        for part in ("data.pkl", "byteorder", "version", "data/0"):
            assert record(entry, part) == record(theirs.getvalue(), part), (name, part)


def test_entries_are_read_back_from_the_middle_of_a_file(tmp_path: Path) -> None:
    entries = written(tmp_path / "file", list(TENSORS.values()))
    start = 0
    with (tmp_path / "file").open("rb") as file:
        for (name, tensor), entry in zip(TENSORS.items(), entries, strict=True):
            found = read_tensor_entry(FileReader(file.fileno()), start, len(entry), tuple(tensor.shape), None)
            assert torch.equal(found.float(), tensor.float()), name
            start += len(entry)


def test_entries_that_begin_alike_are_taken_apart_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.full((4, 2), float(number)) for number in range(5)]
    tensors.append(torch.full((4, 2), 5, dtype=torch.int32))  # of the same length and shape
    entries = written(tmp_path / "file", tensors)
    taken_apart, locate = [], torch_archive._locate
    monkeypatch.setattr(torch_archive, "_locate", lambda *args: taken_apart.append(1) or locate(*args))
    heads: torch_archive.Heads = {}
    start = 0
    with (tmp_path / "file").open("rb") as file:
        for tensor, entry in zip(tensors, entries, strict=True):
            found = read_tensor_entry(FileReader(file.fileno()), start, len(entry), (4, 2), None, heads)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor)
            start += len(entry)
    assert len(taken_apart) == 2


def test_a_tensor_too_large_for_a_plain_archive_goes_through_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_archive, "_MAX_TENSOR_BYTES", 100)
    tensor = torch.randn(64)[8:]
    (entry,) = written(tmp_path / "file", [tensor])
    assert torch.equal(torch.load(io.BytesIO(entry), weights_only=True), tensor)
    assert len(entry) < 2048, "the whole storage was written"
