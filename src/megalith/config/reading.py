"""Values read from one source (command line, recipe or mapping), with all errors found in it.

A recipe is a complete or partial configuration in TOML, one section per group; flags override it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalith.config.fields import Setting
from megalith.config.run import all_settings, group_types
from megalith.config.values import BadValue, checked_value, closest
from megalith.registry import EMPTY, Registry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass
class Reading:
    """Values of one source, with errors and notes about them."""

    values: dict[str, Any] = field(default_factory=dict)
    recipe: str = ""  # path of the recipe, empty for none
    imports: list[str] = field(default_factory=list)  # modules to import
    hooks: list[str] = field(default_factory=list)  # as module:Class, before they are checked
    trusts_recipe: bool = False  # whether the modules that the recipe names may be imported
    problems: list[str] = field(default_factory=list)  # errors, one line each
    # settings whose value could not be parsed, so that no further errors are reported for them
    faulty: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)  # one line for each value that was interpreted
    nothing: dict[str, list[str]] = field(default_factory=dict)  # reason -> flags that were accepted without effect

    def needs_nothing(self, flag: str, why: str) -> None:
        """Record a flag that was accepted and has no effect."""
        flags = self.nothing.setdefault(why, [])
        if flag not in flags:
            flags.append(flag)

    def take(self, setting: Setting, value: Any, name: str, shown: str) -> None:
        """Read a value of a recipe or a mapping."""
        try:
            self.values[setting.name] = checked_value(setting, value)
        except BadValue as error:
            self.problems.append(f"{shown} = {value!r}: {error}")
            self.faulty.add(setting.name)
            return
        if setting.about.nothing and value != setting.default:
            self.needs_nothing(name, setting.about.nothing)


def read_recipe(path: Path, registry: Registry = EMPTY) -> Reading:
    """Read a recipe. Errors are collected in `problems` of the result instead of raised."""
    reading = Reading()
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        reading.problems.append(f"--config {path}: {reason}; give a recipe that can be read")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reading.problems.append(f"--config {path}: not TOML: {error}")
    if reading.problems:
        reading.faulty |= all_settings().keys()  # which it may have
        return reading
    for section, content in sections.items():
        _section(reading, path, section, content, registry)
    return reading


def _section(reading: Reading, path: Path, section: str, content: Any, registry: Registry) -> None:
    groups = [name for name in group_types() if name != "launch"]
    groups += [entry.name for entry in registry.entries if entry.settings is not None]
    if not isinstance(content, dict):
        setting = all_settings().get(section)
        where = f"write it under [{setting.group}]" if setting else f"settings stand in sections: {', '.join(groups)}"
        reading.problems.append(f"{path}: {section} stands outside a section; {where}")
        _blame(reading, setting)
        return
    if section == _RUN:
        _read_imports(reading, path, content)
        return
    if section not in groups:
        guess = closest(section, groups, cutoff=0.6)
        hint = f"did you mean [{guess}]?" if guess else f"sections are {', '.join(groups)}"
        reading.problems.append(f"{path}: no section is called [{section}]; {hint}")
        return
    for key, value in content.items():
        _setting(reading, path, section, key, value, registry)


_RUN, _IMPORT = "run", "import"


def _read_imports(reading: Reading, path: Path, content: dict[str, Any]) -> None:
    for key, value in content.items():
        names = [value] if isinstance(value, str) else value
        if key != _IMPORT:
            reading.problems.append(f"{path}: [{_RUN}] has no setting {key}; it has {_IMPORT} alone")
        elif not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            reading.problems.append(f"{path}: [{_RUN}] {_IMPORT} = {value!r}: not a list of dotted names of modules")
        else:
            reading.imports += names


def _setting(reading: Reading, path: Path, section: str, key: str, value: Any, registry: Registry) -> None:
    setting = all_settings(registry).get(key)
    if setting is None or setting.group != section:
        reading.problems.append(f"{path}: [{section}] has no setting {key}; {_hint(section, key)}")
        _blame(reading, setting or all_settings().get(closest(key, all_settings())))
        return
    reading.take(setting, value, f"[{section}] {key}", f"{path}: [{section}] {key}")


def _hint(section: str, key: str) -> str:
    elsewhere = all_settings().get(key)
    if elsewhere is not None:
        return f"it belongs under [{elsewhere.group}]"
    here = [setting.name for setting in all_settings().values() if setting.group == section]
    near = closest(key.replace("-", "_"), here)
    if near:
        return f"did you mean {near}?"
    anywhere = all_settings().get(closest(key.replace("-", "_"), all_settings()))
    return f"did you mean {anywhere.name} under [{anywhere.group}]?" if anywhere else "see `megalith config --flags`"


def _blame(reading: Reading, setting: Setting | None) -> None:
    """Mark a setting as faulty, so that no further errors are reported for it."""
    if setting is not None:
        reading.faulty.add(setting.name)
