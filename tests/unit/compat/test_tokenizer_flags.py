"""The flags of the tokenizer in commands with a parser of their own."""

from __future__ import annotations

import argparse

import pytest

from megalith.compat.megatron.tokenizer_flags import (
    TOKENIZER_SETTINGS,
    add_tokenizer_flags,
    read_tokenizer_flags,
    tokenizer_of_flags,
)
from megalith.config import TokenizerConfig
from megalith.errors import ConfigError


def parse(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_tokenizer_flags(parser, about="of the model")
    assert all(name.replace("_", "-") in parser.format_help() for name in TOKENIZER_SETTINGS)
    return parser.parse_args(words.split())


def test_what_is_given_and_nothing_else() -> None:
    problems: list[str] = []
    words = "--tokenizer-type TikTokenizer --tiktoken-special-tokens <unk> <s> </s> --vocab-size 300"
    given = read_tokenizer_flags(parse(words), problems)
    assert not problems
    assert given == {
        "tokenizer_type": "TikTokenizer",
        "tokenizer_special_tokens": ("<unk>", "<s>", "</s>"),
        "vocab_size": 300,
    }
    assert read_tokenizer_flags(parse("--tokenizer-hf-no-include-special-tokens"), problems) == {
        "tokenizer_hf_no_include_special_tokens": True
    }


def test_all_that_is_wrong_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        tokenizer_of_flags(
            parse("--tokenizer-type Llama3 --vocab-size many --vocab-extra-ids -1 --tiktoken-pattern v3")
        )
    begins = ["--tokenizer-type Llama3", "--vocab-size many", "--vocab-extra-ids -1", "--tiktoken-pattern v3"]
    assert [line.split(":")[0] for line in caught.value.violations] == begins


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ("", None),
        ("--tokenizer-type Llama2Tokenizer", None),  # without its file: that of the checkpoint
        ("--tokenizer-model m", TokenizerConfig("HuggingFaceTokenizer", tokenizer_model="m")),
        (
            "--tokenizer-type Llama2Tokenizer --tokenizer-model m",
            TokenizerConfig("Llama2Tokenizer", tokenizer_model="m"),
        ),
        ("--vocab-file v --merge-file m", TokenizerConfig(vocab_file="v", merge_file="m")),
    ],
)
def test_the_checkpoint_is_left_its_own(words: str, config: TokenizerConfig | None) -> None:
    assert tokenizer_of_flags(parse(words)) == config
