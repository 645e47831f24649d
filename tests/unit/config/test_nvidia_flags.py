"""The flags of NVIDIA's own files (nvidia_flags.txt): each has a status, Megatron's default and its choices."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from megalith.config import all_settings
from megalith.config.command_line import read_command_line
from megalith.config.fields import Setting
from megalith.config.known import known_flags

_WORD = re.compile(r"(--[\w-]+)([+*]?)(?:(=)([^{]*)(?:\{(.*)\})?)?$")

# Where Megalith differs, and why.
OTHER_DEFAULTS = {
    "--dataloader-type": "Megatron makes single of None",
    "--local_rank": "0 is the same as none",
    "--split": "969,30,1, which was the default until 2024, is what Megatron makes of None",
    "--tokenizer-type": "Megatron requires it; here files alone are those of GPT-2",
    "--profile-ranks": "rank 0 where none is given, too",
    "--sft-tokenizer-prompt-format": "the tokenizer's template, which the start names; Megatron's is of one family",
    "--data-parallel-sharding-strategy": "that of Megatron since late 2025",
}
OTHER_CHOICES = {
    "--tokenizer-type": {"MultimodalTokenizer", "NullMultimodalTokenizer"},  # images
    "--position-embedding-type": {"mrope"},  # images
    "--ckpt-format": {"zarr", "torch_dcp"},
    "--ckpt-convert-format": {"zarr"},
    "--exp-avg-dtype": {"fp16", "fp8"},
    "--exp-avg-sq-dtype": {"fp16", "fp8"},
}


class Flag(NamedTuple):
    name: str
    arity: str
    default: str
    choices: frozenset[str]


def flags_of_nvidia() -> list[Flag]:
    lines = Path(__file__).with_name("nvidia_flags.txt").read_text("utf-8").splitlines()
    words = [word for line in lines if not line.startswith("#") for word in line.split()]
    flags = []
    for word in words:
        match = _WORD.match(word)
        assert match, word
        name, several, value, default, choices = match.groups()
        flags.append(
            Flag(
                name,
                (several or "1") if value else "0",
                default or "",
                frozenset(filter(None, (choices or "").split(","))),
            )
        )
    return flags


def spellings() -> dict[str, Setting]:
    settings = all_settings().values()
    return {flag: s for s in settings for flag in (*s.spellings, *s.off_spellings, *s.about.shorthands)}


def same(mine: str, theirs: str) -> bool:
    try:
        return float(mine) == float(theirs)
    except ValueError:
        return mine.replace(" ", "") == theirs


def test_each_has_a_status() -> None:
    flags = flags_of_nvidia()
    assert len(flags) > 540 and len({flag.name for flag in flags}) == len(flags)
    for flag in flags:
        value = "" if flag.arity == "0" else flag.default or "1"
        problems = read_command_line([flag.name, *filter(None, [value])]).problems
        assert not [problem for problem in problems if "is not a flag" in problem or "belongs to no" in problem], flag


def test_defaults_are_those_of_megatron() -> None:
    differing, of_settings = set(), spellings()
    for flag in flags_of_nvidia():
        setting = of_settings.get(flag.name)
        if setting is None or flag.arity == "0" or setting.kind is bool:
            continue
        default = setting.default
        if isinstance(default, tuple):
            default = " ".join(map(str, default))
        if not same("" if default is None else str(default), flag.default):
            differing.add(flag.name)
    assert differing == set(OTHER_DEFAULTS)


def test_switches_are_off_by_default() -> None:
    of_settings = spellings()
    for flag in flags_of_nvidia():
        setting = of_settings.get(flag.name)
        if setting is not None and flag.arity == "0" and setting.kind is bool:
            changed = flag.name in setting.off_spellings if setting.default is True else flag.name in setting.spellings
            assert changed, f"{flag.name} asks for what is so without it"


def test_choices_are_those_of_megatron() -> None:
    of_settings = spellings()
    lacking = {
        flag.name: flag.choices - set(of_settings[flag.name].about.choices)
        for flag in flags_of_nvidia()
        if flag.name in of_settings and flag.choices and of_settings[flag.name].about.choices
    }
    assert {name: values for name, values in lacking.items() if values} == OTHER_CHOICES


def test_known_flags_take_as_many_values() -> None:
    for flag in flags_of_nvidia():
        known = known_flags().get(flag.name)
        if known is not None:
            assert known.arity == flag.arity or (flag.arity, known.arity) in {("1", "*"), ("1", "+")}, flag
