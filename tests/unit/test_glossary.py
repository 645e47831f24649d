"""Identifiers and words that docs/glossary.md lists as gone are in no module of the package; the words in no page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "megalith"
ROW = re.compile(r"\| `(\w+)` \| `(\w+)` \|")
WORDS = re.compile(r'\| "([\w -]+)" \| (.+) \|')
QUOTED = ("docs/glossary.md", "docs/decisions/", "docs/reference/")
"""Pages that say the words of Megatron-LM, or those of the day."""


def gone() -> dict[str, str]:
    """Return old -> new of the glossary's list; rows with a note, such as "(of a region)", are not searched for."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    return dict(ROW.findall(text.partition("## Identifiers that are gone")[2]))


def identifiers(source: str) -> Iterator[tuple[str, int]]:
    """Yield every identifier of a module and its line."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            yield node.id, line
        elif isinstance(node, ast.Attribute):
            yield node.attr, line
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, line
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg is not None):
            yield str(node.arg), line
        elif isinstance(node, ast.alias):
            yield from ((part, line) for part in [*node.name.split("."), *([node.asname] if node.asname else [])])


def test_gone_identifiers_are_found_in_every_place_they_could_stand() -> None:
    source = "import a.b as c\nclass D:\n  def e(self, f): return g.h(i=1)\nj = 1\n"
    assert {name for name, _ in identifiers(source)} == {*"abcDefghij", "self"}


def test_identifiers_that_are_gone_stay_away() -> None:
    names = gone()
    assert len(names) > 10
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}, say {names[name]}"
        for path in sorted(SOURCE.rglob("*.py"))
        for name, line in [*identifiers(path.read_text(encoding="utf-8")), (path.stem, 1), (path.parent.name, 1)]
        if name in names
    ]
    assert not found


def test_words_that_are_gone_stay_away() -> None:
    words = dict(WORDS.findall((ROOT / "docs/glossary.md").read_text(encoding="utf-8")))
    assert len(words) > 5
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *SOURCE.rglob("*.py")]
    texts = {file.relative_to(ROOT).as_posix(): " ".join(file.read_text("utf-8").lower().split()) for file in files}
    found = [
        f"{name}: {word}, say {words[word]}"
        for name, text in texts.items()
        for word in words
        if word in text and not name.startswith(QUOTED) and name != "CHANGELOG.md"
    ]
    assert not found
