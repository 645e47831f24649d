"""Record what other people's programs read: `python -m tests.contract.record_outputs [SUBJECT...]`.

New sections, fields and types are added to `recorded/`; nothing is taken out. Whoever takes a promise back deletes its
line by hand, and says so in the changelog.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.warm import WarmProcess

from . import test_outputs_commands, test_outputs_serving, test_outputs_training
from .outputs import RECORDED, record


def main(subjects: Sequence[str]) -> int:
    """Record these subjects, or all."""
    RECORDED.mkdir(exist_ok=True)
    parts = (
        (test_outputs_training.Runs, test_outputs_training.SUBJECTS),
        (test_outputs_commands.Tools, test_outputs_commands.SUBJECTS),
        (test_outputs_serving.Server, test_outputs_serving.SUBJECTS),
    )
    for kind, observers in parts:
        wanted = {name: observe for name, observe in observers.items() if not subjects or name in subjects}
        if wanted:
            with tempfile.TemporaryDirectory(prefix="megalith-record-") as folder:
                warm = WarmProcess(Path(folder))
                with kind(Path(folder), warm) as commands:
                    for name, observe in wanted.items():
                        record(name, observe(commands))
                warm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
