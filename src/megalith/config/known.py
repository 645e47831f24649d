"""Look-up of Megatron's flags that have no setting here; `megatron_flags` holds the table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from megalith.config.megatron_flags import LAUNCHER, NEED_NOTHING, PARTLY, REFUSED, RENAMED

_WORD = re.compile(r"(?P<flag>--[\w-]+)(?P<arity>[+*]|:\d)?(?P<value>=(?P<default>\S*))?$")


@dataclass(frozen=True)
class KnownFlag:
    """A flag of Megatron that has no setting here.

    Attributes:
        flag: its spelling.
        arity: how many values it takes: a number, "+" for one or more, "*" for any.
        default: Megatron's default value, empty for none.
        why: why it needs nothing, empty where every use is refused.
        refusal: what it would need, empty where no use is refused.
        accepted: with both of these, the values that need nothing.
        work: whether the refusal is of something that comes with later work, not of a mistake.
    """

    flag: str
    arity: str
    default: str
    why: str = ""
    refusal: str = ""
    accepted: tuple[str, ...] = ()
    work: bool = True

    def needs_nothing(self, values: tuple[str, ...]) -> str:
        """Why these values need nothing; empty when they are refused."""
        if not self.refusal or (values and all(value in self.accepted for value in values)):
            return self.why
        if self.default and all(_same(value, self.default) for value in values):
            return "this is Megatron's default"
        return ""


@cache
def known_flags() -> Mapping[str, KnownFlag]:
    """Spelling -> flag, for every flag of Megatron that is not a setting here."""
    flags = [*_families(), *_partly(), *_mistakes()]
    return {flag.flag: flag for flag in flags}


def _families() -> Iterator[KnownFlag]:
    for family in NEED_NOTHING:
        yield from (_read(word, why=family.reason) for word in family.flags.split())
    for family in REFUSED:
        yield from (_read(word, refusal=family.reason) for word in family.flags.split())


def _partly() -> Iterator[KnownFlag]:
    for item in PARTLY:
        yield _read(item.flag, why=item.why, refusal=item.refused, accepted=tuple(item.accepted.split()))


def _mistakes() -> Iterator[KnownFlag]:
    for old, new in RENAMED.items():
        arity = "0" if old == "--checkpoint-activations" else "1"
        yield KnownFlag(old, arity, "", refusal=f"it is called {new} now", work=False)
    of_torchrun = "it belongs to torchrun; put it before the name of the script"
    for word in LAUNCHER.split():
        # --nproc is no answer to a flag that is about several machines.
        other = (
            ", or give --nproc N without torchrun"
            if word.startswith("--nproc")
            else ": torchrun, srun and mpirun start processes on several machines, --nproc N on this one only"
        )
        yield _read(word, refusal=of_torchrun + other, work=False)


def _read(
    word: str, *, why: str = "", refusal: str = "", accepted: tuple[str, ...] = (), work: bool = True
) -> KnownFlag:
    match = _WORD.match(word)
    assert match, f"not in the notation of megatron_flags: {word}"
    arity = (match["arity"] or ":1").lstrip(":") if match["value"] else "0"
    return KnownFlag(match["flag"], arity, match["default"] or "", why, refusal, accepted, work)


def _same(value: str, default: str) -> bool:
    try:
        return float(value) == float(default)
    except ValueError:
        return value == default
