"""How a global batch is made of micro-batches."""

from __future__ import annotations

from megalith.errors import ConfigError


def num_micro_batches(global_batch_size: int, micro_batch_size: int, data_parallel_size: int) -> int:
    """Micro-batches that each data-parallel rank accumulates before one optimizer step.

    Raises:
        ConfigError: the global batch is not a whole number of rounds of micro-batches.
    """
    samples_a_round = micro_batch_size * data_parallel_size
    if global_batch_size % samples_a_round:
        below = global_batch_size // samples_a_round * samples_a_round
        legal = f"{below} or {below + samples_a_round}" if below else f"{samples_a_round}"
        raise ConfigError(
            f"global batch size ({global_batch_size}) is not divisible by micro batch size ({micro_batch_size}) "
            f"times data parallel size ({data_parallel_size}); use --global-batch-size {legal}"
        )
    return global_batch_size // samples_a_round
