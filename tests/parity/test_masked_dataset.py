"""The samples of BERT are those of Megatron's dataset: which sentences, in which order, and which words are hidden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.random import RandomState
from numpy.typing import NDArray

from megalith.data.indexed import IndexedDataset
from megalith.data.masked.bert import BertDataset, BertDatasetFactory
from megalith.data.masked.dataset import MaskedOptions, Masking
from megalith.data.masked.sample_index import MersenneTwister64, build_sample_index
from megalith.data.samples import SPLIT_NAMES, SplitRatios, SplitSpec, interval_range, parse_split
from megalith.errors import DataError
from megalith.tokenizers.word_piece import WordPieceTokenizer

from .goldens import Goldens

TOPIC = "bert_t5"
PREFIX = "data/bert_text_sentence"
BERT = ("bert_nsp", "bert_nohead", "bert_permute", "bert_longer_ngrams")


@dataclass(frozen=True)
class Topic:
    """The goldens of masked datasets."""

    goldens: Goldens

    def case(self, name: str) -> dict[str, Any]:
        return self.goldens.case(TOPIC, name)

    def arrays(self, name: str) -> Mapping[str, NDArray[Any]]:
        return cast("Mapping[str, NDArray[Any]]", np.load(self.goldens.path(f"{TOPIC}/{name}")))


@pytest.fixture
def topic(golden: Goldens, monkeypatch: pytest.MonkeyPatch) -> Topic:
    """The golden folder as the working directory: the hashed descriptions hold relative paths."""
    monkeypatch.chdir(golden.path(f"{TOPIC}/data").parent)
    return Topic(golden)


def _masking(config: dict[str, Any], **changes: Any) -> Masking:
    names = {
        "probability": "masking_probability",
        "longest_ngram": "masking_max_ngram",
        "whole_words": "masking_do_full_word",
        "permutation": "masking_do_permutation",
        "longer_ngrams": "masking_use_longer_ngrams",
        "geometric": "masking_use_geometric_distribution",
    }
    return Masking(**{**{ours: config[theirs] for ours, theirs in names.items()}, **changes})


def _datasets(
    case: dict[str, Any], tmp_path: Path | None = None, vocabulary: Path = Path("data/vocab.txt"), **changes: Any
) -> dict[str, BertDataset]:
    config = case["config"]
    options = MaskedOptions(
        config["sequence_length"],
        config["random_seed"],
        _masking(config, **changes),
        config["short_sequence_probability"],
    )
    tokenizer = WordPieceTokenizer(vocabulary, lower_case=True)
    assert tokenizer.vocab_size == case["vocab_size"]
    factory = BertDatasetFactory(options, tokenizer, config["classification_head"])
    return {
        name: factory.build(
            IndexedDataset(PREFIX),
            SplitSpec(split, case["sizes"][split], SplitRatios.parse(config["split"]), PREFIX, tmp_path),
        )
        for split, name in enumerate(SPLIT_NAMES)
    }


@pytest.mark.parametrize("name", [*BERT, "t5"])
def test_the_index_of_sentences(topic: Topic, name: str) -> None:
    case, sentences = topic.case(name), IndexedDataset(PREFIX)
    config, arrays = case["config"], topic.arrays(case["file"])
    special = 2 if "sequence_length_decoder" in config else 3
    for split, (label, size) in enumerate(zip(SPLIT_NAMES, case["sizes"], strict=True)):
        interval = parse_split(config["split"])[split]
        assert interval is not None
        own = interval_range(interval, sentences.num_documents)
        index = build_sample_index(
            sentences.document_index[own.start : own.stop + 1],
            sentences.lengths,
            requested=size,
            longest=config["sequence_length"] - special,
            short_probability=config["short_sequence_probability"],
            seed=config["random_seed"],
            min_sentences=2 if config.get("classification_head") else 1,
        )
        assert index.dtype == arrays[f"{label}/sample_index"].dtype
        np.testing.assert_array_equal(index, arrays[f"{label}/sample_index"])


@pytest.mark.parametrize("name", BERT)
def test_the_samples(topic: Topic, name: str, tmp_path: Path) -> None:
    case = topic.case(name)
    arrays, permutes = topic.arrays(case["file"]), case["config"]["masking_do_permutation"]
    datasets, plain = _datasets(case, tmp_path), _datasets(case, permutation=False)
    for split, dataset in datasets.items():
        info = case["info"][split]
        assert len(dataset) == info["len"]
        files = [tmp_path / f"{info['hash']}-BERTMaskedWordPieceDataset-{part}" for part in _PARTS]
        assert all(file.is_file() for file in files), "the index cache has Megatron's names"
        for item in range(8):
            wanted = {key: arrays[f"{split}/{item}/{key}"] for key in dataset[item]}
            if permutes:
                _check_permuted(plain[split][item], dataset[item], wanted)
                np.testing.assert_array_equal(dataset[item]["text"], dataset[item]["text"])
                continue
            for key, value in dataset[item].items():
                assert value.dtype == np.int64
                np.testing.assert_array_equal(value, wanted[key].reshape(value.shape), err_msg=f"{split} {item} {key}")


def test_a_word_that_is_replaced_by_padding_is_padding(topic: Topic, tmp_path: Path) -> None:
    """As in Megatron, which reads the mask of the padding off the text."""
    dataset = _datasets(topic.case("bert_nsp"), tmp_path, probability=0.9)["train"]
    met = 0
    for item in range(len(dataset)):
        sample = dataset[item]
        length = int(sample["padding_mask"].nonzero()[0].max()) + 1
        np.testing.assert_array_equal(sample["padding_mask"], sample["text"] != 0)
        met += int((sample["padding_mask"][:length] == 0).sum())
    assert met > 0


def test_padding_of_another_id_is_padding(topic: Topic, tmp_path: Path) -> None:
    """Where Megatron's mask would hold the id, and let the padding be seen."""
    words = Path("data/vocab.txt").read_text(encoding="utf-8").splitlines()
    moved = [*words[1:5], words[0], *words[5:]]
    (tmp_path / "vocab.txt").write_text("\n".join(moved) + "\n", encoding="utf-8")
    padding = moved.index("[PAD]")
    dataset = _datasets(topic.case("bert_nsp"), tmp_path, tmp_path / "vocab.txt")["train"]
    sample = next(sample for sample in map(dataset.__getitem__, range(len(dataset))) if sample["text"][-1] == padding)
    np.testing.assert_array_equal(sample["padding_mask"], sample["text"] != padding)
    assert set(sample["types"][sample["padding_mask"] == 0]) == {0}


