"""What the real Megatron wrote and computed: all of it beside the working tree, or the few cases of `fixtures`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Goldens:
    """A folder of goldens, one folder a topic, each with a manifest of its cases.

    Attributes:
        root: the folder.
        complete: whether every golden is there; where not, a test that asks for a missing one is skipped.
    """

    root: Path
    complete: bool

    def path(self, name: str) -> Path:
        """A file or folder, such as `train/gpt2/log_tp0_pp0.json`; a file that equals another is that one."""
        topic, _, file = name.partition("/")
        path = self.root / topic / self._aliases(topic).get(file, file)
        if not self.complete and not path.exists():
            self.skip(name)
        return path

    def _aliases(self, topic: str) -> dict[str, str]:
        manifest = self.root / topic / "manifest.json"
        cases = json.loads(manifest.read_text())["cases"] if manifest.exists() else []
        aliases: dict[str, str] = next((case["aliases"] for case in cases if case["name"] == "_aliases"), {})
        return aliases

    def cases(self, topic: str) -> dict[str, dict[str, Any]]:
        """The cases of a topic that are here, by name."""
        cases = json.loads((self.root / topic / "manifest.json").read_text())["cases"]
        return {case["name"]: case for case in cases}

    def case(self, topic: str, name: str) -> dict[str, Any]:
        """What a manifest says of one case."""
        cases = self.cases(topic)
        if not self.complete and name not in cases:
            self.skip(f"{topic}: {name}")
        return cases[name]

    def skip(self, what: str) -> None:
        pytest.skip(f"of the goldens, only those in tests/parity/fixtures are here, and not {what}")
