#!/usr/bin/env python
"""Megatron's entry point for BERT: `megalith train --model-family bert`, out of the checkout that this file lies in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from megalith.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", "--model-family", "bert", *sys.argv[1:]]))
