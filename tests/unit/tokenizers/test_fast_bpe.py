"""Texts to arrays of ids: the change over to gigatoken, and what happens where it is absent or wrong."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megalith.config import TokenizerConfig
from megalith.errors import DataError
from megalith.tokenizers import build_tokenizer, fast_bpe
from megalith.tokenizers.byte_level import read_byte_pair_vocabulary
from megalith.tokenizers.fast_bpe import BytePairArrays, GigatokenModel, array_encoder, as_tokenizer_json
from megalith.tokenizers.gpt2_bpe import GPT2BPETokenizer


@pytest.fixture(scope="module")
def tokenizer(shared: Path) -> GPT2BPETokenizer:
    folder = shared / "golden" / "indexed" / "inputs" / "tok"
    return GPT2BPETokenizer(folder / "vocab.json", folder / "merges.txt")


@pytest.fixture
def arrays(tokenizer: GPT2BPETokenizer) -> Callable[[int], BytePairArrays]:
    files = tokenizer.files()
    vocabulary = read_byte_pair_vocabulary(str(files["vocab.json"]), str(files["merges.txt"]))
    return lambda worth: BytePairArrays(
        lambda: GigatokenModel(as_tokenizer_json(vocabulary)), tokenizer.encode, lambda: True, worth_loading=worth
    )


def pretend(monkeypatch: pytest.MonkeyPatch, encode: Callable[[str], list[int]], no_text: str = "\ud800") -> list[str]:
    """A library in the place of gigatoken, which refuses what has `no_text` in it; returns the texts that it gets."""
    seen: list[str] = []

    def encode_and_tell(text: str) -> Any:
        seen.append(text)
        if no_text and no_text in text:
            raise TypeError("no text")
        return np.array(encode(text), np.uint32)

    made = SimpleNamespace(from_json=lambda text: json.loads(text) and SimpleNamespace(encode=partial(encode_and_tell)))
    monkeypatch.setitem(sys.modules, "gigatoken", SimpleNamespace(Tokenizer=made))
    return seen


def test_the_same_ids_before_and_after_the_change(
    tokenizer: GPT2BPETokenizer, arrays: Callable[[int], BytePairArrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = pretend(monkeypatch, tokenizer.encode)
    encode = arrays(10)
    texts = ["four", "", "score", "and seven", "years ago"]
    assert [ids.tolist() for ids in encode(texts)] == tokenizer.encode_batch(texts)
    assert [text for text in seen if text in texts] == texts[4:]  # the first 18 characters are tiktoken's


def test_gigatoken_itself(
    shared: Path, tokenizer: GPT2BPETokenizer, arrays: Callable[[int], BytePairArrays], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("gigatoken", reason="the extra data is not installed")
    encode = arrays(1)
    encode(["ab"])
    assert encode._gigatoken is not None and not caplog.records
    source = random.Random(3)
    texts = json.loads((shared / "golden" / "tokenizers" / "texts.json").read_text())
    texts += [
        "".join(chr(source.choice((32, 39, 10, source.randrange(0x3000)))) for _ in range(40)) for _ in range(300)
    ]
    assert [ids.tolist() for ids in encode(texts)] == tokenizer.encode_batch(texts)
    with pytest.raises(DataError, match="character 2"):
        encode(["four", "ab\ud800"])


@pytest.mark.full
@pytest.mark.parametrize("block", range(0, 0x110000, 0x8000))
def test_gigatoken_on_every_character(block: int, shared: Path) -> None:
    pytest.importorskip("gigatoken", reason="the extra data is not installed")
    folder = shared / "data" / "gpt2"
    tokenizer = GPT2BPETokenizer(folder / "gpt2-vocab.json", folder / "gpt2-merges.txt")
    encode = tokenizer.array_encoder()
    assert isinstance(encode, BytePairArrays)
    encode.use_gigatoken()
    assert encode._gigatoken is not None
    letters = [chr(code) for code in range(block, block + 0x8000) if not 0xD800 <= code < 0xE000]
    for a, b in zip(letters[::2], letters[1::2], strict=True):
        text = f" {a}{b}x{a} {b} {a}{a}1'{b}"
        assert encode([text])[0].tolist() == tokenizer.encode(text), repr(text)


def test_without_gigatoken_tiktoken_goes_on(
    tokenizer: GPT2BPETokenizer, arrays: Callable[[int], BytePairArrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    encode = arrays(1)
    assert [ids.tolist() for ids in encode(["ab", "cd"])] == tokenizer.encode_batch(["ab", "cd"])


@pytest.mark.parametrize("broken", ["other ids", "takes no text", "other library"])
def test_a_library_that_does_not_do_is_left_alone(
    broken: str,
    tokenizer: GPT2BPETokenizer,
    arrays: Callable[[int], BytePairArrays],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if broken == "other ids":
        pretend(monkeypatch, lambda text: tokenizer.encode(text) if "2021" in text else [0])
    elif broken == "takes no text":
        pretend(monkeypatch, lambda text: tokenizer.encode(text.replace("\ud800", "?")), no_text="")
    else:
        monkeypatch.setitem(sys.modules, "gigatoken", SimpleNamespace())
    encode = arrays(1)
    with caplog.at_level(logging.WARNING):
        assert [ids.tolist() for ids in encode(["ab", "cd"])] == tokenizer.encode_batch(["ab", "cd"])
    (record,) = caplog.records
    assert "using tiktoken" in record.getMessage()


def test_wrong_ids_later_on_stop(
    tokenizer: GPT2BPETokenizer, arrays: Callable[[int], BytePairArrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, lambda text: [0] if text == "wrong" else tokenizer.encode(text))
    monkeypatch.setattr(fast_bpe, "_COMPARE_INTERVAL", 3)
    encode = arrays(1)
    encode(["begin", "a", "b"])
    encode(["c", "wrong", "e"])  # the third and the sixth are compared
    with pytest.raises(DataError, match="tiktoken.*'wrong'.*pip uninstall"):
        encode(["wrong"])


def test_a_process_that_has_grown_begins_with_an_empty_memory(
    tokenizer: GPT2BPETokenizer, arrays: Callable[[int], BytePairArrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, tokenizer.encode)
    resident = iter([100, 100 + fast_bpe._LARGEST_GROWTH, 101 + fast_bpe._LARGEST_GROWTH, 50, 51])
    monkeypatch.setattr(fast_bpe, "_resident_bytes", lambda: next(resident))
    monkeypatch.setattr(fast_bpe, "_MEMORY_CHECK_INTERVAL", 2)
    encode = arrays(1)
    encode(["begin"])
    used = []
    for text in "abcdef":
        used.append(encode._gigatoken)
        assert encode([text])[0].tolist() == tokenizer.encode(text)
    assert used[0] is used[1] is used[2] is used[3] is not used[4] is used[5]


def test_merges_that_ranks_do_not_decide_stay_with_their_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .test_gpt2_bpe import write

    tokenizer = write(tmp_path, [("b", "c"), ("a", "b"), ("ab", "c")])
    seen = pretend(monkeypatch, tokenizer.encode)
    encode = array_encoder(tokenizer, expected_bytes=1 << 30)
    assert encode(["abc"])[0].tolist() == tokenizer.encode("abc")
    assert not seen


def test_any_tokenizer_gives_arrays() -> None:
    encode = array_encoder(build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=9)))
    assert encode(["1 -2 300"])[0].tolist() == [1, -2, 300]
    with pytest.raises(DataError, match=f"-{10**30}"):
        encode([f"1 -{10**30}"])
