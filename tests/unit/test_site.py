"""The site: every page has one place in the navigation, and what is generated for it comes from the program.

`make docs` builds it strictly; links and anchors of pages are also held by test_citations.py, without mkdocs.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megalith import api
from megalith.cli.main import available_commands

ROOT = Path(__file__).resolve().parents[2]
CHANGES = "changelog.md"
GENERATED = {
    CHANGES,
    "commands.md",
    "contributing.md",
    "examples.md",
    "library.md",
    "recipes.md",
    "results/tried.md",
}


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts/docs_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    named = Counter(re.findall(r"[\w./-]+\.md\b", nav))
    pages = {file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*.md")}
    decisions = {page for page in pages if page.startswith("decisions/")}
    assert decisions and "decisions/*" in nav
    assert set(named) == pages - decisions | GENERATED
    assert [page for page, times in named.items() if times > 1] == []


def test_generated_pages_have_every_command_and_name(hooks: ModuleType) -> None:
    commands = hooks.commands()
    assert [name for name in available_commands() if f"\n## {name}\n" not in commands] == []
    assert "| `--microbatches`, `--micro-batches` |" in commands and "\n### checkpoint verify\n" in commands
    library = re.findall(r"^::: megalith\.(?:\w+\.)*(\w+)$", hooks.library(), re.MULTILINE)
    other = {"load": "load", "plan": "plan_for", "Hook": "UserHook"}
    assert sorted(library) == sorted(other.get(name, name) for name in api.__all__)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](../README.md#install)", "[a](index.md)"),
        ("[a](plan.md#which-layout)", "[a](plan.md#which-layout)"),
        ("[a](../CHANGELOG.md)", f"[a]({CHANGES})"),
        ("[a](../src/megalith/layout.py)", "[a](https://host/m/blob/main/src/megalith/layout.py)"),
        ("[a](../src/nothing.py)", "[a](../src/nothing.py)"),
        ("```\n[a](../README.md)\nb\n- c\n```\n- d", "```\n[a](../README.md)\nb\n- c\n```\n\n- d"),
        ("text\n| a |\n|---|", "text\n\n| a |\n|---|"),
        ("- text\n- more", "- text\n- more"),
    ],
)
def test_markdown_of_github_becomes_that_of_the_site(hooks: ModuleType, written: str, shown: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="data.md"))
    config = SimpleNamespace(repo_url="https://host/m/")
    assert hooks.on_page_markdown(written, page, config, None).replace("\n\n\n", "\n\n") == shown
