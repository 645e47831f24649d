"""Files that are made to exhaust memory, the stack or patience end in the usual error, at once."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.checkpoint.files.safe_loading import load_bytes, load_tensors_and_plain_data, map_tensors, read_metadata
from megalith.checkpoint.sources.huggingface import HuggingFaceSource
from megalith.config import load
from megalith.errors import CheckpointError, ConfigError, DataError
from megalith.report.history import read_history
from megalith.tokenizers.byte_level import read_byte_pair_vocabulary
from megalith.tokenizers.fingerprint import fingerprint_path, read_fingerprint

from ...e2e.warm import WarmProcess

MakeContent = Callable[..., CheckpointContent]
DEEP = "[" * 100_000
NESTED = '{"a":' * 100_000


def bomb(path: Path, nbytes: int) -> None:
    """An archive as torch's whose pickle unpacks to `nbytes`, at a thousandth of that on the disk."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"]0" * (nbytes // 2) + b"N.")
        archive.writestr("archive/version", b"3\n")


@pytest.mark.parametrize(
    "read", [load_tensors_and_plain_data, map_tensors, lambda path: load_bytes(io.BytesIO(path.read_bytes()), "x")]
)
def test_an_archive_that_unpacks_to_much_more_is_not_unpacked(tmp_path: Path, read: Callable[[Path], object]) -> None:
    bomb(tmp_path / "common.pt", 2**26)
    assert (tmp_path / "common.pt").stat().st_size < 2**18
    with pytest.raises(CheckpointError, match="unpack"):
        read(tmp_path / "common.pt")


def test_a_memo_index_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(b"\x80\x02Nr" + struct.pack("<I", 80_000_000) + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="memo"):
        read_metadata(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "in KiB"


def test_old_pickles_with_indices_are_read(tmp_path: Path) -> None:
    """Protocols before 4 write an index for each object; it is then a sound pickle of something else."""
    path = tmp_path / ".metadata"
    for protocol in range(5):
        path.write_bytes(pickle.dumps([str(number) for number in range(1000)], protocol))
        with pytest.raises(CheckpointError, match=str(path)):
            read_metadata(path)


@pytest.mark.parametrize("text", [DEEP, NESTED], ids=["lists", "objects"])
def test_deep_nesting_is_damage(tmp_path: Path, make_content: MakeContent, text: str) -> None:
    store = DirectoryStore(tmp_path / "save")
    for iteration in (1, 2):
        store.save(iteration, make_content(iteration), {})
    for name in ("manifest.json", "metadata.json"):
        path = store.folder(2) / name
        kept = path.read_bytes()
        path.write_text(text)
        assert store.newest_verified()[0] == 1
        path.write_bytes(kept)
    (store.folder(2) / "manifest.json").unlink()
    (store.folder(2) / "metadata.json").write_text(text)
    assert DirectoryStore(store.path).newest_verified()[0] == 1


@pytest.mark.parametrize("text", [DEEP, NESTED], ids=["lists", "objects"])
def test_deep_nesting_in_other_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    fingerprint_path(str(tmp_path / "data")).write_text(text)
    with pytest.raises(DataError):
        read_fingerprint(str(tmp_path / "data"))
    with pytest.raises(DataError):
        read_byte_pair_vocabulary(str(path), str(path))
    with pytest.raises(ConfigError, match="per-split"):
        load(["--per-split-data-args-path", str(path)], {})
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"a = {'[' * 100_000}")
    with pytest.raises(ConfigError, match="TOML"):
        load(["--config", str(recipe)], {})
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "metrics.jsonl").write_text(text + "\n")
    assert read_history(tmp_path).unreadable == 1
    with pytest.raises(CheckpointError):
        HuggingFaceSource(tmp_path).common()


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    warm: WarmProcess, tmp_path: Path, make_content: MakeContent
) -> None:
    names = ["manifest.json", "common.pt", ".metadata", "metadata.json", "../latest_checkpointed_iteration.txt"]
    for number, name in enumerate(names):
        store = DirectoryStore(tmp_path / str(number))
        for iteration in (1, 2):
            store.save(iteration, make_content(iteration), {})
        path = store.folder(2) / name
        path.unlink()
        os.mkfifo(path)
    script = (
        "from megalith.checkpoint import DirectoryStore as D\n"
        f"print(*(D(str(number)).newest_verified()[0] for number in range({len(names)})))"
    )
    done = warm.start_script(script, tmp_path).finish()
    assert done.text.split() == ["1", "1", "1", "1", "2"], done.text


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_layer": 10**9, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8},
        {"model_type": "llama", "num_hidden_layers": 10**9, "hidden_size": 8, "num_attention_heads": 2},
        {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 10**8, "hidden_size": 8},
        {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 10**8, "hidden_size": 8},
        {"model_type": "deepseek_v3", "num_hidden_layers": 1, "n_routed_experts": 10**8, "hidden_size": 8},
    ],
    ids=lambda config: config["model_type"],
)
def test_counts_of_a_config_are_compared_with_the_weights(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        DirectoryStore(tmp_path).common(0)


def test_an_object_may_be_read_from_a_stream(make_content: MakeContent) -> None:
    import torch

    stream = io.BytesIO()
    torch.save({"a": torch.zeros(3)}, stream)
    stream.seek(0)
    assert load_bytes(stream, "x")["a"].shape == (3,)
