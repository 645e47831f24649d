"""torch.compile by its front end alone: it traces graphs and derives their backward passes, and torch's own kernels
compute them. This needs no C++ compiler, and is quick.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def graphs() -> int:
    """Return how many graphs there are since `front_end` was entered."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextmanager
def front_end() -> Iterator[dict[str, Any]]:
    """Compile without generated kernels; yields torch's counts of breaks in graphs, by their reason."""
    from torch._dynamo.utils import counters

    compile_ = torch.compile
    torch.compiler.reset()
    counters.clear()
    torch.compile = lambda function, *, options, **rest: compile_(function, backend="aot_eager", **rest)  # type: ignore[assignment]
    try:
        yield counters["graph_break"]
    finally:
        torch.compile = compile_
        torch.compiler.set_stance("default")
        torch.compiler.reset()
