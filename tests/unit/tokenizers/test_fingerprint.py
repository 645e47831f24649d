"""The card of a tokenizer: beside a dataset, compared, and shown side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megalith.errors import DataError
from megalith.tokenizers.fingerprint import (
    fingerprint_differences,
    fingerprint_path,
    read_fingerprint,
    require_same,
    require_tokenizer_of_data,
    vocabulary_hash,
    write_fingerprint,
)

HASH = "0123456789abcdef" * 4
CARD: dict[str, Any] = {
    "class": "GPT2BPETokenizer",
    "vocab_size": 512,
    "special": {"eod": 511},
    "files": {"vocab.json": HASH, "merges.txt": "f" * 64},
}


def test_there_and_back(tmp_path: Path) -> None:
    prefix = str(tmp_path / "my.data_text_document")
    assert read_fingerprint(prefix) is None
    write_fingerprint(prefix, CARD)
    assert read_fingerprint(prefix) == CARD
    assert [path.name for path in tmp_path.iterdir()] == ["my.data_text_document.card"]
    write_fingerprint(prefix, {**CARD, "vocab_size": 1})
    found = read_fingerprint(prefix)
    assert found is not None and found["vocab_size"] == 1


def test_megatron_takes_the_card_for_a_half_of_the_pair(tmp_path: Path) -> None:
    """Its merge_datasets.py asks of every file whether the other half is there: .idx, unless it is the .idx itself."""
    prefix = tmp_path / "a_text_document"
    for ending in (".bin", ".idx"):
        Path(f"{prefix}{ending}").touch()
    write_fingerprint(str(prefix), CARD)
    for file in tmp_path.iterdir():
        assert file.with_suffix(".bin" if file.suffix == ".idx" else ".idx").is_file()


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({}, {}),
        ({"vocab_size": 500}, {"vocab_size": ("512", "500")}),
        ({"class": "HuggingFaceTokenizer"}, {"class": ("GPT2BPETokenizer", "HuggingFaceTokenizer")}),
        ({"special": {"eod": 0}}, {"special eod": ("511", "0")}),
        ({"special": {"eod": 511, "bos": 3}}, {}),  # a later version names more of them
        ({"settings": {"vocab_extra_ids": 9}}, {"setting vocab_extra_ids": ("-", "9")}),
        (
            {"files": {"vocab.json": HASH.replace("0", "1"), "merges.txt": "f" * 64}},
            {"file vocab.json": ("sha256 0123456789ab", "sha256 1123456789ab")},
        ),
        ({"files": {"vocab.json": HASH}}, {"file merges.txt": ("sha256 ffffffffffff", "-")}),
    ],
)
def test_differences(change: dict[str, Any], differing: dict[str, tuple[str, str]]) -> None:
    assert fingerprint_differences(CARD, {**CARD, **change}) == differing


VOCABULARY = {**CARD, "vocabulary": HASH}
IMPORTED = {
    "class": "HuggingFaceTokenizer",
    "vocabulary": HASH,
    "vocab_size": 512,
    "special": {"eod": 511, "bos": 511},
    "files": {"tokenizer.json": "a" * 64},
    "settings": {"include_special_tokens": False},
}


@pytest.mark.parametrize(
    ("one", "other", "differing"),
    [
        (VOCABULARY, IMPORTED, set()),
        (VOCABULARY, {**IMPORTED, "vocabulary": "a" * 64}, {"class", "vocabulary", "file tokenizer.json"}),
        (VOCABULARY, {**IMPORTED, "special": {"eod": 3}}, {"special eod"}),
        (IMPORTED, {**IMPORTED, "settings": {}}, {"setting include_special_tokens"}),
        (VOCABULARY, CARD, set()),  # of an older version, which had no hash of the vocabulary
        (CARD, IMPORTED, {"class", "file tokenizer.json", "setting include_special_tokens"}),
        (
            {**VOCABULARY, "class": "BertWordPieceCase"},
            {**VOCABULARY, "class": "BertWordPieceLowerCase"},
            {"class"},
        ),
    ],
)
def test_cards_with_the_same_vocabulary_agree(one: dict[str, Any], other: dict[str, Any], differing: set[str]) -> None:
    for found in (fingerprint_differences(one, other), fingerprint_differences(other, one)):
        assert differing <= set(found) and bool(found) == bool(differing)


def test_a_vocabulary_is_hashed_by_id() -> None:
    tokens = {"a": 0, "b": 1, "\ud800": 2}
    assert vocabulary_hash(tokens.items()) == vocabulary_hash(reversed(tokens.items()))
    assert vocabulary_hash(tokens.items()) != vocabulary_hash({"a": 1, "b": 0, "\ud800": 2}.items())


def test_an_older_card_says_that_classes_are_compared(tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    for card, older in ((CARD, True), ({**VOCABULARY, "vocabulary": "a" * 64}, False)):
        write_fingerprint(prefix, card)
        with pytest.raises(DataError) as caught:
            require_tokenizer_of_data(prefix, IMPORTED)
        assert ("older version" in str(caught.value)) == older


def test_side_by_side() -> None:
    other = {**CARD, "class": "Llama2Tokenizer", "files": {"tokenizer.model": HASH}}
    with pytest.raises(DataError) as caught:
        require_same(("data/one", "this run"), CARD, other, "do something")
    head, *lines = str(caught.value).split("\n")
    assert "data/one" in head and "this run" in head
    assert lines == [
        "                        data/one             this run",
        "  class                 GPT2BPETokenizer     Llama2Tokenizer",
        "  file vocab.json       sha256 0123456789ab  -",
        "  file merges.txt       sha256 ffffffffffff  -",
        "  file tokenizer.model  -                    sha256 0123456789ab",
        "  do something",
    ]
    require_same(("a", "b"), CARD, dict(CARD), "nothing to do")


def test_data_of_another_tokenizer_stops(tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    said = require_tokenizer_of_data(prefix, CARD)
    assert said is not None and "data.card" in said
    write_fingerprint(prefix, CARD)
    assert require_tokenizer_of_data(prefix, CARD) is None
    with pytest.raises(DataError, match=r"vocab_size +512 +99") as caught:
        require_tokenizer_of_data(prefix, {**CARD, "vocab_size": 99})
    assert str(fingerprint_path(prefix)) in str(caught.value)


def test_sentinels_of_t5_are_in_no_text(tmp_path: Path) -> None:
    """Data without --vocab-extra-ids serve a run with them, as Megatron's command lines have it."""
    prefix, more = str(tmp_path / "data"), {**CARD, "vocab_size": 612, "settings": {"vocab_extra_ids": 100}}
    write_fingerprint(prefix, CARD)
    assert require_tokenizer_of_data(prefix, more) is None
    with pytest.raises(DataError, match=r"vocab_size +512 +513"):
        require_tokenizer_of_data(prefix, {**more, "vocab_size": 613})
    write_fingerprint(prefix, more)
    assert require_tokenizer_of_data(prefix, CARD) is None


def test_the_null_tokenizer_reads_data_that_it_has_room_for(tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    null = {"class": "NullTokenizer", "vocab_size": 513, "special": {"eod": 512}, "files": {}}
    write_fingerprint(prefix, CARD)
    said = require_tokenizer_of_data(prefix, null)
    assert said is not None and all(part in said for part in (prefix, str(CARD["class"]), "NullTokenizer"))
    with pytest.raises(DataError, match="511.*--vocab-size 512"):
        require_tokenizer_of_data(prefix, {**null, "vocab_size": 511})
    write_fingerprint(prefix, {**null, "vocab_size": 9})
    with pytest.raises(DataError, match=r"vocab_size +9 +513"):
        require_tokenizer_of_data(prefix, null)


@pytest.mark.parametrize("content", ["{", "[]", "{}", json.dumps({"class": 3})])
def test_a_damaged_card_stops(tmp_path: Path, content: str) -> None:
    prefix = str(tmp_path / "data")
    fingerprint_path(prefix).write_text(content)
    with pytest.raises(DataError, match=r"data.card"):
        read_fingerprint(prefix)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none/data\.card"):
        write_fingerprint(str(tmp_path / "none" / "data"), CARD)
