"""Reader and writer of `torch.save` archives: ZIP files of uncompressed records, of which `data.pkl` describes the
value and `data/<n>` holds the elements of its n-th tensor.

Tensor entries. Each tensor of a `.distcp` file is one archive. Reading it with `torch.load` costs a Python copy, a
fresh allocation and a copy into the destination; here the elements are read straight into the destination. Tensors
that are not stored contiguously in little-endian order are read by `torch.load`. `torch.save` holds the interpreter
lock while it checksums and writes a tensor, and the hash of the file needs a second pass; here each byte is read once,
by zlib and the system, while other threads run.

Preallocated files, which are laid out before their tensors are known and filled afterwards by any process:

    preallocate       writes the archive with space for each tensor
    tensor_offsets    returns the byte offset of each tensor
    write_at          writes a part of a tensor; several processes may write different parts at once
    write_checksums   enters the checksums of the archive, after the last write

No tensor is held in memory except the arguments of `write_at`. Bytes are written by position rather than through mapped
memory: a full disk is then an error instead of a signal, and hosts that share a network file system do not write back
each other's pages.

`torch_internals` lists the other private parts of torch that are used; the canaries of both are in one test.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.files.hashing import FileReader, HashedFile, read_exactly
from megalith.checkpoint.files.safe_loading import RefusedTypeError, RestrictedUnpickler
from megalith.checkpoint.files.torch_internals import rebuild_tensor
from megalith.device import is_host
from megalith.errors import CheckpointError

# Structures of the ZIP format by PKWARE's APPNOTE, sections 4.3.7 (local header), 4.3.9 (descriptor), 4.3.12
# (directory entry) and 4.3.16 (end of directory).
_LOCAL_HEADER = struct.Struct("<26xHH")  # up to the lengths of the name and the extra field
_RECORD = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = struct.Struct("<4sIII")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_ENTRY_CRC = 16  # offset of the checksum in a directory entry
_DIRECTORY_END = struct.Struct("<4sHHHHIIH")
_FLAGS = 0x0808  # sizes and checksum follow the record, in a descriptor; names in UTF-8
_HAS_DESCRIPTOR = 8  # bit of the flags
_DESCRIPTOR_MAGIC = b"PK\7\x08"
_ENTRY_MAGIC = b"PK\1\2"
_ALIGNMENT = 64  # torch's own default, which `.storage_alignment` records
_BLOCK = 2**20
_CHECKSUM_THREADS = 8  # zlib.crc32 and pread release the interpreter lock
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
_STORAGE_OF = {dtype: getattr(torch, name.removeprefix("torch.")) for name, dtype in _STORAGES.items()}
_MAX_HEADER_BYTES = 4096  # longest header that is cached
_MAX_TENSOR_BYTES = 2**32 - 2**16  # bytes of a tensor whose archive needs no ZIP64: sizes and offsets have 32 bits
# Exceptions that parsing a damaged ZIP archive, or the pickle in it, may raise.
_PARSE_ERRORS = (
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
    """Dtype, record, offset, shape and strides of a tensor, from `data.pkl`."""

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
    """Bytes [start, start + length) of an open file, as a file with its own position."""

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


HeaderCache = dict[tuple[int, tuple[int, ...]], tuple[bytes, _Header]]
"""(length, shape) of an entry -> the bytes before its elements, and the parsed header.

Most entries begin with the same bytes as an earlier one, and parsing an archive costs more than reading a small tensor.
"""


def read_tensor_entry(
    file: FileReader,
    start: int,
    length: int,
    shape: tuple[int, ...],
    target: Tensor | None,
    header_cache: HeaderCache | None = None,
) -> Tensor:
    """Read the tensor of a `shape` at [start, start + length) of an open file.

    It is read into `target`, of that shape, if that is a contiguous CPU tensor of the stored dtype, else into a new CPU
    tensor. `header_cache` is shared by calls, and extended.

    Raises:
        ValueError: the entry is not a tensor of this shape.
        EOFError: the file ends within it.
    """
    entry = _FileSlice(file.fd, start, length)
    located = _locate_cached(entry, file, start, (length, shape), {} if header_cache is None else header_cache)
    if located is None:
        tensor = _load_with_torch(entry)
    else:
        header, position = located
        if header.size != shape:
            raise ValueError(f"stored shape is {list(header.size)}, the metadata says {list(shape)}")
        dtype = header.dtype
        direct = target is not None and target.dtype == dtype and target.is_contiguous() and is_host(target.device)
        tensor = target if direct and target is not None else torch.empty(shape, dtype=dtype)
        if position + tensor.nbytes > start + length:
            raise EOFError(f"{tensor.nbytes} bytes at {position} reach past the entry's end at {start + length}")
        if tensor.numel():
            file.read(_byte_view(tensor), position)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"stored shape is {list(tensor.shape)}, the metadata says {list(shape)}")
    return tensor


def _byte_view(tensor: Tensor) -> memoryview:
    """View the bytes of a contiguous CPU tensor, for writing."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _locate_cached(
    entry: _FileSlice, file: FileReader, start: int, key: tuple[int, tuple[int, ...]], header_cache: HeaderCache
) -> tuple[_Header, int] | None:
    """Return what `_locate` returns, from the cache if the entry begins with the bytes of an earlier one."""
    if key in header_cache:
        expected, header = header_cache[key]
        if _read_bytes(file, start, len(expected)) == expected:
            return header, start + len(expected)
    located = _locate(entry, file.fd, start)
    if located is not None and 0 < located[1] - start <= _MAX_HEADER_BYTES:
        header_cache[key] = _read_bytes(file, start, located[1] - start), located[0]
    return located


