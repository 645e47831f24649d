"""`megalith config`: the complete configuration of a command line as a recipe, or the reference of all flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megalith.config import load
from megalith.config.render import flags_markdown, flags_text, notes_lines, recipe_text

_HELP = """usage: megalith config [--config RECIPE.toml] [flags of a run]
       megalith config --flags [--markdown]

Prints the complete configuration that the flags of `megalith train` or pretrain_gpt.py give, as a recipe in TOML;
`# default` marks what differs from a default. Save it and start the same run by `megalith train --config FILE`.
Files of data and tokenizer need not exist. With --flags: all flags that have an effect, with --markdown as the page
docs/flags.md."""


def run(argv: Sequence[str]) -> int:
    """Print the configuration on the standard output and notes about it on the standard error."""
    if not argv or "--help" in argv or "-h" in argv:
        print(_HELP)
    elif list(argv) == ["--flags"]:
        print(flags_text(), end="")
    elif sorted(argv) == ["--flags", "--markdown"]:
        print(flags_markdown(), end="")
    else:
        configuration = load(argv, files=False)
        print(recipe_text(configuration), end="")
        for line in notes_lines(configuration):
            print(f"note: {line}", file=sys.stderr)
    return 0
