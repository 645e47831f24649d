"""Collecting documents: what is taken, what is left, and in which order."""

from __future__ import annotations

import gzip
import json
from importlib.resources import files
from pathlib import Path

import pytest

from megalith.cli.quickstart.text import (
    MIN_DOCUMENTS,
    build_corpus,
    read_documents,
    split_text,
    standard_library,
    user_texts,
)
from megalith.data.samples import interval_range, parse_split
from megalith.errors import DataError


def source_of(number: int, size: int = 2000) -> str:
    return f"def function_{number}():\n" + f"    return {number}\n" * (size // 16)


def write_library(root: Path, count: int = 30) -> None:
    for number in range(count):
        (root / f"module_{number}.py").write_text(source_of(number), encoding="utf-8")


def test_this_machines_library_is_real_text() -> None:
    corpus = standard_library()
    assert len(corpus.documents) > 200
    assert corpus.num_characters > 3_000_000
    assert any("class JSONEncoder" in text for text in corpus.documents)


def test_folders_of_tests_and_packages_are_left_out(tmp_path: Path) -> None:
    write_library(tmp_path)
    for folder in ("test", "site-packages", "unittest/test", "encodings"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "inside.py").write_text("UNWANTED = 1\n" * 100, encoding="utf-8")
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "decoder.py").write_text("WANTED = 1\n" * 100, encoding="utf-8")
    corpus = standard_library(tmp_path)
    assert not any("UNWANTED" in text for text in corpus.documents)
    assert sum("WANTED" in text for text in corpus.documents) == 1


def test_a_library_without_sources_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too little") as caught:
        standard_library(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "--data" in str(caught.value)


def test_repetitions_and_scraps_are_dropped() -> None:
    texts = [source_of(number) for number in range(MIN_DOCUMENTS)]
    corpus = build_corpus("x", "x", [*texts, *texts, "", "\n" * 100, "short"])
    assert sorted(corpus.documents) == sorted(texts)


def test_the_order_does_not_depend_on_the_order_of_files() -> None:
    texts = [source_of(number) for number in range(50)]
    forwards = build_corpus("x", "x", texts).documents
    assert forwards == build_corpus("x", "x", reversed(texts)).documents
    assert list(forwards) != texts  # mixed, so that each split is a fair sample


def test_the_size_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.cli.quickstart.text.MAX_CHARACTERS", 50_000)
    corpus = build_corpus("x", "x", [source_of(number) for number in range(100)])
    assert 45_000 < corpus.num_characters <= 50_000


def test_half_surrogates_become_text() -> None:
    corpus = build_corpus("x", "x", ["\ud800" * 40, *(source_of(number) for number in range(30))])
    for text in corpus.documents:
        text.encode("utf-8")


def test_too_little_text_is_refused_with_numbers() -> None:
    with pytest.raises(DataError, match="3 different documents"):
        build_corpus("x", "x", [source_of(number) for number in range(3)])


def test_the_smallest_corpus_has_a_document_in_each_split() -> None:
    commands = (files("megalith.cli.quickstart") / "commands.sh").read_text(encoding="utf-8")
    intervals = parse_split(commands.split("--split ")[1].split()[0])
    assert len(intervals) == 3
    for count in range(MIN_DOCUMENTS, 200):
        assert all(interval and interval_range(interval, count) for interval in intervals)


def test_text_with_marks_is_cut_there() -> None:
    assert list(split_text("one\n\nmore\n<|endoftext|>\ntwo\n")) == ["one\n\nmore", "two"]


def test_text_without_marks_is_cut_between_paragraphs() -> None:
    text = "\n\n".join(f"paragraph {number} " * 20 for number in range(200))
    pieces = list(split_text(text))
    assert "\n\n".join(pieces) == text
    assert len(pieces) > 5
    assert all(len(piece) < 4400 for piece in pieces)


@pytest.mark.parametrize("separator", ["\n", " ", ""], ids=["lines", "one line", "no break at all"])
def test_text_without_paragraphs_is_cut_elsewhere(separator: str) -> None:
    text = separator.join(f"sentence {number} " * 5 for number in range(2000))
    pieces = list(split_text(text))
    assert (separator if separator == "\n" else "").join(pieces) == text
    assert len(pieces) > 20
    assert all(4000 <= len(piece) <= 8000 for piece in pieces[:-1])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030", "utf-16"])
@pytest.mark.parametrize("name", ["text.txt", "my.json.notes.txt.gz", "text.jsonl", "text.jsonl.gz"])
def test_users_files_in_their_encoding(tmp_path: Path, encoding: str, name: str) -> None:
    texts = [f"\u7b2c{number}\u7ae0\u3002\u8bdd\u8bf4\u5929\u4e0b\u5927\u52bf\uff0c" * 200 for number in range(25)]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts] if "jsonl" in name else texts
    content = "\r\n".join(lines).encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    documents = list(read_documents(tmp_path / name, "text"))
    assert len(documents) > 10
    assert "".join(documents).replace("\n", "") == "".join(texts)


def test_only_the_beginning_of_a_large_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.cli.quickstart.text.MAX_CHARACTERS", 1 << 20)
    path = tmp_path / "text.txt"
    path.write_text("a line of text\n" * (1 << 18))
    assert 1_000_000 < sum(map(len, read_documents(path, "text"))) < 2_000_000


def test_a_named_encoding_is_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("\u00e9t\u00e9 ".encode("cp1252") * 20)
    with pytest.raises(DataError, match="--encoding"):
        list(read_documents(path, "text"))
    assert list(read_documents(path, "text", "cp1252")) == ["\u00e9t\u00e9 " * 20]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"content": "one", "id": 1}\n\n{"content": "two"}\n', encoding="utf-8")
    assert list(read_documents(path, "content")) == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "line 2: .*JSON"),
        ('{"body": "x"}', 'line 2: .*"text".*"body".*--json-key '),
        ('{"text": 3}', 'line 2: .*"text"'),
        ('["x"]', "line 2: .*object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=message):
        list(read_documents(path, "text"))


@pytest.mark.parametrize("content", [None, b"\xff\xfe broken"], ids=["missing", "not UTF-8"])
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="text.txt"):
        user_texts([path])
