"""From the configuration to a tokenizer, its files beside a checkpoint, and the padded vocabulary."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megalith.config import TokenizerConfig
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import build_tokenizer, padded_vocab_size, padding_message
from megalith.tokenizers.build import with_files_in
from megalith.tokenizers.null import NullTokenizer
from megalith.tokenizers.protocol import import_for, tensor_parallel_note


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"tokenizer_type": "GPT2BPETokenizer"}, ["--vocab-file", "--merge-file"]),
        ({"tokenizer_type": "NullTokenizer"}, ["--vocab-size"]),
        ({"tokenizer_type": "Llama2Tokenizer"}, ["--tokenizer-model"]),
        ({"tokenizer_type": "BertWordPieceCase"}, ["--vocab-file"]),
        (
            {"tokenizer_type": "TikTokenizer", "tokenizer_special_tokens": ("a", "a"), "vocab_size": 2},
            ["--tokenizer-model", *2 * ["--tokenizer-special-tokens"], "--tiktoken-num-special-tokens"],
        ),
        (
            {"vocab_file": "v", "merge_file": "m", "tokenizer_special_tokens": ("a",)},
            ["--tokenizer-special-tokens"],
        ),
        (
            {
                "tokenizer_type": "NullTokenizer",
                "vocab_size": 9,
                "null_tokenizer_eod_id": 9,
                "null_tokenizer_pad_id": 9,
            },
            ["--null-tokenizer-eod-id", "--null-tokenizer-pad-id"],
        ),
    ],
)
def test_what_is_wrong_is_listed_at_once(settings: dict[str, Any], flags: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_tokenizer(TokenizerConfig(**settings))
    assert [line.split()[0] for line in caught.value.violations] == flags


def test_a_kind_that_is_not_built() -> None:
    with pytest.raises(ConfigError, match="MultimodalTokenizer.*GPT2BPETokenizer"):
        build_tokenizer(TokenizerConfig(tokenizer_type="MultimodalTokenizer"))


def test_a_library_that_is_not_installed_is_named_with_its_extra() -> None:
    with pytest.raises(DataError, match=r"Llama2Tokenizer.*no_such_.*\bdata\b"):
        import_for("Llama2Tokenizer", "no_such_package", "data")


def test_null_tokenizer() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=131))
    assert tokenizer.decode(tokenizer.encode("1 2 3")) == "1 2 3"
    assert tokenizer.encode_batch(["7", "-1 131"]) == [[7], [-1, 131]]
    assert tokenizer.identity() == {"class": "_NullTokenizer", "tokenizer_path": [None], "vocab_size": "131"}
    assert tokenizer.fingerprint()["special"] == {"eod": 131}
    assert tokenizer.files() == {} and tokenizer.extra_ids == ()
    with pytest.raises(DataError, match=r"not 'x{40}\.\.\.'"):
        NullTokenizer(9).encode("x" * 1000)


@pytest.mark.parametrize(
    ("flags", "vocab_size", "eod", "pad"),
    [
        ({}, 132, 131, None),
        ({"null_tokenizer_pad_id": -1}, 131, 130, None),
        ({"null_tokenizer_pad_id": 0}, 131, 130, 0),
        ({"null_tokenizer_eod_id": 5}, 131, 5, None),
        ({"null_tokenizer_eod_id": 0, "null_tokenizer_pad_id": 7}, 131, 0, 7),
    ],
)
def test_both_generations_of_the_null_tokenizer(
    flags: dict[str, int], vocab_size: int, eod: int, pad: int | None
) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=131, **flags))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (vocab_size, eod, pad)


def test_a_checkpoint_brings_its_files(shared: Path, tmp_path: Path) -> None:
    tokenizers = shared / "golden" / "tokenizers"
    folder = tmp_path / "iter_0000001"
    config = TokenizerConfig("Llama2Tokenizer", tokenizer_model=str(tokenizers / "sp.model"))
    assert with_files_in(folder, config) == config  # nothing lies there
    tokenizer = build_tokenizer(config)
    folder.mkdir()
    for name, path in tokenizer.files().items():
        shutil.copy(path, folder / name)
    moved = with_files_in(folder, config)
    assert moved.tokenizer_model == str(folder / "tokenizer.model")
    assert build_tokenizer(moved).fingerprint() == tokenizer.fingerprint()
    null = TokenizerConfig("NullTokenizer", vocab_size=9)
    assert with_files_in(folder, null) == null


def test_padding() -> None:
    assert [padded_vocab_size(50257, 128, tp) for tp in (1, 2, 4)] == [50304, 50432, 50688]
    assert padding_message(50257, 50304) == " > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)"
    note = tensor_parallel_note(50257, 128, 4)
    assert "--padded-vocab-size 50688" in note and "50304" in note
    assert tensor_parallel_note(50257, 128, 1) == tensor_parallel_note(512, 128, 4) == ""
