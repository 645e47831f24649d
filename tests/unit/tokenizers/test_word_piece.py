"""BERT's WordPiece: what the vocabulary must have, and what goes there and does not come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalith.errors import DataError
from megalith.tokenizers import word_piece
from megalith.tokenizers.word_piece import WordPieceTokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "un",
    "##aff",
    "##able",
    "hello",
    "'",
    "s",
    "n",
    "##t",
    ".",
    ",",
    "\u4e2d",
    "\u56fd",
    "\u03c3",
    "##\u03c2",
    "i",
]


def write(folder: Path, tokens: list[str], end: str = "\n") -> Path:
    path = folder / "vocab.txt"
    path.write_bytes((end.join(tokens) + end).encode())
    return path


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    return write(tmp_path, [*SPECIAL, *WORDS])


def tokens(tokenizer: WordPieceTokenizer, text: str) -> list[str]:
    return [tokenizer.tokens[number] for number in tokenizer.encode(text)]


def test_the_longest_piece_first(vocabulary: Path) -> None:
    tokenizer = WordPieceTokenizer(vocabulary, lower_case=True)
    assert tokens(tokenizer, "UNaffable, hello.") == ["un", "##aff", "##able", ",", "hello", "."]
    assert tokens(tokenizer, "unaffables") == ["[UNK]"]
    assert tokens(tokenizer, "\u4e2d\u56fd\u4e2d hello\u4e2d") == ["\u4e2d", "\u56fd", "\u4e2d", "hello", "\u4e2d"]
    assert tokens(tokenizer, "[MASK] hello") == ["[UNK]", "[UNK]", "[UNK]", "hello"]


def test_case_and_accents(vocabulary: Path) -> None:
    lower, case = WordPieceTokenizer(vocabulary, lower_case=True), WordPieceTokenizer(vocabulary, lower_case=False)
    assert tokens(lower, "H\u00e9llo") == ["hello"] and tokens(case, "H\u00e9llo") == ["[UNK]"]
    assert tokens(lower, "\u03a3\u03a3") == ["\u03c3", "##\u03c2"]  # the sigma that ends a word
    assert tokens(lower, "\u0130") == ["i"]
    assert tokens(lower, "hel\u200blo hel\x00lo") == ["hello", "hello"]


def test_words_above_200_characters_are_unknown(tmp_path: Path) -> None:
    tokenizer = WordPieceTokenizer(write(tmp_path, [*SPECIAL, "a", "##a"]), lower_case=True)
    assert len(tokenizer.encode("a" * 200)) == 200 and tokens(tokenizer, "a" * 201) == ["[UNK]"]


def test_special_ids(vocabulary: Path) -> None:
    tokenizer = WordPieceTokenizer(vocabulary, lower_case=True, vocab_extra_ids=2)
    size = len(SPECIAL) + len(WORDS)
    assert tokenizer.special == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4, "bos": size, "eos": size + 1}
    assert (tokenizer.eod, tokenizer.pad, tokenizer.extra_ids) == (size + 1, 0, (size + 2, size + 3))
    assert tokenizer.vocab_size == size + 4
    assert tokenizer.identity()["lower_case"] == "True" and tokenizer.identity()["vocab_extra_ids"] == "2"
    assert tokenizer.fingerprint()["class"] == "BertWordPieceLowerCase"


def test_decoding_joins_words_as_megatron_does(vocabulary: Path) -> None:
    tokenizer = WordPieceTokenizer(vocabulary, lower_case=True)
    assert tokenizer.decode(tokenizer.encode("Hello, unaffable 's.")) == "hello, unaffable's."
    with pytest.raises(DataError, match="id -1"):
        tokenizer.decode([-1])


def test_the_memory_of_words_is_bounded(vocabulary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_piece, "_REMEMBERED_WORDS", 10)
    tokenizer = WordPieceTokenizer(vocabulary, lower_case=True)
    words = [f"hello.{'s' * number}" for number in range(40)]
    first = tokenizer.encode_batch(words)
    assert len(tokenizer._words) <= 10 and tokenizer.encode_batch(words) == first


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_lines_end_in_either_way(tmp_path: Path, end: str) -> None:
    assert WordPieceTokenizer(write(tmp_path, [*SPECIAL, "a"], end), lower_case=True).encode("a") == [5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>404", "is a web page"),
        (b"[PAD]\n\xff\n", "is not text: byte 6"),
        (b"[PAD]\n[CLS]\n", r"has no \[UNK\], \[SEP\], \[MASK\]"),
        ("\n".join([*SPECIAL, "a", "a "]).encode(), "'a' is on two lines"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        WordPieceTokenizer(path, lower_case=True)
    with pytest.raises(DataError, match="cannot read --vocab-file"):
        WordPieceTokenizer(tmp_path / "none", lower_case=True)
