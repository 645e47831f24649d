"""Docstrings of functions begin with a verb, and those of properties at least not with an article or a question."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "megalith"

ROOMS = tuple(sorted(path.name for path in SOURCE.iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))))
NO_VERB = re.compile(
    r"[`\[(]|(The|What|Whether|An?|How|If|Where|When|Which|Why|Who|It|One|As|Of|In|On|At|To|From|By|For|With|All|Each|"
    r"Every|No|Nothing|Those|These|This|That|Its|Names? of|Number of|Around)\b"
)
NO_NOUN = re.compile(r"(The|What|Whether|An?|How|If|Where|When|Which|Why|It|As|Of)\b")


def violations(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and beginning of the docstrings of a module's functions that break the rule."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            is_property = any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)
            if (NO_NOUN if is_property else NO_VERB).match(text):
                yield node.lineno, f"{node.name}: {text.splitlines()[0]}"


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_of_functions_begin_with_a_verb(room: str) -> None:
    path = SOURCE / room
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    found = [
        f"{file.relative_to(SOURCE).as_posix()}:{line}: {text}"
        for file in files
        for line, text in violations(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_the_rule_itself() -> None:
    assert len(ROOMS) > 20
    source = (
        'def f():\n  """Whether it is."""\nasync def g():\n  """Analyse."""\nclass C:\n  """The class."""\n'
        '  @property\n  def p(self):\n    """Number of steps."""\n'
        '  @cached_property\n  def q(self):\n    """The size."""\n'
        'def h():\n  """[S, B] -> [B]."""\ndef i():\n  """Number of steps."""\ndef j():\n  """Number the steps."""\n'
    )
    assert [text.partition(":")[0] for _, text in sorted(violations(source))] == ["f", "q", "h", "i"]
