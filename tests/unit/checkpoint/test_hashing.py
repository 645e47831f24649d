"""The block hash: one answer however the bytes arrive, and another for any change."""

from __future__ import annotations

import hashlib
import io
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.checkpoint.files import hashing
from megalith.checkpoint.files.hashing import FileRecord, HashedFile, hash_files, read_exactly

SMALL_BLOCK = 16


def naive(data: bytes) -> FileRecord:
    blocks = [data[start : start + hashing.BLOCK_SIZE] for start in range(0, len(data), hashing.BLOCK_SIZE)]
    checksums = b"".join(zlib.crc32(block).to_bytes(4, "big") for block in blocks)
    return FileRecord(len(data), hashlib.blake2b(checksums, digest_size=16).hexdigest())


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "BLOCK_SIZE", SMALL_BLOCK)
    monkeypatch.setattr(hashing, "_SEGMENT_SIZE", 3 * SMALL_BLOCK)


def write(path: Path, pieces: list[bytes]) -> FileRecord:
    raw = HashedFile(path)
    with io.BufferedWriter(raw, 8) as stream:
        for piece in pieces:
            start = stream.tell()
            assert stream.write(piece) == len(piece)
            assert stream.tell() == start + len(piece)
        stream.flush()
        return raw.record()


@pytest.mark.parametrize("size", [0, 1, SMALL_BLOCK - 1, SMALL_BLOCK, SMALL_BLOCK + 1, 3 * SMALL_BLOCK, 200])
@pytest.mark.parametrize("piece", [1, 7, 16, 64, 1000])
@pytest.mark.usefixtures("small_blocks")
def test_written_and_read_hash_agree_with_the_definition(tmp_path: Path, size: int, piece: int) -> None:
    data = bytes(i * 37 % 256 for i in range(size))
    path = tmp_path / "file"
    record = write(path, [data[start : start + piece] for start in range(0, size, piece)])
    assert path.read_bytes() == data
    assert record == naive(data)
    assert hash_files([path], threads=3) == {"file": record}


def test_real_block_size(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000  # 1.28 MB: more than one block
    assert len(data) > hashing.BLOCK_SIZE
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(b"")
    assert hash_files([tmp_path / "a", tmp_path / "b"]) == {"a": naive(data), "b": naive(b"")}


@given(data=st.binary(min_size=1, max_size=100), position=st.integers(0, 799))
def test_any_flipped_bit_changes_the_digest(data: bytes, position: int) -> None:
    changed = bytearray(data)
    changed[position // 8 % len(data)] ^= 1 << position % 8
    assert naive(bytes(changed)).digest != naive(data).digest


def test_an_error_of_the_disk_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = HashedFile(tmp_path / "file")
    full = OSError(28, "No space left on device")

    def refuse(*_: object) -> int:
        raise full

    monkeypatch.setattr(hashing.os, "write", refuse)
    with pytest.raises(OSError, match="No space"):
        raw.write(b"abc")
    assert raw.failure is full
    raw.abandon()
    assert raw.write(b"abc") == 3
    raw.close()


def test_a_short_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    with (tmp_path / "file").open("rb") as file, pytest.raises(EOFError, match="byte 3"):
        read_exactly(file.fileno(), memoryview(bytearray(4)), 1)


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        HashedFile(tmp_path / "file")
