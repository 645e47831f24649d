"""Record the checkpoints again: `python -m tests.contract.checkpoints.record` in the root of a clean clone.

Only for a run that is new in `runs.py`, or when runs are meant to compute other bits and the changelog says so: users
hold such checkpoints, and a version that cannot continue them breaks the contract. It writes an archive for each model
family and `recorded.json`, in minutes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import lzma
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalith.data.indexed import IndexedWriter

from ...e2e.warm import WarmProcess
from .answers import generated, measured
from .runs import ARITHMETIC, FAMILIES, GENERATED, HELD, LAST, MEASURED, Run, all_runs, iteration_of, last_of

HERE = Path(__file__).parent
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"{a}{b}" for a in "bdgklm" for b in "aeiou")]


def write_data(folder: Path) -> None:
    """Write documents of the GPTs, and sentences of BERT and T5 with their vocabulary."""
    folder.mkdir()
    with IndexedWriter(str(folder / "text"), "uint16") as writer:
        for number in range(30):
            writer.add_document(np.arange(20) * (number + 3) % 39, [20])
        writer.finalize()
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    with IndexedWriter(str(folder / "sentences"), "uint16") as writer:
        for number in range(30):
            lengths = [4 + (number + place) % 5 for place in range(6)]
            writer.add_document(5 + np.arange(sum(lengths)) * (number + 2) % (len(WORDS) - 5), lengths)
        writer.finalize()
    (folder / "ids.txt").write_text(" ".join(str(number * number % 39) for number in range(60)))


def make(run: Run, folder: Path, warm: WarmProcess) -> None:
    """Train it, and keep the two checkpoints: `HELD` in a save folder, `LAST` beside it."""
    save = folder / run.folder
    words = run.flags("--save", run.folder)
    ended = warm.run_ranks(run.processes, words, folder, **ARITHMETIC)
    if any(end.code for end in ended):
        sys.exit(f"{run.name}: " + "\n".join(end.text for end in ended))
    shutil.move(iteration_of(save, LAST), folder / last_of(run))
    (save / "latest_checkpointed_iteration.txt").write_text(str(HELD))
    shutil.rmtree(save / "run")


def pack(folder: Path, name: str) -> str:
    """Archive a sub-folder, the same bytes whenever and by whomever; return the hash of the archive."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for path in sorted((folder / name).rglob("*")):
            entry = archive.gettarinfo(path, str(path.relative_to(folder)))
            entry.mtime = entry.uid = entry.gid = 0
            entry.uname = entry.gname = "root"
            with path.open("rb") if path.is_file() else contextlib.nullcontext() as body:
                archive.addfile(entry, body)
    packed = lzma.compress(plain.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    (HERE / f"{name}.tar.xz").write_bytes(packed)
    return hashlib.sha256(packed).hexdigest()


def record() -> None:
    """Make everything anew."""
    git = ["git", "-C", str(HERE)]
    changed = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True, text=True, check=True).stdout
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    found: dict[str, Any] = {
        "commit": commit + (" with changes" if changed else ""),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "environment": ARITHMETIC,
    }
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write_data(folder / "data")
        (folder / "logs").mkdir()
        warm = WarmProcess(folder / "logs")
        for run in all_runs():
            make(run, folder, warm)
            print(run.name, flush=True)
        warm.close()
        one = {
            run.family: folder / run.folder for run in all_runs() if (run.layout, run.format) == ("one", "torch_dist")
        }
        found["generated"] = {family: generated(one[family], family) for family in GENERATED}
        found["measured"] = {family: measured(one[family], family, folder) for family in MEASURED}
        found["sha256"] = {name: pack(folder, name) for name in ("data", *FAMILIES)}
    (HERE / "recorded.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    record()
