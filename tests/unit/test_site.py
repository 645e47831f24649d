"""The site: every page has one place in the navigation, and what is generated for it comes from the program.

`make docs` builds it strictly; links and anchors of pages are also held by test_citations.py, without mkdocs.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megalith import api
from megalith.cli import schedule
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


@cache
def _sources() -> list[str]:
    """Return the modules of the package, with strings that go on in the next line joined."""
    files = (ROOT / "src/megalith").rglob("*.py")
    return [re.sub(r'"\s*\n\s*f?"', "", file.read_text("utf-8")) for file in files]


@pytest.mark.parametrize("page", ["guides/troubleshoot.md", "zh/guides/troubleshoot.md"])
def test_messages_of_the_page_are_those_of_the_program(page: str) -> None:
    """The words between the dots of a message stand in one module."""
    rows = re.findall(r"^\| `([^|]*(?:\\\|[^|]*)*)` \|", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 25
    messages = [[part.strip() for part in row.split("…") if len(part.strip()) > 3] for row in rows]
    assert [words for words in messages if not words] == []
    assert [words for words in messages if not any(all(word in text for word in words) for text in _sources())] == []


def test_chinese_guides_have_the_commands_of_the_english_ones() -> None:
    """Which tests/e2e/test_guides.py runs."""
    guides = {file.relative_to(ROOT / "docs") for file in (ROOT / "docs/guides").glob("*.md")}
    for page in {Path("start.md")} | guides:
        both = [(ROOT / "docs" / home / page).read_text("utf-8") for home in ("", "zh")]
        english, chinese = [set(re.findall(r"^\$ .*", text, re.MULTILINE)) for text in both]
        assert chinese <= english, page
        recipes = [re.findall(r"^([a-z_]+ = [^#\n]*[^#\s])", text, re.MULTILINE) for text in both]
        assert recipes[0] == recipes[1], page


def test_pictures_of_text_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    """`make pictures` makes them again."""
    found = re.findall(
        r"<!-- picture: megalith schedule ([^\n]*) -->\n```text\n\$ [^\n]*\n(.*?)\n```\n<!-- end -->",
        (ROOT / "docs/concepts.md").read_text("utf-8"),
        re.DOTALL,
    )
    assert len(found) == 3
    for words, shown in found:
        assert schedule.run(words.split()) == 0
        assert capsys.readouterr().out.rstrip() == shown


def test_claims_stand_on_their_pages_and_what_backs_them_exists() -> None:
    """Of docs/claims.md; that the paths exist is held by test_citations.py."""
    prose = (ROOT / "docs/claims.md").read_text("utf-8").partition("## Figures in prose")[2]
    rows = re.findall(r"^\| `([\w/.]+)` \| (.*?) \| (.*) \|$", prose, re.MULTILINE)
    assert len(rows) > 35
    for page, words, backing in rows:
        assert words in " ".join((ROOT / page).read_text("utf-8").split()), f"{page}: {words}"
        assert re.search(r"`[\w.-]+/[\w./-]+`", backing), backing


def test_pictures_exist_and_are_used() -> None:
    pages = {file: file.read_text("utf-8") for file in (ROOT / "docs").rglob("*.md")}
    found = {(file, name) for file, text in pages.items() for name in re.findall(r' src(?:set)?="([^":]+)"', text)}
    assert [str(file) for file, name in found if not (file.parent / name).exists()] == []
    used = "\n".join(pages.values())
    assert [file.name for file in (ROOT / "docs/pictures").iterdir() if f"pictures/{file.name}" not in used] == []
