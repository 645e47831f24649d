"""Data loader: micro-batches of torch tensors in sampling order, read ahead by threads.

A sampling order is a pure function of the number of samples consumed so far over all ranks, so a checkpoint needs no
more than that number. `rank` and `num_ranks` are those of the data-parallel group.

Neither order nor content depends on the number of workers. Threads suffice: a sample is a copy out of a memory map,
during which numpy releases the GIL; unlike processes they need no shared memory and cannot be orphaned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.data.samples import MapDataset
from megalith.errors import DataError

_READ_AHEAD = 2  # micro-batches per worker

Batch = dict[str, Tensor]


class BatchSampler(Protocol):
    """Sampling order: the samples of each micro-batch, forever or until the split is used up."""

    def micro_batches(self, consumed: int, rank: int, num_ranks: int) -> Iterator[Sequence[int | None]]:
        """Yield the samples of each micro-batch of a rank after `consumed` samples; None is padding without a loss."""
        ...


@dataclass(frozen=True)
class SequentialSampler:
    """`--dataloader-type single`: dataset order, once.

    Samples from `consumed` on are dealt in blocks of `micro_batch_size * num_ranks`. Rank r takes the r-th
    `micro_batch_size` of each block; a last block that is not full is dropped. A run that resumes with another
    micro-batch size or number of ranks keeps the order of the samples, because only their number counts.

    Source:  Megatron-LM `MegatronPretrainingSampler`.
    """

    total: int
    micro_batch_size: int

    def micro_batches(self, consumed: int, rank: int, num_ranks: int) -> Iterator[Sequence[int | None]]:
        block = self.micro_batch_size * num_ranks
        first = rank * self.micro_batch_size
        for start in range(consumed, self.total - (self.total - consumed) % block, block):
            yield range(start + first, start + first + self.micro_batch_size)


@dataclass(frozen=True)
class CyclicSampler:
    """`--dataloader-type cyclic`: endless epochs, each shuffled anew.

    An epoch ends with the last block that is full on all ranks; the samples after it are skipped in this epoch. The
    order of an epoch is a permutation seeded with the number of the epoch; every rank permutes its own part of the
    samples.

    Source:  Megatron-LM `MegatronPretrainingRandomSampler`.
    """

    total: int
    micro_batch_size: int

    def micro_batches(self, consumed: int, rank: int, num_ranks: int) -> Iterator[Sequence[int | None]]:
        block = self.micro_batch_size * num_ranks
        per_epoch = self.total - self.total % block
        if per_epoch and consumed % per_epoch % block:
            raise DataError(
                f"the run is {consumed % per_epoch} samples into an epoch of --dataloader-type cyclic, which is not a "
                f"multiple of --micro-batch-size {self.micro_batch_size} x data-parallel size {num_ranks} = {block}: "
                "the order of an epoch depends on both, so resume with the same values"
            )
        return self._epochs(consumed, rank, num_ranks) if per_epoch else iter(())

    def _epochs(self, consumed: int, rank: int, num_ranks: int) -> Iterator[Sequence[int | None]]:
        size = self.micro_batch_size
        part = self.total // (size * num_ranks) * size
        while True:
            epoch, done = divmod(consumed, part * num_ranks)
            generator = torch.Generator().manual_seed(epoch)
            order = rank * part + torch.randperm(part, generator=generator)[done // num_ranks :]
            for start in range(0, len(order) - size + 1, size):
                yield order[start : start + size].tolist()
            consumed += part * num_ranks - done


@dataclass(frozen=True)
class FullValidationSampler:
    """`--full-validation`: every sample once in dataset order, repeated for every evaluation.

    The last global batch is padded with None. Earlier consumption does not count: an evaluation begins with sample 0.
    """

    total: int
    micro_batch_size: int
    num_micro_batches: int  # of a global batch, for each rank

    def iterations(self, num_ranks: int) -> int:
        """Return the global batches of one evaluation."""
        return -(-self.total // (self.micro_batch_size * self.num_micro_batches * num_ranks))

    def micro_batches(self, consumed: int, rank: int, num_ranks: int) -> Iterator[Sequence[int | None]]:
        block = self.micro_batch_size * num_ranks
        while self.total:
            for start in range(0, self.iterations(num_ranks) * self.num_micro_batches * block, block):
                first = start + rank * self.micro_batch_size
                yield [
                    number if number < self.total else None for number in range(first, first + self.micro_batch_size)
                ]


class BatchLoader:
    """Iterator over the micro-batches of one data-parallel rank.

    Each is a dict of tensors of `micro_batch_size` rows: what the samples hold, such as tokens, labels, position_ids
    (i64) and loss_mask (f32).
    """

    def __init__(
        self,
        dataset: MapDataset,
        micro_batch_size: int,
        consumed_samples: int,
        *,
        num_workers: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        sampler: BatchSampler | None = None,
    ) -> None:
        """Start after `consumed_samples`.

        Args:
            consumed_samples: samples that the run has used, over all ranks.
            num_workers: threads that read ahead; with 0 each micro-batch is read when it is requested.
            order: in which the samples come; that of the dataset, once, by default.
        """
        self.dataset = dataset
        self._block = micro_batch_size * num_ranks
        self._consumed = consumed_samples
        sampler = sampler or SequentialSampler(len(dataset), micro_batch_size)
        self._batches = sampler.micro_batches(consumed_samples, rank, num_ranks)
        self._threads = ThreadPoolExecutor(num_workers, "megalith-data") if num_workers else None
        self._depth = max(1, num_workers * _READ_AHEAD)
        self._ahead: deque[Callable[[], Batch]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next micro-batch. Raises DataError if the dataset has no full block of samples left."""
        self._read_ahead()
        if not self._ahead:
            raise self._exhausted_error()
        batch = self._ahead.popleft()()
        if self._threads is not None:
            self._read_ahead()
        self._consumed += self._block
        return batch

    def close(self) -> None:
        """Stop the threads. The loader cannot be used afterwards."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _read_ahead(self) -> None:
        while len(self._ahead) < self._depth and (samples := next(self._batches, None)) is not None:
            read = partial(self._collate, samples)
            self._ahead.append(read if self._threads is None else self._threads.submit(read).result)

    def _collate(self, samples: Sequence[int | None]) -> Batch:
        rows = [self.dataset[sample] if sample is not None else self._padding_sample() for sample in samples]
        return {field: torch.from_numpy(np.stack([row[field] for row in rows])) for field in rows[0]}

    def _padding_sample(self) -> dict[str, NDArray[Any]]:
        """Return a sample that pads a batch: the first sample with its losses (two of them in BERT) masked out."""
        sample = self.dataset[0]
        without = {"loss_mask": np.zeros_like(sample["loss_mask"])}
        if "is_random" in sample:
            without["is_random"] = np.full_like(sample["is_random"], -1)
        return {**sample, **without}

    def _exhausted_error(self) -> DataError:
        dataset = self.dataset
        return DataError(
            f"the {dataset.name} data is used up: {self._consumed} of its {len(dataset)} samples are consumed and the "
            f"next step needs {self._block} more; it was built for {dataset.request_text}: raise --train-iters or "
            "--train-samples, or start a new run"
        )
