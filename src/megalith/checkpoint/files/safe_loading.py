"""Readers of the pickles in checkpoints that run no code from them.

Two readers: a restricted unpickler for DCP's `.metadata`, and `torch.load(weights_only=True)` with a few more types
for `common.pt` and the stored objects. Both refuse every type that is not listed here, and say which. Types of
Megatron that cannot be imported here are replaced by stand-ins that hold data and do nothing.

Deliberately absent: a way to switch the restriction off.
"""

from __future__ import annotations

import argparse
import io
import pathlib
import pickle
import pickletools
import re
import signal
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata, planner

from megalith.checkpoint.files.hashing import require_file
from megalith.checkpoint.files.torch_internals import MemoryFormatEncoding, StorageInfo, get_layout
from megalith.errors import CheckpointError


class ForeignEnum:
    """Stand-in for a member of an enumeration of Megatron: its qualified type name and its value."""

    type_name = "?"

    def __init__(self, value: object = None) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"{self.type_name}({self.value!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ForeignEnum) and (self.type_name, self.value) == (other.type_name, other.value)

    def __hash__(self) -> int:
        return hash((self.type_name, repr(self.value)))


class ForeignModelType(ForeignEnum):
    type_name = "ModelType"


class ForeignAttnBackend(ForeignEnum):
    type_name = "AttnBackend"


class ForeignSavePlan(planner.SavePlan):
    """Stand-in for Megatron 0.12's MCoreSavePlan, which adds one attribute."""


class ForeignMetadata(metadata.Metadata):
    """Stand-in for Megatron 0.12's MCoreMetadata, which adds one attribute."""


_MEGATRON_TYPES: dict[str, type] = {
    "megatron.core.enums.ModelType": ForeignModelType,
    "megatron.model.enums.ModelType": ForeignModelType,
    "megatron.core.transformer.enums.AttnBackend": ForeignAttnBackend,
}
_MEGATRON_PLANS: dict[str, type] = {
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan": ForeignSavePlan,
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": ForeignMetadata,
}


def _named(*objects: Any) -> dict[str, Any]:
    return {f"{item.__module__}.{item.__qualname__}": item for item in objects}


def _numpy_types() -> dict[str, Any]:
    """Return the types that a pickled numpy array names, under the module names of numpy 1 and 2."""
    reconstruct = np.zeros(0).__reduce__()[0]
    found: dict[str, Any] = {
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": np.dtype,
        "numpy._core.multiarray._reconstruct": reconstruct,
        "numpy.core.multiarray._reconstruct": reconstruct,
    }
    for code in "?bBhHiIlLqQefd":
        kind = type(np.dtype(code))
        found[f"{kind.__module__}.{kind.__qualname__}"] = kind
    return found


COMMON_TYPES: dict[str, Any] = {
    **_named(argparse.Namespace, signal.Signals, io.BytesIO),  # the last: the state of TransformerEngine's FP8
    **_MEGATRON_TYPES,
    **_numpy_types(),
}
"""What `common.pt` and the stored objects may name beyond torch's own list for `weights_only=True`."""

METADATA_TYPES: dict[str, Any] = {
    **_named(
        StorageInfo,
        MemoryFormatEncoding,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        planner.SavePlan,
        planner.TensorWriteData,
        planner.WriteItem,
        planner.WriteItemType,
        OrderedDict,
        pathlib.PosixPath,
    ),
    **_MEGATRON_PLANS,
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": get_layout,
    "pathlib.PosixPath": pathlib.PosixPath,
    "pathlib._local.PosixPath": pathlib.PosixPath,
}
"""What `.metadata` may name; the dtypes of torch come on top."""


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickler of plain data and the listed types; refuses the rest by name."""

    def __init__(self, file: IO[bytes], allowed: dict[str, Any]) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in self._allowed:
            return self._allowed[full]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise RefusedTypeError(full)


class RefusedTypeError(pickle.UnpicklingError):
    """Raised for a type in a pickle that is not on the list."""

    def __init__(self, full_name: str) -> None:
        super().__init__(full_name)
        self.full_name = full_name


def read_metadata(path: Path) -> metadata.Metadata:
    """Read DCP's `.metadata`."""

    def load(file: IO[bytes]) -> Any:
        _check_memo(file)
        return RestrictedUnpickler(file, METADATA_TYPES).load()

    found = _guarded(path, load)
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{path} is damaged: it holds no checkpoint metadata")
    return found


def load_tensors_and_plain_data(path: Path) -> Any:
    """Read a file that `torch.save` wrote, such as `common.pt`, with `weights_only=True`."""
    return _guarded(path, _weights_only)


