"""Texts for an encoder: <extra_id_N> stands for itself, whatever the tokenizer makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from megalith.errors import DataError
from megalith.serve.model_runner import text_ids
from megalith.tokenizers.word_piece import WordPieceTokenizer


@pytest.fixture
def words(tmp_path: Path) -> WordPieceTokenizer:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]) + "\n")
    return WordPieceTokenizer(tmp_path / "vocab.txt", lower_case=True, vocab_extra_ids=2)


def test_sentinels_between_words(words: WordPieceTokenizer) -> None:
    first, second = words.extra_ids
    assert text_ids(words, "a <extra_id_1> b<extra_id_0>") == [5, second, 6, first]
    assert text_ids(words, "a b") == [5, 6]
    with pytest.raises(DataError, match=r"<extra_id_2>.* 2 "):
        text_ids(words, "a <extra_id_2>")
    with pytest.raises(DataError, match=r"<extra_id_9+\.\.\.>.* 2 "):  # more than int() reads
        text_ids(words, f"a <extra_id_{'9' * 5000}>")


def test_a_tokenizer_that_knows_them_reads_the_whole() -> None:
    """What it puts around a text stands there once."""

    class Knows:
        extra_ids = (7, 8)

        def encode(self, text: str) -> list[int]:
            return [*({"a": 5, "b": 6, "<extra_id_0>": 7, "<extra_id_1>": 8}[word] for word in text.split()), 1]

    assert text_ids(cast("Any", Knows()), "a <extra_id_1> b") == [5, 8, 6, 1]
