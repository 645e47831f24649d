"""Idle threads of a server spin longer for a large checkpoint."""

from __future__ import annotations

from pathlib import Path

from megalith.cli.threads import spins_for


def _write(path: Path, mebibytes: int) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(mebibytes << 20)  # sparse


def test_spins_grow_with_the_largest_checkpoint_of_a_folder(tmp_path: Path) -> None:
    for iteration in range(3):  # together large, none of them alone
        for part in range(2):
            _write(tmp_path / f"iter_{iteration}" / f"__0_{part}.distcp", 100)
    short = spins_for(tmp_path)
    _write(tmp_path / "iter_2" / "__0_2.distcp", 300)
    assert int(spins_for(tmp_path)) > int(short) == int(spins_for(tmp_path / "iter_1"))
    assert spins_for(tmp_path / "missing") == short
