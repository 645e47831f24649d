"""Canaries for what checkpoints use of torch beyond its public interface; each says what a new version broke."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megalith.checkpoint.files.hashing import HashedFile
from megalith.checkpoint.files.torch_archive import preallocate, tensor_offsets, write_tensor_entry
from megalith.checkpoint.files.torch_internals import MemoryFormatEncoding, StorageInfo, get_layout, rebuild_tensor


def test_the_table_of_contents_of_dcp() -> None:
    info = StorageInfo("__0_0.distcp", 64, 128)
    fields = (info.relative_path, info.offset, info.length)
    assert fields == ("__0_0.distcp", 64, 128), "DCP's _StorageInfo has other fields: files/dcp.py writes them"
    state = torch.distributed.checkpoint.metadata.TensorProperties().__getstate__()  # type: ignore[no-untyped-call]
    assert MemoryFormatEncoding.TORCH_CONTIGUOUS_FORMAT in state, "TensorProperties pickles another memory format"
    assert get_layout(str(torch.strided)) is torch.strided, "torch.serialization._get_layout has changed"
    assert hasattr(FileSystemWriter, "storage_meta"), "DCP's writer names the checkpoint in another way"


def test_how_torch_pickles_a_tensor() -> None:
    function, arguments, *_ = torch.ones(2).__reduce_ex__(2)
    assert function is rebuild_tensor and len(arguments) == 6, "torch pickles tensors in another way: torch_archive.py"


def test_the_records_of_a_torch_archive(tmp_path: Path) -> None:
    theirs, tensor = io.BytesIO(), torch.arange(6, dtype=torch.float32).view(2, 3)
    torch.save(tensor, theirs)
    with io.BufferedWriter(HashedFile(tmp_path / "ours"), 2**16) as stream:
        write_tensor_entry(stream, tensor)
    held = []
    for file in (theirs, tmp_path / "ours"):
        with zipfile.ZipFile(file) as archive:
            held.append({info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()})
    held[0].pop(".data/serialization_id", None)  # an identity for torch's own statistics
    assert held[0] == held[1], "torch.save writes other records: torch_archive.py"


def test_an_archive_with_room_for_tensors(tmp_path: Path) -> None:
    preallocate(tmp_path / "file", {"a": torch.empty(3, device="meta"), "b": torch.ones(2)})
    first, second = tensor_offsets(tmp_path / "file")
    assert second > first, "torch.serialization.skip_data leaves no room for tensors: torch_archive.py"
    assert torch.equal(torch.load(tmp_path / "file", weights_only=True)["b"], torch.ones(2))
