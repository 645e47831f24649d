"""The programs of docs/extending.md run as they are typed there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = {part.splitlines()[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}


@pytest.mark.parametrize("title", SECTIONS)
def test_a_program_of_the_page(title: str, tmp_path: Path) -> None:
    section = SECTIONS[title]
    for name, source in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", section, re.DOTALL):
        (tmp_path / name).write_text(source, encoding="utf-8")
    (block,) = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    tools = {"megalith": f"{sys.executable} -m megalith", "python": sys.executable}
    tools["torchrun"] = f"{sys.executable} -m torch.distributed.run"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert shutil.which("bash")
    for line in block.splitlines():
        words = line.removeprefix("$ ")
        command, _, rest = words.partition(" ")
        done = subprocess.run(
            ["bash", "-c", f"{tools.get(command, command)} {rest}"],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
