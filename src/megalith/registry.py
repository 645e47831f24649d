"""What users add to a run: objects that decorators mark, and the registry from which a run chooses them by name.

A decorator only marks an object. Nothing is registered by importing a module: `collect` imports the modules that a
command line names with --import, gathers what is marked in them into a `Registry`, and that value is passed on.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from megalith.errors import ConfigError, MegalithError

IMPORT_FLAG, TRUST_FLAG = "--import", "--trust-recipe"

KINDS: Mapping[str, str] = {
    "attention": "--attention",
    "dataset": "--data-source",
    "hook": "--hook",
    "loss": "--loss",
    "mlp": "--mlp",
    "model": "--model",
    "norm": "--normalization",
    "optimizer": "--optimizer",
    "position": "--position-embedding-type",
    "router": "--moe-router",
    "schedule": "--lr-decay-style",
    "tokenizer": "--tokenizer-type",
}
"""Kind of a registered object -> the flag that chooses one."""

_MARKS, _MARKED = "__megalith_marks__", "__megalith_marked__"
"""Attributes of an object, with its entries, and of a module, with the entries made in it and the code that did."""
HOOK = "__megalith_hook__"
"""Attribute of the base class of hooks."""

_DOTTED = "give the dotted name, such as my_project for my_project.py, without a path"
_OURS = str(Path(__file__).parent) + os.sep

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Entry:
    """A registered object.

    Attributes:
        kind: One of `KINDS`.
        settings: Dataclass of its settings, whose fields become flags; the object then takes `settings=`, one of them.
        options: Further arguments of the decorator, such as the `unit` of an optimizer.
    """

    kind: str
    name: str
    thing: Any
    settings: type | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """Name of the module that defines the object."""
        return str(getattr(self.thing, "__module__", ""))


class Registered(str):
    """The value of a setting that names a registered object: a string equal to the name, with the object attached.

    Attributes:
        settings: The object's settings in this run; None where it has none.
    """

    __slots__ = ("entry", "settings")

    entry: Entry
    settings: Any

    def __new__(cls, entry: Entry, settings: Any = None) -> Registered:
        """Make the name of `entry`; its settings have their defaults unless given."""
        name = super().__new__(cls, entry.name)
        name.entry = entry
        name.settings = entry.settings() if settings is None and entry.settings is not None else settings
        return name

    def __reduce__(self) -> tuple[Any, ...]:
        return Registered, (self.entry, self.settings)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the object, with its settings where it has some.

        Raises:
            ConfigError: It does not take the arguments of its kind.
            MegalithError: It raises an exception, which the message names with its file and line.
        """
        entry = self.entry
        if entry.settings is not None:
            options = {**options, "settings": self.settings}
        flag = f"{KINDS[entry.kind]} {self}"
        with naming_errors(flag):
            try:
                return entry.thing(*args, **options)
            except TypeError:
                if complaint := _wrong_arguments(entry.thing, args, options):
                    raise ConfigError(f"{flag}: {_name_of(entry)} {complaint}") from None
                raise


@dataclass(frozen=True)
class Import:
    """A module that was named with --import, and the SHA-256 of its source."""

    name: str
    sha256: str


