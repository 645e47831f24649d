"""The pages and the Dockerfile name what is there: files, links, the folders of an image."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_stops_of_the_tour_exist() -> None:
    tour = (ROOT / "docs/tour.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`([\w/]+\.py)`", tour))
    assert len(files) > 25
    assert {
        file for file in files if not any((root / file).exists() for root in (ROOT, ROOT / "src/megalith"))
    } == set()
    for owner in re.findall(r"\b([A-Z]\w+)\.forward", tour):
        assert any(f"class {owner}(" in file.read_text() for file in (ROOT / "src/megalith/models").glob("*.py")), owner


def test_dockerfile_copies_what_is_there() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert "src" in copied
    assert [word for word in copied if not (ROOT / word).exists()] == []
    ignored = set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())
    assert not ignored & set(copied)
    scripts = {path.name for path in ROOT.glob("pretrain_*.py")} | {"tools", "tasks", "recipes", "examples"}
    assert scripts <= set(copied)