def _read_bytes(file: FileReader, start: int, length: int) -> bytes:
    head = bytearray(length)
    file.read(memoryview(head), start)
    return bytes(head)


def _locate(entry: _FileSlice, fd: int, start: int) -> tuple[_Header, int] | None:
    """Return header and absolute offset of the elements; None if torch has to load the entry.

    Raises:  ValueError if the entry is damaged.
    """
    try:
        found = _find_record(entry)
        if found is None:
            return None
        header, record = found
        if record.header_offset < 0:
            raise ValueError(f"{record.filename} begins before its archive")
        return header, _data_start(fd, record, start)
    except RefusedTypeError:
        return None
    except _PARSE_ERRORS as error:
        raise ValueError(f"no torch archive ({type(error).__name__}: {error})") from error


def _find_record(entry: _FileSlice) -> tuple[_Header, zipfile.ZipInfo] | None:
    """Return header and record of the elements; None if they are not stored contiguously in little-endian order."""
    with zipfile.ZipFile(io.BufferedReader(entry, 4096)) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
            return None
        header = _HeaderUnpickler(archive.read(records["data.pkl"])).load()
    record = records.get(f"data/{header.record}") if isinstance(header, _Header) else None
    return None if record is None or not _is_stored_contiguous(header, record) else (header, record)


def _is_stored_contiguous(header: _Header, record: zipfile.ZipInfo) -> bool:
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


def _load_with_torch(entry: _FileSlice) -> Tensor:
    entry.seek(0)
    try:
        tensor = torch.load(io.BytesIO(entry.readall()), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive may raise nearly anything
        raise ValueError(str(error).splitlines()[0]) from error
    if not isinstance(tensor, Tensor):
        raise ValueError(f"expected a tensor, found {type(tensor).__name__}")
    return tensor


# --- writing a tensor entry -------------------------------------------------------------------------------------------


def write_tensor_entry(stream: io.BufferedWriter, tensor: Tensor) -> None:
    """Write a CPU tensor without gradient as `torch.save` does, to a stream over a `HashedFile`."""
    if tensor.dtype not in _STORAGE_OF or tensor.nbytes > _MAX_TENSOR_BYTES:
        torch.save(exact_storage(tensor), stream)
        return
    tensor = tensor.contiguous()
    archive = _ArchiveWriter(stream)
    archive.add("data.pkl", _pickle_header(tensor))
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(_ALIGNMENT).encode())
    archive.add("byteorder", b"little")
    archive.add("data/0", _byte_view(tensor) if tensor.numel() else b"")
    archive.add("version", b"3\n")
    archive.finish()


