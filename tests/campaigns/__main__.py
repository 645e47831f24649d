"""Long campaigns of random faults: `make campaign`, or `python -m tests.campaigns [NAME ...] [options]`.

They are no part of `make test`. Each prints its seed and a table, and the exit code is 1 where one has found something.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from . import configurations, flip, fuzz, kill
from .cluster import cases
from .material import print_table

CAMPAIGNS: dict[str, Callable[[argparse.Namespace, Path], tuple[list[list[str]], list[str]]]] = {
    "kill": lambda options, folder: kill.run(options.kills, options.seed, folder),
    "flip": lambda options, folder: flip.run(options.flips, options.seed, folder),
    "cluster": lambda options, folder: cases.run(folder),
    "prove": lambda options, folder: configurations.run(options.configurations),
    "fuzz": lambda options, folder: fuzz.run(options.minutes, options.seed, folder),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__)
    parser.add_argument("campaigns", nargs="*", metavar="NAME", help=f"{', '.join(CAMPAIGNS)} (default: all)")
    parser.add_argument("--kills", type=int, default=100, metavar="N", help="SIGKILLs of training runs (100)")
    parser.add_argument("--flips", type=int, default=300, metavar="N", help="single-bit flips (300)")
    parser.add_argument("--configurations", type=int, default=50, metavar="N", help="to prove, of new seeds (50)")
    parser.add_argument("--minutes", type=float, default=20, metavar="M", help="of API fuzzing (20)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), metavar="N")
    options = parser.parse_args()
    if unknown := set(options.campaigns) - set(CAMPAIGNS):
        parser.error(f"there is no campaign {', '.join(unknown)}; there are {', '.join(CAMPAIGNS)}")
    os.environ["OMP_NUM_THREADS"] = "1"
    failed = False
    for name in options.campaigns or CAMPAIGNS:
        print(f"== {name}, --seed {options.seed}", flush=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"megalith-{name}-") as folder:
            rows, findings = CAMPAIGNS[name](options, Path(folder))
        print_table(rows)
        for finding in findings:
            print(f"FOUND {finding}")
        print(
            f"{name}: {len(findings)} findings in {time.monotonic() - began:.0f} s, --seed {options.seed}", flush=True
        )
        failed |= bool(findings)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
