"""Hooks of mkdocs: pages made from the program and from files beside docs/, and Markdown as GitHub reads it.

The pages are written for GitHub, their other reader; what Python-Markdown reads otherwise is changed here.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BESIDE = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "results/tried.md": "benchmarks/results/README.md",
}
"""Page of the site -> file of the repository that it is."""
SHOWN = {"README.md": "index.md", "README.zh.md": "zh/index.md", "recipes": "recipes.md", "examples": "examples.md"}
"""File or folder of the repository -> page of the site that has it, or stands for it."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s:]+?)(#[^)\s]+)?\)")
_CODE = re.compile(r"^(```.*?^```|~~~.*?^~~~)", re.DOTALL | re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and number the decisions in the navigation."""
    from mkdocs.structure.files import File

    made = {page: (ROOT / file).read_text("utf-8") for page, file in BESIDE.items()}
    made |= {"commands.md": commands(), "library.md": library()}
    made["recipes.md"] = listing(
        "Recipes", "To start one: `megalith train --config` with its path.", "recipes", "*.toml", "toml"
    )
    made["examples.md"] = listing("Examples", "Scripts to edit.", "examples", "**/*.*", "bash")
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_config(config: Any) -> Any:
    """Put every decision into the navigation."""
    for section in config.nav:
        if section.get("Decisions") == "decisions/*":
            section["Decisions"] = [f"decisions/{file.name}" for file in sorted((ROOT / "docs/decisions").glob("*.md"))]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Change links out of docs/, and put the blank lines that Python-Markdown needs before lists and tables."""
    home = posixpath.dirname(BESIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
    parts = _CODE.split(markdown)
    for place in range(0, len(parts), 2):
        text = re.sub(r"^(?! |- |\d+\. |\||#|>|$)(.+)\n(?=- |1\. |\|)", r"\1\n\n", parts[place], flags=re.MULTILINE)
        text = re.sub(r"\A\n(?=- |1\. |\|)", "\n\n", text)  # right behind a block of code
        parts[place] = _LINK.sub(lambda link: _led(link, home, page.file.src_uri, config.repo_url), text)
    return "".join(parts)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Name the language of Chinese pages, which browsers choose fonts and line breaks by."""
    is_chinese = page.file.src_uri.startswith("zh/") or ".zh." in page.file.src_uri
    return output.replace('<html lang="en"', '<html lang="zh-CN"', 1) if is_chinese else output


def _led(link: re.Match[str], home: str, page: str, repository: str | None) -> str:
    """Return a link as the site has it: to a page, to the repository, or the text alone where there is no address."""
    mark, text, target, anchor = link[1], link[2], link[3], link[4] or ""
    path = posixpath.normpath(posixpath.join(home, target))
    uri = {**{file: uri for uri, file in BESIDE.items()}, **SHOWN}.get(path)
    if uri is None and path.startswith("docs/") and not path.endswith(".ipynb"):
        uri = path.removeprefix("docs/")
        uri = {"decisions": sorted((ROOT / "docs/decisions").iterdir())[0].relative_to(ROOT / "docs").as_posix()}.get(
            uri, uri
        )
    if uri is not None:
        anchor = "" if uri == SHOWN.get(path) else anchor
        return f"{mark}[{text}]({posixpath.relpath(uri, posixpath.dirname(page) or '.')}{anchor})"
    if not (ROOT / path).exists():
        return link[0]  # mkdocs reports it
    return f"[{text}]({repository.rstrip('/')}/blob/main/{path}{anchor})" if repository else f"{text} (`{path}`)"


def commands() -> str:
    """Return the reference of every command, from its parser."""
    from megalith.cli.completion import _pages
    from megalith.cli.main import available_commands
    from megalith.errors import EXIT_CODES

    lines = [
        "# Commands",
        "",
        "Generated from the parsers of this version; `megalith help COMMAND` prints the same.",
        "",
    ]
    lines += ["| command | what it does |", "|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {_cell(about)} |" for name, about in available_commands().items()]
    for page in _pages():
        lines += ["", f"{'##' if ' ' not in page.words else '###'} {page.words}", "", "```text", page.usage, "```", ""]
        about = (re.sub(r"^\s+", "", part, flags=re.MULTILINE) for part in page.about.split("\n\n"))
        lines += [*("\n".join(_plain(line) for line in part.splitlines()) + "\n" for part in about)]
        if page.words == "train":
            lines += ["All flags: [Flags](flags.md)."]
        elif page.words != "config" and page.options:
            lines += ["| flag | value | meaning |", "|---|---|---|"]
            for option in page.options:
                names = ", ".join(f"`{word}`" for word in option.spellings) or f"`{option.placeholder}`"
                value = f"`{_cell(option.placeholder)}`" if option.spellings and option.placeholder else ""
                lines.append(f"| {names} | {value} | {_cell(_plain(option.help))} |")
    lines += ["", "## Exit codes", "", "| code | meaning |", "|---|---|"]
    return "\n".join([*lines, *(f"| {code} | {_cell(about)} |" for code, about in EXIT_CODES.items()), ""])


def library() -> str:
    """Return the reference of `megalith.api`: its names by kind, whose docstrings mkdocstrings reads."""
    from megalith import api

    lines = [
        "# Library",
        "",
        "What programs and modules of yours may rely on is `megalith.api`; the rest may change.",
        "",
    ]
    lines += ["Programs that use it: [Extending](extending.md). Generated from the docstrings of this version."]
    for title, names in _kinds(api):
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", f"::: {_origin(api, name)}"]
    return "\n".join([*lines, ""])


def _origin(api: Any, name: str) -> str:
    """Return the dotted name of what a name of the API stands for; nothing that needs torch is imported for it."""
    if name in api._LATER:
        return str(api._LATER[name].replace(":", "."))
    return f"{getattr(api, name).__module__}.{getattr(api, name).__qualname__}"


def _kinds(api: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield titles and names of the groups that the page has."""
    classes = [name for name in api.__all__ if name[0].isupper()]
    yield "Register your own", [name for name in api.__all__ if name.startswith("register_")]
    yield "Functions", [name for name in api.__all__ if name not in classes and not name.startswith("register_")]
    yield "Classes", [name for name in classes if not name.endswith(("Config", "Error"))]
    yield "Configuration", [name for name in classes if name.endswith("Config")]
    yield "Errors", [name for name in classes if name.endswith("Error")]


def listing(title: str, about: str, folder: str, pattern: str, language: str) -> str:
    """Return a page with every file of a folder."""
    lines = [f"# {title}", "", about]
    for file in sorted((ROOT / folder).glob(pattern)):
        if file.is_file() and "__pycache__" not in file.parts:
            kind = "python" if file.suffix == ".py" else language
            lines += [
                "",
                f"## {file.relative_to(ROOT / folder)}",
                "",
                f"```{kind}",
                file.read_text("utf-8").rstrip(),
                "```",
            ]
    return "\n".join([*lines, ""])


def _plain(text: str) -> str:
    """Return text in which Markdown and HTML find nothing to read."""
    return re.sub(r"([\\`*_\[\]<>{}])", r"\\\1", text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
