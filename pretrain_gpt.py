"""Megatron's entry point for GPT: `megalith train` under its old name, from any working directory, installed or not."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    if find_spec("megalith") is None:
        sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))
    from megalith.cli.main import main

    raise SystemExit(main(["train", *sys.argv[1:]]))
