"""The ids of the real Megatron's tokenizers, and of the `tokenizers` library on arbitrary text.

Goldens that are not compared here belong to the issue that completes the data path (issue 6):
sp_t5style, gpt_sentencepiece, llama2, tiktoken_v1, tiktoken_v2.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalith.config import TokenizerConfig
from megalith.errors import DataError
from megalith.tokenizers import build_tokenizer, padded_vocab_size
from megalith.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megalith.tokenizers.huggingface import HuggingFaceTokenizer
from megalith.tokenizers.null import NullTokenizer

LATER = {"sp_t5style", "gpt_sentencepiece", "llama2", "tiktoken_v1", "tiktoken_v2"}
COMPARED = {"gpt2bpe", "gpt2bpe_openai50257", "huggingface", "null", "padded_vocab"}


@pytest.fixture(scope="module")
def golden(shared: Path) -> Callable[[str], Any]:
    return lambda name: json.loads((shared / "golden" / "tokenizers" / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def openai(shared: Path) -> GPT2BPETokenizer:
    folder = shared / "data" / "gpt2"
    return GPT2BPETokenizer(folder / "gpt2-vocab.json", folder / "gpt2-merges.txt")


@pytest.fixture(scope="module")
def small(shared: Path) -> GPT2BPETokenizer:
    folder = shared / "golden" / "indexed" / "inputs" / "tok"
    return GPT2BPETokenizer(folder / "vocab.json", folder / "merges.txt")


def test_every_golden_is_compared_or_has_an_owner(golden: Callable[[str], Any]) -> None:
    assert {case["name"] for case in golden("manifest")["cases"]} == COMPARED | LATER


@pytest.mark.parametrize(("name", "fixture"), [("gpt2bpe", "small"), ("gpt2bpe_openai50257", "openai")])
def test_byte_pair_ids(name: str, fixture: str, golden: Callable[[str], Any], request: pytest.FixtureRequest) -> None:
    expected, texts = golden(name), golden("texts")
    tokenizer: GPT2BPETokenizer = request.getfixturevalue(fixture)
    assert (tokenizer.vocab_size, tokenizer.eod) == (expected["vocab_size"], expected["eod"])
    assert tokenizer.encode_batch(texts) == expected["ids"]
    assert all(expected["detok_equals_input"])
    assert [tokenizer.decode(ids) for ids in expected["ids"]] == texts


def test_card_holds_the_hashes_of_the_files(openai: GPT2BPETokenizer, golden: Callable[[str], Any]) -> None:
    expected = golden("gpt2bpe_openai50257")
    assert openai.card()["files"] == {
        "vocab.json": expected["vocab_sha256"],
        "merges.txt": expected["merges_sha256"],
    }


def test_huggingface_ids(shared: Path, golden: Callable[[str], Any]) -> None:
    expected, texts = golden("huggingface"), golden("texts")
    tokenizer = HuggingFaceTokenizer(shared / "golden" / "indexed" / "inputs" / "tok" / "hf")
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (expected["vocab_size"], expected["eod"], None)
    assert tokenizer.encode_batch(texts) == expected["ids"]
    assert all(expected["detok_equals_input"])
    assert [tokenizer.decode(ids) for ids in expected["ids"]] == texts


def test_null_tokenizer(golden: Callable[[str], Any]) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=131))
    assert isinstance(tokenizer, NullTokenizer)
    (case,) = [case for case in golden("manifest")["cases"] if case["name"] == "null"]
    assert (tokenizer.vocab_size, tokenizer.eod) == (case["vocab_size"], case["eod"])
    for row in golden("null"):
        if row["ids"] == "ValueError":
            with pytest.raises(DataError, match="whole numbers"):
                tokenizer.encode(row["text"])
        else:
            assert tokenizer.encode(row["text"]) == row["ids"]


def test_padded_vocabulary(golden: Callable[[str], Any]) -> None:
    table = golden("padded_vocab")
    assert len(table["rows"]) > 100
    for vocab_size, divisible_by, tp, padded in table["rows"]:
        assert padded_vocab_size(vocab_size, divisible_by, tp) == padded


@pytest.fixture(scope="module")
def library(shared: Path) -> Callable[[str], list[int]]:
    from tokenizers import ByteLevelBPETokenizer

    folder = shared / "data" / "gpt2"
    tokenizer = ByteLevelBPETokenizer.from_file(str(folder / "gpt2-vocab.json"), str(folder / "gpt2-merges.txt"))
    return lambda text: tokenizer.encode(text).ids


def test_library_agrees_on_real_text(
    shared: Path, openai: GPT2BPETokenizer, library: Callable[[str], list[int]]
) -> None:
    text = (shared / "data" / "wikitext-2" / "valid.txt").read_text(encoding="utf-8")[:200_000]
    assert openai.encode(text) == library(text)


def test_gpt2_takes_the_fast_path(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("megalith.tokenizers.gpt2_bpe._reference_encoder")
    GPT2BPETokenizer(shared / "data/gpt2/gpt2-vocab.json", shared / "data/gpt2/gpt2-merges.txt")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=200) | st.text(alphabet=" \t\n\r\u00a0'sdmtlvreab1.", max_size=60))
def test_library_agrees_on_any_text(text: str, openai: GPT2BPETokenizer, library: Callable[[str], list[int]]) -> None:
    ids = openai.encode(text)
    assert ids == library(text)
    assert openai.decode(ids) == text
