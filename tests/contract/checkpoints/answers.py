"""What the commands answer that use a trained model."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from megalith.cli.main import main

from .runs import GENERATED, MEASURED


def generated(checkpoint: Path, family: str) -> str:
    """Return what `megalith generate` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(["generate", str(checkpoint), *GENERATED[family]])
    assert code == 0, f"megalith generate {checkpoint}: {code}"
    return printed.getvalue()


def measured(checkpoint: Path, family: str, folder: Path) -> Any:
    """Return what `megalith evaluate` writes as its result; the data are in the folder."""
    words = [word.replace("data/", f"{folder}/data/") for word in MEASURED[family]]
    path = folder / "measured.json"
    code = main(["evaluate", str(checkpoint), *words, "--json", str(path)])
    assert code == 0, f"megalith evaluate {checkpoint}: {code}"
    return json.loads(path.read_text())["result"]
