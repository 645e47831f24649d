"""`manifest.json`: the size and hash of every file of a checkpoint, and what the run was.

It is written last, so that a folder with a manifest is complete; Megatron ignores it. The bytes of the file are a
function of its content, and it carries a hash of itself, so that a change of any byte is seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import megalith
from megalith.checkpoint.files.hashing import HASH_NAME, FileRecord, hash_files, require_file
from megalith.errors import CheckpointError, NewerFormatError
from megalith.progress import task

MANIFEST_FILE = "manifest.json"
_FORMAT = 1
_RESERVED = ("format", "hash", "files", "manifest_hash")


def render(records: Mapping[str, FileRecord], manifest_fields: Mapping[str, Any]) -> bytes:
    """Serialise a manifest; `manifest_fields` are anything that JSON can hold, `records` those of every other file."""
    taken = [key for key in _RESERVED if key in manifest_fields]
    assert not taken, f"the manifest keys {taken} are set here"
    files = {name: {"size": records[name].size, "digest": records[name].digest} for name in sorted(records)}
    return _with_own_hash({"format": _FORMAT, "hash": HASH_NAME, "files": files, **manifest_fields})


def _with_own_hash(body: dict[str, Any]) -> bytes:
    digest = hashlib.blake2b(_text(body), digest_size=16).hexdigest()
    return _text({**body, "manifest_hash": digest})


def _text(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1) + "\n").encode("ascii")


def read(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a folder, None where there is none; a NewerFormatError if a later version wrote it."""
    data = _bytes(folder)
    if data is None:
        return None
    body, intact = _parsed(data)
    _check_format(folder, data)
    if not intact:
        raise CheckpointError(f"{folder / MANIFEST_FILE} is damaged")
    return body


def refuse_newer(folder: Path) -> None:
    """Raise a NewerFormatError for a folder that a later version wrote; any other passes, damaged or missing."""
    try:
        data = _bytes(folder)
    except CheckpointError:
        return
    if data is not None:
        _check_format(folder, data)


def _bytes(folder: Path) -> bytes | None:
    """Read the bytes of a manifest; None where there is none."""
    path = folder / MANIFEST_FILE
    try:
        require_file(path)
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _parsed(data: bytes) -> tuple[dict[str, Any], bool]:
    """Return the content without the manifest's own hash, empty if it is no JSON object, and if the hash agrees."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return {}, False
    if not isinstance(body, dict):
        return {}, False
    hashed = body.pop("manifest_hash", None) is not None
    return body, hashed and _is_intact(data)


@lru_cache(maxsize=4)  # a load reads a manifest some 25 times, and rendering takes 30 times as long as parsing
def _is_intact(data: bytes) -> bool:
    body = json.loads(data)
    del body["manifest_hash"]
    return _with_own_hash(body) == data


def _check_format(folder: Path, data: bytes) -> None:
    """Refuse a later format. This version need not understand the hash that such a manifest carries of itself."""
    body, intact = _parsed(data)
    found, method = body.get("format"), body.get("hash", "unknown")
    if isinstance(found, int) and found > _FORMAT and not intact:
        newer = not _parsed(data.replace(b'"format": %d' % found, b'"format": %d' % _FORMAT, 1))[1]
    else:
        newer = intact and (found, method) != (_FORMAT, HASH_NAME)
    if newer:
        writer = body.get("megalith_version", "unknown")
        raise NewerFormatError(
            f"{folder} has checkpoint format {found} with hash {method}, written by Megalith {writer}; this version "
            f"({megalith.__version__}) reads format {_FORMAT} with {HASH_NAME} and leaves the folder as it is: use the "
            "version that wrote it, or a later one"
        )


def records_of(body: Mapping[str, Any]) -> dict[str, FileRecord]:
    """Return file name -> expected size and digest."""
    return {name: FileRecord(entry["size"], entry["digest"]) for name, entry in body["files"].items()}


def missing(folder: Path, body: Mapping[str, Any]) -> list[str]:
    """List the files of a manifest that are missing or have another size."""
    return _by_size(folder, records_of(body))[0]


def _by_size(folder: Path, expected: Mapping[str, FileRecord]) -> tuple[list[str], list[Path]]:
    """List the files that are missing or have another size, and return the others; nothing is read."""
    problems, sound = [], []
    for name, record in expected.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif (size := path.stat().st_size) != record.size:
            problems.append(f"{path} has {size} bytes instead of {record.size}")
        else:
            sound.append(path)
    return problems, sound


def compare(folder: Path, expected: Mapping[str, FileRecord]) -> list[str]:
    """Hash the files of a folder and list what differs from the manifest; sizes first, since they cost nothing."""
    problems, sound = _by_size(folder, expected)
    size = sum(expected[str(path.relative_to(folder))].size for path in sound)
    try:
        with task("verifying the checkpoint", size, "B", counts="bytes hashed"):
            found = hash_files(sound, below=folder)
    except (OSError, EOFError) as error:
        return [*problems, f"{folder} cannot be read: {error}"]
    changed = [folder / name for name, record in found.items() if record.digest != expected[name].digest]
    return problems + [f"{path} has changed since it was saved: its hash differs" for path in changed]
