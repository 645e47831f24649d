#!/usr/bin/env python
"""Megatron's zero-shot tasks under their flags: `megalith evaluate`, out of the checkout that this file lies in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from megalith.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", "tasks/main.py", *sys.argv[1:]]))
