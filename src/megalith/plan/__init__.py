"""Plans: what a run needs of its devices, before they are there.

One micro-batch of each distinct part of a model runs the real step on tensors without memory (`measure`, the only
module that imports torch), is reduced to integers (`record`) and remembered by its structure (`remember`). From these
`memory` adds up layers, stages and micro-batches under way for every kind of rank.
"""

import os
from pathlib import Path


def cache_folder(kind: str = "plan") -> Path:
    """Return the folder of what plans have seen."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megalith" / kind
