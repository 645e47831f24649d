"""A damaged newest checkpoint is found, named and passed over (F06): every file, every kind of damage."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.checkpoint.writers.torch_dist import write_torch_dist
from megalith.cli.arguments import load_model
from megalith.errors import CheckpointError

from .memory_source import ARGS, model_source

MakeContent = Callable[..., CheckpointContent]
Same = Callable[[CheckpointContent, CheckpointContent], bool]
FILES = (".metadata", "__0_0.distcp", "__0_1.distcp", "common.pt", "metadata.json", "manifest.json", "vocab.json")
TRACKER = "latest_checkpointed_iteration.txt"


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lose_last_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def add_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip_at(share: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[min(int(len(data) * share), len(data) - 1)] ^= 0x10
        path.write_bytes(data)

    flip.__name__ = f"flip_at_{share}"
    return flip


def remove(path: Path) -> None:
    path.unlink()


DAMAGES = [halve, lose_last_byte, add_a_byte, empty, zero, remove, *map(flip_at, (0.0, 0.31, 0.5, 0.77, 1.0))]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, make_content: MakeContent) -> Path:
    """A save folder with the sound checkpoints 10, 20 and 30."""
    path = tmp_path_factory.mktemp("original") / "save"
    for iteration in (10, 20, 30):
        DirectoryStore(path).save(iteration, make_content(iteration), {"k": "v"}, files={"vocab.json": b'{"a": 1}'})
    return path


@pytest.fixture
def store(original: Path, tmp_path: Path) -> Iterator[DirectoryStore]:
    shutil.copytree(original, tmp_path / "save")
    yield DirectoryStore(tmp_path / "save")


def test_the_matrix_covers_every_file(store: DirectoryStore) -> None:
    assert sorted(path.name for path in store.folder(30).iterdir()) == sorted(FILES)
    assert store.newest_verified() == (30, [])


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_the_one_before_is_taken(
    store: DirectoryStore, make_content: MakeContent, same_tensors: Same, name: str, damage: Callable[[Path], None]
) -> None:
    damage(store.folder(30) / name)
    iteration, notes = store.newest_verified()
    assert iteration == 20
    assert any(str(store.folder(30) / name) in note for note in notes), notes
    target = make_content(0)
    with pytest.raises(CheckpointError, match=r"iter_0000030 is damaged"):
        store.load(30, target)
    if not name.endswith(".distcp") or damage in (halve, lose_last_byte, add_a_byte, empty, remove):
        assert same_tensors(target, make_content(0)), "a load refused before it read has changed a tensor"
    store.load(20, target)
    assert same_tensors(target, make_content(20))


@pytest.mark.parametrize("byte", range(0, 700, 23))
def test_every_byte_of_the_manifest_counts(store: DirectoryStore, byte: int) -> None:
    path = store.folder(30) / "manifest.json"
    data = bytearray(path.read_bytes())
    assert len(data) > 700
    data[byte] ^= 0x01
    path.write_bytes(data)
    assert store.newest_verified()[0] == 20


def test_damage_after_a_check_is_found_by_the_next(store: DirectoryStore) -> None:
    assert store.verify(30) == []
    flip_at(0.5)(store.folder(30) / "__0_0.distcp")
    assert len(store.verify(30)) == 1


def test_several_damages_are_all_named(store: DirectoryStore) -> None:
    flip_at(0.5)(store.folder(30) / "__0_0.distcp")
    remove(store.folder(30) / "common.pt")
    halve(store.folder(20) / "__0_1.distcp")
    iteration, notes = store.newest_verified()
    assert iteration == 10
    text = "\n".join(notes)
    for part in ("iter_0000030/__0_0.distcp", "iter_0000030/common.pt is missing", "iter_0000020/__0_1.distcp has"):
        assert part in text


def test_no_sound_checkpoint_at_all(store: DirectoryStore) -> None:
    for iteration in store.iterations():
        zero(store.folder(iteration) / "common.pt")
    iteration, notes = store.newest_verified()
    assert iteration is None and len(notes) == 3


def test_an_emptied_folder_is_passed_over(store: DirectoryStore) -> None:
    shutil.rmtree(store.folder(30))
    store.folder(30).mkdir()
    iteration, notes = store.newest_verified()
    assert iteration == 20 and any("iter_0000030/.metadata" in note for note in notes)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "missing"),
        (b"", "''"),
        (b"\0\0", "'\\x00\\x00'"),
        (b"garbage", "'garbage'"),
        (b"-30", "'-30'"),
        (b"40", "iter_0000040"),
        (b"9" * 30, "'9999"),
        (b"release", "'release'"),
    ],
)
def test_a_bad_tracker_leads_to_the_newest_checkpoint(
    store: DirectoryStore, content: bytes | None, expected: str
) -> None:
    tracker = store.path / TRACKER
    tracker.unlink() if content is None else tracker.write_bytes(content)
    iteration, notes = store.newest_verified()
    assert iteration == 30
    assert len(notes) == 1 and expected in notes[0] and TRACKER in notes[0]


def test_the_tracker_is_obeyed_when_it_points_back(store: DirectoryStore) -> None:
    """Users rewind a run by editing it."""
    (store.path / TRACKER).write_bytes(b"10\n")
    iteration, notes = store.newest_verified()
    assert iteration == 10
    assert len(notes) == 1 and re.search(r"\b10\b.*\biter_0000020, iter_0000030\b", notes[0])
    zero(store.folder(10) / "common.pt")
    assert store.newest_verified()[0] == 20, "with nothing sound before the tracker's, the next sound one is taken"


def test_unverified_loads_still_name_a_damaged_file(store: DirectoryStore, make_content: MakeContent) -> None:
    """Hashes off: structural damage is an error with the file's name, never a crash or a silent success."""
    for name in (".metadata", "__0_0.distcp", "__0_1.distcp", "common.pt"):
        for damage in (halve, empty, zero, remove):
            backup = (store.folder(30) / name).read_bytes()
            damage(store.folder(30) / name)
            with pytest.raises(CheckpointError, match=r"iter_0000030"):
                store.load(30, make_content(0), verify=False)
            (store.folder(30) / name).write_bytes(backup)
    store.load(30, make_content(0), verify=False)


@pytest.mark.parametrize(("name", "named"), [(".metadata", True), ("__0_0.distcp", True), (None, False)])
def test_a_model_that_is_read_from_an_older_checkpoint_names_its_iteration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str | None, named: bool
) -> None:
    """What generate, serve and evaluate begin with."""
    source = model_source({**ARGS, "tokenizer_type": "NullTokenizer", "vocab_size": 47}, states=False)
    for iteration in (7, 14):
        final = tmp_path / f"iter_{iteration:07d}"
        write_torch_dist(source, final, manifest_fields={}, files={}, update_tracker=lambda: None)
    (tmp_path / TRACKER).write_text("14")
    if name is not None:
        flip_at(0.5)(tmp_path / "iter_0000014" / name)
    trained = load_model(tmp_path, torch.device("cpu"), None, None)
    assert trained.iteration == (7 if named else 14)
    warned = capsys.readouterr().err.splitlines()
    assert any("iter_0000014" in line for line in warned) == named
    assert any(str(tmp_path / "iter_0000007") in line and "iteration 7" in line for line in warned) == named
