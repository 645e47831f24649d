"""The configuration as text: the page of flags is current and complete, and differences are found."""

from __future__ import annotations

from pathlib import Path

from megalith.config import all_settings, from_values
from megalith.config.known import known_flags
from megalith.config.render import Difference, differences, flags_markdown, flags_text

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


def test_the_terminal_names_every_flag_with_an_effect() -> None:
    text = flags_text()
    assert all(setting.flag in text for setting in all_settings().values() if setting.spellings)
    assert max(len(line) for line in text.splitlines()) <= 120


def test_differences_are_what_is_required_or_not_the_default() -> None:
    run = from_values({**VALUES, "fp16": True, "hidden_dropout": 0.1})
    found = {item.name: item for item in differences(run)}
    assert set(found) == {*VALUES, "fp16"}
    assert found["fp16"] == Difference("fp16", True, False)
