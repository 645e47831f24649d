"""Prompts of --sample-prompts that cannot be continued are refused."""

from __future__ import annotations

import types
from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.tokenizers.null import NullTokenizer
from megalith.train.sample_answers import prompt_of


@pytest.mark.parametrize(
    ("text", "named"), [("once", "once"), ("5 99", "99"), ("5 -1", "-1"), ("1 2 3 4", "4 tokens"), ("", "0 tokens")]
)
def test_prompts_without_room_or_tokens_are_refused(text: str, named: str) -> None:
    nothing: Any = types.SimpleNamespace(encode=lambda text: [], vocab_size=99)
    with pytest.raises(ConfigError, match=f"--sample-prompts '{text}'.*{named}"):
        prompt_of(text, NullTokenizer(99, later=True) if text else nothing, 4)
    assert prompt_of("1 2 98", NullTokenizer(99, later=True), 4).tokens == (1, 2, 98)
