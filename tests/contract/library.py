"""Describe the library of today: signatures, classes of errors, fields of the configuration, names."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
import typing
from pathlib import Path
from typing import Any

import megalith
from megalith import api, errors
from megalith.config import RunConfig, load

from . import training
from .lines import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CALLED = (
    "megalith.config.load",
    "megalith.config.from_values",
    "megalith.config.check_groups",
    "megalith.config.check_run",
    "megalith.config.RunConfig.from_dict",
    "megalith.config.RunConfig.to_dict",
    "megalith.errors.ConfigError",
    "megalith.errors.PeerError",
    "megalith.errors.install_command",
    "megalith.cli.main.main",
    *(f"megalith.api.{name}" for name in api.__all__ if inspect.isfunction(getattr(api, name)) and name != "setting"),
)
"""`setting` has a default without a lasting representation."""

_NOT_HELD = {"megalith.checkpoint.MemoryStore"}  # a double for tests


def fields() -> dict[tuple[str, ...], str]:
    """(group, field) -> type and default, of RunConfig and all its groups."""
    found = {}
    for name, kind in _groups().items():
        found[(f"{name}", f"{kind.__module__.split('.')[0]}.config.{kind.__name__}")] = "group"
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            found[(f"{name}.{field.name}", _type(hints[field.name]))] = _default(field)
    return found


def _groups() -> dict[str, Any]:
    hints = typing.get_type_hints(RunConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(RunConfig) if field.compare}


def _type(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace(" | ", " or ")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return json.dumps(field.default)
    made = field.default_factory
    return "required" if made is dataclasses.MISSING else json.dumps(made())


def error_classes() -> dict[tuple[str, ...], str]:
    """(error,) -> its exit code and the errors that catch it."""
    kinds = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.MegalithError)
    }
    return {
        (name,): f"exit code {kind.exit_code}, caught by "
        + " ".join(sorted(base.__name__ for base in kind.__mro__[1:-1] if base not in (BaseException, object)))
        for name, kind in kinds.items()
    }


def resolve(dotted: str) -> Any:
    """The module, class or function of a dotted name.

    Raises:
        ImportError: it is gone.
    """
    owner, _, name = dotted.rpartition(".")
    if owner and hasattr(holder := resolve(owner), name):
        return getattr(holder, name)
    return importlib.import_module(dotted)


def signature(dotted: str) -> str:
    """The parameters of a function or class: `a, b=default, *, c=default`."""
    words, by_name = [], False
    for parameter in inspect.signature(resolve(dotted)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not by_name:
            words.append("*")
            by_name = True
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        words.append(f"{star}{parameter.name}{default}")
        by_name = by_name or bool(star)
    return ", ".join(words)


def without_additions(recorded: str, now: str) -> str:
    """The parameters of today without new ones that have a default."""
    known = recorded.split(", ")
    return ", ".join(word for word in now.split(", ") if word in known or "=" not in word)


def documented_names() -> list[str]:
    """Dotted names in the pages, and what the examples import; of packages so named all that `__all__` lists."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in _documents())
    names = set(re.findall(r"`(megalith(?:\.\w+)+)`", text))
    for module, imported in re.findall(r"^from (megalith[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
        names |= {f"{module}.{name.strip()}" for name in imported.split(",")}
    packages = {name.rpartition(".")[0] for name in names}
    for package in packages:
        names |= {f"{package}.{name}" for name in getattr(resolve(package), "__all__", ())}
    return sorted(names - _NOT_HELD)


def _documents() -> list[Path]:
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("examples/*.py")]
    return [page for page in pages if page.name != "CHANGELOG.md"]


def place(environment: str) -> str:
    """What a process knows of its place from a launcher's variables, written as `A=1 B=2`."""
    environ = dict(word.split("=", 1) for word in environment.split())
    try:
        launch = load(training.words_of(""), environ, files=False).launch
    except errors.ConfigError:
        return "refused"
    values = [launch.launcher, launch.rank, launch.world_size, launch.local_rank, launch.local_world_size]
    hosts = {"MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"} & environ.keys()
    values += [launch.master_addr] if hosts else []
    values += [launch.master_port] if "MASTER_PORT" in environ else []
    return " ".join(json.dumps(value) for value in values)


def variables() -> set[str]:
    """Words of the source in capitals, among which are the names of environment variables."""
    source = Path(megalith.__file__).parent.rglob("*")
    text = "\n".join(path.read_text(encoding="utf-8") for path in source if path.suffix in (".py", ".toml", ".json"))
    return set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", text))


def packaging() -> list[str]:
    """What an installation has: extras, commands, plug-ins; the targets of the Makefile; scripts, recipes, examples."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [f"extra {name}" for name in project["optional-dependencies"]]
    lines += [f"command {name}" for name in project["scripts"]]
    groups = project["entry-points"].items()
    lines += [f"entry point {group} {name}" for group, entries in groups for name in entries]
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    lines += [f"make {name}" for name in re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE)]
    lines += [f"make variable {name}" for name in re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE)]
    kinds = ("*.py", "tools/**/*.py", "tasks/*.py", "recipes/*.toml", "examples/**/*.*")
    paths = sorted(path for kind in kinds for path in REPOSITORY.glob(kind) if path.is_file())
    return [
        *lines,
        *(f"file {path.relative_to(REPOSITORY).as_posix()}" for path in paths if "__pycache__" not in str(path)),
    ]
