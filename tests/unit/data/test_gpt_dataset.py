"""Samples of a GPTDataset against slices of the token stream, its cache, and what it says of too little data."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megalith.config import DataConfig
from megalith.data.build import build_gpt_datasets
from megalith.data.gpt_dataset import GPTDataset, GPTDatasetOptions
from megalith.data.indexed import IndexedWriter
from megalith.data.samples import SplitRatios, SplitSpec
from megalith.errors import ConfigError, DataError
from megalith.tokenizers.null import NullTokenizer

EOD = 1000


class NumberedDocuments:
    """Documents whose tokens are all different, so that a wrong token shows."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths, np.int32)
        self._tokens = np.split(np.arange(1, sum(lengths) + 1, dtype=np.uint16), np.cumsum(lengths[:-1], dtype=int))

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        if length is not None and not 0 <= offset + length <= len(self._tokens[sequence]):
            raise IndexError(f"{length} tokens from {offset} on")
        return self._tokens[sequence][offset : None if length is None else offset + length]


class PaddedTokenizer(NullTokenizer):
    """Special ids that occur in the text."""

    def __init__(self, num_ids: int, *, eod: int, pad: int | None = 3) -> None:
        super().__init__(num_ids)
        self.eod, self.pad = eod, pad


def dataset(
    lengths: list[int],
    length: int,
    requested: int | None = None,
    *,
    split: str = "1",
    number: int = 0,
    cache_folder: Path | None = None,
    tokenizer: NullTokenizer | None = None,
    **options: Any,
) -> GPTDataset:
    return GPTDataset(
        NumberedDocuments(lengths),
        SplitSpec(number, requested, SplitRatios.parse(split), "data", cache_folder),
        options=GPTDatasetOptions(length, 7, **options),
        tokenizer=tokenizer or NullTokenizer(EOD),
    )


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=10).filter(lambda lengths: sum(lengths) > 1),
    length=st.integers(1, 15),
    requested=st.integers(1, 40),
    extra=st.booleans(),
)
def test_samples_are_slices_of_the_stream(lengths: list[int], length: int, requested: int, extra: bool) -> None:
    built = dataset(lengths, length, requested, add_extra_token=extra)
    documents = NumberedDocuments(lengths)
    stream = np.concatenate([documents.get(document) for document in built.document_index])
    assert len(built) >= requested
    assert sorted(built.shuffle_index) == list(range(len(built)))
    for item in range(len(built)):
        start = int(built.shuffle_index[item]) * length
        sample = built[item]
        assert sample["tokens"].tolist() == stream[start : start + length].tolist()
        expected = (
            stream[start + 1 : start + 1 + length].tolist() if extra else [*stream[start + 1 : start + length], 0]
        )
        assert sample["labels"].tolist() == expected
        assert sample["position_ids"].tolist() == list(range(length))
        assert sample["loss_mask"].tolist() == [1.0] * length if extra else [1.0] * (length - 1) + [0.0]


def test_items_have_the_types_of_training() -> None:
    sample = dataset([20], 4)[0]
    assert {name: array.dtype.name for name, array in sample.items()} == {
        "tokens": "int64",
        "labels": "int64",
        "loss_mask": "float32",
        "position_ids": "int64",
    }
    with pytest.raises(IndexError, match="sample 4 of 4"):
        dataset([20], 4)[4]
    with pytest.raises(IndexError):
        dataset([20], 4)[-1]


def test_the_last_validation_sample_may_be_padded() -> None:
    built = dataset([10], 4, split="0,1", number=1, drop_last_partial_validation=False)
    assert len(built) == 3
    item = built.shuffle_index.tolist().index(2)
    assert built[item]["tokens"].tolist() == [9, 10, 0, 0]
    assert built[item]["labels"].tolist() == [10, 0, 0, 0]
    assert built[item]["loss_mask"].tolist() == [1, 0, 0, 0]
    others = [built[other]["loss_mask"].tolist() for other in range(3) if other != item]
    assert others == [[1] * 4] * 2, "the padding of one sample masks nothing in another"


def test_padding_and_end_of_document_carry_no_loss() -> None:
    sample = dataset([9], 8, tokenizer=PaddedTokenizer(EOD, eod=5), eod_mask_loss=True)[0]
    assert sample["tokens"].tolist() == [1, 2, 0, 4, 5, 6, 7, 8]
    assert sample["labels"].tolist() == [2, 0, 4, 5, 6, 7, 8, 9]
    assert sample["loss_mask"].tolist() == [1, 0, 1, 1, 0, 1, 1, 1]
    assert dataset([9], 8, tokenizer=PaddedTokenizer(EOD, eod=5, pad=None))[0]["loss_mask"].tolist() == [1] * 8


def test_without_a_cache_a_split_that_is_not_drawn_from_is_indexed_when_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    unread = dataset([30, 20], 4, 0)
    assert len(unread) == 12 and "Build" not in caplog.text
    assert unread[0]["tokens"].tolist() == dataset([30, 20], 4)[0]["tokens"].tolist()
    caplog.clear()
    dataset([30, 20], 4, 0, cache_folder=tmp_path)
    assert "Build and save the GPTDataset train indices" in caplog.text


