"""Rules across settings: predicates over the whole configuration, each with the message of its violation.

A notice is a rule whose message is not a violation: it names a setting without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

from megalith.config.fields import Setting
from megalith.config.run import RunConfig, all_settings

Group = TypeVar("Group")


@dataclass(frozen=True)
class Draft:
    """A configuration that may be invalid; required settings that are missing are None."""

    run: RunConfig
    given: frozenset[str]


class UnusableError(Exception):
    """A rule reads a setting that is missing, or whose value could not be read."""


def unreadable(group: Group, names: Collection[str]) -> Group:
    """Return a group of settings of which reading those called `names` raises UnusableError."""

    def read(_: object) -> NoReturn:
        raise UnusableError

    kind: Any = type(group)
    guarded = type(kind.__name__, (kind,), {name: property(read) for name in names if name in vars(group)})
    copy: Any = object.__new__(guarded)
    copy.__dict__.update(vars(group))
    return cast("Group", copy)


@dataclass(frozen=True)
class Rule:
    """A predicate over a draft."""

    name: str  # what holds where it is not violated, or the template of its message
    check: Callable[[Draft], str]  # returns the message of the violation or an empty text
    notice: bool = False

    def broken(self, draft: Draft) -> str:
        """Return the message if the rule is violated, else an empty text, as when it reads an unusable setting."""
        try:
            return self.check(draft)
        except UnusableError:
            return ""


def rule(check: Callable[[Draft], str]) -> Rule:
    """Make a rule of a predicate; its message is empty where it holds."""
    return Rule(check.__name__, check)


def notice(check: Callable[[Draft], str]) -> Rule:
    """Make a notice of a predicate, as `rule` makes a rule."""
    return Rule(check.__name__, check, notice=True)


def forbid(condition: Callable[[RunConfig], object], message: str, **values: Callable[[RunConfig], object]) -> Rule:
    """Make the rule that `condition` does not hold.

    Args:
        condition: whether a run violates the rule.
        message: template, where `{hidden_size}` is that setting as the user wrote it, `{run.global_batch_size}` an
            attribute of the run and any other name one of `values`.
        values: functions of the run, called only where the condition holds.
    """

    def check(draft: Draft) -> str:
        return message.format_map(_Template(draft, values)) if condition(draft.run) else ""

    return Rule(message, check)


def note(
    condition: Callable[[RunConfig], object], message: str, *, given: str = "", **values: Callable[[RunConfig], object]
) -> Rule:
    """Make a notice as `forbid` makes a rule; with `given`, only for users who gave that setting."""
    check = forbid(condition, message, **values).check
    return Rule(message, lambda draft: check(draft) if not given or given in draft.given else "", notice=True)


class _Template(dict[str, object]):
    """Values of the names in the template of a message."""

    def __init__(self, draft: Draft, values: Mapping[str, Callable[[RunConfig], object]]) -> None:
        self.draft, self.values_of_run = draft, values

    def __missing__(self, name: str) -> object:
        if name == "run":
            return self.draft.run
        return self.values_of_run[name](self.draft.run) if name in self.values_of_run else show(self.draft, name)


def exclusive(one: str, other: str, why: str = "exclude each other; use one of them") -> Rule:
    """Make the rule that two switches are not both on; the message completes `--one and --other ...`."""

    def check(draft: Draft) -> str:
        both = value_of(draft, one) and value_of(draft, other)
        return f"{all_settings()[one].positive_flag} and {all_settings()[other].positive_flag} {why}" if both else ""

    return Rule(f"{one}_or_{other}", check)


def excluded(
    kind: str, where: Callable[[RunConfig], Any], reasons: Mapping[str, str], *, switch: str = ""
) -> list[Rule]:
    """Make rules against settings that a kind of run has no use for, each with its reason and remedy.

    The messages begin with `switch`, the setting that decides the kind, if it is given.
    """

    def make(name: str, why: str) -> Rule:
        def check(draft: Draft) -> str:
            value = value_of(draft, name)
            used = value and value != all_settings()[name].default
            head = f"{show(draft, switch)} with " if switch else ""
            return f"{head}{show(draft, name)}: {why}" if used and where(draft.run) else ""

        return Rule(f"{kind}_is_without_{name}", check)

    return [make(name, why) for name, why in reasons.items()]


def idle(names: Collection[str], used: Callable[[RunConfig], Any], why: Callable[[Draft], str]) -> list[Rule]:
    """Make notices for settings other than by default that a run does not read; `why` completes the message."""

    def make(setting: Setting) -> Rule:
        def check(draft: Draft) -> str:
            is_idle = value_of(draft, setting.name) != setting.default and not used(draft.run)
            return f"{show(draft, setting.name)} has no effect{why(draft)}" if is_idle else ""

        return Rule(f"{setting.name}_is_read", check, notice=True)

    return [make(all_settings()[name]) for name in names]


def idle_without(other: str, *names: str, why: str = "") -> list[Rule]:
    """Make notices for settings that are given while the one that they serve, `other`, is not."""
    reason = why or f"{all_settings()[other].positive_flag} is not given"

    def make(name: str) -> Rule:
        def check(draft: Draft) -> str:
            if name not in draft.given or value_of(draft, name) in (False, None) or value_of(draft, other):
                return ""
            return f"{show(draft, name)} has no effect: {reason}"

        return Rule(f"{name}_needs_{other}", check, notice=True)

    return [make(name) for name in names]


def value_of(draft: Draft, name: str) -> Any:
    """Return the value of a setting by its name alone."""
    return getattr(getattr(draft.run, all_settings()[name].group), name)


def show(draft: Draft, name: str) -> str:
    """Return a setting as typed, such as `--hidden-size 1000`; defaults are marked."""
    setting = all_settings()[name]
    value = value_of(draft, name)
    text = " ".join(map(str, value)) if setting.many else f"{value:g}" if isinstance(value, float) else str(value)
    words = setting.positive_flag if value is True else f"{setting.positive_flag} {text}".rstrip()
    if value is False:
        words = setting.flag if setting.default is True else f"no {setting.flag}"
    return words if name in draft.given else f"{words} (the default)"


def multiples(value: int, unit: int) -> str:
    """Return the multiples of `unit` around `value`."""
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"{below} or {above}" if below else f"{above}"


def divisors(total: int, near: int, most: int = 3) -> str:
    """Return the divisors of `total` nearest to `near`, in ascending order."""
    divisors = sorted(
        (d for d in range(1, min(total, 4 * near + 64) + 1) if total % d == 0), key=lambda d: abs(d - near)
    )
    return " or ".join(str(d) for d in sorted(divisors[:most]))
