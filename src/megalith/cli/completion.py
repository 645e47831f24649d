"""`megalith completion`: scripts that complete `megalith` in bash, zsh and fish, and its man page.

All are made from what --help shows: the parsers of the commands, and the settings of training. (shtab, which makes such
scripts from parsers, makes none for fish.)
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megalith import __version__
from megalith.cli.arguments import CommandParser, Option, options_of, subcommands_of
from megalith.cli.main import ABOUT, available_commands, module_of
from megalith.config.render import COMMON_SETTINGS, documented
from megalith.config.run import all_settings
from megalith.errors import EXIT_CODES

# The words before the cursor -> those that may come next, by a table of lines `command TAB word TAB about it`.
# The first argument goes between word and description; without it there is none.
_AWK = """
BEGIN { for (n = 0; n < ARGC - 1; n++) { word[n] = ARGV[n + 1]; ARGV[n + 1] = "" } }
{ known[$1, $2]; takes[$1]; command[NR] = $1; next_word[NR] = $2; about[NR] = $3 }
END {
    key = "megalith"
    for (i = 2; i < n - 1; i++) if (word[i] !~ /^-/ && (key, word[i]) in known) key = key " " word[i]
    if (word[n - 2] ~ /^-/ && (key " " word[n - 2]) in takes) key = key " " word[n - 2]
    for (i = 1; i <= NR; i++)
        if (command[i] == key && substr(next_word[i], 1, length(word[n - 1])) == word[n - 1] &&
                (next_word[i] !~ /^-/ || word[n - 1] ~ /^-/))
            print next_word[i] (word[0] == "" || about[i] == "" ? "" : word[0] about[i])
}"""

# @OFFERS@: the table piped into awk. Where nothing is offered, the shell completes file names.
_SHELLS = {
    "bash": """\
