"""Process settings on a CPU: how glibc allocates and returns memory, and the number of threads for decoding."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# mallopt(3) and madvise(2)
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_HUGE_PAGES, _SMALL_PAGES = 14, 15
_GROWTH = 64 << 20  # bytes that the heap grows by at least


def keep_freed_memory(processes: int) -> bool:
    """Make glibc keep freed memory for the next tensor, in huge pages if available, instead of returning it.

    By default glibc returns large blocks to the system when they are freed, and each step faults their pages in again,
    4 KiB at a time. With freed memory kept in pages of 2 MiB, a step of the 124M model takes 0.86 to 0.97 of the time
    at the same peak memory (benchmarks/results/README.md).

    This reserves only addresses, half of the machine's memory divided by the number of processes: a page uses memory
    when it is first written. Beyond that the heap grows in small pages. Nothing is changed with another C library than
    glibc, if the user has configured malloc (GLIBC_TUNABLES, MALLOC_...) or preloads libraries, which may contain an
    allocator (LD_PRELOAD), or if addresses are limited.

    Returns:
        Whether the settings were applied.
    """
    settled = any(name in ("GLIBC_TUNABLES", "LD_PRELOAD") or name.startswith("MALLOC_") for name in os.environ)
    if platform.libc_ver()[0] != "glibc" or settled or _addresses_limited():
        return False
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    # -1 as a size: no limit. One arena: collectives of gloo copy tensors in threads, which else would not find what
    # other threads have freed.
    settings = ((_TRIM_THRESHOLD, -1), (_TOP_PAD, _GROWTH), (_MMAP_MAX, 0), (_ARENA_MAX, 1))
    if not all([libc.mallopt(name, value) for name, value in settings]):
        return False
    # The block that is freed here stays at the end of the heap, so that huge pages can be requested before first use.
    libc.free(libc.malloc(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (2 * processes)))
    for start, stop in _heap():
        _advise(start, stop, _HUGE_PAGES)
    return True


def return_freed_memory() -> None:
    """Return the pages of freed blocks to the system, but for those at the end of the heap, which the next step needs.

    What loading a model has freed lies in pieces between what stays, most of it too small for anything later.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
        libc.malloc_trim(2 ** (8 * ctypes.sizeof(ctypes.c_size_t) - 2))  # bytes that are left at the end


def use_small_pages(start: int, num_bytes: int) -> None:
    """Let `num_bytes` from the address `start` on take memory by pages of the system's size as they are written.

    For memory that is written here and there: after `keep_freed_memory` the first byte of each 2 MiB takes them all.
    """
    if platform.system() == "Linux":
        page = os.sysconf("SC_PAGE_SIZE")
        _advise(-(-start // page) * page, (start + num_bytes) // page * page, _SMALL_PAGES)


def _advise(start: int, stop: int, advice: int) -> None:
    """Call madvise(2) on whole pages; without effect on a kernel without huge pages."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.madvise(start, max(0, stop - start), advice)


def _addresses_limited() -> bool:
    """Return whether reserving addresses is limited, by this process's ulimits or by strict overcommit."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        return True
    policy = Path("/proc/sys/vm/overcommit_memory")
    return not policy.is_file() or policy.read_text().strip() == "2"


def _heap() -> Iterator[tuple[int, int]]:
    """Yield start and end address of the heap."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            start, stop = line.split()[0].split("-")
            yield int(start, 16), int(stop, 16)


_ROUNDS = 5
_LONG_SECONDS = 0.2  # a longer step has enough work for all threads
_CLEARLY = 0.9


def tune_num_threads(
    step: Callable[[], object],
    most: int,
    set_count: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Set the number of threads with which a decoding step is fastest, and return it.

    Such a step is a series of small products, each divided among threads that wait for one another at its end, asleep,
    as spinning threads would take the cores from the event loop and from clients. More threads are slower if waking
    them takes as long as the work, which is measured: `most`, half of it, and so on down to one, in turn; fewer threads
    are chosen if they are clearly faster.
    """

    def seconds(count: int) -> float:
        set_count(count)
        step()  # creates threads and warms caches
        began = clock()
        step()
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


_Steps = list[tuple[float, float]]  # seconds of each, and of the processor by all threads
_STEPS = 3  # that a number of threads is judged by
_STARVED = 0.75  # of the time of all threads: those that are computing or spin while they wait have more
_FIRST_WAIT, _LONGEST_WAIT = 2.0, 64.0  # seconds between trials


class ThreadsUnderLoad:
    """Halves the number of threads of decoding steps while other programs use their cores.

    Threads that share a product wait for one another at its end, for a time slice if the core of one is taken. Beside
    a single busy program of another session, on two cores, a step of a 124M model took 540 ms with two threads and 12
    with one; without that program 8 and 11. So if the threads do not get their time, half of them is tried for a few
    steps, and kept if clearly faster; later all are tried again, at intervals that grow while they are not faster.

    Args:
        count: Number of threads at first.
        most: The largest number.
        set_count: Sets the number of threads.
        clock: Returns seconds.
        cpu_clock: Returns the processor time of all threads of this process in seconds.
    """

    def __init__(
        self,
        count: int,
        most: int,
        set_count: Callable[[int], None],
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self.count, self._most, self._set_count = count, most, set_count
        self._clock, self._cpu_clock = clock, cpu_clock
        self._tokens, self._steps = 0, _Steps()  # the last ones alike
        self._trial: tuple[int, float] | None = None  # the number before, and the seconds of a step with it
        self._wait, self._next = _FIRST_WAIT, clock() if count == most else clock() + _FIRST_WAIT

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Execute a step of `tokens` tokens in this context."""
        began, cpu_began = self._clock(), self._cpu_clock()
        yield
        seconds, cpu_seconds = self._clock() - began, self._cpu_clock() - cpu_began
        if tokens != self._tokens:  # not to be compared
            self._tokens, self._steps = tokens, []
            if self._trial is not None:
                self._use(self._trial[0])
                self._trial = None
        self._steps = [*self._steps, (seconds, cpu_seconds)][-_STEPS:]
        if self._trial is not None:
            self._judge(*self._trial)
        elif len(self._steps) == _STEPS and self._clock() >= self._next:
            starved = sum(cpu for _, cpu in self._steps) < _STARVED * self.count * sum(wall for wall, _ in self._steps)
            self._try(max(1, self.count // 2) if starved else self._most)

    def _try(self, count: int) -> None:
        if count != self.count:
            self._trial = self.count, _median(self._steps)
            self._use(count)

    def _judge(self, before: int, usual: float) -> None:
        """Return to the previous number of threads unless the one on trial is faster; fewer must be clearly faster."""
        more = self.count > before
        late = self._steps[-1][0] > 2 * usual
        if len(self._steps) < _STEPS and not late:
            return
        self._trial = None
        if late or _median(self._steps) > usual * (1.0 if more else _CLEARLY):
            self._use(before)
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
        elif more:
            self._wait = _FIRST_WAIT
        self._next = self._clock() + self._wait

    def _use(self, count: int) -> None:
        self.count, self._steps = count, []
        self._set_count(count)


def _median(steps: _Steps) -> float:
    return sorted(seconds for seconds, _ in steps)[len(steps) // 2]
