"""`megalith checkpoint verify`, `inspect`, `diff` and `convert`, as a user runs them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megalith.assemble.reading import saved_args
from megalith.assemble.trained import load_trained
from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.cli.checkpoint import human_size, run
from megalith.cli.main import main
from megalith.errors import CheckpointError, ConfigError, DamagedCheckpointError

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
    assert "damaged" in out and re.search(re.escape(str(store.folder(2) / "common.pt")) + r"\b.*\b1 bytes\b", out)
    assert run(["verify", str(store.path), "--iteration", "1"]) == 0
    assert run(["verify", str(store.folder(2))]) == 4


@pytest.mark.parametrize(("tracked", "named"), [("9", "iter_0000009"), ("1", "iter_0000002"), ("x", "'x'")])
def test_verify_says_what_the_tracker_does_not_agree_with(
    tracked: str, named: str, store: DirectoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(store.path)]) == 0
    assert "tracker" not in capsys.readouterr().out
    (store.path / "latest_checkpointed_iteration.txt").write_text(tracked)
    assert run(["verify", str(store.path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tracker")]
    assert str(store.path / "latest_checkpointed_iteration.txt") in line and named in line


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
    assert not [name for name in facts if name.startswith("moe_")]  # a dense model
    assert "optimizer.state" not in out and "12 optimizer tensors" in out and "--all" in out


def test_inspect_all(store: DirectoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(store.folder(1)), "--all"]) == 0
    out = capsys.readouterr().out
    assert "optimizer.state.exp_avg.embedding.word_embeddings.weight" in out and str(store.folder(1)) in out


@pytest.mark.parametrize("arguments", [["verify"], ["inspect"], ["verify", "--iteration", "3"]])
def test_a_place_without_checkpoints(tmp_path: Path, store: DirectoryStore, arguments: list[str]) -> None:
    place = store.path if "--iteration" in arguments else tmp_path
    with pytest.raises(CheckpointError, match="holds"):
        run([*arguments, str(place)])


@pytest.mark.parametrize(
    "words", ["verify IT", "inspect IT", "diff IT IT", "convert IT OUT", "export IT OUT", "merge-lora IT OUT"]
)
@pytest.mark.parametrize("name", ["iter_0000001", "copy"])
def test_a_flag_that_contradicts_the_path(
    name: str, words: str, store: DirectoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store.path / "copy").symlink_to(shutil.copytree(store.folder(1), tmp_path / "my copy"))
    places = {"IT": str(store.path / name), "OUT": str(tmp_path / "out")}
    command = [places.get(word, word) for word in words.split()]
    assert main(["checkpoint", *command, "--iteration", "2"]) == 2
    shown = capsys.readouterr().err
    assert places["IT"] in shown and "--iteration" in shown and not (tmp_path / "out").exists()


def test_an_iteration_is_of_the_save_folder_in_a_diff(
    store: DirectoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["diff", str(store.folder(1)), str(store.path), "--iteration", "1"]) == 0
    assert run(["diff", str(store.folder(2)), str(store.path), "--iteration", "1"]) == 1
    assert f"B  {store.folder(1)}" in capsys.readouterr().out


def test_generate_loads_no_other_iteration_than_that_of_the_path(store: DirectoryStore) -> None:
    for load in (lambda: load_trained(store.folder(1), torch.device("cpu"), 2), lambda: saved_args(store.folder(1), 2)):
        with pytest.raises(ConfigError, match="--iteration"):
            load()


def test_a_checkpoint_is_recognised_whatever_its_folder_is_called(
    store: DirectoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("release", "my copy"):
        copy = shutil.copytree(store.folder(2), tmp_path / name)
        assert run(["verify", str(copy)]) == 0
        assert capsys.readouterr().out == f"sound    {copy}\n"
        assert run(["inspect", str(copy)]) == 0
        assert "torch_dist" in capsys.readouterr().out


def test_verify_of_a_folder_that_cannot_be_read_at_all(
    store: DirectoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in store.folder(2).iterdir():
        path.unlink()
    assert run(["verify", str(store.path)]) == 4
    out = capsys.readouterr().out
    assert out.count("damaged") == 1 and out.count("sound") == 1


def test_inspect_says_what_is_wrong_where_the_contents_cannot_be_read(
    store: DirectoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    (store.folder(2) / "__0_0.distcp").unlink()
    assert run(["inspect", str(store.path)]) == 4
    out = capsys.readouterr().out
    assert "common.pt" in out and "__0_0.distcp" in out


def test_diff_and_its_exit_codes(store: DirectoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = str(store.folder(1)), str(store.folder(2))
    assert run(["diff", one, one]) == 0
    assert "equal: 28 of 28 tensors" in capsys.readouterr().out
    assert run(["diff", one, two]) == 1
    out = capsys.readouterr().out
    assert "iteration: 1 and 2" in out and "optimizer step: 1 and 2" in out
    assert "different: 0 of 28 tensors" in out and "and 8 more; use --all" in out
    assert run(["diff", one, two, "--weights", "--all"]) == 1
    assert "iteration" not in capsys.readouterr().out.split("beside the tensors")[-1].split("tensors:")[0]


@pytest.mark.parametrize("file", ["__0_0.distcp", "common.pt"])
def test_diff_does_not_compare_damaged_files(file: str, store: DirectoryStore, tmp_path: Path) -> None:
    copy = shutil.copytree(store.folder(1), tmp_path / "iter_0000001")
    body = bytearray((copy / file).read_bytes())
    body[len(body) // 2] ^= 1
    (copy / file).write_bytes(body)
    for pair in ([store.folder(1), copy], [copy, store.folder(1)]):
        with pytest.raises(DamagedCheckpointError, match=re.escape(str(copy / file))):
            run(["diff", *map(str, pair)])


def test_conversion_without_an_architecture_in_the_args(store: DirectoryStore, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="hidden_size"):
        run(["convert", str(store.path), str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (1023, "1023"), (1536, "1.5K"), (10240, "10K"), (2**20 - 1, "1024K"), (2**30, "1.0G")]
)
def test_sizes_are_those_of_tree(size: int, text: str) -> None:
    assert human_size(size) == text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("export IN OUT --to peft --max-shard-size 1GB --true-vocab-size 9 --no-compare --dtype q8_0",
         ["--max-shard-size", "--true-vocab-size", "--no-compare", "--dtype"]),
        ("convert IN OUT --moe-router-topk 1 --tp 0", ["--moe-router-topk", "--tp"]),
        ("convert IN OUT --upcycle 2 --moe-router-topk 3 --tp 0", ["--tp", "--moe-router-topk"]),
    ],
)  # fmt: skip
def test_flags_without_effect_are_refused_with_all_that_is_wrong(
    words: str, named: list[str], store: DirectoryStore, tmp_path: Path
) -> None:
    places = {"IN": str(store.path), "OUT": str(tmp_path / "out")}
    with pytest.raises(ConfigError) as caught:
        run([places.get(word, word) for word in words.split()])
    assert [text.split()[0].rstrip(":") for text in caught.value.violations] == named
    assert not (tmp_path / "out").exists()
