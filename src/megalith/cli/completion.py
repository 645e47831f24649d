"""`megalith completion`: the shell script that completes commands and training flags in bash and zsh."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.resources import files

from megalith.cli.main import available_commands
from megalith.config.run import all_settings
from megalith.errors import ConfigError

_HELP = """usage: megalith completion {bash,zsh}

Print the script that completes `megalith`. Put this line into ~/.bashrc or ~/.zshrc:

  eval "$(megalith completion bash)"        or zsh
"""

_ZSH = "autoload -Uz bashcompinit && bashcompinit\n"


def run(argv: Sequence[str]) -> int:
    """Print the completion script of a shell; ConfigError if `argv` names no known shell."""
    if "-h" in argv or "--help" in argv:
        print(_HELP, end="")
        return 0
    if list(argv) not in (["bash"], ["zsh"]):
        raise ConfigError(f"megalith completion {' '.join(argv)}: name the shell, bash or zsh")
    flags = {word for setting in all_settings().values() for word in (*setting.spellings, setting.flag)}
    flags |= {"--config", "--help", "--help-all"}
    script = (files("megalith.cli") / "completion.bash").read_text(encoding="utf-8")
    script = script.replace("@COMMANDS@", " ".join(available_commands())).replace("@FLAGS@", " ".join(sorted(flags)))
    sys.stdout.write(_ZSH + script if argv[0] == "zsh" else script)
    return 0
