"""The programs of docs/extending.md run as they are typed there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .warm import WarmProcess, places

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
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert shutil.which("bash")
    for line in block.splitlines():
        words = line.removeprefix("$ ")
        command, _, rest = words.partition(" ")
        ranks = re.search(r"--nproc(?:_per_node)? (\d+) ", rest)
        if command not in ("megalith", "python", "torchrun") or (ranks and title == WITH_A_SUPERVISOR):
            done = subprocess.run(
                ["bash", "-c", words.replace("megalith", f"{sys.executable} -m megalith", 1)],
                cwd=tmp_path,
                env=environ,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            continue
        typed = shlex.split(rest.replace(ranks[0], "") if ranks else rest)
        started = [
            warm.start(typed[1:], tmp_path, command=typed[0], **place)
            if command == "megalith"
            else warm.start_script(
                f"import runpy; runpy.run_path({typed[0]!r}, run_name='__main__')", tmp_path, **place
            )
            for place in (places(int(ranks[1])) if ranks else [{}])
        ]
        ended = [running.finish() for running in started]
        assert [one.code for one in ended] == [0] * len(ended), f"{words}\n{ended[0].text[-2000:]}"