_megalith_offers() { @OFFERS@ "$@"; }
_megalith() {
    local IFS=$'\\n'
    COMPREPLY=($(_megalith_offers '' "${COMP_WORDS[@]:0:COMP_CWORD}" "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _megalith megalith
""",
    "zsh": """\
#compdef megalith
_megalith_offers() { @OFFERS@ "$@"; }
_megalith() {
    local -a offers=("${(@f)$(_megalith_offers : "${(@)words[1,CURRENT-1]}" "$PREFIX")}")
    if [[ -n "$offers[1]" ]]; then _describe megalith offers; else _files; fi
}
if [[ "$funcstack[1]" = _megalith ]]; then _megalith "$@"; else compdef _megalith megalith; fi
""",
    "fish": """\
function __megalith_offers; @OFFERS@ $argv; end
function __megalith
    set -l current (commandline -ct)
    set -l offers (__megalith_offers \\t (commandline -opc) "$current")
    if set -q offers[1]; printf '%s\\n' $offers; else; __fish_complete_path "$current"; end
end
complete -c megalith -f -a '(__megalith)'
""",
}


@dataclass(frozen=True)
class _Page:
    """What --help shows of a command: its words after `megalith`, usage, description, options and sub-commands."""

    words: str
    usage: str
    about: str
    options: Sequence[Option]
    commands: dict[str, str]


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="megalith completion",
        description="Print the script that completes `megalith` in a shell, or its man page. Write it where the shell "
        "looks: ~/.local/share/bash-completion/completions/megalith, a file _megalith in a folder of zsh's fpath, "
        "~/.config/fish/completions/megalith.fish; ~/.local/share/man/man1/megalith.1. "
        'Or put eval "$(megalith completion bash)" (or zsh) into ~/.bashrc (or ~/.zshrc).',
    )
    parser.add_argument("kind", choices=(*_SHELLS, "man"), help="shell, or man for the man page")
    return parser


def run(argv: Sequence[str]) -> int:
    """Print the script of a shell, or the man page."""
    kind = make_parser().parse_args(argv).kind
    pages = list(_pages())
    if kind == "man":
        print("\n".join(_man(pages)))
        return 0
    table = "\n".join("\t".join((key, word, " ".join(about.split()))) for key, word, about in _table(pages))
    print(_SHELLS[kind].replace("@OFFERS@", f"printf '%s\\n' {shlex.quote(table)} | awk -F '\\t' '{_AWK}'"), end="")
    return 0


def _pages() -> Iterator[_Page]:
    for name in available_commands():
        module = importlib.import_module(module_of(name))
        if hasattr(module, "make_parser"):
            yield from _pages_of(name, module.make_parser())
        else:  # the words of a run, or of a script
            usage, _, about = module.HELP.removeprefix("usage: ").partition("\n\n")
            yield _Page(name, usage, about, () if name == "from-megatron" else list(_training()), {})


def _pages_of(words: str, parser: Any) -> Iterator[_Page]:
    inner = subcommands_of(parser)
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    yield _Page(words, usage, parser.description or "", options_of(parser), {name: help for name, help, _ in inner})
    for name, _, command in inner:
        yield from _pages_of(f"{words} {name}", command)


def _training() -> Iterator[Option]:
    yield Option(("--help", "-h"), "", "show the most common flags and exit", ())
    yield Option(("--help-all",), "", "show all flags and exit", ())
    yield Option(("--config",), "FILE.toml", "recipe to start from; flags override it", ())
    for setting in all_settings().values():
        if setting.spellings:
            yield Option(tuple(dict.fromkeys((setting.flag, *setting.spellings))), *documented(setting))


def _table(pages: Sequence[_Page]) -> Iterator[tuple[str, str, str]]:
    """Yield (words so far, next word, what it is); after a flag with choices the words end with the flag."""
    commands = available_commands()
    yield from (("megalith", name, about) for name, about in {**commands, "help": "", "version": ""}.items())
    yield from (("megalith help", name, about) for name, about in commands.items())
    for page in pages:
        key = f"megalith {page.words}"
        yield from ((key, name, about) for name, about in page.commands.items())
        for option in page.options:
            flags = [word for word in option.spellings if word.startswith("--")]
            yield from ((key, flag, option.help) for flag in flags)
            for place in [f"{key} {flag}" for flag in flags] or [key]:
                yield from ((place, choice, "") for choice in option.choices)


def _man(pages: Sequence[_Page]) -> Iterator[str]:
    """Yield the lines of the man page in the macros of man(7); of training the flags that its --help shows."""
    common = {name for names in COMMON_SETTINGS.values() for name in names.split()}
    shown = {"--help", "--help-all", "--config"} | {all_settings()[name].flag for name in common}
    yield from (f'.TH MEGALITH 1 "" "megalith {__version__}"', ".ad l", ".SH NAME", _roff(ABOUT.replace(":", " -", 1)))
    yield from (".SH SYNOPSIS", ".B megalith", ".I COMMAND", "[options]", ".SH COMMANDS")
    for page in pages:
        usage = "\n.br\n".join(_roff(line) for line in page.usage.splitlines())
        yield from (f".SS {_roff(page.words)}", usage, ".PP", _roff(page.about))
        for option in page.options if page.words != "config" else ():
            if page.words != "train" or option.spellings[0] in shown:
                names = (
                    ", ".join(f"\\fB{_roff(word)}\\fR" for word in option.spellings) or f"\\fI{option.placeholder}\\fR"
                )
                value = f" \\fI{_roff(option.placeholder)}\\fR" if option.spellings and option.placeholder else ""
                yield from (".TP", names + value, _roff(option.help))
    yield ".SH EXIT STATUS"
    for code, about in EXIT_CODES.items():
        yield from (".TP", f".B {code}", _roff(about))


def _roff(text: str) -> str:
    """Return text that man(7) shows as it is."""
    return re.sub(r"^(?=[.'])", r"\\&", text.replace("\\", "\\e").replace("-", "\\-"), flags=re.MULTILINE).strip()