class _ArchiveWriter:
    """Writer of a ZIP file of uncompressed records whose contents begin at multiples of 64 bytes."""

    def __init__(self, stream: io.BufferedWriter) -> None:
        raw = stream.raw
        assert isinstance(raw, HashedFile)
        self._stream, self._raw = stream, raw
        self._size, self._entries = 0, b""
        self._count = 0

    def add(self, name: str, content: bytes | memoryview) -> None:
        path, start = f"archive/{name}".encode("ascii"), self._size
        head = _RECORD.size + len(path)
        filling = -(start + head + 4) % _ALIGNMENT
        # torch pads by an extra field of this id too, so that records can be mapped.
        extra = struct.pack("<2sH", b"FB", filling) + b"Z" * filling
        self._write(_RECORD.pack(b"PK\3\4", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(path), len(extra)) + path + extra)
        if isinstance(content, memoryview):
            self._stream.flush()
            checksum = self._raw.write_summed(content)
            self._size += len(content)
        else:
            checksum = zlib.crc32(content)
            self._write(content)
        sizes = (checksum, len(content), len(content))
        self._write(_DESCRIPTOR.pack(_DESCRIPTOR_MAGIC, *sizes))
        self._entries += (
            _ENTRY.pack(_ENTRY_MAGIC, 0, 0, _FLAGS, 0, 0, 0, *sizes, len(path), 0, 0, 0, 0, 0, start) + path
        )
        self._count += 1

    def finish(self) -> None:
        """Write the directory of the records."""
        start = self._size
        self._write(self._entries)
        self._write(_DIRECTORY_END.pack(b"PK\5\6", 0, 0, self._count, self._count, len(self._entries), start, 0))

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._size += len(data)


class _Pickler(pickle.Pickler):
    """Pickler of a contiguous CPU tensor as torch pickles it, with the elements in record 0."""

    def __init__(self, buffer: io.BytesIO, tensor: Tensor) -> None:
        super().__init__(buffer, protocol=2)  # torch.serialization.DEFAULT_PROTOCOL
        self._storage = (
            object()
        )  # replaces the elements in the pickle, which names their type, record, device and number
        self._id = ("storage", _STORAGE_OF[tensor.dtype], "0", "cpu", tensor.numel())

    def persistent_id(self, value: Any) -> Any:
        return self._id if value is self._storage else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        return rebuild_tensor, (self._storage, 0, tuple(value.shape), value.stride(), False, OrderedDict())


def _pickle_header(tensor: Tensor) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, tensor).dump(tensor)
    return buffer.getvalue()


def exact_storage(tensor: Tensor) -> Tensor:
    """Return the tensor, contiguous, with a storage of exactly its elements: `torch.save` writes the whole storage."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous():
        return tensor
    if not tensor.is_contiguous() or tensor.numel() == 0:
        return tensor.clone(memory_format=torch.contiguous_format)
    array = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)


# --- preallocated files -----------------------------------------------------------------------------------------------


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples, in the order in which torch numbers them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def preallocate(path: Path, value: Any) -> None:
    """Write a new file as `torch.save` does, with space for tensors on the meta device; other tensors are written.

    Its disk space is allocated, and it is synced. The tensors in `value` are different objects.
    """
    nbytes = sum(_aligned_nbytes(tensor) for tensor in tensors_in(value))
    try:
        with _blank_memory(nbytes) as memory, torch.serialization.skip_data():
            torch.save(_with_file_storage(value, memory, [0]), path)
    except RuntimeError as error:  # torch does not say why a write failed: a larger one fails for the same reason
        with path.open("ab") as file:
            _allocate(file.fileno(), 2 * nbytes + 2**20)
        raise OSError(errno.EIO, str(error)) from error
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _allocate(fd, os.fstat(fd).st_size)
        for tensor, start in zip(tensors_in(value), tensor_offsets(path), strict=True):
            if not tensor.is_meta:
                write_at(fd, start, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor)
        os.fsync(fd)
    finally:
        os.close(fd)


def _allocate(fd: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):  # not on macOS
        os.posix_fallocate(fd, 0, size)


@contextmanager
def _blank_memory(nbytes: int) -> Iterator[memoryview]:
    """Map read-only memory that is never touched, so that no physical memory is used or reserved."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with memoryview(memory) as view, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        yield view


def _aligned_nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, rounded up so that the next one is aligned."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _with_file_storage(value: Any, memory: memoryview, at: list[int]) -> Any:
    """Copy the value; meta tensors become views of `memory`, from offset at[0] on, which is advanced."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            return value.detach().cpu().clone(memory_format=torch.contiguous_format)
        if not value.numel():
            return torch.empty(value.shape, dtype=value.dtype)
        start = at[0]
        at[0] += _aligned_nbytes(value)
        return torch.frombuffer(memory, dtype=value.dtype, count=value.numel(), offset=start).view(value.shape)
    if isinstance(value, Mapping):
        made = {key: _with_file_storage(item, memory, at) for key, item in value.items()}
        return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        return type(value)([_with_file_storage(item, memory, at) for item in value])
    return value


def tensor_offsets(path: Path) -> list[int]:
    """Return the byte offset of each tensor of a file, in the order of `tensors_in`."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            numbered = sum(name.startswith("data/") for name in records)
            return [_data_start(file.fileno(), records[f"data/{number}"]) for number in range(numbered)]
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _data_start(fd: int, info: zipfile.ZipInfo, archive: int = 0) -> int:
    """Return the byte offset of the content of a record, in an archive that begins at byte `archive`."""
    # The extra field of the local header may be longer than that of the directory: the padding is in the former.
    local, start = bytearray(_LOCAL_HEADER.size), archive + info.header_offset
    read_exactly(fd, memoryview(local), start)
    return start + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(local))


