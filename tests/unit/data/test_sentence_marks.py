"""Sentences by their marks, in Chinese and English."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalith.cli.preprocess import parse
from megalith.data.encoding import SentenceSettings
from megalith.data.sentences import PunctuationSplitter


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two? Three!", ["One.", "Two?", "Three!"]),
        (
            'Mr. Smith met J. Doe at 3.14 p.m. yesterday. "Good." He left.',
            ["Mr. Smith met J. Doe at 3.14 p.m. yesterday.", '"Good."', "He left."],
        ),
        (
            "Wait... what? (Yes.) \nA line without a mark\n\nAnother",
            ["Wait... what?", "(Yes.)", "A line without a mark", "Another"],
        ),
        (
            "\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002\u6211\u4eec\u53bb\u54ea\u91cc\uff1f\u201c\u8d70\u5427\uff01\u201d\u4ed6\u8bf4\u3002",
            [
                "\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002",
                "\u6211\u4eec\u53bb\u54ea\u91cc\uff1f",
                "\u201c\u8d70\u5427\uff01\u201d",
                "\u4ed6\u8bf4\u3002",
            ],
        ),
        (
            "\u4e2d\u6587 and English. \u6df7\u5408\u2026\u2026\u7ed3\u675f",
            ["\u4e2d\u6587 and English.", "\u6df7\u5408\u2026\u2026", "\u7ed3\u675f"],
        ),
        ("", []),
        (" \n ", []),
        ("no end", ["no end"]),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert PunctuationSplitter().split(text) == sentences


def test_nothing_but_blanks_is_lost() -> None:
    text = "A b. C? d e\nF! \u4e00\u4e8c\u3002\u4e09 etc. and so on."
    assert "".join("".join(PunctuationSplitter().split(text)).split()) == "".join(text.split())


@pytest.mark.parametrize("text", ["." * 200_000 + "x", "a" + " " * 200_000 + "b", "x" * 200_000 + " y. B"])
def test_a_long_run_is_looked_at_once(text: str) -> None:
    """Trying it from each of its characters would take minutes."""
    assert "".join("".join(PunctuationSplitter().split(text)).split()) == "".join(text.split())


def test_the_flag_chooses_the_splitter(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "1"}\n')
    line = f"--input {tmp_path}/in.jsonl --output-prefix {tmp_path}/out --tokenizer-type NullTokenizer --vocab-size 9"
    by_marks = parse([*line.split(), "--split-sentences", "--sentence-splitter", "marks", "--lang", "german"], {})
    assert by_marks.options.sentences == SentenceSettings("german", by_marks=True)
    assert isinstance(by_marks.options.sentences.splitter(), PunctuationSplitter)
    assert [note for note in by_marks.notes if note.startswith("--lang") and "--sentence-splitter marks" in note]
    idle = parse([*line.split(), "--sentence-splitter", "marks"], {})
    assert idle.options.sentences is None
    assert [note for note in idle.notes if note.startswith("--sentence-splitter") and "--split-sentences" in note]
