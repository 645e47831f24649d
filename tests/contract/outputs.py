"""What other people's programs read from Megalith: how outputs are recorded, and compared with the record.

`recorded/SUBJECT.json` maps sections (a kind of record, a file, an endpoint) to names and the types of their values.
Nothing recorded may disappear or change its type; additions are free until they are recorded.
`recorded/console.txt` holds the lines of the console as regular expressions, by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.e2e.warm import Finished, Running, WarmProcess

RECORDED = Path(__file__).parent / "recorded"

MAPS = ("files", "tokenizer.files", "tokenizer.settings", "tokenizer.special")
"""Objects of a manifest whose keys are data."""

Fields = Mapping[str, str]
"""Name -> types, joined by "|". A name is a path: `a.b` of an object, `a[]` of an array, `a.*` where keys are data.

A type that ends with "?" is put in by hand: null may be all that a machine or a run gives.
"""
Found = Mapping[str, Fields]
"""Section -> its fields."""


def fields_of(values: Iterable[Any], maps: Iterable[str] = ()) -> dict[str, str]:
    """Return every field of JSON values with its types, merged over all values.

    Args:
        values: JSON values of the same kind.
        maps: paths of objects whose keys are data rather than names.
    """
    types: dict[str, set[str]] = {}
    for value in values:
        for path, kind in _walk(value, "", frozenset(maps)):
            types.setdefault(path, set()).add(kind)
    types.pop("", None)
    return {path: "|".join(sorted(kinds)) for path, kinds in types.items()}


def _walk(value: Any, path: str, maps: frozenset[str]) -> Iterator[tuple[str, str]]:
    yield path, type_of(value)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            name = "*" if path in maps else str(key)
            yield from _walk(inner, f"{path}.{name}" if path else name, maps)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _walk(inner, f"{path}[]", maps)


def type_of(value: Any) -> str:
    """Return JSON's name of a value's type; the class's where JSON has none."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", tuple: "array"}
    if isinstance(value, Mapping):
        return "object"
    return names.get(type(value), type(value).__name__)


def problems(recorded: Found, found: Found, *, accepted: bool = False) -> list[str]:
    """List what of a record is missing or has changed its type.

    Args:
        recorded: the promise.
        found: what the program does now.
        accepted: the fields are those of requests: types may be added, but none dropped.
    """
    wrong = []
    for section, fields in recorded.items():
        for name, types in fields.items():
            before, now = _kinds(types), _kinds(found.get(section, {}).get(name, ""))
            if not now:
                wrong.append(f"{section}: {name} is missing")
                continue
            never_set = now == {"null"} != before and not types.endswith("?")
            if not (_is_within(before, now) if accepted else _is_within(now, before) and not never_set):
                wrong.append(f"{section}: {name} was {types} and is {'|'.join(sorted(now))}")
    return wrong


def _kinds(types: str) -> set[str]:
    """Split types; `number?` is a number, or null in all values where this machine or run has none."""
    return {kind for kind in types.removesuffix("?").split("|") if kind} | ({"null"} if types.endswith("?") else set())


def _is_within(kinds: set[str], allowed: set[str]) -> bool:
    return all(kind in allowed or (kind == "integer" and "number" in allowed) for kind in kinds)


def recorded(subject: str) -> dict[str, dict[str, str]]:
    """Return the record of a subject."""
    content: dict[str, dict[str, str]] = json.loads((RECORDED / f"{subject}.json").read_text(encoding="utf-8"))
    return content


def record(subject: str, found: Found) -> None:
    """Add what is found to the record of a subject. What it holds already stays: a promise is taken back by hand."""
    path = RECORDED / f"{subject}.json"
    known = recorded(subject) if path.exists() else {}
    for section, fields in found.items():
        entry = known.setdefault(section, {})
        for name, types in fields.items():
            if not entry.get(name, "").endswith("?"):
                entry[name] = "|".join(sorted(_kinds(types) | _kinds(entry.get(name, ""))))
    path.write_text(json.dumps(known, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def console_lines(section: str) -> list[str]:
    """Return the regular expressions of a section of console.txt."""
    text = (RECORDED / "console.txt").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^== (.+) ==\n((?:(?!== ).*\n)*)", text, re.MULTILINE))
    return [line for line in sections[section].splitlines() if line and not line.startswith("#")]


def missing_lines(section: str, text: str) -> list[str]:
    """List the lines of a section of console.txt that a text lacks, or has before those that come first there."""
    lines, missing, position = text.splitlines(), list[str](), 0
    for pattern in console_lines(section):
        places = [place for place, line in enumerate(lines) if re.fullmatch(pattern, line)]
        after = [place for place in places if place >= position]
        if after:
            position = after[0] + 1
        else:
            missing.append(f"{pattern}{'  (too early)' if places else ''}")
    return missing


def file_names(folder: Path) -> dict[str, str]:
    """Return the files below a folder, with numbers of processes, machines and times of day as `*`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        name = re.sub(r"tfevents\..*", "tfevents.*", name)
        name = re.sub(r"[0-9a-f]{32}", "MD5", name)
        name = re.sub(r"\.[0-9a-f]{8}\.\d+\.\d*", ".PLACE.PID.BORN", name)
        if path.is_file():
            found[name] = "file"
    return found


class Commands:
    """Runs commands in a folder of their own, each in a process that is forked from a warm one.

    Args:
        folder: where they run.
        warm: the process that is forked.
    """

    def __init__(self, folder: Path, warm: WarmProcess) -> None:
        self.folder, self.warm = folder, warm

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the warm process to its owner."""

    def run(self, *words: object, code: int = 0, **env: str) -> str:
        """Run `megalith WORDS` and return what it printed."""
        finished = self.warm.run(words[1:], self.folder, command=str(words[0]), **env)
        return self._checked(finished, code)

    def run_ranks(self, number: int, *words: object) -> str:
        """Run `megalith train WORDS` on several ranks and return what the first printed."""
        return [self._checked(finished, 0) for finished in self.warm.run_ranks(number, words, self.folder)][0]

    def start(self, *words: object, **env: str) -> Running:
        """Start `megalith WORDS`."""
        return self.warm.start(words[1:], self.folder, command=str(words[0]), **env)

    def _checked(self, finished: Finished, code: int) -> str:
        assert finished.code == code, finished.text
        return finished.text

    def read(self, name: str) -> Any:
        """Read a JSON file."""
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def read_lines(self, name: str) -> list[Any]:
        """Read a file of one JSON value a line."""
        return [json.loads(line) for line in (self.folder / name).read_text(encoding="utf-8").splitlines()]
