"""All rules of a configuration, collected from the modules that define them.

A rule that reads a setting which is missing or unreadable says nothing, so that one mistake gives one message.
`RULES` concern the configuration alone, `FILE_RULES` also look at the file system; `NOTICES` are no violations but say
what has no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from megalith.config.rules import data, expert, family, file, layout, lora, model, optimizer, output, training
from megalith.config.rules.rule import Rule


def _defined_in(*modules: ModuleType) -> Iterator[Rule]:
    """Yield all rules of a module, single or in a list or tuple, in the order of definition."""
    for module in modules:
        for value in vars(module).values():
            yield from (
                item for item in (value if isinstance(value, list | tuple) else (value,)) if isinstance(item, Rule)
            )


_ALL = tuple(_defined_in(data, model, expert, training, optimizer, output, layout, family, lora))
RULES: tuple[Rule, ...] = tuple(rule for rule in _ALL if not rule.notice)
NOTICES: tuple[Rule, ...] = tuple(rule for rule in _ALL if rule.notice)
FILE_RULES: tuple[Rule, ...] = tuple(_defined_in(file))
