"""`megalith serve` beside programs that compute without end: seconds for one stream of 64 tokens after a prompt of 64.

    python benchmarks/busy.py CHECKPOINT --programs 0 1 2 --rounds 5

The programs begin when the server runs and has answered once; the rounds follow at once, so that the first ones have
the steps in which the server finds the number of threads that is fastest beside them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from machine import describe
from peers.generate import Asked, Server, client, requests


def _rounds(ask: Callable[[Sequence[Asked]], int], programs: int, rounds: int) -> list[float]:
    """Return the seconds of each round beside this number of programs."""
    seconds = list[float]()
    with ExitStack() as running:
        for _ in range(programs):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
            running.callback(busy.wait)
            running.callback(busy.kill)
        for index in range(rounds):
            began = time.perf_counter()
            ask(requests(1, 1 + index + rounds * programs))
            seconds.append(time.perf_counter() - began)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--programs", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(describe())
    with Server(options.checkpoint, options.precision) as port:
        ask = client(port)
        ask(requests(1, 0))
        for number in options.programs:
            seconds = _rounds(ask, number, options.rounds)
            print(f"beside {number} programs: {' '.join(f'{each:.2f}' for each in seconds)} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
