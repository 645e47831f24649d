"""No file that is read can run code (F11): live pickles in the places that `checkpoint/test_safe_loading` has not.

There: common.pt, .metadata, random states and tensors of torch_dist. Here: the files of format torch, weights and
optimizer, every kind of tokenizer, and the caches of the sample index.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.checkpoint.files.safe_loading import load_tensors_and_plain_data
from megalith.config import TokenizerConfig
from megalith.errors import CheckpointError, ConfigError, DataError
from megalith.tokenizers.build import build_tokenizer

from .checkpoint.test_per_rank_saving import content_of
from .data.test_gpt_dataset import dataset


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def bomb(tmp_path: Path) -> Bomb:
    """One whose kind was seen to go off."""
    tried = Bomb(tmp_path / "tried")
    pickle.loads(pickle.dumps(tried))
    assert tried.canary.exists()
    return Bomb(tmp_path / "canary")


@pytest.mark.parametrize("name", ["model_optim_rng.pt", "distrib_optim.pt"])
def test_files_of_format_torch(bomb: Bomb, tmp_path: Path, name: str) -> None:
    store, content = (
        DirectoryStore(tmp_path / "save", save_format="torch"),
        content_of(1, use_distributed_optimizer=True),
    )
    store.save(1, content, {})
    (file,) = store.folder(1).rglob(name)
    torch.save({**load_tensors_and_plain_data(file), "optimizer": bomb, 0: bomb}, file)
    with pytest.raises(CheckpointError) as caught:
        store.load(1, CheckpointContent(content.chunks), verify=False)
    assert str(file) in str(caught.value) and "posix.mkdir" in str(caught.value)
    assert not bomb.canary.exists()


TOKENIZERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "GPT2BPETokenizer": lambda path: {"vocab_file": path, "merge_file": path},
    "BertWordPieceLowerCase": lambda path: {"vocab_file": path},
    "SentencePieceTokenizer": lambda path: {"tokenizer_model": path},
    "GPTSentencePieceTokenizer": lambda path: {"tokenizer_model": path},
    "Llama2Tokenizer": lambda path: {"tokenizer_model": path},
    "TikTokenizer": lambda path: {"tokenizer_model": path},
    "HuggingFaceTokenizer": lambda path: {"tokenizer_model": path.parent},
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("write", ["pickle", "torch"])
def test_tokenizers(bomb: Bomb, tmp_path: Path, kind: str, write: str) -> None:
    path = tmp_path / "t" / "tokenizer.json"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(bomb))
    if write == "torch":
        torch.save(bomb, path)
    named = {name: str(value) for name, value in TOKENIZERS[kind](path).items()}
    with pytest.raises((ConfigError, DataError)) as caught:
        build_tokenizer(TokenizerConfig(tokenizer_type=kind, **named)).encode("a")
    assert str(path.parent) in str(caught.value)
    assert not bomb.canary.exists()


@pytest.mark.parametrize("name", ["document_index", "sample_index", "shuffle_index"])
def test_caches_of_samples(bomb: Bomb, tmp_path: Path, name: str) -> None:
    """They are built again."""
    cache = tmp_path / "cache"
    expected = dataset([30, 20], 4, 25, cache_folder=cache)
    (file,) = cache.glob(f"*{name}.npy")
    np.save(file, np.array([bomb], dtype=object), allow_pickle=True)
    next(cache.glob("*-checksums.json")).unlink()  # with them the file is not even opened
    found = dataset([30, 20], 4, 25, cache_folder=cache)
    assert not bomb.canary.exists()
    np.testing.assert_array_equal(found[0]["tokens"], expected[0]["tokens"])
    np.load(file, allow_pickle=False)
