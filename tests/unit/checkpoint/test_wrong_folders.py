"""Folders that are no checkpoint of ours, or no whole one: one message that says what was found and what to do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megalith.assemble.reading import saved_args
from megalith.assemble.trained import load_trained
from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.checkpoint.convert import ConversionOptions, convert
from megalith.checkpoint.files.safe_loading import load_tensors_and_plain_data, map_tensors
from megalith.checkpoint.store.store import locate
from megalith.cli.main import main
from megalith.errors import CheckpointError, DamagedCheckpointError, OtherModelError
from megalith.train.checkpoint_fit import find_checkpoint

MakeContent = Callable[[int], CheckpointContent]
AGAIN = "copy the folder again from where it was written, or take another checkpoint"
WAYS: dict[str, Callable[[Path, Path], object]] = {
    "train": lambda folder, _: find_checkpoint(DirectoryStore(folder)),
    "convert": lambda folder, out: convert(folder, out, ConversionOptions()),
    "generate": lambda folder, _: load_trained(folder, torch.device("cpu")),
    "serve": lambda folder, _: saved_args(folder),
}
"""What the commands begin with."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["roberta", "umt5"])
def test_another_model_of_hugging_face_is_not_called_damaged(tmp_path: Path, kind: str, way: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 7}))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(OtherModelError) as caught:
        WAYS[way](folder, tmp_path / "out")
    message = str(caught.value)
    assert str(folder / "config.json") in message and f"'{kind}'" in message and "gpt2" in message
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, make_content: MakeContent) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    DirectoryStore(folder).save(10, make_content(0), {})
    return folder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [".metadata", "__0_1.distcp", "common.pt"])
def test_a_folder_that_was_copied_in_part(whole: Path, tmp_path: Path, name: str, way: str) -> None:
    folder = tmp_path / "half"
    shutil.copytree(whole, folder)
    path = folder / "iter_0000010" / name
    path.unlink()
    with pytest.raises(CheckpointError) as caught:
        WAYS[way](folder, tmp_path / "out")
    message = str(caught.value)
    assert message.count(f"{path} ") == 1
    assert message.endswith(AGAIN) or "give another --load" in message
    assert not (tmp_path / "out").exists()


def test_a_remedy_that_was_said_is_not_said_again(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError) as caught:
        convert(tmp_path, tmp_path / "out", ConversionOptions())
    assert str(caught.value).count("again") == 1


@pytest.mark.parametrize("way", ["convert", "generate", "serve"])  # training begins anew where nothing is
def test_a_path_that_leads_nowhere(tmp_path: Path, way: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("x")
    said = {"nothing": "exist", "file": "file", "folder": "notes.txt"}
    for name, found in said.items():
        with pytest.raises(CheckpointError) as caught:
            WAYS[way](tmp_path / name, tmp_path / "out")
        message = str(caught.value)
        assert message.startswith(f"{tmp_path / name} ") and found in message.removeprefix(str(tmp_path / name))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lost", ["", ".metadata"])
def test_a_checkpoint_under_another_name_is_no_empty_folder(whole: Path, tmp_path: Path, lost: str, way: str) -> None:
    """A run that took it for one would begin from random weights."""
    folder = tmp_path / "copy"
    shutil.copytree(whole / "iter_0000010", folder)
    if lost:
        (folder / lost).unlink()
    if way == "convert" and not lost:  # which is asked for one checkpoint, whatever it is called
        assert locate(folder) == folder
        return
    with pytest.raises(CheckpointError, match="iter_0000100"):
        WAYS[way](folder, tmp_path / "out")


@pytest.mark.parametrize(("size", "said"), [(0, "empty"), (30_000, "30,000 bytes")])
def test_a_rank_file_that_was_copied_in_part(tmp_path: Path, size: int, said: str) -> None:
    """Without a manifest, which would tell the size that it had, the file itself has to show it."""
    file = tmp_path / "model_optim_rng.pt"
    torch.save({"model": {"weight": torch.zeros(9000)}}, file)
    os.truncate(file, size)
    for read in (load_tensors_and_plain_data, map_tensors):
        with pytest.raises(CheckpointError) as caught:
            read(file)
        assert str(caught.value).startswith(f"{file} ") and said in str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_a_hugging_face_folder_without_its_weights(tmp_path: Path, way: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        WAYS[way](tmp_path, tmp_path / "out")


def test_a_config_of_another_program_leaves_a_folder_empty(tmp_path: Path) -> None:
    """The first start of a run with --save and --load here begins anew."""
    (tmp_path / "config.json").write_text(json.dumps({"train_batch_size": 8}))
    assert DirectoryStore(tmp_path).newest_verified() == (None, [])


def test_an_iteration_that_is_not_there(whole: Path) -> None:
    with pytest.raises(CheckpointError, match="iteration 5.* 10$"):
        saved_args(whole, 5)


@pytest.mark.parametrize("path", ["s3://b/c", Path("s3://b/c"), "gs://b/iter_0000001", "file:///c", "HTTPS://b/c"])
def test_a_store_is_on_a_file_system(path: str | Path) -> None:
    with pytest.raises(CheckpointError, match=":/"):
        DirectoryStore(path)


def test_a_folder_with_a_colon_is_a_folder(tmp_path: Path, make_content: MakeContent) -> None:
    store = DirectoryStore(tmp_path / "s3:" / "b")
    store.save(1, make_content(1), {})
    assert store.iterations() == [1]


@pytest.mark.parametrize("command", ["generate", "evaluate", "serve", "checkpoint verify", "checkpoint inspect"])
def test_no_command_takes_a_remote_path(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([*command.split(), "s3://b/c"])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2 and "s3://b/c" in capsys.readouterr().err


def test_no_checkpoint_goes_into_a_model_folder(whole: Path, tmp_path: Path, make_content: MakeContent) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")
    store = DirectoryStore(model)
    with pytest.raises(CheckpointError, match="Hugging Face"):
        store.save(1, make_content(1), {})
    with pytest.raises(CheckpointError, match="Hugging Face"), store.claim():
        pass
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "model.safetensors"]
