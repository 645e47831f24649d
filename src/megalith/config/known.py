"""Megatron's flags without a setting here, from megatron_flags.toml: accepted without effect, or refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_WORD = re.compile(r"(?P<flag>--[\w-]+)(?P<arity>[+*]|:\d)?(?P<value>=(?P<default>\S*))?$")


@dataclass(frozen=True)
class KnownFlag:
    """Flag of Megatron that has no setting here."""

    flag: str
    arity: str  # number of values: a number, "+" for one or more, "*" for any
    default: str  # Megatron's default value, empty for none
    why: str = ""  # why it has no effect, empty if every use is refused
    refusal: str = ""  # why it is refused and the alternative, empty if no use is refused
    accepted: tuple[str, ...] = ()  # values without effect, if others are refused
    work: bool = True  # whether it is refused as not implemented, instead of as a mistake

    def needs_nothing(self, values: tuple[str, ...]) -> str:
        """Return why these values have no effect, or an empty string if they are refused."""
        if not self.refusal or (values and all(value in self.accepted for value in values)):
            return self.why
        if self.default and all(_same(value, self.default) for value in values):
            return "this is Megatron's default"
        return ""


@cache
def known_flags() -> Mapping[str, KnownFlag]:
    """Return flag -> KnownFlag for every flag of Megatron that is not a setting here."""
    return {flag.flag: flag for flag in read_known_flags()}


def read_known_flags() -> Iterator[KnownFlag]:
    """Yield the flags in the order of the file."""
    tables = tomllib.loads(files("megalith.config").joinpath("megatron_flags.toml").read_text(encoding="utf-8"))
    for family in tables["accepted"]:
        yield from _read(family["flags"], why=family["reason"])
    for family in tables["refused"]:
        yield from _read(family["flags"], refusal=family["reason"], work="mistake" not in family)
    for family in tables["partly"]:
        accepted = tuple(family["accepted"].split())
        yield from _read(family["flags"], why=family["reason"], refusal=family["refused"], accepted=accepted)
    for old, new in tables["renamed"].items():
        yield from _read(old, refusal=f"it is called {new} now", work=False)


def _read(
    words: str, *, why: str = "", refusal: str = "", accepted: tuple[str, ...] = (), work: bool = True
) -> Iterator[KnownFlag]:
    """Yield flags in the notation of the file that share a reason, which may be wrapped there."""
    for word in words.split():
        match = _WORD.match(word)
        assert match, f"not in the notation of megatron_flags.toml: {word}"
        arity = (match["arity"] or ":1").lstrip(":") if match["value"] else "0"
        reasons = " ".join(why.split()), " ".join(refusal.split())
        yield KnownFlag(match["flag"], arity, match["default"] or "", *reasons, accepted, work)


def _same(value: str, default: str) -> bool:
    try:
        return float(value) == float(default)
    except ValueError:
        return value == default
