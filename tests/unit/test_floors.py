"""The floors of the package: a module imports from its own folder and from lower floors only.

The imports are read from the syntax tree, those inside functions and under `TYPE_CHECKING` included, so that a
cycle cannot hide. What stands on which floor: docs/architecture.md#folders-and-floors.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "megalith"

FLOORS = {
    "": -1,  # megalith/__init__.py
    "errors": -3,  # under all others
    "datasheet": -2,  # a table
    "torch_builds": -1,  # a table
    "device": -1,  # what torch can do on a device, under all that computes
    "registry": -2,  # what users add: a value of names and objects
    "hub": -2,  # names of models and data on the Hugging Face Hub
    "progress": 1,  # of long work; all that works reports to it
    "flat": -1,  # pure integers: parameters in flat memory
    "layout": -1,  # pure integers, which the rules of the configuration use
    "config": 0,
    "schedules": -1,  # pure functions, which the rules of the configuration use
    "tokenizers": 1,
    "distributed": 1,
    "nn": 1,
    "kernels": 0,  # operations on tensors alone, which the layers use
    "report": 1,  # reads what a run wrote; without torch
    "data": 2,
    "models": 2,
    "parallel": 2,
    "optim": 3,
    "checkpoint": 3,
    "train": 4,
    "serve": 4,
    "assemble": 5,
    "evaluate": 6,
    "prove": 6,
    "plan": 6,  # runs steps of what is assembled, on shapes
    "compat": 7,
    "text_model": 7,  # writes and scores text, for commands and programs
    "cli": 8,  # the edge: it speaks through compat
    "api": 9,  # what users' programs import
}
"""Folder (or module) directly under src/megalith -> floor."""

WITHOUT_TORCH = (
    "errors",
    "config",
    "datasheet",
    "layout",
    "progress",
    "registry",
    "schedules",
    "tokenizers",
    "torch_builds",
)
"""Folders that never import torch: what they do must be quick to start and to test."""

MAY_IMPORT_TORCH_DISTRIBUTED = {
    "distributed/board.py": "torch.distributed.Store",
    "distributed/comm.py": "torch.distributed",
    "distributed/p2p.py": "torch.distributed",
    "distributed/context.py": "torch.distributed",
    "distributed/launch.py": "torch.distributed",
    "distributed/forked.py": "torch.distributed",
    "checkpoint/": "torch.distributed.checkpoint",
    "parallel/fsdp.py": "torch.distributed",
    "prove/megatron_core.py": "torch.distributed",  # of Megatron, in a process of its own
}
"""File or folder -> the part of torch.distributed that it may name. All collectives stand in `distributed/`;
torch.distributed.checkpoint is a file format, which one process uses too; FSDP2 is an adapter over torch's own."""


@dataclass(frozen=True)
class Import:
    """One imported dotted name and where it stands."""

    file: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCE.parent)}:{self.line} imports {self.name}"


