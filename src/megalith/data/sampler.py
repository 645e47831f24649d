"""Which samples a data-parallel rank takes for each micro-batch, from where the run stands on.

An order is a pure function of the number of samples consumed so far, over all ranks, so that a checkpoint need hold no
more than that number. `rank` and `num_ranks` are those of the data-parallel axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megalith.errors import DataError


class Order(Protocol):
    """The micro-batches of a split, forever or until its samples are used up."""

    def micro_batches(self, consumed: int, rank: int, num_ranks: int) -> Iterator[Sequence[int | None]]:
        """The samples of each micro-batch of a rank; None fills up a batch and carries no loss.

        Args:
            consumed: samples that the run has used, over all ranks.
        """
        ...


@dataclass(frozen=True)
class Sequential:
    """`--dataloader-type single`: in the order of the dataset, once.

    Attributes:
        total: samples of the dataset.
        micro_batch_size: samples of a micro-batch.
    """

    total: int
    micro_batch_size: int

    def micro_batches(self, consumed: int, rank: int, num_ranks: int) -> Iterator[Sequence[int | None]]:
        return sequential_micro_batches(self.total, consumed, self.micro_batch_size, rank=rank, num_ranks=num_ranks)


@dataclass(frozen=True)
class Cyclic:
    """`--dataloader-type cyclic`: epoch after epoch, each in an order of its own.

    An epoch ends with the last block that is full on all ranks; the samples behind it wait for another order.

    Attributes:
        total, micro_batch_size: as in `Sequential`.
    """

    total: int
    micro_batch_size: int

    def micro_batches(self, consumed: int, rank: int, num_ranks: int) -> Iterator[Sequence[int | None]]:
        block = self.micro_batch_size * num_ranks
        per_epoch = self.total - self.total % block
        if per_epoch and consumed % per_epoch % block:
            raise DataError(
                f"the run stands {consumed % per_epoch} samples into an epoch of --dataloader-type cyclic, which is no "
                f"multiple of --micro-batch-size {self.micro_batch_size} x data-parallel size {num_ranks} = {block}: "
                "the order of an epoch depends on both, so resume with those that the run had"
            )
        return self._epochs(consumed, rank, num_ranks) if per_epoch else iter(())

    def _epochs(self, consumed: int, rank: int, num_ranks: int) -> Iterator[Sequence[int | None]]:
        per_epoch = self.total - self.total % (self.micro_batch_size * num_ranks)
        while True:
            yield from cyclic_micro_batches(self.total, consumed, self.micro_batch_size, rank=rank, num_ranks=num_ranks)
            consumed += per_epoch - consumed % per_epoch


@dataclass(frozen=True)
class WholePasses:
    """`--full-validation`: every sample once, in the order of the dataset, then all of them again for the next time.

    The last global batch is filled up with None. What was consumed before does not count: a pass begins with sample 0.

    Attributes:
        total, micro_batch_size: as in `Sequential`.
        num_micro_batches: of a global batch, for each rank.
    """

    total: int
    micro_batch_size: int
    num_micro_batches: int

    def iterations(self, num_ranks: int) -> int:
        """Global batches of a pass."""
        return -(-self.total // (self.micro_batch_size * self.num_micro_batches * num_ranks))

    def micro_batches(self, consumed: int, rank: int, num_ranks: int) -> Iterator[Sequence[int | None]]:
        block = self.micro_batch_size * num_ranks
        while self.total:
            for start in range(0, self.iterations(num_ranks) * self.num_micro_batches * block, block):
                first = start + rank * self.micro_batch_size
                yield [
                    number if number < self.total else None for number in range(first, first + self.micro_batch_size)
                ]


def sequential_micro_batches(
    total: int, consumed: int, micro_batch_size: int, *, rank: int = 0, num_ranks: int = 1, drop_last: bool = True
) -> Iterator[range]:
    """Sample numbers of each micro-batch of one rank.

    The samples from `consumed` on are dealt in blocks of `micro_batch_size * num_ranks`; rank r takes the r-th
    `micro_batch_size` of each block. A run that resumes with another micro-batch size or number of ranks keeps
    the order of the samples, because only their number counts.

    Args:
        total: samples of the dataset.
        consumed: samples that the run has used, over all ranks.
        micro_batch_size: samples of a micro-batch.
        rank: rank among the data-parallel ranks.
        num_ranks: data-parallel ranks.
        drop_last: leave out a last block that is not full; otherwise ranks take what it has for them.

    Source:  Megatron-LM `MegatronPretrainingSampler`.
    """
    block = micro_batch_size * num_ranks
    stop = total - (total - consumed) % block if drop_last else total
    for start in range(consumed, stop, block):
        first = start + rank * micro_batch_size
        yield range(min(first, total), min(first + micro_batch_size, total))


def cyclic_micro_batches(
    total: int, consumed: int, micro_batch_size: int, *, rank: int = 0, num_ranks: int = 1, sharded: bool = True
) -> Iterator[list[int]]:
    """Sample numbers of each full micro-batch that is left to one rank in the current epoch.

    The order of an epoch is a permutation whose seed is the number of the epoch. Sharded, every rank permutes the
    samples of its own part of the dataset; else the ranks deal out one permutation of all samples, and may have one
    micro-batch more or less than others.

    Args:
        total, consumed, micro_batch_size, rank, num_ranks: as in `sequential_micro_batches`; a block of
            `micro_batch_size * num_ranks` samples is not left half consumed.

    Source:  Megatron-LM `MegatronPretrainingRandomSampler`.
    """
    block = micro_batch_size * num_ranks
    per_epoch = total - total % block
    if not per_epoch:
        return
    epoch, done = divmod(consumed, per_epoch)
    generator = torch.Generator().manual_seed(epoch)
    if sharded:
        part = total // block * micro_batch_size
        order = rank * part + torch.randperm(part, generator=generator)[done // num_ranks :]
    else:
        whole = total // micro_batch_size * micro_batch_size
        order = torch.randperm(whole, generator=generator)[done:][rank::num_ranks]
    for start in range(0, len(order) - micro_batch_size + 1, micro_batch_size):
        yield order[start : start + micro_batch_size].tolist()
