"""The tour and the Dockerfile name what is there; what nobody should type is in no page. Links: test_citations.py."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megalith import errors
from megalith.errors import install_command

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("page", "number"), [("tour", 25), ("architecture", 15)])
def test_files_that_explain_the_code_exist(page: str, number: int) -> None:
    files = set(re.findall(r"`([\w/]+\.py)`", (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")))
    assert len(files) >= number
    roots = (ROOT, ROOT / "src/megalith")
    assert [file for file in sorted(files) if not any((root / file).exists() for root in roots)] == []


def test_calls_of_the_tour_exist() -> None:
    tour = (ROOT / "docs/tour.md").read_text(encoding="utf-8")
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "src/megalith").rglob("*.py")]
    for owner in re.findall(r"\b(_?[A-Z]\w+)\.forward", tour):
        assert any(re.search(rf"^class {owner}\b", source, re.MULTILINE) for source in sources), owner


def test_dockerfile_copies_what_is_there() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert "src" in copied
    assert [word for word in copied if not (ROOT / word).exists()] == []
    ignored = set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())
    assert not ignored & set(copied)
    scripts = {path.name for path in ROOT.glob("pretrain_*.py")} | {"tools", "tasks", "recipes", "examples"}
    assert scripts <= set(copied)


INSTALLABLE = ("src", "docs", "examples", "recipes", "tools", "tasks", "benchmarks", "Dockerfile", "Makefile", ".ci")
OURS_FROM_AN_INDEX = re.compile(
    r"pip3? (?:install|download|wheel)\b(?![^\n]*--no-index)[^\n`]*[ '\"]megalith\b(?![/.])|megalith\[\w"
)


def test_nobody_is_told_to_install_megalith_from_an_index() -> None:
    """The name is registered on no public index: whoever takes it would run code on our users' machines."""
    places = [*ROOT.glob("*.md"), *(ROOT / name for name in INSTALLABLE)]
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*"))]
    texts = {file: file.read_text("utf-8", "ignore") for file in files if file.is_file() and file.suffix != ".pyc"}
    assert len(texts) > 400
    found = [f"{file}: {match[0]}" for file, text in texts.items() for match in OURS_FROM_AN_INDEX.finditer(text)]
    assert found == []


@pytest.mark.parametrize("line", ["pip install megalith", "pip install 'megalith[eval]'", 'pip3 install -U "megalith"'])
def test_the_search_for_our_name_finds_it(line: str) -> None:
    assert OURS_FROM_AN_INDEX.search(f"not installed: {line}")


def test_an_extra_is_installed_from_the_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert install_command("eval") == f"pip install -e '{ROOT}[eval]'" or Path(sys.prefix) == (ROOT / ".venv")
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    assert install_command("eval") == f"make -C {ROOT} install EXTRAS=eval"
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "lib/python3/megalith/errors.py"))
    assert install_command("eval").startswith("pip install 'CLONE[eval]'")


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_installs_the_extras_that_are_named() -> None:
    def dry_run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", "-n", "-B", *words], cwd=ROOT, capture_output=True, text=True)

    assert "-e '.[plot,eval,track]'" in dry_run("install", "EXTRAS=eval,track").stdout
    assert "-e '.[plot]'" in dry_run("install", "EXTRAS=").stdout
    unknown = dry_run("install", "EXTRAS=eval,bogus")
    assert unknown.returncode != 0 and "bogus" in unknown.stderr and "eval" not in unknown.stderr


def test_complete_training_commands_say_how_often_they_save() -> None:
    """--save without --save-interval is refused."""
    texts = [file.read_text(encoding="utf-8") for file in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))]
    commands = [line for text in texts for line in text.replace("\\\n", " ").splitlines()]
    saving = [command for command in commands if "--save " in command and "--train-iters " in command]
    assert len(saving) > 10
    assert [command for command in saving if not re.search("--save-interval|--config", command)] == []
