"""How a dataset is cut into training, validation and test parts, and how many samples each is asked for."""

from __future__ import annotations

import re

from megalith.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")

Interval = tuple[float, float]
SplitMatrix = list[Interval | None]
Sizes = tuple[int | None, int | None, int | None]


def parse_split(split: str) -> SplitMatrix:
    """Shares such as "949,50,1" as intervals of [0, 1], None for a share of zero.

    Numbers may be separated by anything; missing ones are 0.

    Raises:  ConfigError if there are no or more than three numbers, or they are all 0.
    Source:  Megatron-LM `parse_and_normalize_split`, `convert_split_vector_to_split_matrix`.
    """
    numbers = re.findall(r"[.0-9]+", split)
    try:
        shares = [float(number) for number in numbers]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(SPLIT_NAMES) or sum(shares) == 0:
        raise ConfigError(f"--split {split!r} is not one to three numbers with a sum above 0, such as 949,50,1")
    shares += [0.0] * (len(SPLIT_NAMES) - len(shares))
    total = sum(shares)
    # Running sums of the normalised shares from the integer 0: the hashed description of an index shows them.
    bounds: list[float] = [0]
    for share in shares:
        bounds.append(bounds[-1] + share / total)
    return [(low, high) if high > low else None for low, high in zip(bounds, bounds[1:], strict=False)]


def interval_range(interval: Interval, count: int) -> range:
    """The elements of 0 to `count` - 1 that an interval takes; halves round to even, as in Megatron."""
    low, high = interval
    return range(round(low * count), round(high * count))


def target_sizes(
    *,
    train_iters: int,
    train_samples: int | None = None,
    eval_interval: int,
    eval_iters: int,
    global_batch_size: int,
    eval_batch_size: int | None = None,
) -> tuple[int, int, int]:
    """Samples that a run draws for training, validation and test.

    Args:
        train_iters: iterations of the whole run, also where `train_samples` limits it.
        train_samples: samples of the whole run; by default `train_iters` full batches.
        eval_interval: iterations between evaluations; one more follows the last iteration.
        eval_iters: batches of one evaluation.
        global_batch_size: samples of a batch.
        eval_batch_size: samples of a batch of an evaluation; as many unless given.

    Source:  Megatron-LM `get_train_valid_test_num_samples`.
    """
    train = train_iters * global_batch_size if train_samples is None else train_samples
    per_evaluation = eval_iters * (eval_batch_size or global_batch_size)
    return train, (train_iters // eval_interval + 1) * per_evaluation, per_evaluation
