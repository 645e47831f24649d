"""Output streams whose reader may disappear, which must not end the run."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def warn(text: str) -> None:
    """Print to stderr, if it is open."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)


def drop(stream: TextIO) -> None:
    """Redirect a broken stream to the null device: else Python fails again when it flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
