"""From the configuration to a tokenizer, and the padded vocabulary."""

from __future__ import annotations

import pytest

from megalith.config import TokenizerConfig
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import build_tokenizer, padded_vocab_size, padding_message
from megalith.tokenizers.null import NullTokenizer


def test_what_is_missing_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build_tokenizer(TokenizerConfig(tokenizer_type="GPT2BPETokenizer"))
    assert [line.split()[0] for line in caught.value.violations] == ["--vocab-file", "--merge-file"]
    with pytest.raises(ConfigError, match="--vocab-size is missing"):
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer"))
    with pytest.raises(ConfigError, match="Llama2Tokenizer is not in this version"):
        build_tokenizer(TokenizerConfig(tokenizer_type="Llama2Tokenizer"))


def test_null_tokenizer() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=131))
    assert tokenizer.decode(tokenizer.encode("1 2 3")) == "1 2 3"
    assert tokenizer.encode_batch(["7", "-1 131"]) == [[7], [-1, 131]]
    assert tokenizer.identity() == {"class": "_NullTokenizer", "tokenizer_path": [None], "vocab_size": "131"}
    assert tokenizer.card()["special"] == {"eod": 131}
    assert tokenizer.files() == {}
    with pytest.raises(DataError, match=r"not 'x{40}\.\.\.'"):
        NullTokenizer(9).encode("x" * 1000)


def test_padding() -> None:
    assert [padded_vocab_size(50257, 128, tp) for tp in (1, 2, 4)] == [50304, 50432, 50688]
    assert padding_message(50257, 50304) == " > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)"
