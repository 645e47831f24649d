"""The configuration as text: the page of flags is current and complete, and differences are found."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megalith.config import all_settings, from_values
from megalith.config.fields import setting
from megalith.config.known import known_flags
from megalith.config.render import (
    COMMON_SETTINGS,
    Difference,
    common_flags_text,
    differences,
    flags_markdown,
    flags_text,
)
from megalith.registry import Entry, Registry

VALUES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "seq_length": 64,
    "micro_batch_size": 2,
    "train_iters": 10,
    "lr": 1e-3,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 100,
}


def test_the_page_of_flags_is_current(repository: Path) -> None:
    page = (repository / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == flags_markdown(), "run: megalith config --flags --markdown > docs/flags.md"


def test_the_page_names_every_flag() -> None:
    page = flags_markdown()
    documented = {flag for setting in all_settings().values() if setting.spellings for flag in (setting.flag,)}
    assert [flag for flag in sorted(documented | set(known_flags())) if f"`{flag}`" not in page] == []


def options_of(text: str) -> list[str]:
    """The flags that have lines of their own, in their order."""
    return [match for line in text.splitlines() for match in re.findall(r"^  (--[\w-]+)", line)]


def declared(names: list[str]) -> list[str]:
    """The flags by which settings are documented."""
    found = [all_settings()[name] for name in names]
    return [one.flag for one in found if one.spellings]


def test_the_terminal_names_every_flag_with_an_effect_once_and_the_model_first() -> None:
    text = flags_text()
    beside = ["--config", "--import", "--trust-recipe"]
    assert sorted(options_of(text)) == sorted([*beside, *declared(list(all_settings()))])
    assert options_of(text)[:5] == [*beside, "--num-layers", "--hidden-size"]
    assert max(len(line) for line in text.splitlines()) <= 120


def test_common_flags_are_few_declared_ones_in_order() -> None:
    names = [name for part in COMMON_SETTINGS.values() for name in part.split()]
    flags = options_of(common_flags_text())
    assert flags == ["--config", "--import", "--trust-recipe", *declared(names)]
    assert len(declared(names)) <= 40 and len(set(flags)) == len(flags)
    required = [one.flag for one in all_settings().values() if one.required]
    expected = [*required, "--data-path", "--tensor-model-parallel-size", "--save", "--load", "--bf16", "--train-iters"]
    assert set(expected) <= set(flags)
    assert not {"--moe-router-dtype", "--mscale", "--num-experts", "--profile-ranks"} & set(flags)


@dataclass(frozen=True)
class PaintSettings:
    paint_layers: int = setting(3, help="layers of paint", ours=True)


def test_the_terminal_names_flags_of_registered_objects() -> None:
    registry = Registry((Entry("norm", "paint", object, PaintSettings),))
    options = options_of(flags_text(registry))
    assert [flag for flag in options if flag not in options_of(flags_text())] == ["--paint-layers"]


def test_differences_are_what_is_required_or_not_the_default() -> None:
    run = from_values({**VALUES, "fp16": True, "hidden_dropout": 0.1})
    found = {item.name: item for item in differences(run)}
    assert set(found) == {*VALUES, "fp16"}
    assert found["fp16"] == Difference("fp16", True, False)
