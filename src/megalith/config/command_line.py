"""Parser of Megatron's command line: reports all errors at once, and ignores no flag silently.

Unlike Megatron's parser it accepts `--flag=value`, underscores for hyphens (with a note), and `--no-x` for every
boolean. Like Megatron's it rejects abbreviated flags and stray arguments.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megalith.config.fields import Setting
from megalith.config.known import KnownFlag, known_flags
from megalith.config.reading import Reading
from megalith.config.run import all_settings
from megalith.config.values import BadValue, closest, expanded, value_from_words
from megalith.registry import EMPTY, IMPORT_FLAG, TRUST_FLAG, Registry

RECIPE_FLAG = "--config"
_NEGATIVE_NUMBER = re.compile(r"-(\.?\d|inf)")
_TYPOGRAPHIC_DASHES = ("\u2010", "\u2011", "\u2012", "\u2013", "\u2014", "\u2212")


@dataclass(frozen=True)
class _Spelling:
    """Spelling of a setting; `constant` is its value if the flag takes none."""

    setting: Setting
    constant: bool | str | None = None


@cache
def _spellings(registry: Registry) -> Mapping[str, _Spelling]:
    spellings: dict[str, _Spelling] = {}
    for setting in all_settings(registry).values():
        for flag in setting.spellings:
            spellings[flag] = _Spelling(setting, True if setting.kind is bool else None)
        for flag in setting.off_spellings:
            spellings[flag] = _Spelling(setting, False)
        for flag, constant in setting.about.shorthands.items():
            spellings[flag] = _Spelling(setting, constant)
    return spellings


def read_command_line(argv: Sequence[str], registry: Registry = EMPTY) -> Reading:
    """Parse a command line. Errors are collected in `problems` of the result instead of raised."""
    parser = _Parser(list(argv), registry)
    return parser.read()


def given_settings(argv: Sequence[str], registry: Registry = EMPTY) -> frozenset[str]:
    """Return the names of the settings that a command line sets, in any spelling."""
    return frozenset(read_command_line(argv, registry).values)


def without_settings(argv: Sequence[str], names: Collection[str], registry: Registry = EMPTY) -> list[str]:
    """Return the arguments of a valid command line without the flags (in any spelling) and values of these settings.

    `names` may have `RECIPE_FLAG` too.
    """
    parser, kept = _Parser(list(argv), registry), []
    while parser.words:
        before = list(parser.words)
        parser.read_one()
        taken = before[: len(before) - len(parser.words)]
        flag = parser.canonical(taken[0].partition("=")[0])
        if (parser.spellings[flag].setting.name if flag in parser.spellings else flag) not in names:
            kept += taken
    return kept


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Return the flags that set these values of settings."""
    words = list[str]()
    for name, value in values.items():
        setting = all_settings()[name]
        if setting.kind is bool:
            words.append(setting.positive_flag if value else setting.off_spellings[0])
        else:
            words += [setting.positive_flag, *map(str, value if setting.many else [value])]
    return words


