"""Rows of conversations against their tokens and masks one by one, their cache, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megalith.config import DataConfig
from megalith.data.build import Datasets, build_gpt_datasets, fingerprint
from megalith.data.indexed import IndexedDataset, IndexedWriter
from megalith.data.sft_dataset import SFTDataset, pack
from megalith.errors import DataError
from megalith.tokenizers.null import NullTokenizer

LENGTH = 32
VOCABULARY = 500


def write(prefix: Path, conversations: list[NDArray[Any]], masks: list[NDArray[Any]]) -> str:
    for path, dtype, items in ((f"{prefix}", np.uint16, conversations), (f"{prefix}_loss_mask", np.uint8, masks)):
        with IndexedWriter(path, dtype) as writer:
            for item in items:
                writer.add_document(item, [len(item)])
            writer.finalize()
    return str(prefix)


def conversations(folder: Path, count: int = 60, longest: int = LENGTH + 1, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest + 1, count)
    lengths[0] = longest
    masks = [(rng.random(length) < 0.5).astype(np.uint8) for length in lengths]
    for mask in masks:
        mask[-1] = 1
    return write(folder / "talk", [rng.integers(0, VOCABULARY, length) for length in lengths], masks)


def build(prefix: str, train: int | None, *, tokenizer: NullTokenizer | None = None, **options: Any) -> Datasets:
    data = DataConfig(LENGTH, train_data_path=(prefix,), sft=True, **options)
    return build_gpt_datasets(data, tokenizer or NullTokenizer(VOCABULARY), sizes=(train, 0, 0), seed=3)


def train_set(prefix: str, train: int | None = None, **options: Any) -> SFTDataset:
    found = build(prefix, train, **options).train
    assert isinstance(found, SFTDataset)
    return found


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_packing_is_best_fit_decreasing_and_shuffles_all(sizes: list[int], seed: int) -> None:
    room: list[int] = []
    for size in sorted(sizes, reverse=True):  # the naive form
        fitting = [row for row, left in enumerate(room) if left >= size]
        if not fitting:
            room.append(20)
        row = min(fitting, key=lambda row: room[row]) if fitting else len(room) - 1
        room[row] -= size
    packed = pack(np.array(sizes), 20)
    order, counts = packed.shuffled(np.random.RandomState(seed))
    assert sorted(order.tolist()) == list(range(len(sizes)))
    rows = np.split(np.array(sizes)[order], counts.cumsum()[:-1])
    assert sorted(20 - int(row.sum()) for row in rows) == sorted(room)


def test_realistic_lengths_fill_the_rows() -> None:
    lengths = np.random.default_rng(1).lognormal(5.5, 0.9, 20_000).astype(int).clip(8, 2048)
    assert lengths.sum() / (pack(lengths, 2048).num_rows * 2048) > 0.98


@pytest.mark.parametrize("packing", [True, False])
def test_rows_hold_each_conversation_once_an_epoch(tmp_path: Path, packing: bool) -> None:
    prefix = conversations(tmp_path)
    data = train_set(prefix, sft_packing=packing)
    tokens, masks = IndexedDataset(prefix), IndexedDataset(f"{prefix}_loss_mask")
    wanted = sorted((tokens.get(i).tolist(), masks.get(i)[1:].tolist()) for i in range(len(tokens)))
    found = []
    for row in (data[i] for i in range(len(data))):
        assert {len(field) for field in row.values()} == {LENGTH}
        numbers, places = row["document_ids"], row["position_ids"]
        for number in np.unique(numbers):
            here = np.flatnonzero(numbers == number)
            assert places[here].tolist() == list(range(len(here)))
            text = [*row["tokens"][here].tolist(), int(row["labels"][here[-1]])]
            if not row["loss_mask"][here].any():  # padding, which comes last
                assert not any(text) and number == numbers[-1]
                continue
            assert row["labels"][here[:-1]].tolist() == text[1:-1]
            found.append((text, row["loss_mask"][here].astype(int).tolist()))
    assert sorted(found) == wanted
    assert (len(data) == len(tokens)) is not packing


def test_epochs_differ_and_do_not_depend_on_the_length_of_the_run(tmp_path: Path) -> None:
    prefix = conversations(tmp_path)
    rows = len(train_set(prefix))
    short, long = train_set(prefix, 2 * rows), train_set(prefix, 5 * rows - 1)
    assert (len(short), len(long), long.num_epochs) == (2 * rows, 5 * rows, 5)
    for number in range(2 * rows):
        assert all(np.array_equal(short[number][field], value) for field, value in long[number].items())
    assert any(not np.array_equal(short[number]["tokens"], short[rows + number]["tokens"]) for number in range(rows))


def test_the_cache_is_of_this_mask(tmp_path: Path) -> None:
    prefix = conversations(tmp_path)
    before = train_set(prefix)
    assert list((Path(prefix) / "cache").rglob("*-SFTDataset-train-row_index.npy"))
    tokens, masks = IndexedDataset(prefix), IndexedDataset(f"{prefix}_loss_mask")
    changed = [masks.get(i).copy() for i in range(len(masks))]
    changed[5][:] = 0  # nothing to learn from it
    write(Path(prefix), [tokens.get(i) for i in range(len(tokens))], changed)
    after = train_set(prefix)
    assert len(before.document_index) - len(after.document_index) == 1 and 5 not in after.document_index
    assert "1 conversations left out" in after.summary
    same, packing = (
        fingerprint(DataConfig(LENGTH, data_path=(prefix,), sft=True, sft_packing=p), seed=3) for p in (True, False)
    )
    assert same["digest"] != packing["digest"]
    assert same["source"] != fingerprint(DataConfig(LENGTH, data_path=(prefix,)), seed=3)["source"]


def test_conversations_that_are_too_long(tmp_path: Path) -> None:
    prefix = conversations(tmp_path, longest=40)
    with pytest.raises(DataError, match=r"--seq-length.*--sft-overlong"):
        train_set(prefix)
    lengths = IndexedDataset(prefix).lengths
    fitting = np.flatnonzero(lengths <= LENGTH + 1)
    assert np.sort(train_set(prefix, sft_overlong="drop").document_index).tolist() == fitting.tolist()
    data = train_set(prefix, sft_overlong="truncate", sft_packing=False)
    assert len(data) == len(lengths)  # each has a token to predict before the cut
    for number, document in enumerate(data.document_index):
        text = IndexedDataset(prefix).get(int(document))[: LENGTH + 1]
        assert np.array_equal(data[number]["tokens"][: len(text) - 1], text[:-1])
    assert f"{(lengths > LENGTH + 1).sum()} conversations cut" in data.summary


def test_a_split_that_rounding_leaves_empty_is_refused_with_the_split_that_helps(tmp_path: Path) -> None:
    data, tokenizer = DataConfig(LENGTH, data_path=(conversations(tmp_path),), sft=True), NullTokenizer(VOCABULARY)
    with pytest.raises(DataError, match=r"test split.*no conversation.*share by --split \(0.*--eval-iters 0"):
        build_gpt_datasets(data, tokenizer, sizes=(1, 1, 1), seed=3)
    without = build_gpt_datasets(replace(data, split="90,10,0"), tokenizer, sizes=(1, 1, 1), seed=3)
    assert without.valid is not None and without.test is None


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefix = conversations(tmp_path)
    with pytest.raises(DataError, match="vocabulary"):
        data = train_set(prefix, tokenizer=NullTokenizer(VOCABULARY // 2))
        for number in range(len(data)):
            data[number]
    build_gpt_datasets(
        DataConfig(LENGTH, train_data_path=(prefix,)), NullTokenizer(VOCABULARY), sizes=(1, 0, 0), seed=3
    )
    assert "--sft" in caplog.text
    nothing = write(tmp_path / "nothing", [np.arange(5)], [np.array([1, 0, 0, 0, 0])])  # its first token has no context
    with pytest.raises(DataError, match="no conversation"):
        train_set(nothing, 1)
    mask = Path(f"{prefix}_loss_mask.idx")
    other = write(tmp_path / "other", [np.arange(5)], [np.ones(4)])
    with pytest.raises(DataError, match="not the loss mask"):
        train_set(other)
    mask.unlink()
    with pytest.raises(DataError, match="--sft.*megalith preprocess"):
        train_set(prefix)
