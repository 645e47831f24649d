"""The programs of docs/extending.md run as they are typed there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from .typed import run_typed
from .warm import WarmProcess

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = {part.splitlines()[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}

WITH_A_SUPERVISOR = "An optimizer"
"""The section whose line with `--nproc` runs as it is typed; all other programs and ranks are forks of the template."""


@pytest.mark.parametrize("title", SECTIONS)
def test_a_program_of_the_page(title: str, tmp_path: Path, warm: WarmProcess) -> None:
    section = SECTIONS[title]
    for name, source in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", section, re.DOTALL):
        (tmp_path / name).write_text(source, encoding="utf-8")
    (block,) = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    assert shutil.which("bash")
    for line in block.splitlines():
        words = line.removeprefix("$ ")
        done = run_typed(words, tmp_path, warm, supervised=title == WITH_A_SUPERVISOR)
        assert done.code == 0, f"{words}\n{done.text[-2000:]}"