class _Parser:
    """Parser state for the arguments of one command line."""

    def __init__(self, words: list[str], registry: Registry = EMPTY) -> None:
        self.words = words
        self.spellings = _spellings(registry)
        self.reading = Reading()
        self.refused: dict[str, list[str]] = {}

    def read(self) -> Reading:
        while self.words:
            self.read_one()
        for reason, uses in self.refused.items():
            self.reading.problems.append(f"{', '.join(uses)}: {reason}")
        return self.reading

    def read_one(self) -> None:
        """Consume the next argument, with its values if it is a flag."""
        word = self.words.pop(0)
        if _is_flag(word):
            self._flag(word)
        else:
            self._stray(word)

    def _flag(self, word: str) -> None:
        written, has_value, inline = word.partition("=")
        flag = self.canonical(written)
        given = [inline] if has_value else None
        if flag == RECIPE_FLAG:
            self._recipe(given)
        elif flag in (IMPORT_FLAG, TRUST_FLAG):
            self._import(flag, given)
        elif flag in self.spellings:
            self._setting(flag, self.spellings[flag], given)
        elif flag in known_flags():
            self._known(known_flags()[flag], given)
        else:
            self._unknown(flag)

    def canonical(self, written: str) -> str:
        """Return the known spelling of a flag, and note where it differs from the given one."""
        if self._exists(written):
            return written
        hyphened = written.replace("_", "-")
        if hyphened != written and self._exists(hyphened):
            self.reading.notes.append(f"{written} is read as {hyphened}")
            return hyphened
        off = "--no-" + hyphened.removeprefix("--disable-")
        return off if hyphened.startswith("--disable-") and self._exists(off) else hyphened

    def _setting(self, flag: str, spelling: _Spelling, given: list[str] | None) -> None:
        setting, reading = spelling.setting, self.reading
        if spelling.constant is not None:
            if given is not None:
                reading.problems.append(f"{flag}={given[0]}: {flag} takes no value; write it alone")
                reading.faulty.add(setting.name)
                return
            self._store(flag, setting, spelling.constant)
            return
        several = setting.many or setting.about.per_layer
        words = given if given is not None else self._following(flag, "+" if several else "1")
        if not words and not setting.about.may_be_empty:
            reading.problems.append(f"{flag} needs a value ({setting.about.help})")
            reading.faulty.add(setting.name)
            return
        bare = [_without_quotes(word) for word in words]
        if setting.about.registers == "hook":
            reading.hooks += bare
        if bare != words:
            reading.notes.append(f"{flag} {' '.join(words)}: the quotes are removed (the shell has kept them)")
        if setting.about.per_layer and len(set(bare)) > 1:
            reading.problems.append(f"{flag} {' '.join(words)}: it is the same in all layers here; give one of them")
            reading.faulty.add(setting.name)
            return
        try:
            value = value_from_words(setting, bare)
            earlier = reading.values.get(setting.name, ()) if setting.about.repeatable else ()
            self._store(flag, setting, tuple(dict.fromkeys((*earlier, *value))) if earlier else value)
        except BadValue as error:
            reading.problems.append(f"{flag} {' '.join(words) or chr(39) * 2}: {error}")
            reading.faulty.add(setting.name)

    def _store(self, flag: str, setting: Setting, value: object) -> None:
        reading = self.reading
        repeated = setting.name in reading.values and not setting.about.repeatable
        if repeated and reading.values[setting.name] != value:
            reading.notes.append(f"{flag} is given more than once; the last value is used")
        reading.values[setting.name] = value
        if setting.about.nothing:
            reading.needs_nothing(flag, setting.about.nothing)

    def _known(self, known: KnownFlag, given: list[str] | None) -> None:
        words = given if given is not None else self._following(known.flag, known.arity)
        if known.arity not in ("0", "*") and not words:
            self.reading.problems.append(f"{known.flag} needs a value")
            return
        why = known.needs_nothing(tuple(words))
        if why:
            self.reading.needs_nothing(known.flag, why)
            return
        reason = f"{known.refusal}; not in this version" if known.work else known.refusal
        self.refused.setdefault(reason, []).append(" ".join([known.flag, *words]))

    def _exists(self, flag: str) -> bool:
        return flag in (RECIPE_FLAG, IMPORT_FLAG, TRUST_FLAG) or flag in self.spellings or flag in known_flags()

    def _unknown(self, flag: str) -> None:
        reading = self.reading
        self._following(flag, "*")
        guess = closest(flag, self.spellings) or closest(flag, known_flags())
        hint = f"did you mean {guess}?" if guess else "see `megalith config --flags` for all flags"
        if flag.startswith(_TYPOGRAPHIC_DASHES):
            hint = "it begins with a typographic dash; write it with two hyphens"
        elif not flag.startswith("--") and self._exists("-" + flag):
            guess = "-" + flag
            hint = f"did you mean {guess}?"
        reading.problems.append(f"{flag} is not a flag; {hint}")
        if guess in self.spellings:
            reading.faulty.add(self.spellings[guess].setting.name)

    def _stray(self, word: str) -> None:
        shown = word or "''"
        hint = "empty variable, or missing -- before it?"
        if "<" in word or ">" in word:
            hint = "replace the placeholder in < >"
        elif word.endswith(".toml"):
            hint = f"give a recipe by --config {word}"
        self.reading.problems.append(f"{shown} belongs to no flag ({hint})")

    def _following(self, flag: str, arity: str) -> list[str]:
        limit = int(arity) if arity.isdigit() else len(self.words)
        taken: list[str] = []
        while self.words and len(taken) < limit and not _is_flag(self.words[0]):
            taken.append(self.words.pop(0))
        if arity.isdigit() and 0 < len(taken) < int(arity):
            self.reading.problems.append(f"{flag} {' '.join(taken)}: needs {arity} values")
        return taken

    def _import(self, flag: str, given: list[str] | None) -> None:
        if flag == TRUST_FLAG:
            self.reading.trusts_recipe = True
            if given is not None:
                self.reading.problems.append(f"{flag}={given[0]}: {flag} takes no value; write it alone")
            return
        words = given if given is not None else self._following(flag, "+")
        if not words:
            self.reading.problems.append(f"{flag} needs a value (dotted name of a Python module)")
        self.reading.imports += words

    def _recipe(self, given: list[str] | None) -> None:
        words = given if given is not None else self._following(RECIPE_FLAG, "1")
        if not words:
            self.reading.problems.append(f"{RECIPE_FLAG} needs a value (path of a recipe in TOML)")
        elif self.reading.recipe:
            self.reading.problems.append(f"{RECIPE_FLAG} {words[0]}: one recipe is read already, {self.reading.recipe}")
        else:
            try:
                self.reading.recipe = expanded(words[0])
            except BadValue as error:
                self.reading.problems.append(f"{RECIPE_FLAG} {words[0]}: {error}")


def _without_quotes(word: str) -> str:
    """Return a value without surrounding quotes; quotes inside a text or a bash array are kept."""
    quoted = len(word) > 2 and word[0] == word[-1] and word[0] in "'\""
    return word[1:-1] if quoted else word


def _is_flag(word: str) -> bool:
    if word.startswith(_TYPOGRAPHIC_DASHES):
        return len(word) > 1
    return len(word) > 1 and word.startswith("-") and not _NEGATIVE_NUMBER.match(word)
