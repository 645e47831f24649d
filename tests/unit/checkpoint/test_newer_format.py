"""A checkpoint that a later version wrote is refused by its format, and never replaced, pruned or passed over."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.assemble.reading import saved_args
from megalith.assemble.trained import load_trained
from megalith.checkpoint import CheckpointContent, DirectoryStore, Retention
from megalith.checkpoint.convert import ConversionOptions, convert
from megalith.checkpoint.files.commit import make_temp_folder
from megalith.cli.checkpoint import run as checkpoint_command
from megalith.errors import DamagedCheckpointError, NewerFormatError
from megalith.train.checkpoint_fit import find_checkpoint

MakeContent = Callable[..., CheckpointContent]


def make_newer(folder: Path, *, own_hash: bool = True) -> None:
    """Rewrite the manifest of a checkpoint as a later version would."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    del body["manifest_hash"]
    body |= {"format": 2, "megalith_version": "9.8.7"}
    if own_hash:
        body["manifest_hash"] = hashlib.blake2b(
            (json.dumps(body, indent=1) + "\n").encode(), digest_size=16
        ).hexdigest()
        path.write_text(json.dumps(body, indent=1) + "\n")
    else:
        path.write_text(json.dumps({**body, "root": "sha256:0"}, indent=2))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=[True, False], ids=["its hash is ours", "its hash is another"])
def store(request: pytest.FixtureRequest, tmp_path: Path, make_content: MakeContent) -> DirectoryStore:
    """Iteration 3 of this version and 6 of a later one."""
    store = DirectoryStore(tmp_path / "save")
    for iteration in (3, 6):
        store.save(iteration, make_content(iteration), {})
    make_newer(store.folder(6), own_hash=request.param)
    return store


def test_nothing_falls_past_it(store: DirectoryStore, tmp_path: Path, make_content: MakeContent) -> None:
    path = store.path
    refusing: list[Callable[[], object]] = [
        lambda: DirectoryStore(path).newest_verified(),
        lambda: DirectoryStore(path).newest_verified(deferred=True),
        lambda: find_checkpoint(DirectoryStore(path)),
        lambda: find_checkpoint(DirectoryStore(path), 6),
        lambda: DirectoryStore(path).load(6, make_content(0), verify=False),
        lambda: DirectoryStore(path).common(6),
        lambda: saved_args(path),
        lambda: load_trained(path, "cpu"),  # type: ignore[arg-type]
        lambda: convert(path, tmp_path / "converted", ConversionOptions()),
        lambda: convert(path, tmp_path / "converted", ConversionOptions(), verify=False),
        lambda: checkpoint_command(["inspect", str(path)]),
        lambda: checkpoint_command(["diff", str(store.folder(3)), str(path)]),
    ]
    before = snapshot(path)
    for refuse in refusing:
        with pytest.raises(NewerFormatError, match=r"format 2.*Megalith 9\.8\.7") as caught:
            refuse()
        assert caught.value.exit_code == 4
        assert "again" not in str(caught.value), "to copy it again does not help"
    assert snapshot(path) == before and not (tmp_path / "converted").exists()


def test_verify_calls_it_newer_not_damaged(store: DirectoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint_command(["verify", str(store.path)]) == 4
    out = capsys.readouterr().out
    assert "damaged" not in out and "copy" not in out
    assert "9.8.7" in out and "iter_0000006" in out


def test_a_run_does_not_claim_its_folder(store: DirectoryStore) -> None:
    with pytest.raises(NewerFormatError, match="--save"), store.claim():
        pass


def test_it_is_neither_replaced_nor_pruned(store: DirectoryStore, tmp_path: Path, make_content: MakeContent) -> None:
    before = snapshot(store.folder(6))
    with pytest.raises(NewerFormatError):
        store.save(6, make_content(0), {})
    with pytest.raises(NewerFormatError):
        make_temp_folder(store.folder(6))  # of a conversion or an export
    keeping = DirectoryStore(store.path, retention=Retention(keep_last=1))
    keeping.save(9, make_content(9), {})
    keeping.delete_after(3)
    assert snapshot(store.folder(6)) == before
    assert store.iterations() == [6]
    assert not [path for path in store.path.iterdir() if path.name.startswith(".")]


def test_an_older_tracker_is_obeyed(store: DirectoryStore) -> None:
    (store.path / "latest_checkpointed_iteration.txt").write_text("3")
    assert store.newest_verified()[0] == 3


@pytest.mark.parametrize("number", [b"3", b"9"])
def test_a_damaged_number_of_the_format_is_damage(tmp_path: Path, make_content: MakeContent, number: bytes) -> None:
    """`1` is one bit away from `3`, `5` and `9`."""
    store = DirectoryStore(tmp_path)
    for iteration in (3, 6):
        store.save(iteration, make_content(iteration), {})
    path = store.folder(6) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": ' + number))
    assert store.newest_verified()[0] == 3
    with pytest.raises(DamagedCheckpointError):
        store.load(6, make_content(0))
