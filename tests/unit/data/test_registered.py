"""Registered datasets and tokenizers: samples in epochs, blends, and what is wrong with a user's object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalith.config import DataConfig, TokenizerConfig
from megalith.data.build import build_gpt_datasets, fingerprint
from megalith.errors import ConfigError, DataError, MegalithError
from megalith.registry import Entry, Registered
from megalith.tokenizers import Tokenizer, build_tokenizer


class Bytes:
    vocab_size, eod = 257, 256

    def __init__(self, config: TokenizerConfig) -> None:
        self.files = {"vocab": config.vocab_file} if config.vocab_file else {}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace") if 256 not in ids else "<eod>"


TOKENIZER = build_tokenizer(TokenizerConfig(tokenizer_type=Registered(Entry("tokenizer", "bytes", Bytes))))


def source(items: Any, **options: Any) -> Registered:
    return Registered(Entry("dataset", "own", lambda data, tokenizer, split, seed: items.get(split), None, options))


def datasets(*sources: Registered, weights: tuple[float, ...] = (), sizes: tuple[int, int, int] = (25, 4, 0)) -> Any:
    data = DataConfig(seq_length=4, data_source=sources, data_source_weights=weights)
    return tuple(build_gpt_datasets(data, TOKENIZER, sizes=sizes, seed=3))


def rows(count: int, start: int = 0) -> list[Any]:
    return [np.arange(5) + 5 * number + start for number in range(count)]


def test_each_epoch_has_each_sample_once_in_an_order_of_its_own() -> None:
    train, valid, test = datasets(source({"train": rows(10), "valid": rows(2)}))
    assert (len(train), len(valid), test) == (26, 5, None)
    firsts = [int(train[item]["tokens"][0]) // 5 for item in range(20)]
    assert sorted(firsts[:10]) == sorted(firsts[10:]) == list(range(10)) and firsts[:10] != firsts[10:]
    again = datasets(source({"train": rows(10)}))[0]
    assert [int(again[item]["tokens"][0]) // 5 for item in (7, 0, 19)] == [firsts[7], firsts[0], firsts[19]]
    sample = train[0]
    assert np.array_equal(sample["labels"], sample["tokens"] + 1) and sample["loss_mask"].dtype == np.float32
    in_order = datasets(source({"train": rows(10)}, shuffle=False))[0]
    assert [int(in_order[item]["tokens"][0]) // 5 for item in range(12)] == [*range(10), 0, 1]


def test_a_blend_keeps_to_its_weights() -> None:
    low, high = source({"train": rows(10)}), source({"train": rows(10, 100)})
    train = datasets(low, high, weights=(3.0, 1.0), sizes=(40, 0, 0))[0]
    of_high = sum(int(train[item]["tokens"][0]) >= 100 for item in range(40))
    assert of_high == 10 and {int(train[item]["dataset_id"]) for item in range(40)} == {0, 1}


@pytest.mark.parametrize(
    ("items", "named"),
    [
        ({"train": []}, "train split is empty"),
        ({"train": iter(rows(3))}, "train split is a list_iterator"),
        ({"train": [np.arange(4)]}, r"shape \(4,\).*5 tokens"),
        ({"train": [{"tokens": np.arange(4)}]}, "no labels"),
        ({"train": [{"tokens": np.arange(4), "labels": np.arange(4), "loss_mask": [1.0]}]}, "loss_mask has the shape"),
        ({"train": [np.arange(5) + 255]}, "outside the vocabulary of 257"),
        ({"train": [np.arange(5) + 0.5]}, "tokens has the dtype float64"),
    ],
)
def test_a_wrong_sample_is_named(items: Any, named: str) -> None:
    with pytest.raises(DataError, match=named):
        datasets(source(items))[0][0]


def test_a_dataset_that_is_shorter_than_it_says_names_the_sample() -> None:
    class Short(list[Any]):
        def __len__(self) -> int:
            return 10

    train = datasets(source({"train": Short(rows(3))}, shuffle=False))[0]
    assert len(train[2]["tokens"]) == 4
    with pytest.raises(DataError, match="--data-source own: sample 3 of its train split, of 10: IndexError") as caught:
        train[3]
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_function_with_other_arguments_is_named() -> None:
    def rows_of(data: Any, tokenizer: Any) -> list[Any]:
        return []

    def breaks(data: Any, tokenizer: Any, split: str, seed: int) -> Any:
        return len(seed)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="--data-source short:.*rows_of.*4 positional"):
        datasets(Registered(Entry("dataset", "short", rows_of)))
    with pytest.raises(MegalithError, match=rf"--data-source breaks: .*{Path(__file__).name}:\d+") as caught:
        datasets(Registered(Entry("dataset", "breaks", breaks)))
    assert isinstance(caught.value.__cause__, TypeError)


def test_training_needs_a_split() -> None:
    with pytest.raises(ConfigError, match="train split"):
        datasets(source({"valid": rows(2)}))


def test_the_fingerprint_tells_sources_apart() -> None:
    one, other = (
        fingerprint(DataConfig(seq_length=4, data_source=(source({}),), data_source_weights=weights), seed=1)["digest"]
        for weights in ((), (2.0,))
    )
    assert one != other


def test_a_registered_tokenizer_is_a_tokenizer() -> None:
    assert isinstance(TOKENIZER, Tokenizer)
    assert TOKENIZER.decode(TOKENIZER.encode("né")) == "né" and TOKENIZER.encode_batch(["a", "b"]) == [[97], [98]]
    card = TOKENIZER.fingerprint()
    assert card["class"] == "bytes" and card["vocab_size"] == 257 and len(card["vocabulary"]) == 64
    with pytest.raises(DataError, match="257"):
        TOKENIZER.decode([257])


@pytest.mark.parametrize(("attributes", "named"), [({}, "lacks vocab_size, eod"), ({"vocab_size": 3, "eod": 3}, "eod")])
def test_a_tokenizer_that_lacks_something_is_refused(attributes: dict[str, int], named: str) -> None:
    codec = type("Codec", (), {**attributes, "encode": None, "decode": None})
    kind = Registered(Entry("tokenizer", "own", lambda config: codec()))
    with pytest.raises(ConfigError, match=named):
        build_tokenizer(TokenizerConfig(tokenizer_type=kind))
