"""`megalith config`: the complete configuration of a command line as a recipe, or the reference of all flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megalith.config import load
from megalith.config.render import flags_markdown, flags_text, note_lines, recipe_text
from megalith.errors import ConfigError

HELP = """usage: megalith config [--config RECIPE.toml] [flags of a run]
       megalith config --flags [--markdown]

Prints the complete configuration of flags for `megalith train` or pretrain_gpt.py as a TOML recipe; `# default` marks
settings that differ from their default. `megalith train --config FILE` starts the run from a saved recipe. Files of
data and tokenizer need not exist. --flags prints all flags that have an effect, with --markdown as docs/flags.md."""


def run(argv: Sequence[str]) -> int:
    """Print the configuration to stdout and notes about it to stderr."""
    if not argv or "--help" in argv or "-h" in argv:
        print(HELP)
    elif list(argv) == ["--flags"]:
        print(flags_text(), end="")
    elif sorted(argv) == ["--flags", "--markdown"]:
        print(flags_markdown(), end="")
    elif not {"--flags", "--markdown"}.isdisjoint(argv):
        raise ConfigError("megalith config --flags prints all flags and takes --markdown alone; leave the others out")
    else:
        configuration = load(argv, files=False)
        print(recipe_text(configuration), end="")
        for line in note_lines(configuration):
            print(f"note: {line}", file=sys.stderr)
    return 0
