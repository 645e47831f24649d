"""Commands of a page, run as they are typed there: ranks and programs as forks of the template."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from .warm import Finished, WarmProcess, places


def run_typed(line: str, folder: Path, warm: WarmProcess, *more: str, supervised: bool = False) -> Finished:
    """Run a line of a page in a folder, with more words behind it, and wait for its end.

    Args:
        supervised: `--nproc` starts its ranks itself; otherwise each is a fork, in place of a launcher.
    """
    words = line.partition("  # ")[0]
    command, _, rest = words.partition(" ")
    ranks = re.search(r"--nproc(?:_per_node)? (\d+)(?: |$)", rest)
    if command not in ("megalith", "python", "torchrun") or (ranks and supervised):
        done = subprocess.run(
            ["bash", "-c", words.replace("megalith", f"{sys.executable} -m megalith", 1)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        return Finished(done.returncode, done.stdout + done.stderr, 0.0)
    typed = [*shlex.split(rest.replace(ranks[0], "") if ranks else rest), *more]
    started = [
        warm.start(typed[1:], folder, command=typed[0], **place)
        if command == "megalith"
        else warm.start_script(f"import runpy; runpy.run_path({typed[0]!r}, run_name='__main__')", folder, **place)
        for place in (places(int(ranks[1])) if ranks else [{}])
    ]
    ended = [running.finish() for running in started]
    return next((one for one in ended if one.code), ended[0])
