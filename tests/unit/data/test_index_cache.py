"""The index cache: flipped bits, files of other documents, several builders at once, and a builder that was killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalith import progress
from megalith.data import index_cache
from megalith.data.blend import BlendedDataset
from megalith.data.gpt_dataset import GPTDataset, GPTDatasetOptions
from megalith.data.index_cache import Arrays, IndexCache, IndexSpec, load_or_build
from megalith.data.indexed import IndexedDataset, IndexedWriter
from megalith.data.masked.dataset import MaskedDataset, MaskedOptions, Masking
from megalith.data.masked.t5 import T5DatasetFactory
from megalith.data.samples import SplitRatios, SplitSpec
from megalith.tokenizers.null import NullTokenizer

NAMES = ("first", "second")


def arrays() -> Arrays:
    return {"first": np.arange(2000), "second": np.arange(3000) * 2}


def whole(found: Arrays) -> bool:
    return all(np.array_equal(found[name], array) for name, array in arrays().items())


def counted(folder: Path, seconds: float) -> Arrays:
    """Leaves a mark for each build, and takes its time."""
    (folder / f"mark {os.getpid()}").touch()
    time.sleep(seconds)
    return arrays()


def get(folder: Path, build: Callable[[], Arrays]) -> Arrays:
    return load_or_build(folder / "cache", recipe(build)).arrays


def recipe(build: Callable[[], Arrays] = arrays, source: str = "") -> IndexSpec:
    return IndexSpec("Kind-train", "what it is", NAMES, build, lambda: source)


def _builder(folder: Path, ready: Any, go: Any) -> None:
    ready.release()
    go.wait()
    found = get(folder, partial(counted, folder, 0.3))
    os._exit(0 if whole(found) else 1)


def _slow_builder(folder: Path, ready: Any) -> None:
    def build() -> Arrays:
        found = arrays()
        (folder / "cache" / ".left-over").touch()
        ready.release()
        time.sleep(60)
        return found

    get(folder, build)


def test_of_several_processes_one_builds(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")  # nothing of torch is here
    ready, go = fork.Semaphore(0), fork.Event()
    builders = [fork.Process(target=_builder, args=(tmp_path, ready, go)) for _ in range(4)]
    for builder in builders:
        builder.start()
    for _ in builders:
        ready.acquire()
    go.set()
    for builder in builders:
        builder.join(60)
    assert [builder.exitcode for builder in builders] == [0] * 4
    assert len(list(tmp_path.glob("mark *"))) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 4, "no lock and no temporary file is left"


def test_a_killed_builder_holds_no_one_up(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ready = fork.Semaphore(0)
    builder = fork.Process(target=_slow_builder, args=(tmp_path, ready))
    builder.start()
    ready.acquire()
    builder.kill()
    builder.join()
    assert whole(get(tmp_path, arrays))
    names = {path.suffix for path in (tmp_path / "cache").iterdir()}
    assert names == {".npy", ".txt", ".json", ""}, "the lock of the killed one was taken over and removed"


def test_what_a_killed_builder_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path / "cache", "Kind-train", "what it is")
    cache.stem.parent.mkdir()
    old, new, other = (
        cache.stem.with_name(f".{name}.partial")
        for name in (f"{cache.stem.name}-first.npy.0", f"{cache.stem.name}-first.npy.1", "other-first.npy.2")
    )
    for path in (old, new, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (0, 0))
    get(tmp_path, arrays)
    assert [path.exists() for path in (old, new, other)] == [False, True, True]


def test_without_locks_all_build_and_the_entry_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("no locks on this file system")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert whole(get(tmp_path, arrays))
    cache = IndexCache(tmp_path / "cache", "Kind-train", "what it is")
    loaded = cache.load(recipe())
    assert loaded is not None and whole(loaded)
    assert len(list((tmp_path / "cache").iterdir())) == 4, "no lock is left"


def test_an_entry_that_is_replaced_is_none_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get(tmp_path, arrays)
    cache = IndexCache(tmp_path / "cache", "Kind-train", "what it is")
    seen = []
    replace = os.replace

    def watched(source: Any, target: Any) -> None:
        replace(source, target)
        seen.append(cache.exists(NAMES))

    monkeypatch.setattr(os, "replace", watched)
    cache.save({name: array + 1 for name, array in arrays().items()})
    assert seen == [False, False, False, True]


def test_a_pipe_in_the_place_of_the_checksums_holds_no_one_up(tmp_path: Path) -> None:
    get(tmp_path, arrays)
    (record,) = (tmp_path / "cache").glob("*-checksums.json")
    record.unlink()
    os.mkfifo(record)
    assert whole(get(tmp_path, arrays))
    assert record.is_file()


def test_files_that_prove_sound_are_not_replaced(tmp_path: Path) -> None:
    """A run on another host that has them mapped would lose them over NFS."""
    get(tmp_path, arrays)
    first, second = (next((tmp_path / "cache").glob(f"*-{name}.npy")) for name in NAMES)
    (record,) = (tmp_path / "cache").glob("*-checksums.json")
    record.unlink()
    content = bytearray(second.read_bytes())
    content[-8] ^= 1
    second.write_bytes(content)
    before = [path.stat().st_ino for path in (first, second)]
    held = second.open("rb")  # keeps its inode from being used again
    assert whole(get(tmp_path, partial(counted, tmp_path, 0)))
    assert len(list(tmp_path.glob("mark *"))) == 1 and record.is_file()
    assert [path.stat().st_ino == inode for path, inode in zip((first, second), before, strict=True)] == [True, False]
    held.close()
    loaded = IndexCache(tmp_path / "cache", "Kind-train", "what it is").load(recipe())
    assert loaded is not None and whole(loaded)


class Sentences(MaskedDataset):
    """The index of BERT and T5, without their samples."""

    def _sample(self, sentences: list[Any], target: int, random: Any) -> dict[str, Any]:
        raise NotImplementedError


def _gpt(prefix: str, folder: Path, requested: int | None = 390, **place: Any) -> GPTDataset:
    # The run uses so little of the last epoch that it is shuffled apart.
    spec = SplitSpec(0, requested, SplitRatios.parse("1"), prefix, folder, **place)
    return GPTDataset(IndexedDataset(prefix), spec, options=GPTDatasetOptions(4, 7), tokenizer=NullTokenizer(99))


def _indices(kind: str, prefix: str, folder: Path) -> list[Any]:
    """All index arrays of a dataset, from `folder` where they are intact."""
    if kind == "masked":
        sentences = Sentences(
            IndexedDataset(prefix),
            SplitSpec(0, 40, SplitRatios.parse("1"), prefix, folder),
            T5DatasetFactory(MaskedOptions(16, 7, Masking(0.15, 3)), NullTokenizer(99), decoder_length=8),
            longest=14,
            min_sentences=1,
            extra_identity={},
        )
        return [sentences.sample_index]
    gpt = _gpt(prefix, folder)
    if kind == "gpt":
        assert gpt.plan.separate_last
        return [gpt.document_index, gpt.sample_index, gpt.shuffle_index]
    blend = BlendedDataset([gpt, _gpt(prefix, folder, 391)], [0.3, 0.7], 300, cache_folder=folder)
    return [blend.dataset_index, blend.dataset_sample_index, gpt.shuffle_index]


def write_documents(prefix: Path, lengths: list[int]) -> str:
    with IndexedWriter(str(prefix), "uint16") as writer:
        for length in lengths:
            writer.add_document(np.arange(length), [length // 2, length - length // 2])
        writer.finalize()
    return str(prefix)


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("kind", ["gpt", "blend", "masked"])
def test_no_flipped_bit_changes_an_index(kind: str, has_checksums: bool, tmp_path: Path) -> None:
    """Over all files of the cache, those of Megatron too, which have no checksums."""
    prefix, folder = write_documents(tmp_path / "data", [5, 9, 14, 30, 12, 7]), tmp_path / "cache"
    clean = [np.array(array) for array in _indices(kind, prefix, folder)]
    files = {path: path.read_bytes() for path in folder.iterdir()}
    draw = random.Random(17)
    for _ in range(60):
        path = draw.choice([file for file in files if has_checksums or file.suffix != ".json"])
        content = bytearray(files[path])
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        if not has_checksums:
            for record in folder.glob("*-checksums.json"):
                record.unlink()
        found = _indices(kind, prefix, folder)
        for array, wanted in zip(found, clean, strict=True):
            np.testing.assert_array_equal(array, wanted)
            assert array.dtype == wanted.dtype
        for file, content in files.items():
            file.write_bytes(content)


def test_a_cache_without_checksums_is_used_and_then_has_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    prefix = write_documents(tmp_path / "data", [5, 9, 14])
    _gpt(prefix, tmp_path / "cache")
    files = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    (record,) = (tmp_path / "cache").glob("*-checksums.json")
    record.unlink()
    caplog.clear()
    _gpt(prefix, tmp_path / "cache")
    assert "Load the GPTDataset train indices" in caplog.text and "Build" not in caplog.text
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()} == files


def test_indices_of_other_documents_are_built_again(tmp_path: Path) -> None:
    """Intact files, with the checksums that they were written with."""
    get(tmp_path, arrays)
    built = []

    def build() -> Arrays:
        built.append(True)
        return arrays()

    for source in ("", "other documents", "other documents"):
        load_or_build(tmp_path / "cache", recipe(build, source))
    assert len(built) == 1


def test_ranks_after_the_first_rely_on_what_it_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get(tmp_path, arrays)
    folder = tmp_path / "cache"
    read: list[Path] = []
    checksum = index_cache._crc32
    monkeypatch.setattr(index_cache, "_crc32", lambda path: read.append(path) or checksum(path))
    for is_checked, wanted in ((False, 2), (True, 0)):
        read.clear()
        assert whole(load_or_build(folder, recipe(), is_checked=is_checked).arrays)
        assert len(read) == wanted
    # Files of another size or time, or a changed dataset, are read whoever has checked them.
    (path,) = folder.glob("*-second.npy")
    for written_ns in (None, 5):
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        read.clear()
        assert whole(load_or_build(folder, recipe(), written_ns, is_checked=True).arrays)
        assert len(read) == 2
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert whole(load_or_build(folder, recipe(), is_checked=True).arrays)


def test_what_takes_long_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BEFORE_A_BAR", 0.0)
    monkeypatch.setattr(progress, "_SECONDS_BEFORE_A_LINE", 0.01)
    monkeypatch.delenv("RANK", raising=False)
    told: list[str] = []

    def build() -> Arrays:
        while not (said := capsys.readouterr().err):
            time.sleep(0.01)
        told.append(said)
        return arrays()

    with progress.on_console():
        load_or_build(tmp_path, recipe(build))
    assert "Kind train" in told[0]
