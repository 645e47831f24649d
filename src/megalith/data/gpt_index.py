"""Index arrays of a GPT dataset: the three arrays of Megatron's GPTDataset, as pure functions.

The documents of a split, repeated for the requested epochs and shuffled, form one long stream of tokens. Sample k takes
L tokens from k * L on and one more (`extra`, the last label), so that neighbours share one token:

    document index   3       0          2    ...      documents in stream order
    stream           |-------|----------|----|...
    samples          |--0--|--1--|--2--|--3--|...     sample index: (position in the document index, token offset)
    shuffle index    2 0 3 1 ...                      samples in training order

Everything is vectorised: bisection in the running sums of document lengths finds the start of sample k.

Inside a sample, a document ends with its end-of-document token, which still belongs to it:

    tokens         5 7 eod 3 eod 2 2
    document_ids   0 0 0   1 1   2 2       attention is limited to tokens of the same number
    positions      0 1 2   0 1   0 1

Source:  Megatron-LM `gpt_dataset.py` and `helpers.cpp`, whose results these functions repeat exactly;
`_get_ltor_masks_and_position_ids`, without its dense mask of S x S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SAMPLES_AT_ONCE = 1 << 20
_INT32_LIMIT = 2**31 - 1
_UINT32_LIMIT = 2**32 - 2
# A last epoch of which a smaller share is used is shuffled separately.
_SEPARATE_BELOW = 0.80


@dataclass(frozen=True)
class EpochPlan:
    """Number of epochs and samples, and which of them are shuffled together.

    Attributes:
        shuffled_first: samples shuffled among themselves before the rest; equals `num_samples` unless the last
            epoch is separate.
        separate_last: whether the last epoch is shuffled apart, because the run uses less than 80 % of it.
    """

    tokens: int
    num_epochs: int
    num_samples: int
    shuffled_first: int
    separate_last: bool

    @property
    def parts(self) -> tuple[int, ...]:
        """Return the numbers of epochs whose documents are shuffled together."""
        return (self.num_epochs - 1, 1) if self.separate_last else (self.num_epochs,)


def plan_epochs(tokens: int, sequence_length: int, requested: int | None, *, extra: int, drop_last: bool) -> EpochPlan:
    """Compute the epochs and samples that serve `requested` samples (None: one epoch) of a split of `tokens` tokens.

    `tokens` must be above 0 when samples are requested.
    """
    num_epochs = 1
    if requested is not None and tokens > 0:
        num_epochs = max(1, -(-(requested * sequence_length + extra) // tokens))
    total = num_epochs * tokens - extra
    if drop_last:
        num_samples = max(0, total // sequence_length)
    else:
        # Single precision, as in the C++ helper.
        num_samples = max(0, math.ceil(np.float32(total) / np.float32(sequence_length)))
    shuffled_first = num_samples
    separate_last = False
    if num_epochs > 1:
        assert requested is not None
        before_last = ((num_epochs - 1) * tokens - extra) // sequence_length
        per_epoch = (tokens - extra) // sequence_length
        separate_last = requested - before_last < int(_SEPARATE_BELOW * per_epoch)
        if separate_last:
            shuffled_first = before_last
    return EpochPlan(tokens, num_epochs, num_samples, shuffled_first, separate_last)


def build_document_index(documents: range, plan: EpochPlan, rng: np.random.RandomState) -> NDArray[np.int32]:
    """Return the documents of the split in stream order, [num_epochs * len(documents)] i32."""
    once = np.arange(documents.start, documents.stop, dtype=np.int32)
    shuffled = []
    for epochs in plan.parts:
        part = np.tile(once, epochs)
        rng.shuffle(part)
        shuffled.append(part)
    return np.concatenate(shuffled)


def document_index_fits(document_index: NDArray[Any], documents: range, plan: EpochPlan) -> bool:
    """Return whether `build_document_index` can return this: each part holds every document once per epoch."""
    if document_index.shape != (plan.num_epochs * len(documents),) or document_index.dtype != np.int32:
        return False
    done = 0
    for epochs in plan.parts:
        part = document_index[done : done + epochs * len(documents)]
        if not _contains_each(part, documents.start, len(documents), epochs):
            return False
        done += len(part)
    return True


def _contains_each(values: NDArray[Any], start: int, count: int, times: int) -> bool:
    """Return whether `values` holds each of `start` to `start + count - 1` exactly `times` times, in any order."""
    if not len(values):
        return True
    if int(values.min()) < start or int(values.max()) >= start + count:
        return False
    if times == 1:
        seen = np.zeros(count, bool)
        for first in range(0, len(values), _SAMPLES_AT_ONCE):
            seen[values[first : first + _SAMPLES_AT_ONCE].astype(np.int64) - start] = True
        return bool(seen.all())
    return bool((np.bincount(values.astype(np.int64) - start, minlength=count) == times).all())


def build_sample_index(
    lengths: NDArray[np.int32], document_index: NDArray[np.int32], num_samples: int, sequence_length: int, *, extra: int
) -> NDArray[Any]:
    """Return the start of each sample and the end of the last; `extra` is 1 if samples have one more token, else 0.

    Returns:
        [num_samples + 1, 2]: position in `document_index` and token offset; i32 where it suffices, else i64.
    """
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    longest = int(lengths.max()) if len(lengths) else 0
    dtype = np.int32 if max(len(document_index), longest) <= _INT32_LIMIT else np.int64
    index = np.zeros((num_samples + 1, 2), dtype)
    for start in range(1, num_samples + 1, _SAMPLES_AT_ONCE):
        stop = min(start + _SAMPLES_AT_ONCE, num_samples + 1)
        index[start:stop] = _sample_starts(np.arange(start, stop, dtype=np.int64), ends, sequence_length, extra)
    return index


def _sample_starts(
    samples: NDArray[np.int64], ends: NDArray[np.int64], sequence_length: int, extra: int
) -> NDArray[np.int64]:
    """Return (position, offset) of samples after the first, given the stream position where each document ends.

    A sample starts `extra` before the end of the one before it, in the document where that one ended; a sample that
    ends exactly with a document ended there. Past the end of the stream it is the end of the last document.
    """
    sample_ends = np.minimum(samples * sequence_length + extra, ends[-1])
    position = np.searchsorted(ends, sample_ends, side="left")
    past_the_end = samples * sequence_length + extra > ends[-1]
    position[past_the_end] = len(ends) - 1
    begins = np.where(position > 0, ends[position - 1], 0)
    return np.stack([position, sample_ends - extra - begins], axis=1)


def sample_index_fits(
    sample_index: NDArray[Any],
    lengths: NDArray[np.int32],
    document_index: NDArray[Any],
    num_samples: int,
    sequence_length: int,
    *,
    extra: int,
) -> bool:
    """Return whether `build_sample_index` returns this. `document_index` must hold valid document numbers."""
    if sample_index.shape != (num_samples + 1, 2) or sample_index.dtype not in (np.int32, np.int64):
        return False
    if sample_index[0].any():
        return False
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    for start in range(1, num_samples + 1, _SAMPLES_AT_ONCE):
        samples = np.arange(start, min(start + _SAMPLES_AT_ONCE, num_samples + 1), dtype=np.int64)
        starts = _sample_starts(samples, ends, sequence_length, extra)
        if not np.array_equal(sample_index[start : start + len(samples)], starts):
            return False
    return True


def build_shuffle_index(plan: EpochPlan, rng: np.random.RandomState) -> NDArray[Any]:
    """Return the samples in training order, [num_samples] u32 where it suffices, else i64."""
    dtype = np.uint32 if plan.num_samples < _UINT32_LIMIT else np.int64
    first = np.arange(plan.shuffled_first, dtype=dtype)
    rng.shuffle(first)
    if plan.shuffled_first == plan.num_samples:
        return first
    last = np.arange(plan.shuffled_first, plan.num_samples, dtype=dtype)
    rng.shuffle(last)
    return np.concatenate([first, last])


def shuffle_index_fits(shuffle_index: NDArray[Any], plan: EpochPlan) -> bool:
    """Return whether `build_shuffle_index` can return this: both parts are permutations."""
    dtype = np.uint32 if plan.num_samples < _UINT32_LIMIT else np.int64
    if shuffle_index.shape != (plan.num_samples,) or shuffle_index.dtype != dtype:
        return False
    boundary = plan.shuffled_first
    return _contains_each(shuffle_index[:boundary], 0, boundary, 1) and _contains_each(
        shuffle_index[boundary:], boundary, plan.num_samples - boundary, 1
    )


def document_ids(tokens: NDArray[np.int64], eod: int) -> NDArray[np.int32]:
    """Number the documents of a sample from 0; each token gets the number of its document. [S] -> [S]."""
    ends = tokens == eod
    return np.asarray(np.cumsum(ends) - ends, np.int32)


def part_ids(lengths: Sequence[int], size: int) -> NDArray[np.int32]:
    """Number the parts of a sample from 0, given their lengths; each of the first `size` tokens gets its part. [size].

    Padding after the last part counts as part of it; parts without tokens are not numbered.
    """
    there = [length for length in lengths if length]
    numbers = np.repeat(np.arange(len(there), dtype=np.int32), there)[:size]
    return np.pad(numbers, (0, size - len(numbers)), mode="edge")


def reset_positions(documents: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return positions that restart at 0 with each document. [S] -> [S]."""
    places = np.arange(len(documents), dtype=np.int64)
    starts = np.flatnonzero(np.diff(documents, prepend=-1))
    return places - starts[documents]
