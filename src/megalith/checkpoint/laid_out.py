"""Files of `torch.save` that are laid out before their tensors are known, and filled afterwards from anywhere.

    lay_out     writes the archive with room for each tensor
    find        says where the room of each tensor is
    write       puts a part of a tensor there; several processes may write different parts at once
    seal        completes the checksums of the archive, when all is written

Nothing of the size of a tensor is in memory at any time, but what `write` is given. Written is by position rather than
through mapped memory: a full disk is then an error instead of a signal, and hosts that share a network file system do
not write back each other's pages.
"""

from __future__ import annotations

import mmap
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.errors import CheckpointError

_BLOCK = 2**20
_SEALING_THREADS = 8
_LOCAL_HEADER = struct.Struct("<26xHH")  # up to the lengths of the name and the extra field
_ENTRY = struct.Struct("<4s12xLLLHHH12x")  # signature, CRC, sizes, lengths of name, extra field and comment
_ENTRY_CRC = 16
_DESCRIPTOR = b"PK\x07\x08"
_HAS_DESCRIPTOR = 8  # bit of the flags


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested dicts, lists and tuples, in the order in which torch numbers them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def lay_out(path: Path, value: Any) -> None:
    """Write a new file as `torch.save` does, with room for the tensors on the meta device and with the others whole.

    It has its disk space afterwards, and is durable.

    Args:
        path: the file.
        value: nested dicts, lists and tuples; the tensors in it are different objects.

    Raises:
        OSError: the disk is full or refuses.
    """
    with _blank_memory(sum(_room(tensor) for tensor in tensors_in(value))) as memory, torch.serialization.skip_data():
        torch.save(_with_storage(value, memory, [0]), path)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(fd, 0, os.fstat(fd).st_size)
        for tensor, start in zip(tensors_in(value), find(path), strict=True):
            if not tensor.is_meta:
                write(fd, start, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor)
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _blank_memory(nbytes: int) -> Iterator[memoryview]:
    """Memory that is never touched, so that none is taken; not to be written to, so that none is promised either."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with memoryview(memory) as view, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        yield view


def _room(tensor: Tensor) -> int:
    """Bytes of a tensor, so that the next one is aligned."""
    return -(-tensor.numel() * tensor.element_size() // 64) * 64


def _with_storage(value: Any, memory: memoryview, at: list[int]) -> Any:
    """The value with a storage of its own for each tensor."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            return value.detach().cpu().clone(memory_format=torch.contiguous_format)
        if not value.numel():
            return torch.empty(value.shape, dtype=value.dtype)
        start = at[0]
        at[0] += _room(value)
        return torch.frombuffer(memory, dtype=value.dtype, count=value.numel(), offset=start).view(value.shape)
    if isinstance(value, Mapping):
        made = {key: _with_storage(item, memory, at) for key, item in value.items()}
        return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        return type(value)([_with_storage(item, memory, at) for item in value])
    return value


def find(path: Path) -> list[int]:
    """The byte at which each tensor of a file begins, in the order of `tensors_in`.

    Raises:
        CheckpointError: it is no archive of torch.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            numbered = sum(name.startswith("data/") for name in records)
            return [_data_start(file.fileno(), records[f"data/{number}"]) for number in range(numbered)]
    except (zipfile.BadZipFile, KeyError, struct.error) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _data_start(fd: int, info: zipfile.ZipInfo) -> int:
    header = os.pread(fd, _LOCAL_HEADER.size, info.header_offset)
    return info.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))


@torch.no_grad()
def write(fd: int, start: int, place: Tensor, values: Tensor) -> None:
    """Write values into a file.

    Args:
        fd: the file.
        start: where the tensor begins of which `place` is a view.
        place: on the meta device; its offset and strides say which elements of the tensor are meant.
        values: of the shape of `place`; cast to its dtype.

    Raises:
        OSError: the disk is full or refuses.
    """
    assert place.shape == values.shape, f"{list(values.shape)} does not go to {list(place.shape)}"
    if not place.numel():
        return
    octets: Any = values.detach().to("cpu", place.dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
    data, size, first = memoryview(octets), place.element_size(), int(place.storage_offset())
    outer = _outer_dims(place)
    run = prod(place.shape[outer:]) * size
    for number, index in enumerate(product(*map(range, place.shape[:outer]))):
        element = first + sum(i * step for i, step in zip(index, place.stride(), strict=False))
        _write_all(fd, data[number * run : (number + 1) * run], start + element * size)


def _outer_dims(place: Tensor) -> int:
    """How many leading dimensions are strided; the elements of the others follow each other."""
    length, outer = 1, place.ndim
    while outer and (place.shape[outer - 1] == 1 or place.stride(outer - 1) == length):
        length *= place.shape[outer - 1]
        outer -= 1
    return outer


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done


def seal(path: Path) -> None:
    """Enter the checksums of the tensors into a file that is filled, durably; torch does not look at them, others do.

    Raises:
        OSError: the disk refuses.
    """
    with zipfile.ZipFile(path) as archive:
        open_records = [info for info in archive.infolist() if not info.CRC and info.file_size]
        directory: int = archive.start_dir
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        entries = _directory_entries(fd, directory)
        with ThreadPoolExecutor(_SEALING_THREADS, thread_name_prefix="seal") as pool:
            list(pool.map(lambda info: _enter(fd, info, entries[info.filename]), open_records))
        os.fsync(fd)
    finally:
        os.close(fd)


def _directory_entries(fd: int, start: int) -> dict[str, int]:
    """Name of a record -> where its entry in the archive's directory begins."""
    data = os.pread(fd, os.fstat(fd).st_size - start, start)
    found, at = {}, 0
    while data[at : at + 4] == b"PK\x01\x02":
        *_, name, extra, comment = _ENTRY.unpack_from(data, at)
        first = at + _ENTRY.size
        found[data[first : first + name].decode()] = start + at
        at = first + name + extra + comment
    return found


def _enter(fd: int, info: zipfile.ZipInfo, entry: int) -> None:
    """Compute the checksum of a record and enter it in the directory and behind the record."""
    data = _checksum(fd, info).to_bytes(4, "little")
    _write_all(fd, memoryview(data), entry + _ENTRY_CRC)
    behind = _data_start(fd, info) + info.file_size
    if info.flag_bits & _HAS_DESCRIPTOR and os.pread(fd, 4, behind) == _DESCRIPTOR:
        _write_all(fd, memoryview(data), behind + 4)


def _checksum(fd: int, info: zipfile.ZipInfo) -> int:
    """The CRC-32 of the bytes of a record as they are now."""
    start, checksum = _data_start(fd, info), 0
    for at in range(start, start + info.file_size, _BLOCK):
        checksum = zlib.crc32(os.pread(fd, min(_BLOCK, start + info.file_size - at), at), checksum)
    return checksum


def changed_records(path: Path) -> list[str]:
    """The records of an archive whose bytes are not those of their checksums; none of a file that is no archive.

    Records without a checksum, as torch writes them on request, are passed over.

    Raises:
        CheckpointError: the archive is damaged.
    """
    if not zipfile.is_zipfile(path):
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            summed = [info for info in archive.infolist() if info.CRC and info.compress_type == zipfile.ZIP_STORED]
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    try:
        with ThreadPoolExecutor(_SEALING_THREADS, thread_name_prefix="checksum") as pool:
            checksums = pool.map(lambda info: _checksum(fd, info), summed)
            return [info.filename for info, found in zip(summed, checksums, strict=True) if found != info.CRC]
    except (OSError, struct.error) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    finally:
        os.close(fd)