@dataclass(frozen=True, eq=False)
class Registry:
    """The registered objects of a run."""

    entries: tuple[Entry, ...] = ()
    imports: tuple[Import, ...] = ()

    def find(self, kind: str, name: str) -> Entry | None:
        """Return the object of a kind with this name, or None."""
        return next((entry for entry in self.entries if (entry.kind, entry.name) == (kind, name)), None)

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the names of the objects of a kind, in the order of registration."""
        return tuple(entry.name for entry in self.entries if entry.kind == kind)


EMPTY = Registry()


def mark(kind: str, name: str, *, settings: type | None = None, **options: Any) -> Callable[[Thing], Thing]:
    """Make the decorator that marks an object as one of a kind; arguments as of `Entry`."""
    if kind not in KINDS:
        raise ValueError(f"no kind is called {kind!r}; kinds are {', '.join(KINDS)}")
    if not isinstance(name, str):
        raise TypeError(
            f"{name!r} is not a name: give the decorator the one that {KINDS[kind]} takes, such as 'my-{kind}'"
        )
    if not name or name != name.strip() or any(character in " ,=[]\"'" for character in name):
        raise ValueError(f"{name!r} cannot be given to {KINDS[kind]}; use letters, digits, - and _")
    if settings is not None and not is_dataclass(settings):
        raise TypeError(f"settings of {name!r}: {settings!r} is not a dataclass")

    def decorate(thing: Thing) -> Thing:
        entry = Entry(kind, name, thing, settings, options)
        frame = sys._getframe(1)
        # Of two marks of one run of a module both count; those of a reload or a new notebook cell replace the earlier.
        earlier = frame.f_globals.get(_MARKED, ())
        kept = [(e, code) for e, code in earlier if code is frame.f_code or (e.kind, e.name) != (kind, name)]
        frame.f_globals[_MARKED] = [*kept, (entry, frame.f_code)]
        if getattr(thing, "__module__", None) == frame.f_globals.get("__name__"):  # not what others define
            # for modules that import it; `vars`, as a subclass would inherit the marks of its base
            setattr(thing, _MARKS, (*vars(thing).get(_MARKS, ()), entry))
        return thing

    return decorate


def marked_in(module: Any) -> Iterator[Entry]:
    """Yield the entries of all marked objects of a module, including those that it imports from elsewhere.

    Its own subclasses of `megalith.api.Hook` are entries without a mark.
    """
    own = [entry for entry, _ in vars(module).get(_MARKED, ())]
    yield from own
    for thing in list(vars(module).values()):
        marks = getattr(thing, "__dict__", {}).get(_MARKS, ())
        yield from (entry for entry in marks if entry.thing is thing and entry not in own)
        if isinstance(thing, type) and getattr(thing, HOOK, False) and thing.__module__ == module.__name__:
            yield Entry("hook", f"{module.__name__}:{thing.__qualname__}", thing)


def collect(names: Sequence[str]) -> Registry:
    """Import modules by their dotted names and gather what is marked in them.

    Of a name `module:Class`, as hooks have, the module counts. The working directory is searched last.

    Raises:
        ConfigError: A module does not exist or fails to import, or two objects of a kind have one name.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    names = list(dict.fromkeys(name.partition(":")[0] for name in names))
    problems: list[str] = []
    entries: list[Entry] = []
    imports = []
    for name in names:
        if "/" in name or not all(name.split(".")):
            problems.append(f"{IMPORT_FLAG} {name or chr(39) * 2}: no module has this name; {_DOTTED}")
            continue
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit) as error:
            problems.append(f"{IMPORT_FLAG} {name}: {_why_not(name, error)}")
            continue
        entries += (entry for entry in marked_in(module) if entry not in entries)
        imports.append(Import(name, source_hash(module)))
    problems += _doubles(entries)
    if problems:
        raise ConfigError(problems)
    return Registry(tuple(entries), tuple(imports))


def _why_not(name: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
        return f"there is no module {error.name} in {os.getcwd()} or among the installed packages; {_DOTTED}"
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {error.msg}"
    return error_of_user(error)


def error_of_user(error: BaseException) -> str:
    """Return type, text and place of an exception in code of the user, in one line.

    The place is the innermost line of the user's, which may have raised the exception by calling a library.
    """
    libraries = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, "<frozen "))
    ]
    theirs = [frame for frame in frames if not frame.filename.startswith(libraries)] or frames
    return f"{type(error).__name__}: {error}" + "".join(f" at {at.filename}:{at.lineno}" for at in theirs[-1:])


@contextmanager
def naming_errors(where: str) -> Iterator[None]:
    """Turn an exception in code of the user into a MegalithError that starts with `where` and names file and line."""
    try:
        yield
    except MegalithError:
        raise
    except Exception as error:
        raise MegalithError(f"{where}: {error_of_user(error)}") from error


def _name_of(entry: Entry) -> str:
    return f"{entry.module}.{getattr(entry.thing, '__qualname__', entry.name)}"


def _wrong_arguments(thing: Any, args: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Return why an object cannot be called like this; "" if it can."""
    try:
        inspect.signature(thing).bind(*args, **options)
    except TypeError as error:
        words = [f"{len(args)} positional arguments", *(f"{name}=" for name in options)]
        return f"is called with {', '.join(words)}: {error}"
    except ValueError:  # a builtin without a signature
        pass
    return ""


def _doubles(entries: Iterable[Entry]) -> list[str]:
    seen: dict[tuple[str, str], Entry] = {}
    problems = []
    for entry in entries:
        other = seen.setdefault((entry.kind, entry.name), entry)
        if other is not entry:
            problems.append(
                f"{KINDS[entry.kind]} {entry.name} is registered twice, by {_name_of(other)} and {_name_of(entry)}; "
                "give one of them another name"
            )
    return problems


def source_hash(module: Any) -> str:
    """Return the SHA-256 of a module's source, of a package's all modules; empty if there is no source file."""
    found = getattr(module, "__file__", None)
    if not found or not found.endswith(".py"):
        return ""
    path = Path(found)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(path.parent)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