def test_a_split_without_documents_is_not_blamed_on_their_sentences(topic: Topic) -> None:
    case = topic.case("bert_nsp")
    none = {**case, "config": {**case["config"], "split": "999998,1,1"}}
    with pytest.raises(DataError, match=r"valid split .*--eval-iters 0"):
        _datasets(none)


_PARTS = ("description.txt", "sample_index.npy")


def _check_permuted(
    whole: dict[str, NDArray[Any]], ours: dict[str, NDArray[Any]], wanted: dict[str, NDArray[Any]]
) -> None:
    """Which tokens move Megatron draws from a generator that nobody seeded; all else is to be the same."""
    hidden, told = whole["labels"] >= 0, wanted["labels"] >= 0
    assert told[hidden].all() and told.sum() <= 2 * max(1, round(0.15 * int(whole["padding_mask"].sum())))
    np.testing.assert_array_equal(wanted["labels"][hidden], whole["labels"][hidden])
    np.testing.assert_array_equal(wanted["text"][hidden], whole["text"][hidden])
    moved = told & ~hidden
    np.testing.assert_array_equal(wanted["labels"][moved], whole["text"][moved])
    np.testing.assert_array_equal(np.sort(wanted["text"][moved]), np.sort(whole["text"][moved]))
    still = ~told
    np.testing.assert_array_equal(wanted["text"][still], whole["text"][still])
    assert (ours["labels"][hidden] >= 0).all() and ((ours["labels"] >= 0).sum() > hidden.sum()) == moved.any()


def test_the_64_bit_generator_is_that_of_the_standard() -> None:
    # [rand.predef] of the C++ standard: the 10000th number of a std::mt19937_64 with its default seed.
    assert int(MersenneTwister64(5489).draw(10000)[-1]) == 9981545732273789042
    words = RandomState(5489).randint(0, 1 << 32, 10000, np.uint32)
    assert int(words[-1]) == 4123659995, "numpy's legacy generator is std::mt19937"
