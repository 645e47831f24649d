"""What comments, messages, tests and pages refer to is in this repository: files, headings, tests, goldens."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {".py", ".md", ".sh", ".sbatch", ".toml", ".yml", ".cff", ""}
DATA = ("tests/contract", "tests/parity/fixtures", "tests/unit/compat/scripts")
"""Folders whose files are names of flags, or of others."""
NAVIGATION = ROOT / "mkdocs.yml"
"""Names generated pages too; test_site.py holds it."""

PATH = re.compile(
    r"(?<!--out )(?<!--plot )(?<![\w./-])((?:docs|tests|benchmarks|recipes|examples|src/megalith)/[\w./-]*\w)(#[\w-]+)?"
)
PAGE = re.compile(r"(?<![\w./*\"'\[-])([\w./-]+\.md)\b(#[\w-]+)?")
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]+)?\)")
MODULE = re.compile(r"(?<![\w./-])([a-z]+/[\w/]+\.py)\b")
DECISION = re.compile(r"[Dd]ecision (\d{4})|decisions/(\d{4})")
TEST = re.compile(r"`(test_\w+)`")
GOLDEN = re.compile(r"[Gg]oldens? `(\w+)[/`]")
FAULT_TEST = re.compile(r"\bF(?:0[1-9]|[1-3]\d|4[0-2])\b")


@cache
def sources() -> dict[Path, str]:
    """Return the text files of the repository; those that git ignores are left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    is_clone = (ROOT / ".git").exists() and shutil.which("git") is not None
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout if is_clone else ""
    files = [ROOT / line for line in listed.splitlines()] or [
        file for file in ROOT.rglob("*") if not any(part.startswith(".") for part in file.relative_to(ROOT).parts)
    ]
    data = [ROOT / folder for folder in DATA]
    chosen = [
        file for file in files if file.suffix in TEXTS and file.is_file() and file not in (Path(__file__), NAVIGATION)
    ]
    chosen = [file for file in chosen if not any(file.is_relative_to(folder) for folder in data)]
    return {file: file.read_text("utf-8", "ignore") for file in chosen}


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", without_code(page.read_text("utf-8")), flags=re.MULTILINE)
    return frozenset("#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


def without_code(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)


def leads_somewhere(path: Path, anchor: str | None) -> bool:
    return path.exists() and (not anchor or path.suffix != ".md" or anchor in anchors(path))


def found(pattern: re.Pattern[str], *suffixes: str) -> Iterator[tuple[Path, re.Match[str]]]:
    for file, text in sources().items():
        if not suffixes or file.suffix in suffixes:
            yield from ((file, match) for match in pattern.finditer(text))


def shown(file: Path, match: re.Match[str]) -> str:
    return f"{file.relative_to(ROOT)}: {match[0]}"


def test_the_files_are_found() -> None:
    files = {str(file.relative_to(ROOT)) for file in sources()}
    assert {"README.md", "docs/reference/README.md", "src/megalith/layout.py", "tests/conftest.py"} <= files


def test_links_of_pages() -> None:
    wrong = [
        shown(file, match)
        for file, text in sources().items()
        if file.suffix == ".md"
        for match in LINK.finditer(without_code(text))
        if "://" not in match[1] and not leads_somewhere(file.parent / match[1] if match[1] else file, match[2])
    ]
    assert wrong == []


def test_paths_in_comments_messages_and_pages() -> None:
    wrong = [
        shown(file, match)
        for file, match in found(PATH)
        if not leads_somewhere(ROOT / match[1], match[2]) and not list(ROOT.glob(f"{match[1]}*"))
    ]
    assert wrong == []


def test_pages_that_are_named() -> None:
    """From the root, from `docs`, or from the file that names them."""
    wrong = [
        shown(file, match)
        for file, match in found(PAGE)
        if "://" not in match[1]
        and not any(leads_somewhere(folder / match[1], match[2]) for folder in (ROOT, ROOT / "docs", file.parent))
    ]
    assert wrong == []


def test_modules_that_are_named_from_their_folder() -> None:
    """As `nn/region.py`, from `src/megalith`, `tests`, `tests/unit` or the file that names them."""
    folders = {folder.name for folder in (ROOT / "src/megalith").iterdir() if folder.is_dir()}
    homes = [ROOT / home for home in ("src/megalith", "tests", "tests/unit")]
    wrong = [
        shown(file, match)
        for file, match in found(MODULE)
        if match[1].partition("/")[0] in folders
        and file.name != "CHANGELOG.md"
        and not any((folder / match[1]).exists() for folder in (*homes, file.parent))
    ]
    assert wrong == []


def test_decisions() -> None:
    wrong = [
        shown(file, match)
        for file, match in found(DECISION)
        if not list((ROOT / "docs/decisions").glob(f"{match[1] or match[2]}-*.md"))
    ]
    assert wrong == []


def test_tests_that_pages_name() -> None:
    names = {match[1] for _, match in found(re.compile(r"def (test_\w+)\("), ".py")}
    assert [shown(file, match) for file, match in found(TEST, ".md") if match[1] not in names] == []


def test_goldens() -> None:
    folder = ROOT / "tests/parity/fixtures/golden"
    wrong = [shown(file, match) for file, match in found(GOLDEN) if not (folder / f"{match[1]}.tar.xz").exists()]
    assert wrong == []


def test_fault_tests() -> None:
    """Each number that a test gives is a row of the reference, and each row names tests (`test_paths_...`)."""
    rows = set(
        re.findall(r"^\| (F\d\d) \|.*`tests/", (ROOT / "docs/reference/reliability.md").read_text("utf-8"), re.M)
    )
    assert len(rows) > 35
    tests = ((file, match) for file, match in found(FAULT_TEST, ".py") if file.is_relative_to(ROOT / "tests"))
    assert [shown(file, match) for file, match in tests if match[0] not in rows] == []
