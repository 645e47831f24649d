"""Docstrings of functions in the rooms that are done begin with a verb, not with the subject of a riddle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "megalith"

ROOMS = ("assemble", "cli", "config", "distributed", "kernels", "report", "schedules")
"""Folders of src/megalith whose docstrings have been revised; a folder that has been is added here."""

NO_VERB = re.compile(r"(The|What|Whether|An?|How|If|Where)\b")


def docstrings(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and docstring of the functions of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            yield node.lineno, node.name, text


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_of_functions_begin_with_a_verb(room: str) -> None:
    files = sorted((SOURCE / room).rglob("*.py"))
    assert files
    found = [
        f"{file.relative_to(SOURCE)}:{line}: {name}: {text.splitlines()[0]}"
        for file in files
        for line, name, text in docstrings(file.read_text(encoding="utf-8"))
        if NO_VERB.match(text)
    ]
    assert not found, "\n".join(found)


def test_the_rule_itself() -> None:
    source = 'def f():\n  """Whether it is."""\nasync def g():\n  """Analyse."""\nclass C:\n  """The class."""\n'
    assert [(name, bool(NO_VERB.match(text))) for _, name, text in docstrings(source)] == [("f", True), ("g", False)]
