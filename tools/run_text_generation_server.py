#!/usr/bin/env python
"""Megatron's text generation server under its flags: `megalith serve`, out of the checkout that this file lies in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from megalith.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", "tools/run_text_generation_server.py", *sys.argv[1:]]))
