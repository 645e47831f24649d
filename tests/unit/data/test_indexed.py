"""The .bin/.idx pair: what is written is read, damage is named, nothing half-written has a final name."""

from __future__ import annotations

import os
import pickle
import resource
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalith.data.indexed import HEADER_SIZE, IndexedDataset, IndexedWriter
from megalith.errors import DataError

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10]]


def write(folder: Path, documents: list[list[int]] = DOCUMENTS) -> str:
    prefix = str(folder / "data")
    with IndexedWriter(prefix, "uint16") as writer:
        for tokens in documents:
            writer.add_document(tokens, [len(tokens)] if tokens else [])
        writer.finalize()
    return prefix


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=3), max_size=6),
    mmap_bin=st.booleans(),
)
def test_what_is_written_is_read(documents: list[list[list[int]]], mmap_bin: bool, tmp_path: Path) -> None:
    prefix = str(tmp_path / "any")
    with IndexedWriter(prefix, "int32") as writer:
        for sequences in documents:
            for tokens in sequences:
                writer.add_item(tokens)
            writer.end_document()
        writer.finalize()
    dataset = IndexedDataset(prefix, mmap_bin=mmap_bin)
    flat = [tokens for sequences in documents for tokens in sequences]
    assert [dataset.get(item).tolist() for item in range(len(dataset))] == flat
    assert [tokens.tolist() for tokens in dataset[:]] == flat
    assert dataset.num_documents == len(documents)
    assert np.diff(dataset.document_index).tolist() == [len(sequences) for sequences in documents]
    assert dataset.num_tokens == sum(map(len, flat))


def test_places_are_reserved_between_what_is_written(tmp_path: Path) -> None:
    lengths, per_document = np.array([2, 1, 1], np.int32), np.array([2, 0, 1], np.int64)
    with IndexedWriter(str(tmp_path / "data"), "uint16") as writer:
        writer.add_document([7], [1])
        assert writer.reserve(lengths, per_document) == 2
        writer.add_document([8], [1])
        os.pwrite(writer.bin_descriptor, np.array([1, 2, 3, 4], np.uint16).tobytes(), 2)
        writer.finalize()
    dataset = IndexedDataset(str(tmp_path / "data"))
    assert [tokens.tolist() for tokens in dataset[:]] == [[7], [1, 2], [3], [4], [8]]
    assert dataset.document_index.tolist() == [0, 1, 3, 3, 4, 5]


def test_a_dataset_crosses_process_borders(tmp_path: Path) -> None:
    dataset = pickle.loads(pickle.dumps(IndexedDataset(write(tmp_path), mmap_bin=False)))
    assert dataset.get(2).tolist() == [9, 10]
    assert dataset.get(-1, 1).tolist() == [10]


def test_reading_past_a_sequence_is_refused(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path))
    for arguments in ((0, 2, 2), (0, -1, 1), (0, 4), (3,)):
        with pytest.raises(IndexError):
            dataset.get(*arguments)
    with pytest.raises(ValueError, match="contiguous"):
        dataset[::2]


@pytest.mark.parametrize("given", ["data", "data_text_document.bin", "data_text_documnet"])
def test_a_dataset_with_a_name_that_is_near_is_named(tmp_path: Path, given: str) -> None:
    for ending in ("bin", "idx"):
        (tmp_path / f"data_text_document.{ending}").write_bytes(b"")
    with pytest.raises(DataError, match=r"/data_text_document\?"):
        IndexedDataset(str(tmp_path / given))


def test_missing_files_are_both_named(tmp_path: Path) -> None:
    prefix = str(tmp_path / "none")
    with pytest.raises(DataError) as caught:
        IndexedDataset(prefix)
    assert f"{prefix}.idx and {prefix}.bin" in str(caught.value)
    written = write(tmp_path)
    with pytest.raises(DataError, match=f"{written}.bin"):
        IndexedDataset(written + ".bin")
    os.unlink(written + ".bin")
    with pytest.raises(DataError, match=r"missing .*data\.bin \("):
        IndexedDataset(written)


S = 3  # sequences of DOCUMENTS
LENGTHS, POINTERS, ENTRIES = HEADER_SIZE, HEADER_SIZE + 4 * S, HEADER_SIZE + 12 * S


