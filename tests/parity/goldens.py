"""What the real Megatron wrote and computed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Goldens:
    """A folder of goldens, one folder a topic, each with a manifest of its cases."""

    root: Path

    def path(self, name: str) -> Path:
        """A file or folder, such as `train/gpt2/log_tp0_pp0.json`; a file that equals another is that one."""
        topic, _, file = name.partition("/")
        return self.root / topic / self._aliases(topic).get(file, file)

    def _aliases(self, topic: str) -> dict[str, str]:
        manifest = self.root / topic / "manifest.json"
        cases = json.loads(manifest.read_text())["cases"] if manifest.exists() else []
        aliases: dict[str, str] = next((case["aliases"] for case in cases if case["name"] == "_aliases"), {})
        return aliases

    def cases(self, topic: str) -> dict[str, dict[str, Any]]:
        """The cases of a topic, by name."""
        cases = json.loads((self.root / topic / "manifest.json").read_text())["cases"]
        return {case["name"]: case for case in cases}

    def case(self, topic: str, name: str) -> dict[str, Any]:
        """The manifest's entry for one case."""
        return self.cases(topic)[name]
