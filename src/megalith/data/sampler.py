"""Which samples a data-parallel rank takes for each micro-batch: in order, from where the run stands."""

from __future__ import annotations

from collections.abc import Iterator


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
