"""Imports of many modules at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collections_paused() -> Iterator[None]:
    """Pause garbage collection in a block of imports.

    What they make stays, and collections would walk all of it again and again: a tenth of the time of importing torch
    and a third of that of Megalith's modules after it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
