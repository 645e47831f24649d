"""Micro-batches of torch tensors in the order of the samples, read ahead by threads.

The order and the content never depend on the number of workers. Threads suffice: a sample is a copy out of a memory
map, during which numpy lets other threads run; unlike processes they need no shared memory and cannot be orphaned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.data.sampler import Order, Sequential
from megalith.errors import DataError

_READ_AHEAD = 2  # micro-batches per worker

Batch = dict[str, Tensor]


class Samples(Protocol):
    """A dataset of one split.

    Attributes:
        name: train, valid or test.
        requested: number of samples that it was built for, None for one epoch.
        built_for: the same in words, with what it is made of.
    """

    name: str
    requested: int | None

    @property
    def built_for(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, item: int, /) -> dict[str, NDArray[Any]]: ...


class BatchLoader:
    """Iterator over the micro-batches of one data-parallel rank.

    Each is a dict of tensors of `micro_batch_size` rows: what the samples hold, such as tokens, labels, position_ids
    (i64) and loss_mask (f32).
    """

    def __init__(
        self,
        dataset: Samples,
        micro_batch_size: int,
        consumed_samples: int,
        *,
        num_workers: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        order: Order | None = None,
    ) -> None:
        """Start after `consumed_samples`.

        Args:
            dataset: where the samples come from.
            micro_batch_size: samples of a micro-batch.
            consumed_samples: samples that the run has used, over all ranks.
            num_workers: threads that read ahead; with 0 each micro-batch is read when it is asked for.
            rank: rank among the data-parallel ranks.
            num_ranks: data-parallel ranks.
            order: in which the samples come; that of the dataset, once, by default.
        """
        self._dataset = dataset
        self._block = micro_batch_size * num_ranks
        self._consumed = consumed_samples
        order = order or Sequential(len(dataset), micro_batch_size)
        self._plan = order.micro_batches(consumed_samples, rank, num_ranks)
        self._threads = ThreadPoolExecutor(num_workers, "megalith-data") if num_workers else None
        self._depth = num_workers * _READ_AHEAD
        self._ahead: deque[Future[Batch]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch.

        Raises:  DataError if the dataset has no full block of samples left.
        """
        batch = self._read_now() if self._threads is None else self._read_ahead(self._threads)
        self._consumed += self._block
        return batch

    def close(self) -> None:
        """Stop the threads. The loader is of no use afterwards."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _read_now(self) -> Batch:
        samples = next(self._plan, None)
        if samples is None:
            raise self._exhausted()
        return self._collate(samples)

    def _read_ahead(self, threads: ThreadPoolExecutor) -> Batch:
        while len(self._ahead) < self._depth and (samples := next(self._plan, None)) is not None:
            self._ahead.append(threads.submit(self._collate, samples))
        if not self._ahead:
            raise self._exhausted()
        batch = self._ahead.popleft().result()
        if (samples := next(self._plan, None)) is not None:
            self._ahead.append(threads.submit(self._collate, samples))
        return batch

    def _collate(self, samples: Sequence[int | None]) -> Batch:
        rows = [self._dataset[sample] if sample is not None else self._filling() for sample in samples]
        return {field: torch.from_numpy(np.stack([row[field] for row in rows])) for field in rows[0]}

    def _filling(self) -> dict[str, NDArray[Any]]:
        """A sample that fills up a batch: the first one, without a loss; BERT's has two of them."""
        sample = self._dataset[0]
        without = {"loss_mask": np.zeros_like(sample["loss_mask"])}
        if "is_random" in sample:
            without["is_random"] = np.full_like(sample["is_random"], -1)
        return {**sample, **without}

    def _exhausted(self) -> DataError:
        dataset = self._dataset
        return DataError(
            f"the {dataset.name} data is used up: {self._consumed} of its {len(dataset)} samples are consumed and the "
            f"next step needs {self._block} more; it was built for {dataset.built_for}, so ask for more when building "
            "it (--train-iters or --train-samples) or start anew"
        )
