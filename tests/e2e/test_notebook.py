"""docs/notebook.ipynb runs from top to bottom in an empty folder, in a kernel with an event loop as in Jupyter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest


def _text(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.full
def test_the_notebook_runs(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ipykernel", "matplotlib"):
        pytest.importorskip(
            module, reason=f"{module}, which the notebook needs, is not installed (the extra dev has it)"
        )
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (the extra dev has it)")
    import nbformat

    for name in ("JUPYTER_DATA_DIR", "IPYTHONDIR"):  # kernels and settings of the user may be of another environment
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(repository / "docs/notebook.ipynb", as_version=4)
    work = tmp_path / "work"
    work.mkdir()
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(work)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    curve, streamed, scored = (
        next(cell for cell in cells if word in cell.source) for word in ("in train(", "model.stream(", "model.score(")
    )
    assert [output for output in curve.outputs if "image/png" in output.get("data", {})]
    first, last = map(float, re.findall(r"\d+\.\d+", _text(curve)))
    assert last < first / 10
    assert "comes" in _text(streamed) or "after" in _text(streamed)
    assert _text(scored).strip() == "likeliest: eight."
    assert (work / "model/iter_0000200/manifest.json").is_file()