def folder_of(dotted: str) -> str:
    """Give the part of `megalith.<folder>...` that has a floor; "" for the package itself."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_of(source: str, file: Path, package: tuple[str, ...]) -> Iterator[Import]:
    """Yield every import of a module; `package` is the package that relative imports count from."""
    for node in ast.walk(ast.parse(source, filename=str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            # `from megalith import nn` names a folder by its alias, `from megalith.nn import x` by its module.
            for alias in node.names:
                yield Import(file, node.lineno, f"{module}.{alias.name}")
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed"):
            yield Import(file, node.lineno, ast.unparse(node))  # reached through `import torch`


def all_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@cache
def imports_in_file(file: Path) -> list[Import]:
    package = ("megalith", *file.relative_to(SOURCE).parent.parts)
    return list(imports_of(file.read_text(encoding="utf-8"), file, package))


def home_of(file: Path) -> str:
    """Give the folder (or top-level module) of a file: the name that FLOORS knows."""
    relative = file.relative_to(SOURCE)
    if len(relative.parts) > 1:
        return relative.parts[0]
    return "" if relative.stem in ("__init__", "__main__") else relative.stem


def is_or_under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def breaches(imports: list[Import], home: str) -> list[str]:
    """List the imports of one file that reach a sibling folder of the same floor or a higher floor."""
    found = []
    for item in imports:
        if not is_or_under(item.name, "megalith"):
            continue
        target = folder_of(item.name)
        if target not in FLOORS:
            continue  # `from megalith import __version__`
        if target != home and FLOORS[target] >= FLOORS[home]:
            found.append(f"{item} (floor {FLOORS[target]}) from {home or 'megalith'} (floor {FLOORS[home]})")
    return found


def names_torch_distributed(item: Import) -> bool:
    """Tell whether an import reaches torch.distributed where it must not."""
    if not is_or_under(item.name, "torch.distributed"):
        return False
    place = item.file.relative_to(SOURCE).as_posix()
    return not any(
        place.startswith(prefix) and is_or_under(item.name, part)
        for prefix, part in MAY_IMPORT_TORCH_DISTRIBUTED.items()
    )


def test_every_folder_has_a_floor() -> None:
    homes = {home_of(file) for file in all_files()}
    assert len(homes) > 1
    assert homes <= set(FLOORS), f"no floor for {sorted(homes - set(FLOORS))}"


def test_modules_import_downwards_only() -> None:
    found = []
    for file in all_files():
        if file.name == "__main__.py":
            continue  # `python -m megalith` is the command: it may import cli
        found += breaches(imports_in_file(file), home_of(file))
    assert not found, "\n".join(found)


def test_floor_zero_and_tokenizers_never_import_torch() -> None:
    found = [
        str(item)
        for file in all_files()
        if home_of(file) in ("", *WITHOUT_TORCH)
        for item in imports_in_file(file)
        if is_or_under(item.name, "torch")
    ]
    assert not found, "\n".join(found)


def test_only_the_communication_modules_import_torch_distributed() -> None:
    found = [str(item) for file in all_files() for item in imports_in_file(file) if names_torch_distributed(item)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "line", "allowed"),
    [
        ("distributed/comm.py", "import torch.distributed as dist", True),
        ("distributed/rng.py", "import torch.distributed as dist", False),
        ("checkpoint/store/store.py", "from torch.distributed.checkpoint import FileSystemWriter", True),
        ("checkpoint/store/store.py", "import torch\ntorch.distributed.barrier()", False),
        ("train/loop.py", "from torch import distributed", False),
    ],
)
def test_the_rule_of_torch_distributed(file: str, line: str, allowed: bool) -> None:
    found = [item for item in imports_of(line, SOURCE / file, ("megalith",)) if names_torch_distributed(item)]
    assert bool(found) is not allowed


@pytest.mark.parametrize(
    ("home", "line", "allowed"),
    [
        ("nn", "from megalith.nn.region import Solo", True),
        ("nn", "from megalith.config import ModelConfig", True),
        ("nn", "from megalith.models.gpt import GPT", False),
        ("nn", "import megalith.distributed.rng", False),
        ("nn", "from megalith import distributed", False),
        ("nn", "def f():\n    from megalith.train.loop import train", False),
        ("train", "from megalith.compat.megatron import console", False),
        ("cli", "from megalith.train.loop import train", True),
        ("config", "from megalith.errors import ConfigError", True),
        ("config", "from megalith.nn import placement", False),
        ("config", "from megalith import __version__", True),
    ],
)
def test_the_rule_itself(home: str, line: str, allowed: bool) -> None:
    file = SOURCE / home / "example.py"
    assert bool(breaches(list(imports_of(line, file, ("megalith", home))), home)) is not allowed


def test_relative_imports_are_resolved() -> None:
    file = SOURCE / "nn" / "example.py"
    names = [
        item.name for item in imports_of("from ..train import loop\nfrom . import cache", file, ("megalith", "nn"))
    ]
    assert names == ["megalith.train.loop", "megalith.nn.cache"]
