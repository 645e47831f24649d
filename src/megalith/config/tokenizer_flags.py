"""Tokenizer flags for commands with their own parser, declared once in `TokenizerConfig`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from megalith.config.fields import Setting, settings_of
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.values import BadValue, out_of_range, value_from_words
from megalith.errors import ConfigError
from megalith.registry import EMPTY, IMPORT_FLAG, Registered, Registry, collect

TOKENIZER_SETTINGS: tuple[str, ...] = tuple(setting.name for setting in settings_of("tokenizer", TokenizerConfig))
"""Names of the settings of a tokenizer, Megatron's."""


def add_tokenizer_flags(parser: argparse.ArgumentParser, *, about: str = "") -> None:
    """Add the tokenizer flags to a parser; `read_tokenizer_flags` reads the result."""
    add = parser.add_argument_group("tokenizer", about or None).add_argument
    for setting in settings_of("tokenizer", TokenizerConfig):
        words, text = setting.spellings, _help(setting)
        if setting.kind is bool:
            add(*words, dest=setting.name, action="store_true", default=None, help=text)
        elif setting.many:
            add(*words, dest=setting.name, nargs="+", metavar="TEXT", help=text)
        else:
            add(*words, dest=setting.name, metavar="N" if setting.kind is int else "TEXT", help=text)


def read_tokenizer_flags(options: argparse.Namespace, problems: list[str]) -> dict[str, Any]:
    """Return the given tokenizer settings by name; append errors to `problems`."""
    values = {}
    registry = imported_by(options)
    settings = settings_of("tokenizer", TokenizerConfig)
    if registry is not EMPTY:
        from megalith.config.run import all_settings, resolved

        settings = tuple(map(all_settings(registry).__getitem__, TOKENIZER_SETTINGS))
    for setting in settings:
        found = getattr(options, setting.name)
        if found is None:
            continue
        words = found if isinstance(found, list) else [found]
        try:
            value = found if setting.kind is bool else value_from_words(setting, words)
            wrong = out_of_range(setting, value)
        except BadValue as error:
            value, wrong = None, str(error)
        if wrong:
            problems.append(f"{setting.positive_flag} {' '.join(words)}: {wrong}")
        values[setting.name] = value
    return values if registry is EMPTY else resolved(values, registry, {})


def add_import_flag(parser: argparse.ArgumentParser) -> None:
    """Add --import to a parser; `imported_by` reads the result."""
    parser.add_argument(
        IMPORT_FLAG,
        dest="imports",
        nargs="+",
        action="extend",
        default=[],
        metavar="MODULE",
        help="Python modules that register what the checkpoint or the other flags name",
    )


def imported_by(options: argparse.Namespace) -> Registry:
    """Import the modules of a parser's --import; return what they register."""
    names: list[str] = getattr(options, "imports", [])
    return collect(names) if names else EMPTY


def tokenizer_from(given: Mapping[str, Any]) -> TokenizerConfig | None:
    """Return the tokenizer that settings name; None if they leave it to the checkpoint."""
    named = {name: given[name] for name in TOKENIZER_SETTINGS if given.get(name) is not None}
    if not named.keys() - {"tokenizer_type"} and not isinstance(named.get("tokenizer_type"), Registered):
        return None
    if "tokenizer_type" not in named and "tokenizer_model" in named:
        named["tokenizer_type"] = "HuggingFaceTokenizer"
    config = TokenizerConfig(**named)
    if config.missing_flags:
        default = "" if "tokenizer_type" in named else " (the default)"
        flags = " ".join(_flag(name) for name in named if name != "tokenizer_type")
        raise ConfigError(
            f"{flags}: --tokenizer-type {config.tokenizer_type}{default} also requires "
            f"{' and '.join(config.missing_flags)}; add that, change --tokenizer-type, or omit all tokenizer flags to "
            "use the checkpoint's"
        )
    if wrong := config.contradictions:
        raise ConfigError(wrong)
    return config


def tokenizer_of_flags(options: argparse.Namespace) -> TokenizerConfig | None:
    """Return the tokenizer that a parser's flags name; None if they leave it to the checkpoint."""
    problems: list[str] = []
    given = read_tokenizer_flags(options, problems)
    if problems:
        raise ConfigError(problems)
    return tokenizer_from(given)


def tokenizer_of_arguments(given: Mapping[str, Any], imports: Sequence[str] = ()) -> TokenizerConfig | None:
    """Return the tokenizer of keyword arguments named like the settings; None if there are none.

    A value may be its text, in which several are separated by spaces. `imports` are modules that register tokenizers.
    """
    if unknown := [name for name in given if name not in TOKENIZER_SETTINGS]:
        raise ConfigError([f"{name}={given[name]} is not known" for name in unknown])
    words: dict[str, Any] = dict.fromkeys(TOKENIZER_SETTINGS) | {"imports": imports}
    for setting in settings_of("tokenizer", TokenizerConfig):
        value = given.get(setting.name)
        if value is not None:
            words[setting.name] = (
                _yes(setting.name, value)
                if setting.kind is bool
                else str(value).split()
                if setting.many
                else str(value)
            )
    return tokenizer_of_flags(argparse.Namespace(**words))


def _yes(name: str, value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ConfigError(f"{name}={value} is not True or False")
    return str(value).lower() == "true"


def _flag(name: str) -> str:
    return next(setting.positive_flag for setting in settings_of("tokenizer", TokenizerConfig) if setting.name == name)


def _help(setting: Setting) -> str:
    choices = f" ({', '.join(setting.about.choices)})" if setting.about.choices else ""
    return (setting.about.help + choices).replace("%", "%%")
