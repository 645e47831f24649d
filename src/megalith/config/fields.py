"""Declaration of settings: type, default, help, flags, unit and legal range.

Command line, recipes, reference page and saved configuration are derived from the `Setting`s that `settings_of` builds
from the fields of a group. Rules about several settings are in `rules`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from megalith.errors import ConfigError

_METADATA_KEY = "megalith"


@dataclass(frozen=True)
class Declaration:
    """Metadata of a field beyond its type and default."""

    help: str  # one line for the reference page
    unit: str = ""  # unit of the number, empty if the help names it
    flag: str = ""  # the Megatron flag when it is not the field name with hyphens
    aliases: tuple[str, ...] = ()  # other spellings that take the same value
    off: tuple[str, ...] = ()  # flags that switch a boolean off, besides the derived `--no-x` and `--disable-x`
    # flags without a value -> the value that they set
    shorthands: Mapping[str, str] = dataclasses.field(default_factory=dict)
    choices: tuple[str, ...] = ()
    later: tuple[str, ...] = ()  # Megatron's values that are not implemented yet
    later_with: str = ""  # the work that will implement them
    # at_least, above, at_most, below: legal range of a number
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    nothing: str = ""  # why this setting has no effect here, empty if it has one
    ours: bool = False  # true for settings that Megatron does not have
    per_layer: bool = False  # whether Megatron also takes a value per layer; here all must be equal
    repeatable: bool = False  # whether each use of the flag adds values, instead of replacing those of the last
    may_be_empty: bool = False  # whether the flag without a value means an empty list, unlike its absence
    from_environment: str = ""  # the environment variable that sets it, empty for none
    flagless: bool = False  # true where only the environment can set it
    registers: str = ""  # the kind of registered objects whose names are legal values too (megalith.registry)


def setting(default: Any = dataclasses.MISSING, /, *, help: str, **declaration: Any) -> Any:
    """Declare a field of a dataclass of settings; without a default it is required.

    Args:
        help: What it sets, in one line, with the unit.
        declaration: Further fields of `Declaration`. at_least, above, at_most and below are the legal range of a
            number, choices the legal texts, aliases further flags.

    Raises:
        TypeError: `Declaration` has no such field.
    """
    metadata = {_METADATA_KEY: Declaration(help, **declaration)}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """Field of a group as parsers and documentation use it."""

    group: str  # section name in recipes and saved configurations, such as `model`
    name: str  # field name, which is Megatron's name for it
    kind: type  # the type of one value: bool, int, float or str
    many: bool  # whether it holds a tuple of values
    optional: bool  # whether None is a legal value
    default: Any
    required: bool  # whether there is no default
    about: Declaration

    @property
    def flag(self) -> str:
        """Return the flag that Megatron documents; for a boolean that is on by default, the one to switch it off."""
        if self.kind is bool and self.default is True:
            return self.about.off[0] if self.about.off else f"--no-{self.name.replace('_', '-')}"
        return self.positive_flag

    @property
    def positive_flag(self) -> str:
        """Return the flag that sets the value or switches a boolean on."""
        return self.about.flag or "--" + self.name.replace("_", "-")

    def as_given(self, value: Any) -> str:
        """Return a value in the words that go with `flag`: of a boolean, whether that flag is given."""
        if self.kind is bool and isinstance(value, bool):
            return "given" if value is not self.default else "not given"
        return str(value)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return all flags that take a value or switch a boolean on."""
        return () if self.about.flagless else (self.positive_flag, *self.about.aliases)

    @property
    def off_spellings(self) -> tuple[str, ...]:
        """Return all flags that switch a boolean off; empty for other types."""
        if self.kind is not bool:
            return ()
        words = self.positive_flag.removeprefix("--")
        if words.startswith("no-"):
            return ("--" + words.removeprefix("no-"),)
        return tuple(dict.fromkeys((*self.about.off, f"--no-{words}", f"--disable-{words}")))


@cache
def settings_of(group_name: str, group: type) -> tuple[Setting, ...]:
    """Return the settings of a group in the order of declaration.

    Raises:
        ConfigError: fields have types that no flag can have, all of them are named; or an annotation names nothing.
    """
    try:
        hints = typing.get_type_hints(group)
    except NameError as error:
        raise ConfigError(f"the settings of {group_name}: in an annotation of {group.__name__}, {error}") from None
    found = tuple(_setting_of(group_name, field, hints[field.name]) for field in dataclasses.fields(group))
    if wrong := [setting for setting in found if setting.kind not in (bool, int, float, str)]:
        usable = "bool, int, float, str or a tuple of one of them such as tuple[int, ...], each also with | None"
        raise ConfigError(
            [
                f"{setting.positive_flag}: the field {setting.name} of {group.__name__} has the type "
                f"{hints[setting.name]}; use {usable}"
                for setting in wrong
            ]
        )
    return found


def with_choices(own: Setting, names: tuple[str, ...]) -> Setting:
    """Return the setting with the names of registered objects as further legal values."""
    return dataclasses.replace(own, about=dataclasses.replace(own.about, choices=(*own.about.choices, *names)))


def _setting_of(group_name: str, field: dataclasses.Field[Any], hint: Any) -> Setting:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    members = [member for member in (typing.get_args(hint) if union else (hint,)) if member is not types.NoneType]
    value_type = members[0] if len(members) == 1 else hint
    many = typing.get_origin(value_type) is tuple
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    required = default is dataclasses.MISSING
    return Setting(
        group=group_name,
        name=field.name,
        kind=typing.get_args(value_type)[0] if many else value_type,
        many=many,
        optional=union and types.NoneType in typing.get_args(hint),
        default=None if required else default,
        required=required,
        about=field.metadata.get(_METADATA_KEY) or Declaration(help=f"setting of {group_name}", ours=True),
    )
