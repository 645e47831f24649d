"""The samples of a step as a function of the samples consumed: constant, ramped up, or in steps.

Whatever the form, it is a row of stages: from so many consumed samples on, so many samples a step. Iterations and
samples are turned into each other by walking over the stages, not over the steps, so that a run of millions of steps
costs nothing. Knows nothing of configuration or of torch.

Source: docs/reference/training.md#batch-size; golden `schedulers`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """From `start` consumed samples on, `size` samples a step."""

    start: int
    size: int


@dataclass(frozen=True)
class BatchSizes:
    """The stages of a run, the first from 0 on."""

    stages: tuple[Stage, ...]  # by ascending start
    unit: int = 1  # samples that all replicas consume at once: a step takes a multiple of it

    def fills(self, size: int) -> bool:
        """Whether so many samples are whole micro-batches on all replicas, and at least one on each."""
        return size > 0 and size % self.unit == 0

    @property
    def final(self) -> int:
        """Samples of a step at the end, as asked for."""
        return self.stages[-1].size

    def asked(self, consumed: int) -> int:
        """Samples asked for in the step that follows `consumed` samples."""
        return self.stages[bisect_right(self.stages, consumed, key=lambda stage: stage.start) - 1].size

    def running(self, consumed: int) -> int:
        """Samples of that step: what is asked for, rounded down to whole micro-batches on all replicas."""
        return self.asked(consumed) // self.unit * self.unit

    def num_micro_batches(self, consumed: int) -> int:
        """Micro-batches of that step on each replica."""
        return self.asked(consumed) // self.unit

    def consumed_after(self, iterations: int, consumed: int = 0) -> int:
        """Samples consumed when so many more steps are done."""
        for stage, end in self._from(consumed):
            if end is None:
                return consumed + iterations * stage.size
            steps = min(iterations, max(0, math.ceil((end - consumed) / stage.size)))
            consumed, iterations = consumed + steps * stage.size, iterations - steps
        raise AssertionError("the last stage has no end")

    def iterations_of(self, samples: int) -> int:
        """Steps of a run that are complete within `samples` samples."""
        consumed, iterations = 0, 0
        for stage, end in self._from(0):
            fit = max(0, (samples - consumed) // stage.size)
            steps = fit if end is None else min(fit, max(0, math.ceil((end - consumed) / stage.size)))
            consumed, iterations = consumed + steps * stage.size, iterations + steps
            if steps == fit:
                break
        return iterations

    def _from(self, consumed: int) -> Iterator[tuple[Stage, int | None]]:
        """The stages that are not over, with the consumed samples that end each; None for the last."""
        ends = [*(stage.start for stage in self.stages[1:]), None]
        for stage, end in zip(self.stages, ends, strict=True):
            if end is None or end > consumed:
                yield stage, end


def constant(size: int, unit: int = 1) -> BatchSizes:
    """The same size throughout."""
    return BatchSizes((Stage(0, size),), unit)


def ramped(start: int, increment: int, samples: int, final: int, unit: int = 1) -> BatchSizes:
    """From `start` to `final` by whole increments that are spread over `samples` (`--rampup-batch-size`)."""
    count = (final - start) // increment
    assert count > 0 and start + count * increment == final, "a rule of the configuration"
    per_increment = samples / count
    stages = [Stage(0, start)]
    for number in range(1, count + 1):
        first = math.ceil(number * per_increment)
        while int(first / per_increment) < number:  # the quotient of floats may be a little smaller
            first += 1
        while first > 0 and int((first - 1) / per_increment) >= number:
            first -= 1
        if number == count:
            first = min(first, samples + 1)
        stages.append(Stage(first, start + number * increment))
    return BatchSizes(tuple(stages), unit)


def stepped(steps: Sequence[tuple[int, int]], seq_length: int, unit: int = 1) -> BatchSizes:
    """Sizes from thresholds in tokens on (`--step-batch-size-schedule`).

    A threshold takes effect at the last whole sample before it, as in Megatron.

    Args:
        steps: (tokens, size) in ascending order, as of `read_steps`.

    Raises:
        ValueError: the first threshold is not within the first sample, or two are within one; says which.
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
    return BatchSizes(stages, unit)


_MULTIPLES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def read_steps(text: str) -> list[tuple[int, int]] | None:
    """Read `0:768 250B:1536` (tokens:size, by blanks or commas) into ascending order; None if it is not of that form.

    Both numbers may have a suffix and a fraction, which is cut off, as in Megatron.
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
