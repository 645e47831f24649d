"""The tokenizer of a Hugging Face folder: which token ends a text, and what may be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from megalith.config import TokenizerConfig
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import build_tokenizer
from megalith.tokenizers.huggingface import HuggingFaceTokenizer

LETTERS = pre_tokenizers.ByteLevel.alphabet()


def _write(folder: Path, *special: str, begins: bool = False) -> None:
    """A byte-level tokenizer: 256 bytes, then special tokens; perhaps with the first of them before every text."""
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted(LETTERS))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], tokenizer.token_to_id(special[0]))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))


def _say(folder: Path, file: str, **values: Any) -> None:
    (folder / file).write_text(json.dumps(values))


def test_text_there_and_back(tmp_path: Path) -> None:
    _write(tmp_path, "</s>")
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    text = "gr\u00fc\u00dfe, \u4e16\u754c </s>\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.encode_batch([text, ""]) == [ids, []]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (257, 256, None)
    assert 256 in ids  # a special token in a text is its id, as in Megatron


def test_what_stands_before_every_text_is_there(tmp_path: Path) -> None:
    _write(tmp_path, "<s>", "</s>", begins=True)
    assert HuggingFaceTokenizer(tmp_path).encode("a")[0] == 256


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    _write(tmp_path, "</s>")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert [len(ids) for ids in HuggingFaceTokenizer(tmp_path).encode_batch(["a", "abcdefgh"])] == [1, 8]


ENDS: dict[str, tuple[dict[str, dict[str, Any]], int]] = {
    "eos_token": ({"tokenizer_config.json": {"eos_token": "<b>"}}, 257),
    "as an object": ({"tokenizer_config.json": {"eos_token": {"content": "<b>", "lstrip": False}}}, 257),
    "special tokens": ({"special_tokens_map.json": {"eos_token": "<b>"}}, 257),
    "the model's, a number": ({"generation_config.json": {"eos_token_id": 257}}, 257),
    "the model's, several": ({"generation_config.json": {"eos_token_id": [257, 256]}}, 257),
    "of config.json": ({"config.json": {"eos_token_id": 256}}, 256),
    "the tokenizer's before the model's": (
        {"tokenizer_config.json": {"eos_token": "<b>"}, "config.json": {"eos_token_id": 256}},
        257,
    ),
    "unknown token": (
        {"tokenizer_config.json": {"eos_token": "<nowhere>"}, "config.json": {"eos_token_id": 256}},
        256,
    ),
    "a usual name": ({}, 258),
}


@pytest.mark.parametrize("case", ENDS)
def test_which_token_ends_a_text(tmp_path: Path, case: str) -> None:
    files, wanted = ENDS[case]
    _write(tmp_path, "<a>", "<b>", "<|endoftext|>")
    for name, values in files.items():
        _say(tmp_path, name, **values)
    assert HuggingFaceTokenizer(tmp_path).eod == wanted


def test_padding_that_is_the_end_is_none(tmp_path: Path) -> None:
    _write(tmp_path, "<a>", "<b>")
    _say(tmp_path, "tokenizer_config.json", eos_token="<a>", pad_token="<b>")
    assert HuggingFaceTokenizer(tmp_path).pad == 257
    _say(tmp_path, "tokenizer_config.json", eos_token="<a>", pad_token="<a>")
    assert HuggingFaceTokenizer(tmp_path).pad is None


def test_card_and_files(tmp_path: Path) -> None:
    _write(tmp_path, "</s>")
    _say(tmp_path, "tokenizer_config.json", eos_token="</s>")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert set(tokenizer.files()) == {"tokenizer.json", "tokenizer_config.json"}
    card = tokenizer.card()
    assert card["vocab_size"] == 257 and card["special"] == {"eod": 256} and len(card["files"]["tokenizer.json"]) == 64
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    assert HuggingFaceTokenizer(other).card() == card  # wherever it lies


def test_what_is_no_text_or_no_id(tmp_path: Path) -> None:
    _write(tmp_path, "</s>")
    tokenizer = HuggingFaceTokenizer(tmp_path)
    with pytest.raises(DataError, match=r"character 1 is a lone surrogate \(U\+D800\)"):
        tokenizer.encode("a\ud800")
    with pytest.raises(DataError, match="lone surrogate"):
        tokenizer.encode_batch(["a", "\ud800"])
    with pytest.raises(DataError, match="id 257 is outside the vocabulary of 257"):
        tokenizer.decode([0, 257])


def test_what_is_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tokenizer-model is missing"):
        build_tokenizer(TokenizerConfig("HuggingFaceTokenizer"))
    with pytest.raises(DataError, match=r"meta-llama/Llama-2-7b-hf is no folder.*Nothing is downloaded"):
        HuggingFaceTokenizer("meta-llama/Llama-2-7b-hf")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(
        DataError, match=r"has no tokenizer.json \(tokenizer.model alone is not enough\).*AutoTokenizer"
    ):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", ')
    with pytest.raises(DataError, match=r"tokenizer.json is damaged"):
        HuggingFaceTokenizer(tmp_path)
    _write(tmp_path, "<a>")
    with pytest.raises(DataError, match="nothing in .* says which token ends a text"):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json is damaged"):
        HuggingFaceTokenizer(tmp_path)
