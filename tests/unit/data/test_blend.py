"""Blends: the order against its ten-line definition, what is said of bad ones, and what a blend remembers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.config import DataConfig
from megalith.config.data_sources import Blend, data_sources, parse_blend
from megalith.data import blend as blends
from megalith.data.blend import BlendedDataset
from megalith.data.build import build_gpt_datasets
from megalith.data.indexed import IndexedWriter
from megalith.errors import ConfigError, DataError
from megalith.tokenizers.null import NullTokenizer


def defined(weights: list[float], size: int, limits: list[int] | None = None) -> list[tuple[int, int]]:
    """(dataset, its sample) of each sample of a blend, as Megatron defines it."""
    counts = [0] * len(weights)
    order = []
    for number in range(size):
        sample = max(float(number), 1.0)
        candidates = [d for d in range(len(weights)) if limits is None or counts[d] < limits[d]]
        chosen = max(candidates, key=lambda d: (weights[d] * sample - float(counts[d]), -d))
        order.append((chosen, counts[chosen]))
        counts[chosen] += 1
    return order


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.one_of(st.integers(1, 5), st.floats(1e-4, 10)), min_size=1, max_size=7),
    size=st.integers(0, 700),
    block=st.sampled_from([3, 16, 128]),
)
def test_a_blend_by_weights_is_the_greedy_order(parts: list[float], size: int, block: int) -> None:
    weights = np.array(parts) / np.sum(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blends, "_SHORTEST_BLOCK", block)
        datasets, samples = blends.build_blending_index(weights, size)
    assert list(zip(datasets.tolist(), samples.tolist(), strict=True)) == defined(weights.tolist(), size)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 120), min_size=1, max_size=6), block=st.sampled_from([3, 16, 128]))
def test_a_blend_of_everything_takes_every_sample_once(sizes: list[int], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blends, "_SHORTEST_BLOCK", block)
        datasets, samples = blends.build_exhaustive_blending_index(np.array(sizes))
    order = list(zip(datasets.tolist(), samples.tolist(), strict=True))
    assert sorted(order) == [(number, sample) for number, size in enumerate(sizes) for sample in range(size)]
    shares = [size / max(sum(sizes), 1) for size in sizes]
    assert order == defined(shares, sum(sizes), sizes)


def write(prefix: Path, first: int, documents: int = 12, length: int = 20) -> str:
    with IndexedWriter(str(prefix), "uint16") as writer:
        for document in range(documents):
            writer.add_document(first + 20 * document + np.arange(length), [length])
        writer.finalize()
    return str(prefix)


def config(*words: str, split: str = "1,0,0", **changes: object) -> DataConfig:
    return dataclasses.replace(DataConfig(seq_length=4, data_path=words, split=split), **changes)  # type: ignore[arg-type]


def test_a_blend_keeps_to_its_weights_and_names_its_sources(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 0), write(tmp_path / "b", 1000)
    blend, _, _ = build_gpt_datasets(config("1", a, "3", b), NullTokenizer(2000), sizes=(40, 0, 0), seed=1)
    assert isinstance(blend, BlendedDataset)
    assert blend.counts.tolist() == [10, 30]
    assert blend.sources == (a, b)
    for item in range(len(blend)):
        sample = blend[item]
        assert (sample["tokens"] >= 1000).all() == bool(sample["dataset_id"] == 1)
    assert "40 samples of 2 datasets:" in blend.summary and f"30 of {b}, which has 59 samples" in blend.summary
    with pytest.raises(IndexError, match="sample 40 of 40"):
        blend[40]


def test_one_dataset_twice_has_two_names(tmp_path: Path) -> None:
    a = write(tmp_path / "a", 0)
    blend, _, _ = build_gpt_datasets(config(a, a), NullTokenizer(2000), sizes=(40, 0, 0), seed=1)
    assert isinstance(blend, BlendedDataset)
    assert blend.sources == (f"{a} (1)", f"{a} (2)")


def test_a_dataset_that_is_too_short_for_its_part_is_named(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 0), write(tmp_path / "b", 0)
    built, _, _ = build_gpt_datasets(config("1", a, "1", b), NullTokenizer(2000), sizes=(20, 0, 0), seed=1)
    assert isinstance(built, BlendedDataset)
    with pytest.raises(DataError, match="--mid-level-dataset-surplus") as caught:
        BlendedDataset(built.datasets, [1.0, 9.0], 400, cache_folder=None)
    assert all(part in str(caught.value) for part in (b, "59", "360"))


def test_a_blend_is_loaded_from_the_cache_and_built_again_if_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    a, b = write(tmp_path / "a", 0), write(tmp_path / "b", 1000)
    data = config("1", a, "3", b, data_cache_path=str(tmp_path / "cache"))

    def order() -> list[int]:
        caplog.clear()
        blend, _, _ = build_gpt_datasets(data, NullTokenizer(2000), sizes=(40, 0, 0), seed=1)
        assert isinstance(blend, BlendedDataset)
        return [*blend.dataset_index.tolist(), *blend.dataset_sample_index.tolist()]

    built = order()
    assert "Build and save the BlendedDataset train indices" in caplog.text
    assert order() == built and "Load the BlendedDataset train indices" in caplog.text
    (path,) = (tmp_path / "cache").glob("*dataset_sample_index.npy")
    np.save(path, np.zeros(40, np.int64))
    assert order() == built and path.name in caplog.text


def test_validation_sets_stay_apart(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 0), write(tmp_path / "b", 1000)
    data = DataConfig(seq_length=4, train_data_path=(a,), valid_data_path=(a, b), multiple_validation_sets=True)
    built = build_gpt_datasets(data, NullTokenizer(2000), sizes=(10, 5, 5), seed=1)
    assert [dataset.prefix for dataset in (built.valid, *built.further_valid)] == [a, b]  # type: ignore[union-attr]
    whole = build_gpt_datasets(data, NullTokenizer(2000), sizes=(10, None, 5), seed=1)
    assert [len(dataset) for dataset in (whole.valid, *whole.further_valid) if dataset is not None] == [59, 59]


def test_weights_cannot_share_out_an_unknown_number(tmp_path: Path) -> None:
    a = write(tmp_path / "a", 0)
    with pytest.raises(ConfigError, match="--full-validation"):
        build_gpt_datasets(config("1", a, "2", a, split="1,1,0"), NullTokenizer(2000), sizes=(10, None, 5), seed=1)


@pytest.mark.parametrize(
    ("words", "blend"),
    [
        ("a", Blend(("a",))),
        ("a b c", Blend(("a", "b", "c"))),
        ("a b", Blend(("a", "b"))),
        ("0.3 a 7 b", Blend(("a", "b"), (0.3, 7.0))),
        ("1 a", Blend(("a",), (1.0,))),
        ("1 a 2", None),
    ],
)
def test_words_of_blends(words: str, blend: Blend | None) -> None:
    if blend is None:
        with pytest.raises(ConfigError, match=f"--data-path {words}"):
            parse_blend(words.split(), "--data-path")
        return
    assert parse_blend(words.split(), "--data-path") == blend
    assert blend.is_single == (words == "a")


def test_words_from_files(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("0.3 a\n0.7 b\n")
    data = DataConfig(seq_length=4, data_args_path=str(tmp_path / "words"))
    assert data_sources(data).whole == Blend(("a", "b"), (0.3, 0.7))
    (tmp_path / "splits").write_text('{"train": ["1", "a", 3, "b"], "valid": "c d", "test": null}')
    sources = data_sources(DataConfig(seq_length=4, per_split_data_args_path=str(tmp_path / "splits")))
    assert sources.splits == (Blend(("a", "b"), (1.0, 3.0)), Blend(("c", "d")), None)
    assert sources.prefixes == ("a", "b", "c", "d")
    assert math.isclose(sum(sources.splits[0].weights or ()), 4)


def test_many_datasets_are_refused() -> None:
    with pytest.raises(DataError, match="at most 32766"):
        BlendedDataset([None] * 32767, [1.0] * 32767, 1, cache_folder=None)  # type: ignore[list-item]
