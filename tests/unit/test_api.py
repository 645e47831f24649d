"""What `megalith.api` offers is there, is documented, and is on the page about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalith import api
from megalith.registry import KINDS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", api.__all__)
def test_a_public_name_is_documented(name: str) -> None:
    text = getattr(api, name).__doc__ or ""
    assert text and not text.startswith(f"{name}("), "the signature that a dataclass has in place of a docstring"


def test_decorators_and_flags_are_on_the_page() -> None:
    decorators = {name for name in api.__all__ if name.startswith("register_")}
    assert set(re.findall(r"\bregister_\w+", PAGE)) == decorators
    assert len(decorators) == len(KINDS) - 1, "hooks are subclasses"
    assert not {flag for flag in KINDS.values() if f"`{flag} " not in PAGE}


def test_programs_of_the_page_import_public_names_only() -> None:
    imports = re.findall(r"^from (megalith\S*) import (.+)$", PAGE, re.MULTILINE)
    assert imports and {module for module, _ in imports} == {"megalith.api"}
    assert {name for _, names in imports for name in names.split(", ")} <= set(api.__all__)
