"""What is read in one pass is what is in the file, and the hash is that of the whole file, whatever is asked for."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.checkpoint.files import hashing
from megalith.checkpoint.files.hashing import FileRecord, HashingFileReader, HashingReader, hash_files
from megalith.errors import DamagedCheckpointError
from megalith.train.checkpoint_fit import find_checkpoint

MakeContent = Callable[..., CheckpointContent]
Same = Callable[[CheckpointContent, CheckpointContent], bool]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("BLOCK_SIZE", 64), ("_PIECE", 100)):
        monkeypatch.setattr(hashing, name, size)


def record_of(path: Path) -> FileRecord:
    return hash_files([path])[path.name]


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
@pytest.mark.usefixtures("small_blocks")
def test_any_parts_of_a_file_and_its_hash(tmp_path: Path, size: int) -> None:
    """Ascending, overlapping and backwards, as readers of several boxes of one entry ask."""
    draw, path = random.Random(size), tmp_path / "file"
    data = draw.randbytes(size)
    path.write_bytes(data)
    for _ in range(20):
        with path.open("rb") as file:
            reading = HashingFileReader(file.fileno(), size)
            for _ in range(draw.randrange(6)):
                start = draw.randrange(size + 1)
                view = bytearray(draw.randrange(size - start + 1))
                reading.read(memoryview(view), start)
                assert view == data[start : start + len(view)]
            assert reading.record() == record_of(path)
            reading.close()


def test_every_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is the point of it."""
    path, taken = tmp_path / "file", []
    path.write_bytes(bytes(3_000_000))
    preadv = os.preadv
    monkeypatch.setattr(hashing.os, "preadv", lambda *args: taken.append(preadv(*args)) or taken[-1])
    through = HashingReader(tmp_path, {"file": FileRecord(3_000_000, "")})
    with path.open("rb") as file, through.reading("file", file.fileno()) as reading:
        for start in (100, 1_000_000, 2_500_000):
            reading.read(memoryview(bytearray(400_000)), start)
    assert len(through.problems()) == 1
    assert sum(taken) == 3_000_000


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(50))
    with (tmp_path / "file").open("rb") as file, pytest.raises(EOFError, match="byte 50"):
        reading = HashingFileReader(file.fileno(), 60)
        with closing(reading):
            reading.record()


def test_files_that_nothing_is_read_from_are_hashed_too(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    expected = {name: record_of(tmp_path / name) for name in ("a", "b")}
    assert HashingReader(tmp_path, expected).problems() == []
    (tmp_path / "b").write_bytes(b"c" * 100)
    through = HashingReader(tmp_path, expected)
    with (tmp_path / "a").open("rb") as file, through.reading("a", file.fileno()) as reading:
        reading.read(memoryview(bytearray(10)), 20)
    (problem,) = through.problems()
    assert problem.startswith(f"{tmp_path / 'b'} ")


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 0.999])
@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_1.distcp"])
def test_a_load_finds_the_flipped_bit_that_a_search_has_left_to_it(
    tmp_path: Path, make_content: MakeContent, same_tensors: Same, name: str, share: float
) -> None:
    """Also where the load asks for a part of the file only."""
    store = DirectoryStore(tmp_path)
    for iteration in (10, 20):
        store.save(iteration, make_content(iteration), {})
    path = store.folder(20) / name
    data = bytearray(path.read_bytes())
    data[int(share * len(data))] ^= 4
    path.write_bytes(data)
    store = DirectoryStore(tmp_path)
    assert store.newest_verified(deferred=True) == (20, [])
    whole = make_content(0)
    for content in (whole, CheckpointContent(whole.chunks[:1])):
        with pytest.raises(DamagedCheckpointError, match=f"iter_0000020.*\n.*{name}"):
            store.load(20, content)
    found = find_checkpoint(store, thorough=True)
    assert found is not None and found.iteration == 10 and name in found.notes[0]
    target = make_content(0)
    store.load(10, target)
    assert same_tensors(target, make_content(10))


def test_what_was_hashed_by_a_load_is_not_hashed_again(
    tmp_path: Path, make_content: MakeContent, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    store.save(10, make_content(10), {})
    store.load(10, make_content(0))
    monkeypatch.setattr("megalith.checkpoint.files.manifest.hash_files", None)
    monkeypatch.setattr("megalith.checkpoint.files.folder.HashingReader", None)
    assert store.verify(10) == []
    store.load(10, make_content(0))
