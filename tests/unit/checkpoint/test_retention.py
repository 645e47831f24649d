"""Which checkpoints stay, and that deleting never leaves a run without a sound one (F26)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.checkpoint import CheckpointContent, DirectoryStore, Retention, Staging
from megalith.checkpoint.files import commit as commits

MakeContent = Callable[..., CheckpointContent]


@pytest.mark.parametrize(
    ("retention", "saved", "before", "there", "incomplete", "superseded"),
    [
        (Retention(), 30, 20, [10, 20, 30], [], []),
        (Retention(keep_last=1), 30, 20, [10, 20, 30], [], [20, 10]),
        (Retention(keep_last=2), 30, 20, [10, 20, 30], [], [10]),
        (Retention(keep_last=5), 30, 20, [10, 20, 30], [], []),
        # One that lacks files counts for nothing, and goes when enough newer ones are there.
        (Retention(keep_last=2), 40, 30, [10, 20, 30, 40], [30], [10]),
        (Retention(keep_last=2), 40, 30, [10, 20, 30, 40], [20], [20, 10]),
        (Retention(keep_last=1), 30, 20, [10, 20, 30], [30], []),
        # What a run that went back has left behind is not its business.
        (Retention(keep_last=1), 20, 30, [10, 20, 30], [], [10]),
        # Megatron's --save-retain-interval deletes the one that was saved before.
        (Retention(retain_interval=20), 30, 20, [10, 20, 30], [], []),
        (Retention(retain_interval=20), 40, 30, [10, 20, 30, 40], [], [30]),
        (Retention(retain_interval=20), 40, None, [10, 20, 30, 40], [], []),
        (Retention(retain_interval=20), 20, 30, [10, 20, 30], [], []),
        (Retention(retain_interval=20), 40, 40, [10, 30, 40], [], []),
        # Both: multiples are never deleted.
        (Retention(keep_last=1, retain_interval=20), 50, 40, [10, 20, 30, 40, 50], [], [30, 10]),
        # The best is never deleted, and counts among the newest where it is one of them.
        (Retention(keep_last=1, best=10), 30, 20, [10, 20, 30], [], [20]),
        (Retention(keep_last=2, best=20), 40, 30, [10, 20, 30, 40], [], [10]),
        (Retention(retain_interval=100, best=20), 30, 20, [10, 20, 30], [], []),
    ],
)
def test_what_is_superseded(
    retention: Retention, saved: int, before: int | None, there: list[int], incomplete: list[int], superseded: list[int]
) -> None:
    assert retention.superseded(saved, before, there, lambda number: number not in incomplete) == superseded


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "latest_checkpointed_iteration.txt")


@pytest.mark.parametrize("beside", [False, True])
def test_the_newest_two_stay(tmp_path: Path, make_content: MakeContent, beside: bool) -> None:
    store = DirectoryStore(tmp_path, retention=Retention(keep_last=2))
    staging = Staging()
    for iteration in (10, 20, 30, 40):
        if beside:
            pending = store.schedule(iteration, make_content(iteration), {}, staging=staging)
            while pending.advance() is None:
                pass
        else:
            store.save(iteration, make_content(iteration), {})
        assert store.newest_verified() == (iteration, [])
    assert [name for name in names(tmp_path) if not name.startswith(".removing")] == ["iter_0000030", "iter_0000040"]


def test_a_damaged_one_is_not_counted(tmp_path: Path, make_content: MakeContent) -> None:
    store = DirectoryStore(tmp_path, retention=Retention(keep_last=2))
    store.save(10, make_content(10), {})
    store.save(20, make_content(20), {})
    (store.folder(20) / "__0_0.distcp").write_bytes(b"short")
    store.save(30, make_content(30), {})
    assert store.iterations() == [10, 20, 30], "10 is the second sound one"
    store.save(40, make_content(40), {})
    assert store.iterations() == [30, 40]


def test_a_save_that_fails_deletes_nothing(tmp_path: Path, make_content: MakeContent) -> None:
    store = DirectoryStore(tmp_path, retention=Retention(keep_last=1))
    store.save(10, make_content(10), {})

    def fail(point: str) -> None:
        if point == "pre_commit":
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        store.save(20, make_content(20), {}, on_stage=fail)
    assert names(tmp_path) == ["iter_0000010"] and store.newest_verified() == (10, [])


def test_a_link_to_a_checkpoint_stays(tmp_path: Path, make_content: MakeContent) -> None:
    DirectoryStore(tmp_path / "other").save(10, make_content(10), {})
    store = DirectoryStore(tmp_path / "save", retention=Retention(keep_last=1))
    store.path.mkdir()
    store.folder(10).symlink_to(tmp_path / "other" / "iter_0000010")
    store.save(20, make_content(20), {})
    assert names(store.path) == ["iter_0000010", "iter_0000020"]


def test_what_cannot_be_deleted_does_not_fail_the_save(
    tmp_path: Path, make_content: MakeContent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    store = DirectoryStore(tmp_path, retention=Retention(keep_last=1))
    store.save(10, make_content(10), {})
    monkeypatch.setattr(commits.shutil, "rmtree", refuse)
    store.save(20, make_content(20), {})
    assert store.newest_verified() == (20, []) and store.iterations() == [20]
    assert "iter_0000010" in caplog.text and "Permission denied" in caplog.text


def test_delete_after(tmp_path: Path, make_content: MakeContent) -> None:
    store = DirectoryStore(tmp_path)
    for iteration in (10, 20, 30):
        store.save(iteration, make_content(iteration), {})
    store.delete_after(15)
    assert names(tmp_path) == ["iter_0000010"]
