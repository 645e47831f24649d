"""Training of a byte-level BPE: reproducible, complete, and readable by the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalith.errors import DataError
from megalith.tokenizers import train_byte_level_bpe
from megalith.tokenizers.gpt2_bpe import GPT2BPETokenizer

DOCUMENTS = [f"def function_{number}(value):\n    return value + {number}\n" for number in range(50)]


def test_a_trained_tokenizer_reads_back_and_shortens_its_text(tmp_path: Path) -> None:
    tokenizer = GPT2BPETokenizer(*train_byte_level_bpe(DOCUMENTS, 280, tmp_path / "new" / "folder"))
    assert tokenizer.vocab_size == 280
    assert tokenizer.eod == 279
    ids = tokenizer.encode(DOCUMENTS[7])
    assert tokenizer.decode(ids) == DOCUMENTS[7]
    assert len(ids) < len(DOCUMENTS[7]) / 2


def test_a_trained_tokenizer_takes_the_fast_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("megalith.tokenizers.gpt2_bpe._reference_encoder")
    assert GPT2BPETokenizer(*train_byte_level_bpe(DOCUMENTS, 280, tmp_path)).encode(DOCUMENTS[0])


def test_the_same_text_gives_the_same_files(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in train_byte_level_bpe(iter(DOCUMENTS), 300, tmp_path / "a")]
    second = [path.read_bytes() for path in train_byte_level_bpe(DOCUMENTS, 300, tmp_path / "b")]
    assert first == second


def test_little_text_gives_a_smaller_vocabulary(tmp_path: Path) -> None:
    vocab_file, merge_file = train_byte_level_bpe(["abab abab"], 1000, tmp_path)
    tokens = json.loads(vocab_file.read_text())
    assert 257 < len(tokens) < 270
    assert list(tokens)[-1] == "<|endoftext|>"
    assert GPT2BPETokenizer(vocab_file, merge_file).eod == len(tokens) - 1


def test_end_of_text_in_the_corpus_is_plain_text(tmp_path: Path) -> None:
    tokenizer = GPT2BPETokenizer(*train_byte_level_bpe(["a<|endoftext|>b"] * 9, 290, tmp_path))
    assert tokenizer.eod not in tokenizer.encode("a<|endoftext|>b")


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="257"):
        train_byte_level_bpe(DOCUMENTS, 256, tmp_path)
    with pytest.raises(DataError) as caught:
        train_byte_level_bpe(["ab"], 300, tmp_path)
    assert caught.value.exit_code == 3
    assert not list(tmp_path.iterdir())
