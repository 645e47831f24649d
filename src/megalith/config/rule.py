"""What a rule is: a predicate over the whole configuration with the message of its violation."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from megalith.config.run import RunConfig, all_settings


@dataclass(frozen=True)
class Draft:
    """A configuration that may still be wrong: None stands for required settings that are missing.

    Attributes:
        run: the values.
        given: names of the settings that the user gave.
    """

    run: RunConfig
    given: frozenset[str]


@dataclass(frozen=True)
class Rule:
    """A predicate over a draft; `check` returns the message of the violation or an empty text."""

    name: str
    needs: tuple[str, ...]
    check: Callable[[Draft], str]

    def broken(self, draft: Draft, unusable: Collection[str]) -> str:
        """The message if the rule is violated, else an empty text; empty too when a needed setting is unusable."""
        return "" if any(name in unusable for name in self.needs) else self.check(draft)


def rule(*needs: str) -> Callable[[Callable[[Draft], str]], Rule]:
    """Make a rule of a predicate that reads the settings `needs`; its message is empty where it holds."""
    unknown = [name for name in needs if name not in all_settings()]
    assert not unknown, f"rules name settings that do not exist: {unknown}"
    return lambda check: Rule(check.__name__, needs, check)


def show(draft: Draft, name: str) -> str:
    """A setting as the user writes it, such as `--hidden-size 1000`; a default is marked as such."""
    setting = all_settings()[name]
    value = getattr(getattr(draft.run, setting.group), name)
    text = " ".join(map(str, value)) if setting.many else f"{value:g}" if isinstance(value, float) else str(value)
    words = setting.positive_flag if value is True else f"{setting.positive_flag} {text}".rstrip()
    if value is False:
        words = setting.flag if setting.default is True else f"no {setting.flag}"
    return words if name in draft.given else f"{words} (the default)"


def multiples(value: int, unit: int) -> str:
    """The multiples of `unit` next to `value`."""
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"{below} or {above}" if below else f"{above}"


def divisors(total: int, near: int, most: int = 3) -> str:
    """The divisors of `total` nearest to `near`, in ascending order."""
    divisors = sorted(
        (d for d in range(1, min(total, 4 * near + 64) + 1) if total % d == 0), key=lambda d: abs(d - near)
    )
    return " or ".join(str(d) for d in sorted(divisors[:most]))
