"""The three index arrays against naive loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.data.gpt_index import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
    sample_index_fits,
)


def naive_sample_index(
    lengths: list[int], documents: list[int], num_samples: int, sequence_length: int, extra: int
) -> list[list[int]]:
    """One token after another, as the C++ helper of Megatron walks."""
    position, offset = 0, 0
    index = [[0, 0]]
    for _ in range(num_samples):
        remaining = sequence_length + extra
        while remaining > lengths[documents[position]] - offset:
            if position == len(documents) - 1:
                remaining = lengths[documents[position]] - offset
                break
            remaining -= lengths[documents[position]] - offset
            position, offset = position + 1, 0
        offset += remaining - extra
        index.append([position, offset])
    return index


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    epochs=st.integers(1, 3),
    sequence_length=st.integers(1, 12),
    extra=st.integers(0, 1),
    drop_last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sample_starts_are_where_walking_finds_them(
    lengths: list[int], epochs: int, sequence_length: int, extra: int, drop_last: bool, seed: int
) -> None:
    documents = np.random.RandomState(seed).permutation(np.tile(np.arange(len(lengths), dtype=np.int32), epochs))
    total = epochs * sum(lengths) - extra
    num_samples = total // sequence_length if drop_last else -(-total // sequence_length)
    index = build_sample_index(np.array(lengths, np.int32), documents, num_samples, sequence_length, extra=extra)
    assert index.tolist() == naive_sample_index(lengths, documents.tolist(), num_samples, sequence_length, extra)
    assert sample_index_fits(
        index, np.array(lengths, np.int32), documents, len(index) - 1, sequence_length, extra=extra
    )


@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=12),
    sequence_length=st.integers(1, 12),
    extra=st.integers(0, 1),
    data=st.data(),
)
def test_an_index_of_other_documents_does_not_fit(
    lengths: list[int], sequence_length: int, extra: int, data: st.DataObject
) -> None:
    """An index that fits other lengths too is the same index."""
    documents = np.arange(len(lengths), dtype=np.int32)
    num_samples = (sum(lengths) - extra) // sequence_length
    index = build_sample_index(np.array(lengths, np.int32), documents, num_samples, sequence_length, extra=extra)
    others = np.array(data.draw(st.permutations(lengths)), np.int32)
    same = np.array_equal(index, build_sample_index(others, documents, num_samples, sequence_length, extra=extra))
    fits = sample_index_fits(index, others, documents, len(index) - 1, sequence_length, extra=extra)
    assert fits == same or (fits and extra == 0)  # without an extra token, an end and a begin are the same place


@given(
    tokens=st.integers(2, 500),
    sequence_length=st.integers(1, 60),
    requested=st.integers(0, 400),
    extra=st.integers(0, 1),
)
def test_the_plan_has_the_fewest_epochs_that_serve_the_request(
    tokens: int, sequence_length: int, requested: int, extra: int
) -> None:
    plan = plan_epochs(tokens, sequence_length, requested, extra=extra, drop_last=True)
    needed = requested * sequence_length + extra
    assert plan.num_epochs * tokens >= needed
    assert plan.num_epochs == 1 or (plan.num_epochs - 1) * tokens < needed
    assert plan.num_samples == (plan.num_epochs * tokens - extra) // sequence_length >= requested
    assert plan.separate_last == (plan.shuffled_first < plan.num_samples)
    assert plan.num_epochs > 1 or not plan.separate_last


def test_a_split_without_tokens_or_request_is_one_empty_epoch() -> None:
    for drop_last in (True, False):
        plan = plan_epochs(0, 16, None, extra=1, drop_last=drop_last)
        assert (plan.num_epochs, plan.num_samples, plan.separate_last) == (1, 0, False)


@pytest.mark.parametrize(("requested", "separate"), [(110, True), (190, False)])
def test_a_little_used_last_epoch_is_shuffled_apart(requested: int, separate: bool) -> None:
    plan = plan_epochs(1001, 10, requested, extra=1, drop_last=True)
    assert (plan.num_epochs, plan.separate_last) == (2, separate)
    rng = np.random.RandomState(3)
    documents = build_document_index(range(40, 60), plan, rng)
    order = build_shuffle_index(plan, rng)
    assert sorted(documents) == sorted([*range(40, 60)] * 2)
    assert sorted(order) == list(range(plan.num_samples))
    assert (sorted(documents[:20]) == list(range(40, 60))) == separate
    assert (sorted(order[:100]) == list(range(100))) == separate


def test_a_long_index_is_built_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.arange(1, 30, dtype=np.int32)
    documents = np.random.RandomState(0).permutation(29).astype(np.int32)
    whole = build_sample_index(lengths, documents, 43, 10, extra=1)
    monkeypatch.setattr("megalith.data.gpt_index._SAMPLES_AT_ONCE", 7)
    np.testing.assert_array_equal(build_sample_index(lengths, documents, 43, 10, extra=1), whole)
