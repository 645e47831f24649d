"""Reading one tensor of a `.distcp` file straight into memory.

Each tensor stands in the file as a whole `torch.save` archive: a ZIP of uncompressed records, of which `data.pkl`
describes the tensor and `data/0` holds its elements. Going through `torch.load` costs a Python copy, a fresh
allocation and a copy into the destination; here the elements go from the file to the destination in one read.
Whatever is not of the plain form (another byte order, a transposed view) goes through
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.hashing import read_exactly
from megalith.checkpoint.safe_loading import RefusedTypeError, RestrictedUnpickler

_LOCAL_HEADER = struct.Struct("<26xHH")  # ZIP local file header up to the lengths of its name and extra field
_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Float": torch.float32,
        "Double": torch.float64,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}
# What a ZIP archive, a pickle in it and the header that this makes raise when they are not what they claim to be.
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    pickle.UnpicklingError,
    struct.error,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class _Header:
    """What `data.pkl` says of a tensor."""

    dtype: torch.dtype
    record: str
    storage_offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _header(storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any, *_: Any) -> _Header:
    _kind, dtype, record, _location, _numel = storage
    return _Header(dtype, record, offset, tuple(size), tuple(stride))


def _parameter(header: _Header, *_: Any) -> _Header:
    return header


class _HeaderUnpickler(RestrictedUnpickler):
    def __init__(self, data: bytes) -> None:
        allowed: dict[str, Any] = {
            **_STORAGES,
            "torch._utils._rebuild_tensor_v2": _header,
            "torch._utils._rebuild_parameter": _parameter,
            "collections.OrderedDict": OrderedDict,
            "torch.Size": tuple,
        }
        super().__init__(io.BytesIO(data), allowed)

    def persistent_load(self, pid: Any) -> Any:
        return pid


class _FileSlice(io.RawIOBase):
    """Bytes [start, start + length) of an open file, with a position of its own."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        super().__init__()
        self._fd, self._start, self._length, self._at = fd, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        got = os.preadv(self._fd, [view], self._start + self._at) if view else 0
        self._at += got
        return got


def read_tensor_entry(fd: int, start: int, length: int, shape: tuple[int, ...], target: Tensor | None) -> Tensor:
    """Read the tensor that stands at [start, start + length) of an open file.

    Args:
        fd: the file.
        start: first byte of the entry.
        length: bytes of the entry.
        shape: the shape that the tensor must have.
        target: a tensor of that shape to read into if that can be done directly, or None.

    Returns:
        `target` itself if it was filled, else a CPU tensor of shape `shape` and the stored dtype.

    Raises:
        ValueError: the entry is no such tensor. EOFError: the file ends within it.
    """
    entry = _FileSlice(fd, start, length)
    located = _locate(entry, fd, start)
    if located is None:
        tensor = _through_torch(entry)
    else:
        header, position = located
        if header.size != shape:
            raise ValueError(f"stored shape is {list(header.size)}, the metadata says {list(shape)}")
        dtype = header.dtype
        direct = target is not None and target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu"
        tensor = target if direct and target is not None else torch.empty(shape, dtype=dtype)
        if position + tensor.nbytes > start + length:
            raise EOFError(f"{tensor.nbytes} bytes at {position} reach past the entry's end at {start + length}")
        if tensor.numel():
            read_exactly(fd, _memory(tensor), position)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"stored shape is {list(tensor.shape)}, the metadata says {list(shape)}")
    return tensor


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, to be written to."""
    octets: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(octets)


def _locate(entry: _FileSlice, fd: int, start: int) -> tuple[_Header, int] | None:
    """Header, and absolute position of the elements, if these stand in the file as they do in a contiguous tensor.

    Raises:  ValueError: the archive or its header is damaged.
    """
    try:
        found = _find_record(entry)
        if found is None:
            return None
        header, record = found
        if record.header_offset < 0:
            raise ValueError(f"{record.filename} begins before its archive")
        local = bytearray(_LOCAL_HEADER.size)
        read_exactly(fd, memoryview(local), start + record.header_offset)
    except RefusedTypeError:
        return None
    except _UNREADABLE as error:
        raise ValueError(f"no torch archive ({type(error).__name__}: {error})") from error
    name_length, extra_length = _LOCAL_HEADER.unpack(local)
    return header, start + record.header_offset + _LOCAL_HEADER.size + name_length + extra_length


def _find_record(entry: _FileSlice) -> tuple[_Header, zipfile.ZipInfo] | None:
    """Header and record of the elements of a plain entry, else None."""
    with zipfile.ZipFile(io.BufferedReader(entry, 4096)) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
            return None
        header = _HeaderUnpickler(archive.read(records["data.pkl"])).load()
    record = records.get(f"data/{header.record}") if isinstance(header, _Header) else None
    return None if record is None or not _is_plain(header, record) else (header, record)


def _is_plain(header: _Header, record: zipfile.ZipInfo) -> bool:
    contiguous, stride = [], 1
    for extent in reversed(header.size):
        contiguous.append(stride)
        stride *= max(extent, 1)
    laid_out = all(
        extent == 1 or have == want
        for extent, have, want in zip(header.size, header.stride, reversed(contiguous), strict=True)
    )
    stored = record.compress_type == zipfile.ZIP_STORED and header.storage_offset == 0
    return stored and laid_out and record.file_size >= torch.Size(header.size).numel() * header.dtype.itemsize


def _through_torch(entry: _FileSlice) -> Tensor:
    entry.seek(0)
    try:
        tensor = torch.load(io.BytesIO(entry.readall()), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive may raise nearly anything
        raise ValueError(str(error).splitlines()[0]) from error
    if not isinstance(tensor, Tensor):
        raise ValueError(f"expected a tensor, found {type(tensor).__name__}")
    return tensor
