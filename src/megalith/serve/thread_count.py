"""How many threads a step of a small model is worth: more are slower where waking them takes as long as the work.

A step of decoding is a row of small products. Each is divided among the threads, which wait for one another at its end:
asleep, as spinning threads would take the cores from the event loop and from clients. So it is tried, not computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from megalith.serve.runner import Batch, Piece, Runner

_ROWS = 8  # sequences in a typical step
_ROUNDS = 5
_LONG_SECONDS = 0.2  # a step that takes longer is work enough for all threads
_CLEARLY = 0.9


def fastest_count(
    runner: Runner,
    most: int,
    set_count: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
    *,
    encodes: bool = False,
) -> int:
    """The number of threads with which a step takes the least time; it is set.

    Tried are `most`, half of it, and so on down to one, in turn; fewer are taken if they are clearly faster. Written
    over are the first blocks of the cache: call it before anything is served.

    Args:
        most: threads that there may be.
        set_count: sets their number.
        encodes: whether a text for an encoder stands before each token.
    """
    rows = range(min(_ROWS, runner.num_blocks))
    if encodes:
        pairs = [[row % runner.num_blocks, (row + 1) % runner.num_blocks] for row in rows]
        batch = Batch([Piece([0], runner.block_size, blocks, source=1) for blocks in pairs])
    else:
        batch = Batch([Piece([0], 0, [row]) for row in rows])

    def seconds(count: int) -> float:
        set_count(count)
        runner.run(batch)  # threads are made, and what was in the caches of others is read again
        began = clock()
        runner.run(batch)
        return clock() - began

    best = {most: seconds(most)}
    if most > 1 and best[most] < _LONG_SECONDS:
        counts = [most >> shift for shift in range(most.bit_length())]
        for _ in range(_ROUNDS):
            best = {count: min(best.get(count, float("inf")), seconds(count)) for count in counts}
    fewest = min(best, key=lambda count: best[count])
    chosen = fewest if best[fewest] < _CLEARLY * best[most] else most
    set_count(chosen)
    return chosen
