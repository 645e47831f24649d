"""Freed memory that stays with the process: no page of it is faulted in twice; and memory that is used bit by bit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Writes 64 MiB eight times over, freed each time, and prints the pages that were faulted in after the second.
CHILD = """
import resource, sys
from megalith.kernels.cpu.process import keep_freed_memory
print(keep_freed_memory(1) if sys.argv[1] == "keep" else False)
import numpy
for turn in range(8):
    if turn == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    numpy.empty(64 << 20, dtype=numpy.uint8).fill(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _run(how: str, **extra: str) -> tuple[str, int]:
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GLIBC_TUNABLES", "LD_PRELOAD") and not name.startswith(("MALLOC_", "NUMPY_"))
    }
    command = [sys.executable, "-c", CHILD, how]
    finished = subprocess.run(command, env={**environ, **extra}, capture_output=True, text=True, check=True)
    done, faults = finished.stdout.split()
    return done, int(faults)


glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")


@glibc
def test_freed_memory_is_used_again_without_page_faults() -> None:
    done, faults = _run("keep")
    if done == "False":
        pytest.skip("addresses are limited on this machine (ulimit -v, vm.overcommit_memory)")
    assert faults < 8  # of 6 x 64 MiB, 32 huge pages each at the least
    assert _run("leave")[1] >= 6 * 32


@glibc
@pytest.mark.parametrize("variable", ["GLIBC_TUNABLES=glibc.malloc.arena_max=1", "MALLOC_ARENA_MAX=1", "LD_PRELOAD= "])
def test_what_the_user_has_set_stays(variable: str) -> None:
    name, value = variable.split("=", 1)
    assert _run("keep", **{name: value})[0] == "False"


@glibc
def test_limited_addresses_are_left_alone() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
    limited = subprocess.run([sys.executable, "-c", limit + CHILD, "keep"], capture_output=True, text=True, check=True)
    assert limited.stdout.split()[0] == "False"


CACHE = """
import re, sys, torch
from megalith.kernels.cpu.process import keep_freed_memory
from megalith.serve.cache import PagedKVCache
keep_freed_memory(1)
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10
cache = PagedKVCache(8, 4096, 16, 8, 64, dtype=torch.float32, device=torch.device("cpu"))
before = resident()
for keys, values in zip(cache.layer_keys, cache.layer_values):
    keys[:, 0], values[:, 0] = 1, 1
print(cache.bytes >> 20, resident() - before)
"""


@glibc
def test_one_token_takes_little_of_a_large_key_value_cache() -> None:
    finished = subprocess.run([sys.executable, "-c", CACHE], capture_output=True, text=True, check=True)
    size, taken = map(int, finished.stdout.split())
    assert size == 2048
    assert taken < 32  # MiB; 8 layers of 8 heads, keys and values: 256 in pages of 2 MiB
