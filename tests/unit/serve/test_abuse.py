"""The page on serving names the tests of every abuse of its list; a test that is renamed does not drop out of it."""

from __future__ import annotations

import re
from pathlib import Path


def test_every_abuse_has_its_tests(repository: Path) -> None:
    page = (repository / "docs" / "serving.md").read_text()
    rows = dict(re.findall(r"^\| (A\d+) \|(.*)$", page, re.MULTILINE))
    assert list(rows) == [f"A{number}" for number in range(1, 17)]
    known = {
        name
        for path in (repository / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    for number, row in rows.items():
        named = set(re.findall(r"`(test_\w+)`", row))
        assert named and named <= known, (number, named - known)