def map_tensors(path: Path) -> Any:
    """Load as `load_tensors_and_plain_data` with mapped tensors; files from before torch 1.6 are read whole."""

    def load(file: IO[bytes]) -> Any:
        is_archive = file.read(len(_ARCHIVE)) == _ARCHIVE
        file.seek(0)
        return _weights_only(path) if is_archive else _weights_only(file)

    return _guarded(path, load)


def load_bytes(value: IO[bytes], source: str) -> Any:
    """Read what `torch.save` wrote from an open stream; `source` names it in errors."""
    try:
        return _weights_only(value)
    except Exception as error:
        raise _translated(error, source) from error


def dump_bytes(value: object, name: str) -> bytes:
    """Serialise a value with `torch.save`; a CheckpointError if `load_bytes` would refuse it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    try:
        _weights_only(io.BytesIO(stream.getvalue()))
    except Exception as error:
        refused = _refused_name(str(error)) or str(error)
        raise CheckpointError(
            f"{name} cannot be saved: it holds a {refused}, which a load would refuse; save plain values, tensors "
            "and numpy arrays"
        ) from error
    return stream.getvalue()


def _check_memo(file: IO[bytes]) -> None:
    """Refuse a pickle with a memo larger than itself: the C unpickler makes an array up to the largest index."""
    data = file.read()
    file.seek(0)
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise pickle.UnpicklingError(f"memo index {argument} in a pickle of {len(data)} bytes")


def _check_archive(file: IO[bytes] | Path) -> None:
    """Refuse an archive that unpacks to much more than its own size; torch compresses nothing."""
    if isinstance(file, Path):
        size = file.stat().st_size
    else:
        place = file.tell()
        size = file.seek(0, io.SEEK_END) - place
        file.seek(place)
        if file.read(len(_ARCHIVE)) != _ARCHIVE:
            file.seek(place)
            return
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return  # torch reports the error
    finally:
        if not isinstance(file, Path):
            file.seek(place)
    if unpacked > size + _UNPACKED_MORE:
        raise zipfile.BadZipFile(
            f"an archive of {size:,} bytes that would unpack to {unpacked:,}; torch writes none of that kind"
        )


_UNPACKED_MORE = 2**24
_ARCHIVE = b"PK\x03\x04"  # how a ZIP begins


def _weights_only(file: IO[bytes] | Path) -> Any:
    """Load the value in a file with `weights_only=True`; tensors are mapped if the file is given by its path."""
    _check_archive(file)
    listed: list[Any] = [(item, name) for name, item in COMMON_TYPES.items()]
    with torch.serialization.safe_globals(listed):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, Path))


def _guarded(path: Path, load: Callable[[IO[bytes]], Any]) -> Any:
    try:
        require_file(path)
        with path.open("rb") as file:
            return load(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except Exception as error:  # a damaged pickle may raise nearly anything
        if (cut := _cut(path)) is not None:
            raise CheckpointError(f"{path} is damaged: {cut}") from error
        raise _translated(error, str(path)) from error


def _cut(path: Path) -> str | None:
    """Describe a truncated file, or return None: torch's archives have their directory at the end."""
    try:
        require_file(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            is_archive = file.read(len(_ARCHIVE)) == _ARCHIVE
    except OSError:
        return None
    if size == 0:
        return "it is empty; its copy or its save did not end"
    if is_archive and not zipfile.is_zipfile(path):
        return (
            f"it is cut off after {size:,} bytes, before the directory of its archive; its copy or its save did not end"
        )
    return None


# The wordings of torch 2.10 to 2.13; a message that none of them matches is reported as damage, never let through.
_REFUSED_BY_TORCH = re.compile(
    r"(?:unsupported global(?:: GLOBAL)?|unrecognized function|allowlisted via `add_safe_globals` but got) (\S+|<.+?>)",
    re.IGNORECASE,
)


def _translated(error: Exception, source: str) -> CheckpointError:
    refused = error.full_name if isinstance(error, RefusedTypeError) else _refused_name(str(error))
    if refused is not None:
        return CheckpointError(
            f"{source} names the type {refused}, which a checkpoint has no need of: refused, because loading it "
            "could run code; if the file comes from a source that you trust, save it again with plain values only"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return CheckpointError(f"{source} cannot be read: {error.strerror}")
    reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    return CheckpointError(f"{source} is damaged: {reason}")


def _refused_name(message: str) -> str | None:
    match = _REFUSED_BY_TORCH.search(message)
    return match[1] if match else None