def test_the_second_build_loads_what_the_first_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = dataset([30, 20], 4, 25, cache_folder=tmp_path / "new" / "folder")
    assert "Build and save the GPTDataset train indices" in caplog.text
    caplog.clear()
    second = dataset([30, 20], 4, 25, cache_folder=tmp_path / "new" / "folder")
    assert "Load the GPTDataset train indices" in caplog.text
    assert "Build" not in caplog.text
    assert isinstance(second.sample_index, np.memmap)
    for item in range(len(first)):
        np.testing.assert_array_equal(first[item]["tokens"], second[item]["tokens"])


def test_what_changes_the_samples_changes_the_names(tmp_path: Path) -> None:
    dataset([30, 20], 4, 25, cache_folder=tmp_path)
    for number, arguments in enumerate([([30, 20], 5, 25), ([30, 20], 4, 26)], start=2):
        dataset(*arguments, cache_folder=tmp_path)
        assert len(list(tmp_path.iterdir())) == 5 * number
    dataset([30, 20], 4, 25, tokenizer=NullTokenizer(99), cache_folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 5 * 4


def damaged_caches() -> dict[str, Any]:
    bomb = np.array([{"not": "numbers"}], dtype=object)
    return {
        "document_index: cut short": lambda path: path.write_bytes(path.read_bytes()[:-3]),
        "sample_index: empty": lambda path: path.write_bytes(b""),
        "shuffle_index: a pickle": lambda path: np.save(path, bomb, allow_pickle=True),
        "sample_index: another shape": lambda path: np.save(path, np.zeros((3, 2), np.int32)),
        "sample_index: other places": lambda path: np.save(path, np.maximum(np.load(path) - [0, 1], 0)),
        "document_index: out of range": lambda path: np.save(path, np.load(path) + 2),
        "shuffle_index: one sample twice": lambda path: np.save(path, np.maximum(np.load(path), 1)),
        "document_index: one document twice": lambda path: np.save(path, np.maximum(np.load(path), 1)),
        "sample_index: a header that is no Python": lambda path: path.write_bytes(
            path.read_bytes().replace(b"(", b"\\")
        ),
        "shuffle_index: floats": lambda path: np.save(path, np.load(path).astype(float)),
    }


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("damage", damaged_caches())
def test_a_damaged_cache_is_built_again(
    damage: str, has_checksums: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = dataset([30, 20], 4, 25, cache_folder=tmp_path)
    expected = [whole[item]["tokens"].tolist() for item in range(len(whole))]
    name, _, _ = damage.partition(":")
    (file,) = tmp_path.glob(f"*{name}.npy")
    damaged_caches()[damage](file)
    if not has_checksums:
        next(tmp_path.glob("*-checksums.json")).unlink()
    for run in ("repairs", "loads"):
        caplog.clear()
        built = dataset([30, 20], 4, 25, cache_folder=tmp_path)
        assert [built[item]["tokens"].tolist() for item in range(len(built))] == expected
        assert any(record.levelname == "WARNING" for record in caplog.records) == (run == "repairs")


def text_of(data: DataConfig, size: int) -> list[list[int]]:
    train, _, _ = build_gpt_datasets(data, NullTokenizer(EOD), sizes=(size, 0, 0), seed=1)
    assert train is not None
    return [train[item]["tokens"].tolist() for item in range(len(train))]


def write_lengths(prefix: Path, lengths: list[int]) -> DataConfig:
    with IndexedWriter(str(prefix), "uint16") as writer:
        for document, length in enumerate(lengths):
            writer.add_document(100 * document + np.arange(length), [length])
        writer.finalize()
    return DataConfig(seq_length=4, data_path=(str(prefix),), split="1,0,0")


@pytest.mark.parametrize("keeps_time", [False, True])
def test_indices_of_an_overwritten_dataset_are_built_again(
    keeps_time: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Documents, tokens and samples are as many as before: only the borders have moved."""
    new, old = [9, 31, 10], [30, 12, 8]
    expected = text_of(write_lengths(tmp_path / "fresh", new), 25)
    data = write_lengths(tmp_path / "data", old)
    make_older(tmp_path / "data.idx")
    text_of(data, 25)
    write_lengths(tmp_path / "data", new)
    if keeps_time:  # as `cp -p` and `rsync -t` do
        make_older(tmp_path / "data.idx")
    else:
        later = time.time_ns() + 10**9
        os.utime(tmp_path / "data.idx", ns=(later, later))
    caplog.clear()
    assert text_of(data, 25) == expected
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and str(tmp_path) in warnings[0]


def make_older(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**10))


def test_what_cannot_be_read_names_the_dataset() -> None:
    built = dataset([30, 20], 4, 25)
    built.sample_index[:, 1] += 40
    with pytest.raises(DataError, match="train"):
        for item in range(len(built)):
            built[item]


def test_without_a_writable_cache_folder_one_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write(tmp_path / "data")
    (tmp_path / "file").touch()  # stands where the folder would be; permissions do not stop root
    data = dataclasses.replace(data, data_cache_path=str(tmp_path / "file" / "cache"))
    train, _, _ = build_gpt_datasets(data, NullTokenizer(EOD), sizes=(100, 10, 10), seed=1)
    assert train is not None and len(train) == 119
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "--data-cache-path" in warnings[0] and "\n" not in warnings[0]


def test_tokens_of_another_vocabulary_are_found() -> None:
    built = dataset([20], 4, tokenizer=NullTokenizer(15))
    seen = 0
    for item in range(len(built)):
        if built.shuffle_index[item] < 3:
            assert built[item]["tokens"].max() <= 15
            continue
        seen += 1
        with pytest.raises(DataError, match="17.*16"):
            built[item]
    assert seen == 1


def test_a_split_without_a_token_is_explained() -> None:
    """F24: no token."""
    with pytest.raises(DataError) as caught:
        dataset([10, 10, 0], 16, 8, split="2,0,1", number=2)
    for fragment in ("test split", "0 tokens", "8 samples", "--split 2,0,1", "1 of 3", "--eval-iters 0"):
        assert fragment in str(caught.value)
    with pytest.raises(DataError, match="train split .*larger share") as caught:
        dataset([10], 16, 8, split="50,50", number=0)
    assert "--eval-iters" not in str(caught.value), "training cannot do without samples"


def test_a_split_of_one_token_repeats_it(caplog: pytest.LogCaptureFixture) -> None:
    """F24: as many epochs as Megatron's formula gives, 8 * 16 + 1."""
    built = dataset([10, 10, 1], 16, 8, split="2,0,1", number=2)
    assert (len(built), built.num_epochs) == (8, 129)
    for item in range(8):
        assert built[item]["tokens"].tolist() == built[item]["labels"].tolist() == [21] * 16
        assert built[item]["loss_mask"].sum() == 16
    assert re.search(r"\b1 tokens\b.*\b17\b", caplog.text)


def test_less_than_a_sample_is_repeated_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """F24: fewer tokens than a sample."""
    built = dataset([10], 16, 3)
    assert (len(built), built.num_epochs) == (3, 5)
    assert re.search(r"\b10 tokens\b.*\b17\b", caplog.text)


def test_senseless_repetition_is_refused() -> None:
    with pytest.raises(DataError, match="2 tokens"):
        dataset([2], 1024, 2**23)


def test_an_empty_split_without_request_is_empty() -> None:
    """F24: an empty split."""
    for requested in (None, 0):
        assert len(dataset([10, 10, 0], 16, requested, split="2,0,1", number=2)) == 0


def write(prefix: Path, documents: int = 20) -> DataConfig:
    with IndexedWriter(str(prefix), "uint16") as writer:
        for document in range(documents):
            writer.add_document(np.arange(30) + document, [30])
        writer.finalize()
    return DataConfig(seq_length=8, data_path=(str(prefix),), split="8,1,1")


@pytest.mark.parametrize("mmap_bin_files", [True, False])
def test_building_from_files(mmap_bin_files: bool, tmp_path: Path) -> None:
    data = dataclasses.replace(write(tmp_path / "data"), mmap_bin_files=mmap_bin_files)
    train, valid, test = build_gpt_datasets(data, NullTokenizer(EOD), sizes=(100, 10, None), seed=1)
    assert train is not None and valid is not None and test is not None
    assert (len(train), train.num_epochs) == (119, 2)
    assert (len(valid), valid.num_epochs) == (14, 2)
    assert (len(test), test.num_epochs) == (7, 1)
    assert (tmp_path / "data" / "cache" / "GPTDataset_indices").is_dir()


def test_a_split_without_a_share_is_none(tmp_path: Path) -> None:
    data = dataclasses.replace(write(tmp_path / "data"), split="1,0,0")
    train, valid, test = build_gpt_datasets(data, NullTokenizer(EOD), sizes=(10, 10, 10), seed=1)
    assert train is not None
    assert (valid, test) == (None, None)


def test_training_without_a_share_is_refused(tmp_path: Path) -> None:
    data = dataclasses.replace(write(tmp_path / "data"), split="0,1,0")
    with pytest.raises(ConfigError, match="--split 0,1,0 .*10"):
        build_gpt_datasets(data, NullTokenizer(EOD), sizes=(10, 10, 10), seed=1)


def test_no_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="--data-path is missing"):
        build_gpt_datasets(DataConfig(seq_length=8), NullTokenizer(EOD), sizes=(1, 1, 1), seed=1)


def test_mock_data_needs_no_files_and_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    datasets = build_gpt_datasets(
        DataConfig(seq_length=1024, mock_data=True), NullTokenizer(99), sizes=(4, 4, 4), seed=1
    )
    sample = datasets.train[0] if datasets.train else {}
    assert sample["tokens"].min() >= 0 and sample["tokens"].max() < 100
    assert not list(tmp_path.iterdir())