@pytest.mark.parametrize(
    ("offset", "layout", "value", "message"),
    [
        (0, "<B", 0, "magic"),
        (9, "<Q", 2, "version (byte 9) is 2"),
        (17, "<B", 0, "dtype code (byte 17) is 0"),
        (17, "<B", 9, "dtype code (byte 17) is 9"),
        (18, "<Q", 0, "0 sequences (byte 18) and 5 document entries (byte 26) make an index of 74 bytes"),
        (18, "<Q", 2**40, "1099511627776 sequences (byte 18)"),
        (18, "<Q", 2**61, "2305843009213693952 sequences (byte 18)"),
        (18, "<q", -1, "18446744073709551615 sequences (byte 18)"),
        (26, "<Q", 0, "document count (byte 26) is 0"),
        (26, "<Q", 2**40, "1099511627776 document entries (byte 26)"),
        (26, "<Q", 2**61, "2305843009213693952 document entries (byte 26)"),
        (26, "<q", -1, "18446744073709551615 document entries (byte 26)"),
        (LENGTHS + 4, "<i", -5, f"length of sequence 1 (byte {LENGTHS + 4}) is -5"),
        (LENGTHS, "<i", 4, f"pointer of sequence 1 (byte {POINTERS + 8}) is 6"),
        (LENGTHS + 8, "<i", 3, "describes 7 tokens of 2 bytes = 14"),
        (POINTERS, "<q", -2, f"pointer of sequence 0 (byte {POINTERS}) is -2"),
        (POINTERS + 8, "<q", 2**40, f"pointer of sequence 1 (byte {POINTERS + 8}) is 1099511627776"),
        (POINTERS + 8, "<q", 7, f"pointer of sequence 1 (byte {POINTERS + 8}) is 7"),
        (POINTERS + 16, "<q", 0, f"pointer of sequence 2 (byte {POINTERS + 16}) is 0"),
        (ENTRIES, "<q", 1, f"document entry 0 (byte {ENTRIES}) is 1"),
        (ENTRIES + 8, "<q", 2, f"document entry 2 (byte {ENTRIES + 16}) is 1, below"),
        (ENTRIES + 32, "<q", 2, f"the last document entry (byte {ENTRIES + 32}) is 2, must be 3"),
    ],
)
def test_damage_is_named_by_field_and_offset(
    offset: int, layout: str, value: int, message: str, tmp_path: Path
) -> None:
    """F21: each field."""
    path = Path(write(tmp_path) + ".idx")
    content = bytearray(path.read_bytes())
    struct.pack_into(layout, content, offset, value)
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        IndexedDataset(str(path)[:-4])
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("change", [-1, 1, -12])
def test_a_bin_of_another_size_is_refused(change: int, tmp_path: Path) -> None:
    prefix = write(tmp_path)
    os.truncate(prefix + ".bin", 12 + change)
    with pytest.raises(DataError, match=rf"{12 + change} .* 12"):
        IndexedDataset(prefix)


def test_a_truncated_read_is_an_error_without_a_map(tmp_path: Path) -> None:
    prefix = write(tmp_path)
    dataset = IndexedDataset(prefix, mmap_bin=False)
    os.truncate(prefix + ".bin", 3)
    with pytest.raises(DataError, match=r"data\.bin.*byte 3"):
        dataset.get(0)


@settings(max_examples=300, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_bytes_do_worse_than_an_error(data: Any, tmp_path: Path) -> None:
    """F21: any bytes."""
    prefix = str(tmp_path / "data")
    if not Path(prefix + ".idx").exists():
        write(tmp_path)
        (tmp_path / "whole").write_bytes(Path(prefix + ".idx").read_bytes())
    content = bytearray((tmp_path / "whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=8))
        content[position : position + len(patch)] = patch
    content = content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]
    Path(prefix + ".idx").write_bytes(content)
    try:
        dataset = IndexedDataset(prefix)
    except DataError as error:
        assert "data." in str(error)
    else:
        assert sum(len(tokens) for tokens in dataset[:]) == dataset.num_tokens


def test_a_huge_claim_costs_neither_time_nor_memory(tmp_path: Path) -> None:
    """F21: 24 GiB of index."""
    path = Path(write(tmp_path) + ".idx")
    with path.open("r+b") as file:
        file.seek(18)
        file.write(struct.pack("<Q", 2**31))
        file.truncate(HEADER_SIZE + 12 * 2**31 + 8 * 5)  # sparse: 24 GiB of zeros that cost nothing on the disk
        file.seek(HEADER_SIZE)
        file.write(struct.pack("<i", -1))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(DataError, match="sequence 0"):
        IndexedDataset(str(path)[:-4])
    assert time.perf_counter() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_leaving_early_leaves_nothing(tmp_path: Path) -> None:
    prefix = write(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError), IndexedWriter(prefix, "uint16") as writer:
        writer.add_item([1, 2, 3])
        raise RuntimeError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_partial_file_of_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "data.bin.partial").write_bytes(b"left over")
    dataset = IndexedDataset(write(tmp_path))
    assert dataset.num_tokens == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]


def test_two_writers_do_not_share_a_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.data.indexed.writer._SECONDS_FOR_ORPHANS", 0.0)
    with IndexedWriter(str(tmp_path / "data"), "uint16") as writer:
        with pytest.raises(DataError, match=str(tmp_path / "data")):
            IndexedWriter(str(tmp_path / "data"), "uint16")
        writer.add_document([1], [1])
        writer.finalize()
    assert IndexedDataset(str(tmp_path / "data")).num_tokens == 1


def test_tokens_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with IndexedWriter(str(tmp_path / "data"), "uint16") as writer:
        for token in (-1, 65536, 2**40):
            with pytest.raises(DataError, match=f"{token} .*uint16"):
                writer.add_item([1, token])


def test_another_dtype_is_not_merged(tmp_path: Path) -> None:
    prefix = write(tmp_path)
    with IndexedWriter(str(tmp_path / "other"), "int32") as writer, pytest.raises(DataError, match="holds uint16"):
        writer.add_index(prefix)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.bin\.partial"):
        IndexedWriter(str(tmp_path / "absent" / "data"), "uint16")
