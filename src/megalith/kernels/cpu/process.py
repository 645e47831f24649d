"""The process on a CPU: how the C library takes its memory, and how many threads a step of decoding is worth."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# mallopt(3) and madvise(2)
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_HUGE_PAGES = 14
_GROWTH = 64 << 20  # bytes that the heap grows by at least


def keep_freed_memory(processes: int) -> bool:
    """Keep freed memory for the next tensor, in huge pages where the system has them, instead of giving it back.

    By its defaults glibc gives large tensors back when they are freed, and each step faults their pages in again, 4 KiB
    at a time. Kept in pages of 2 MiB, a step of the 124M model takes 0.86 to 0.97 of the time, with the same peak of
    memory (benchmarks/results/README.md).

    Only addresses are taken here, half of the machine's memory divided among its processes: a page takes memory when
    it is first written. Beyond that the heap grows as it needs to, in small pages. Nothing changes where the C library
    is another than glibc, where the user has set it up (GLIBC_TUNABLES, MALLOC_...) or preloads libraries, which may
    bring an allocator of their own (LD_PRELOAD), and where addresses are limited.

    Returns:
        Whether it was done.
    """
    settled = any(name in ("GLIBC_TUNABLES", "LD_PRELOAD") or name.startswith("MALLOC_") for name in os.environ)
    if platform.libc_ver()[0] != "glibc" or settled or _addresses_limited():
        return False
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    settings = ((_TRIM_THRESHOLD, -1), (_TOP_PAD, _GROWTH), (_MMAP_MAX, 0))  # -1 as a size: no limit
    if not all([libc.mallopt(name, value) for name, value in settings]):
        return False
    # What is taken and freed stays at the end of the heap, so that huge pages can be asked for before they are touched.
    libc.free(libc.malloc(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (2 * processes)))
    for start, stop in _heap():
        libc.madvise(start, stop - start, _HUGE_PAGES)  # a kernel without them says so, and nothing changes
    return True


def _addresses_limited() -> bool:
    """Whether untouched addresses count: by a limit of this process, or as memory that the system has promised."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        return True
    policy = Path("/proc/sys/vm/overcommit_memory")
    return not policy.is_file() or policy.read_text().strip() == "2"


def _heap() -> Iterator[tuple[int, int]]:
    """Where the heap lies, first and behind the last byte."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            start, stop = line.split()[0].split("-")
            yield int(start, 16), int(stop, 16)


_ROUNDS = 5
_LONG_SECONDS = 0.2  # a step that takes longer is work enough for all threads
_CLEARLY = 0.9


def fastest_count(
    step: Callable[[], object],
    most: int,
    set_count: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """The number of threads with which a step of decoding takes the least time; it is set.

    Such a step is a row of small products. Each is divided among the threads, which wait for one another at its end:
    asleep, as spinning threads would take the cores from the event loop and from clients. More of them are slower where
    waking them takes as long as the work, so it is tried, not computed: `most`, half of it, and so on down to one, in
    turn; fewer are taken if they are clearly faster.
    """

    def seconds(count: int) -> float:
        set_count(count)
        step()  # threads are made, and what was in the caches of others is read again
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
