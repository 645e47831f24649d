"""Identifiers that docs/glossary.md lists as gone are in no module of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "megalith"
ROW = re.compile(r"\| `(\w+)` \| `(\w+)` \|")


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
