"""Datasets of BERT and T5 of options drawn at random are the real Megatron's: cache names, indices, blends, samples.

Never a dependency: runs where MEGALITH_MEGATRON_CORE names a folder with megatron-core 0.16.1 (`test_megatron_core`).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalith.config import DataConfig
from megalith.data.blend import BlendedDataset
from megalith.data.build import build_datasets
from megalith.data.indexed.writer import IndexedWriter
from megalith.data.masked.bert import BertDatasetFactory
from megalith.data.masked.dataset import MaskedDataset, MaskedOptions, Masking
from megalith.data.masked.t5 import T5DatasetFactory
from megalith.data.samples import SplitDataset
from megalith.errors import DataError
from megalith.tokenizers.word_piece import WordPieceTokenizer

from .test_megatron_core import core  # noqa: F401

CASES = 60
PIECES = 400
# Documents, sentences of each and tokens of each, from and to.
TEXTS = {
    "plain": (60, (2, 9), (3, 40)),
    "long-sentences": (40, (1, 6), (1, 900)),
    "empty-documents": (300, (0, 12), (0, 40)),
    "few": (3, (2, 3), (5, 30)),
    "long-documents": (30, (10, 200), (3, 60)),
    "one-sentence": (150, (1, 1), (1, 300)),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with vocab.txt and datasets of sentences."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    pieces = [f"{'##' * (number % 3 == 0)}p{number}" for number in range(PIECES)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    for name, (documents, sentences, tokens) in TEXTS.items():
        with IndexedWriter(str(folder / name), np.dtype(np.uint16)) as writer:
            for _ in range(documents):
                for _ in range(draw.randint(*sentences)):
                    writer.add_item([draw.randrange(5, len(words)) for _ in range(draw.randint(*tokens))])
                writer.end_document()
            writer.finalize()
    return folder


def _case(folder: Path, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    family, files = draw.choice(["bert", "bert", "t5"]), draw.choices(list(TEXTS), k=draw.choice([1, 1, 2, 3]))
    weights = None if len(files) == 1 else [round(draw.uniform(0.05, 1), 3) for _ in files]  # Megatron needs them here
    geometric = draw.random() < 0.4
    config: dict[str, Any] = {
        "random_seed": draw.choice([0, 1, 1234, 2**31 - 1, draw.randrange(10**6)]),
        "sequence_length": draw.choice([16, 32, 64, 128, 512]),
        "masking_probability": draw.choice([0.15, 0.15, 0.05, 0.3, 0.5, 0.9]),
        "short_sequence_probability": draw.choice([0.1, 0.1, 0.0, 0.01, 0.5, 1.0, 0.37]),
        "masking_max_ngram": draw.choice([1, 2, 3, 3, 10]),
        "masking_do_full_word": draw.random() < 0.7,
        "masking_do_permutation": family == "bert" and not geometric and draw.random() < 0.3,
        "masking_use_longer_ngrams": draw.random() < 0.3,
        "masking_use_geometric_distribution": geometric,
        "blend": [[str(folder / file) for file in files], weights],
        "split": draw.choice(["90,5,5", "949,50,1", "5,3,2", "1,1,1", "100,0,0", "80,20", "7,2,1"]),
    }
    further = ("classification_head", draw.random() < 0.6) if family == "bert" else ("sequence_length_decoder", 600)
    sizes = [draw.choice([1, 5, 40, 200, 1000]), *draw.choices([0, 1, 5, 40, 200], k=2)]
    return {
        "family": family,
        "vocabulary": str(folder / "vocab.txt"),
        "extra_ids": 300 if family == "t5" else 0,
        "sizes": sizes,
        "items": [7919 * number for number in range(12)],
        "config": {**config, further[0]: further[1]},
    }


def _ours(case: dict[str, Any], cache: Path) -> dict[str, SplitDataset | BlendedDataset | None]:
    config = case["config"]
    masking = Masking(
        config["masking_probability"],
        config["masking_max_ngram"],
        whole_words=config["masking_do_full_word"],
        permutation=config["masking_do_permutation"],
        longer_ngrams=config["masking_use_longer_ngrams"],
        geometric=config["masking_use_geometric_distribution"],
    )
    options = MaskedOptions(
        config["sequence_length"], config["random_seed"], masking, config["short_sequence_probability"]
    )
    tokenizer = WordPieceTokenizer(case["vocabulary"], lower_case=True, vocab_extra_ids=case["extra_ids"])
    factory: BertDatasetFactory | T5DatasetFactory = (
        BertDatasetFactory(options, tokenizer, config["classification_head"])
        if case["family"] == "bert"
        else T5DatasetFactory(options, tokenizer, config["sequence_length_decoder"])
    )
    prefixes, weights = config["blend"]
    words = (
        prefixes
        if weights is None
        else [word for pair in zip(map(str, weights), prefixes, strict=True) for word in pair]
    )
    data = DataConfig(
        seq_length=config["sequence_length"], data_path=tuple(words), split=config["split"], data_cache_path=str(cache)
    )
    built = build_datasets(data, factory, sizes=tuple(case["sizes"]))
    return dict(zip(("train", "valid", "test"), built, strict=True))


def _parts(dataset: SplitDataset | BlendedDataset) -> Sequence[SplitDataset]:
    return dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]


def _compare(dataset: SplitDataset | BlendedDataset, kept: Mapping[str, Any]) -> None:
    assert len(dataset) == int(kept["length"])
    for number, part in enumerate(_parts(dataset)):
        assert isinstance(part, MaskedDataset)
        np.testing.assert_array_equal(part.sample_index, kept[f"{number}/index"])
        assert part.sample_index.dtype == kept[f"{number}/index"].dtype
        assert hashlib.md5(json.dumps(part.identity, indent=4).encode()).hexdigest() == str(kept[f"{number}/hash"])
    if isinstance(dataset, BlendedDataset):
        np.testing.assert_array_equal(dataset.dataset_index, kept["blend"])
        np.testing.assert_array_equal(dataset.dataset_sample_index, kept["sample"])
    for key in kept:
        item, _, field = key.partition("/")
        if not item.isdigit() or field in ("index", "hash"):
            continue
        if field == "error":
            with pytest.raises(DataError):
                dataset[int(item)]
            continue
        np.testing.assert_array_equal(dataset[int(item)][field], kept[key], err_msg=key)


@pytest.mark.full
def test_options_drawn_at_random(core: Path, texts: Path, tmp_path: Path) -> None:  # noqa: F811
    cases, ours = list[dict[str, Any]](), []
    for seed in range(2 * CASES):
        case = _case(texts, seed)
        case["config"]["path_to_cache"] = str(tmp_path / f"theirs-{seed}")
        try:
            built = _ours(case, tmp_path / f"ours-{seed}")
        except DataError:  # a split without a sample, for which Megatron looks for ever
            continue
        parts = [part for dataset in built.values() if dataset is not None for part in _parts(dataset)]
        if all(map(len, parts)):  # Megatron gives up on a split without documents even where nothing is asked of it
            ours.append(built)
            cases.append(case)
    assert len(cases) > CASES / 2
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("megatron_core_masked.py")
    environ = {**os.environ, "PYTHONPATH": str(core), "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(script), str(tmp_path / "cases.json"), str(tmp_path)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    for number, (case, found) in enumerate(zip(cases, ours, strict=True)):
        kept = np.load(tmp_path / f"{number}.npz")
        for split, dataset in found.items():
            own = {key.removeprefix(f"{split}/"): kept[key] for key in kept if key.startswith(f"{split}/")}
            assert (dataset is None) == (not own)
            try:
                if dataset is not None:
                    _compare(dataset, own)
            except AssertionError as error:
                raise AssertionError(f"case {number}, {split}: {case}") from error