@torch.no_grad()
def write_at(fd: int, start: int, view: Tensor, values: Tensor) -> None:
    """Write `values`, cast to the dtype of `view`, into the tensor that begins at byte `start` of a file.

    `view` is a view of that tensor on the meta device: its offset and strides select the elements to write.
    """
    assert view.shape == values.shape, f"values {list(values.shape)} for a view {list(view.shape)}"
    if not view.numel():
        return
    array: Any = values.detach().to("cpu", view.dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
    data, size, first = memoryview(array), view.element_size(), int(view.storage_offset())
    outer = _outer_dims(view)
    run_bytes = prod(view.shape[outer:]) * size
    for number, index in enumerate(product(*map(range, view.shape[:outer]))):
        element = first + sum(i * step for i, step in zip(index, view.stride(), strict=False))
        _write_all(fd, data[number * run_bytes : (number + 1) * run_bytes], start + element * size)


def _outer_dims(view: Tensor) -> int:
    """Return the number of leading dimensions that are strided; the elements of the others are contiguous."""
    length, outer = 1, view.ndim
    while outer and (view.shape[outer - 1] == 1 or view.stride(outer - 1) == length):
        length *= view.shape[outer - 1]
        outer -= 1
    return outer


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done


def write_checksums(path: Path) -> None:
    """Write the checksums of the tensors into a filled file and sync it; torch ignores them, ZIP tools do not."""
    with zipfile.ZipFile(path) as archive:
        # `preallocate` wrote blank records, whose checksum is 0.
        open_records = [info for info in archive.infolist() if not info.CRC and info.file_size]
        directory: int = archive.start_dir
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        entries = _directory_entries(fd, directory)
        with ThreadPoolExecutor(_CHECKSUM_THREADS, thread_name_prefix="checksum") as pool:
            list(pool.map(lambda info: _write_checksum(fd, info, entries[info.filename]), open_records))
        os.fsync(fd)
    finally:
        os.close(fd)


def _directory_entries(fd: int, start: int) -> dict[str, int]:
    """Return the offset of each record's entry in the archive's directory, by name."""
    data = os.pread(fd, os.fstat(fd).st_size - start, start)
    found, at = {}, 0
    while data[at : at + 4] == _ENTRY_MAGIC:
        name, extra, comment = _ENTRY.unpack_from(data, at)[10:13]
        first = at + _ENTRY.size
        found[data[first : first + name].decode()] = start + at
        at = first + name + extra + comment
    return found


def _write_checksum(fd: int, info: zipfile.ZipInfo, entry: int) -> None:
    """Compute the checksum of a record and write it into its directory entry and its descriptor."""
    data = _checksum(fd, info).to_bytes(4, "little")
    _write_all(fd, memoryview(data), entry + _ENTRY_CRC)
    descriptor = _data_start(fd, info) + info.file_size
    if info.flag_bits & _HAS_DESCRIPTOR and os.pread(fd, 4, descriptor) == _DESCRIPTOR_MAGIC:
        _write_all(fd, memoryview(data), descriptor + 4)


def _checksum(fd: int, info: zipfile.ZipInfo) -> int:
    """Compute the CRC-32 of the bytes of a record as they are now."""
    start, checksum = _data_start(fd, info), 0
    for at in range(start, start + info.file_size, _BLOCK):
        checksum = zlib.crc32(os.pread(fd, min(_BLOCK, start + info.file_size - at), at), checksum)
    return checksum


def changed_records(path: Path) -> list[str]:
    """List the records of a ZIP archive whose bytes differ from their CRC-32; those without one are skipped."""
    if not zipfile.is_zipfile(path):
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            summed = [info for info in archive.infolist() if info.CRC and info.compress_type == zipfile.ZIP_STORED]
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    try:
        with ThreadPoolExecutor(_CHECKSUM_THREADS, thread_name_prefix="checksum") as pool:
            checksums = pool.map(lambda info: _checksum(fd, info), summed)
            return [info.filename for info, found in zip(summed, checksums, strict=True) if found != info.CRC]
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    finally:
        os.close(fd)
