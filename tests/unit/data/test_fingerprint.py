"""The fingerprint changes with what a run reads, and with nothing else."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megalith.config import DataConfig
from megalith.data.build import fingerprint
from megalith.data.indexed import IndexedWriter


def write(prefix: Path, documents: list[list[int]]) -> DataConfig:
    with IndexedWriter(str(prefix), "uint16") as writer:
        for tokens in documents:
            writer.add_document(tokens, [len(tokens)])
        writer.finalize()
    return DataConfig(seq_length=8, data_path=(str(prefix),))


def test_moved_data_is_the_same_data(tmp_path: Path) -> None:
    data = write(tmp_path / "here", [[1, 2], [3, 4]])
    for ending in (".bin", ".idx"):
        shutil.copy(tmp_path / f"here{ending}", tmp_path / f"there{ending}")
    moved = dataclasses.replace(data, data_path=(str(tmp_path / "there"),))
    assert fingerprint(moved, seed=1) == fingerprint(data, seed=1)
    assert json.loads(json.dumps(fingerprint(data, seed=1))) == fingerprint(data, seed=1)


def test_changed_data_is_other_data(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4, 5]]
    changes = [documents, documents[::-1], [[1, 2, 3], [4, 6]], [[1, 2], [3, 4, 5]], [*documents, [6]]]
    digests = [fingerprint(write(tmp_path / "data", change), seed=1)["digest"] for change in changes]
    data = write(tmp_path / "data", documents)
    digests.append(fingerprint(data, seed=2)["digest"])
    for change in ({"split": "1,1,1"}, {"seq_length": 9}, {"mock_data": True}):
        digests.append(fingerprint(dataclasses.replace(data, **change), seed=1)["digest"])
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("position", [0, 333_333, 599_999])
def test_a_shifted_text_shows_in_a_large_file(position: int, tmp_path: Path) -> None:
    tokens = np.arange(600_000) % 50_000
    data = write(tmp_path / "data", [tokens.tolist()])
    before = fingerprint(data, seed=1)
    shifted = np.concatenate([tokens[:position], tokens[position + 1 :], [7]])
    write(tmp_path / "data", [shifted.tolist()])
    assert fingerprint(data, seed=1)["digest"] != before["digest"]


def test_of_a_blend_every_dataset_weight_and_place_counts(tmp_path: Path) -> None:
    (a,), (b,), (c,) = (
        write(tmp_path / name, documents).data_path
        for name, documents in (("a", [[1, 2]]), ("b", [[3, 4]]), ("c", [[5, 6]]))
    )
    blends = [(a, b), (b, a), (a, b, c), ("1", a, "2", b), ("2", a, "1", b)]
    single = DataConfig(seq_length=8, data_path=(a,))
    found = [fingerprint(dataclasses.replace(single, data_path=words), seed=1) for words in blends]
    found += [
        fingerprint(single, seed=1),
        fingerprint(dataclasses.replace(single, dataloader_type="cyclic"), seed=1),
        fingerprint(DataConfig(seq_length=8, train_data_path=(a, b)), seed=1),
        fingerprint(DataConfig(seq_length=8, train_data_path=(a, b), valid_data_path=(c,)), seed=1),
    ]
    assert len({each["digest"] for each in found}) == len(found)
    assert found[3]["dataset 1"].endswith(" of 1 sequences, 2 tokens, weight 1")
    assert found[8]["valid dataset 1"].endswith(" of 1 sequences, 2 tokens")
    words = tmp_path / "words"
    words.write_text(" ".join(blends[3]))
    in_a_file = DataConfig(seq_length=8, data_args_path=str(words))
    assert fingerprint(in_a_file, seed=1) == found[3]
