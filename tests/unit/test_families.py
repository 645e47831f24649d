"""A family of models is named where it is defined: elsewhere code asks for its objective, its stacks or its methods."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megalith.config.families import FAMILIES
from megalith.models.families import MODELS

SOURCE = Path(__file__).resolve().parents[2] / "src" / "megalith"

MAY_NAME_A_FAMILY = {
    "models/": "the models",
    "config/families.py": "facts about each family",
    "config/groups/model.py": "the default of --model-family",
    "config/rules/family.py": "rules about the flags of one family",
    "data/sources/documents.py": "a speaker in dialogues of ShareGPT",
    "prove/megatron_core.py": "the models of Megatron",
    "api.py": "GPT is a base for users' models",
}

CLASSES = {model.__name__ for model in MODELS.values()}
MODULES = {model.__module__ for model in MODELS.values()}


def family_names(source: str) -> list[str]:
    """List what of a module depends on one family: its name as a value, its class as a type, its module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        named: set[str] = set()
        if isinstance(node, ast.Constant):
            named = {str(node.value)} & set(FAMILIES)
        elif isinstance(node, ast.Name | ast.Attribute):
            named = {node.id if isinstance(node, ast.Name) else node.attr} & CLASSES
        elif isinstance(node, ast.Import):
            named = {alias.name for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            named = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
            named &= MODULES
        found += [f"{node.lineno}: {name}" for name in named if hasattr(node, "lineno")]
    return found


def test_no_module_outside_the_models_names_a_family() -> None:
    found = [
        f"{place}:{line}"
        for place, source in ((file.relative_to(SOURCE).as_posix(), file) for file in sorted(SOURCE.rglob("*.py")))
        if not place.startswith(tuple(MAY_NAME_A_FAMILY))
        for line in family_names(source.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("place", MAY_NAME_A_FAMILY)
def test_every_exception_is_needed(place: str) -> None:
    files = [SOURCE / place] if place.endswith(".py") else sorted((SOURCE / place).glob("*.py"))
    assert any(family_names(file.read_text(encoding="utf-8")) for file in files)


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ('if model.model_family == "t5": pass', False),
        ('if model.model_family in ("gpt", "bert"): pass', False),
        ('table = {"bert": 1}', False),
        ("match family:\n    case 'gpt': pass", False),
        ("isinstance(model, GPT)", False),
        ("isinstance(model, bert.Bert | Other)", False),
        ("from megalith.models.t5 import T5", False),
        ("from megalith.models import bert", False),
        ("import megalith.models.gpt", False),
        ('if model.family.objective == "spans": pass', True),
        ('"""Of T5 the decoder counts too."""', True),
        ("from megalith.models.language_model import GenerativeModel", True),
    ],
)
def test_the_rule_itself(line: str, allowed: bool) -> None:
    assert bool(family_names(line)) is not allowed
