#!/usr/bin/env python
"""Megatron's converter of 2023 under its flags, out of the checkout that this file lies in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from megalith.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["checkpoint", "checkpoint_util.py", *sys.argv[1:]]))
