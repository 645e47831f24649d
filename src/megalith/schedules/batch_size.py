"""Global batch size as a function of consumed samples: constant, ramped up, or stepped.

All forms are a sequence of stages. Iterations and samples are converted by iterating over the stages instead of the
steps, so that the cost does not grow with the length of the run.

Source: docs/reference/training.md#batch-size; golden `schedulers`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Global batch size `size` from `start` consumed samples on."""

    start: int
    size: int


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Stages of the global batch size of a run; the first starts at 0."""

    stages: tuple[Stage, ...]  # by ascending start
    unit: int = 1  # micro-batch size times replicas: a step consumes a multiple of it

    def is_whole(self, size: int) -> bool:
        """Return whether a batch of this size consists of whole micro-batches on all replicas, at least one each."""
        return size > 0 and size % self.unit == 0

    @property
    def final(self) -> int:
        """Return the configured global batch size of the last stage."""
        return self.stages[-1].size

    def nominal_size(self, consumed: int) -> int:
        """Return the configured global batch size of the step after `consumed` samples."""
        return self.stages[bisect_right(self.stages, consumed, key=lambda stage: stage.start) - 1].size

    def num_micro_batches(self, consumed: int) -> int:
        """Return the micro-batches of that step on each replica: the size is rounded down to whole ones."""
        return self.nominal_size(consumed) // self.unit

    def consumed_after(self, iterations: int, consumed: int = 0) -> int:
        """Return the samples consumed after `iterations` more steps."""
        for stage, end in self._remaining_stages(consumed):
            if end is None:
                return consumed + iterations * stage.size
            steps = min(iterations, max(0, math.ceil((end - consumed) / stage.size)))
            consumed, iterations = consumed + steps * stage.size, iterations - steps
        raise AssertionError("the last stage has no end")

    def iterations_of(self, samples: int) -> int:
        """Return the number of steps that are complete within `samples` samples."""
        consumed, iterations = 0, 0
        for stage, end in self._remaining_stages(0):
            fit = max(0, (samples - consumed) // stage.size)
            steps = fit if end is None else min(fit, max(0, math.ceil((end - consumed) / stage.size)))
            consumed, iterations = consumed + steps * stage.size, iterations + steps
            if steps == fit:
                break
        return iterations

    def _remaining_stages(self, consumed: int) -> Iterator[tuple[Stage, int | None]]:
        """Yield the stages that are not over, each with the consumed samples at its end (None for the last)."""
        ends = [*(stage.start for stage in self.stages[1:]), None]
        for stage, end in zip(self.stages, ends, strict=True):
            if end is None or end > consumed:
                yield stage, end


def constant(size: int, unit: int = 1) -> BatchSizeSchedule:
    """Return a constant global batch size."""
    return BatchSizeSchedule((Stage(0, size),), unit)


def ramped(start: int, increment: int, samples: int, final: int, unit: int = 1) -> BatchSizeSchedule:
    """Return a ramp from `start` to `final` in equal increments over `samples` samples (`--rampup-batch-size`)."""
    count = (final - start) // increment
    assert count > 0 and start + count * increment == final, "a rule of the configuration"
    per_increment = samples / count
    stages = [Stage(0, start)]
    for number in range(1, count + 1):
        first = math.ceil(number * per_increment)
        while int(first / per_increment) < number:  # rounding may make the quotient smaller
            first += 1
        while first > 0 and int((first - 1) / per_increment) >= number:
            first -= 1
        if number == count:
            first = min(first, samples + 1)
        stages.append(Stage(first, start + number * increment))
    return BatchSizeSchedule(tuple(stages), unit)


def stepped(steps: Sequence[tuple[int, int]], seq_length: int, unit: int = 1) -> BatchSizeSchedule:
    """Return batch sizes with thresholds in tokens (`--step-batch-size-schedule`).

    A threshold takes effect at the last whole sample before it, as in Megatron.

    Args:
        steps: (tokens, size) in ascending order, as of `read_steps`.

    Raises:
        ValueError: the first threshold is not within the first sample, or two are within one sample.
    """
    stages = tuple(Stage(tokens // seq_length, size) for tokens, size in steps)
    if stages[0].start:
        raise ValueError(f"the smallest threshold is {steps[0][0]} tokens; begin with 0:SIZE")
    for before, after, (tokens, _) in zip(stages, stages[1:], steps[1:], strict=False):
        if before.start == after.start:
            raise ValueError(
                f"the threshold of {tokens} tokens and the one before it are within one sample of {seq_length} tokens; "
                "leave one of them out"
            )
    return BatchSizeSchedule(stages, unit)


_MULTIPLES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def read_steps(text: str) -> list[tuple[int, int]] | None:
    """Parse `0:768 250B:1536` (tokens:size, separated by blanks or commas), sorted by tokens; None if it is malformed.

    Both numbers may have a suffix (K, M, B, T) and a fraction, which is truncated, as in Megatron.
    """
    steps: list[tuple[int, int]] = []
    for word in text.replace(",", " ").split():
        tokens, _, size = word.partition(":")
        threshold, samples = _number(tokens), _number(size)
        if threshold is None or samples is None or threshold < 0 or samples < 1:
            return None
        steps.append((threshold, samples))
    return sorted(steps, key=lambda step: step[0]) or None


def _number(text: str) -> int | None:
    factor = _MULTIPLES.get(text[-1:].upper(), 1)
    try:
        return int(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):  # no number, or an infinite one
        return None
