"""`megalith checkpoint verify` and `inspect`, as a user runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.cli.checkpoint import run
from megalith.errors import CheckpointError

MakeContent = Callable[..., CheckpointContent]


@pytest.fixture
def store(tmp_path: Path, make_content: MakeContent) -> DirectoryStore:
    store = DirectoryStore(tmp_path / "a [save] folder")
    for iteration in (1, 2):
        store.save(iteration, make_content(iteration), {})
    return store


def test_verify_says_sound(store: DirectoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(store.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["sound", "sound"]
    assert lines[1].endswith(str(store.folder(2)))


def test_verify_names_the_damaged_file_and_fails(store: DirectoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    (store.folder(2) / "common.pt").write_bytes(b"x")
    assert run(["verify", str(store.path)]) == 4
    out = capsys.readouterr().out
    assert "damaged" in out and f"{store.folder(2) / 'common.pt'} has 1 bytes instead of" in out
    assert run(["verify", str(store.path), "--iteration", "1"]) == 0
    assert run(["verify", str(store.folder(2))]) == 4


def test_verify_says_what_it_cannot_know(store: DirectoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    (store.path / "latest_checkpointed_iteration.txt").write_text("9")
    assert run(["verify", str(store.path)]) == 0
    assert "tracker" in capsys.readouterr().out


def test_inspect_shows_files_settings_and_tensors(store: DirectoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(store.path)]) == 0
    out = capsys.readouterr().out
    assert str(store.folder(2)) in out and "__0_1.distcp" in out and "manifest.json" in out
    assert "written by" in out and "Megalith" in out
    parameters = 24 * 8 + 2 * (8 + 12 * 8 + 8 * 6)
    facts = {line.split()[0]: line.split()[-1] for line in out.splitlines() if line.startswith(" ")}
    assert (facts["iteration"], facts["parameters"], facts["num_layers"]) == ("2", f"{parameters:,}", "2")
    (row,) = [line for line in out.splitlines() if "decoder.layers.mlp.linear_fc1.weight" in line]
    assert "2 x 12 x 8" in row and "bfloat16" in row and " 4 " in row
    assert "optimizer.state" not in out and "12 tensors of the optimizer are not shown" in out


def test_inspect_all(store: DirectoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(store.folder(1)), "--all"]) == 0
    out = capsys.readouterr().out
    assert "optimizer.state.exp_avg.embedding.word_embeddings.weight" in out and str(store.folder(1)) in out


@pytest.mark.parametrize("arguments", [["verify"], ["inspect"], ["verify", "--iteration", "3"]])
def test_a_place_without_checkpoints(tmp_path: Path, store: DirectoryStore, arguments: list[str]) -> None:
    place = store.path if "--iteration" in arguments else tmp_path
    with pytest.raises(CheckpointError, match="holds"):
        run([*arguments, str(place)])
