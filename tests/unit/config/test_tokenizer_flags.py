"""The flags of the tokenizer in commands with a parser of their own."""

from __future__ import annotations

import argparse

import pytest

from megalith.config import TokenizerConfig
from megalith.config.tokenizer_flags import (
    TOKENIZER_SETTINGS,
    add_tokenizer_flags,
    read_tokenizer_flags,
    tokenizer_of_arguments,
    tokenizer_of_flags,
)
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


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--vocab-file v", ("--vocab-file", "--tokenizer-type GPT2BPETokenizer", "--merge-file")),
        (
            "--tokenizer-type BertWordPieceCase --vocab-extra-ids 20",
            ("--vocab-extra-ids", "--tokenizer-type BertWordPieceCase", "--vocab-file"),
        ),
        (
            "--tokenizer-type TikTokenizer --tokenizer-model m --tiktoken-num-special-tokens 1",
            ("--tiktoken-num-special-tokens 1", "3"),
        ),
    ],
)
def test_half_a_tokenizer_is_refused_and_not_passed_over(words: str, named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        tokenizer_of_flags(parse(words))
    assert all(fact in caught.value.violations[0] for fact in named)


def test_arguments_are_called_as_the_settings_are() -> None:
    assert tokenizer_of_arguments({}) is None
    given = {
        "tokenizer_model": "m",
        "tokenizer_special_tokens": "<a> <b>",
        "tokenizer_hf_no_include_special_tokens": True,
    }
    assert tokenizer_of_arguments(given) == TokenizerConfig(
        "HuggingFaceTokenizer",
        tokenizer_model="m",
        tokenizer_special_tokens=("<a>", "<b>"),
        tokenizer_hf_no_include_special_tokens=True,
    )
    assert tokenizer_of_arguments({"tokenizer_type": "NullTokenizer", "vocab_size": 9}) == TokenizerConfig(
        "NullTokenizer", vocab_size=9
    )
    for wrong, said in (
        ({"trust_remote_code": True}, "trust_remote_code=True"),
        ({"tokenizer_hf_no_include_special_tokens": "maybe"}, "maybe"),
        ({"tokenizer_type": "Llama3"}, "--tokenizer-type Llama3"),
    ):
        with pytest.raises(ConfigError, match=said):
            tokenizer_of_arguments(wrong)


@pytest.mark.parametrize(
    "words",
    [
        "--tokenizer-type BertWordPieceLowerCase --vocab-file FILE --vocab-extra-ids 20",
        "--tokenizer-type GPT2BPETokenizer --vocab-file FILE --merge-file FILE",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model FILE --tokenizer-special-tokens <a> <b> "
        "--tokenizer-hf-no-include-special-tokens",
    ],
)
def test_the_flags_that_name_a_tokenizer_whose_files_lie_elsewhere(words: str) -> None:
    config = tokenizer_of_flags(parse(words))
    assert config is not None and config.flags_for_moved_files == words
