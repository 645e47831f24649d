"""Notices for settings that are given while the one that they serve is not."""

from __future__ import annotations

from megalith.config.rule import Draft, Rule, show
from megalith.config.run import all_settings


def idle_without(name: str, other: str, why: str) -> Rule:
    """A notice for a setting that is given while the one that it serves is not."""

    def check(draft: Draft) -> str:
        setting, needed = all_settings()[name], all_settings()[other]
        value = getattr(getattr(draft.run, needed.group), other)
        if name not in draft.given or getattr(getattr(draft.run, setting.group), name) in (False, None) or value:
            return ""
        return f"{show(draft, name)} has no effect: {why}"

    return Rule(f"{name}_needs_{other}", (name, other), check)
