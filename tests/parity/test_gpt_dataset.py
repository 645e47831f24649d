"""Indices, blends, cache names, samples, masks and sampling orders of the real Megatron.

Megatron's dense attention mask is compared with the one that a sample's `document_ids` mean.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalith.config import DataConfig, TokenizerConfig
from megalith.data import gpt_index
from megalith.data.blend import BlendedDataset, build_blending_index, build_exhaustive_blending_index
from megalith.data.build import build_gpt_datasets
from megalith.data.gpt_dataset import GPTDataset, GPTDatasetOptions
from megalith.data.gpt_index import EpochPlan
from megalith.data.indexed import IndexedDataset
from megalith.data.loader import BatchLoader, CyclicSampler, FullValidationSampler, SequentialSampler
from megalith.data.samples import SPLIT_NAMES, SplitRatios, SplitSpec, parse_split
from megalith.errors import DataError
from megalith.tokenizers import Tokenizer, build_tokenizer
from megalith.tokenizers.gpt2_bpe import GPT2BPETokenizer

SINGLE = (
    "none_949",
    "epoch_lt1",
    "epoch_gt1_sep",
    "epoch_gt1_nosep",
    "exact_epoch_0",
    "exact_epoch_1",
    "exact_epoch_2",
    "all_train",
    "pylib_many_epochs",
    "sweep_sep_0",
    "sweep_sep_1",
    "sweep_sep_2",
    "sweep_sep_3",
    "sweep_sep_4",
    "sweep_sep_5",
    "reset_flags",
    "reset_pos_only",
    "eod_mask_only",
    "attn_mask",
    "no_extra_token",
    "valid_keep_partial",
    "pad_token",
    "zero_len_seqs",
    "fractional_split",
    "split_slash_999",
    "too_small",
)
OTHER = {"mock", "empty_split_hang", "helpers", "samplers"}
BLENDS = (
    "blend2",
    "blend2_eq",
    "blend3",
    "blend_noweights_size",
    "blend_noweights_nosize",
    "blend_per_split",
    "blend_surplus",
)
INDICES = ("document_index", "sample_index", "shuffle_index")


class PaddingTokenizer(GPT2BPETokenizer):
    """The tokenizer of the `pad_token` golden: a text token serves as padding."""

    pad = 198

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"class": "PadTok"}


@pytest.fixture
def folder(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The golden folder as the working directory: the hashed descriptions hold relative paths."""
    monkeypatch.chdir(shared / "golden" / "gpt_dataset")
    return shared / "golden" / "gpt_dataset"


@pytest.fixture(scope="module")
def cases(shared: Path) -> dict[str, dict[str, Any]]:
    manifest = json.loads((shared / "golden" / "gpt_dataset" / "manifest.json").read_text())
    return {case["name"]: case for case in manifest["cases"]}


def tokenizer_of(case: dict[str, Any]) -> Tokenizer:
    identity = case["tokenizer"]["unique_identifiers"]
    if identity["class"] == "_NullTokenizer":
        config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=int(identity["vocab_size"]))
        return build_tokenizer(config)
    kind = PaddingTokenizer if identity["class"] == "PadTok" else GPT2BPETokenizer
    return kind(*identity["tokenizer_path"])


def megatrons_files(folder: Path) -> list[str]:
    """Names of the files of a cache folder, without those that Megatron does not have."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith("-checksums.json"))


def dataset_of(case: dict[str, Any], split: int, cache_folder: Path | None) -> GPTDataset:
    config = case["config"]
    ((prefix,), _) = config["blend"]
    options = GPTDatasetOptions(
        sequence_length=config["sequence_length"],
        seed=config["random_seed"],
        eod_mask_loss=config["eod_mask_loss"],
        reset_position_ids=config["reset_position_ids"],
        reset_attention_mask=config["reset_attention_mask"],
        add_extra_token=config["add_extra_token_to_sequence"],
        drop_last_partial_validation=config["drop_last_partial_validation_sequence"],
    )
    return GPTDataset(
        IndexedDataset(prefix),
        SplitSpec(split, case["sizes"][split], SplitRatios.parse(config["split"]), prefix, cache_folder),
        options=options,
        tokenizer=tokenizer_of(case),
    )


def check_indices(dataset: GPTDataset, expected: dict[str, Any], arrays: dict[str, Any], name: str) -> None:
    assert dataset.description == expected["description"]
    assert (len(dataset), dataset.num_epochs) == (expected["len"], expected["num_epochs"])
    for index in INDICES:
        built = np.ascontiguousarray(getattr(dataset, index))
        assert built.dtype.name == expected["dtypes"][index]
        stored = arrays[f"{name}/{index}"]
        np.testing.assert_array_equal(built[: len(stored)], stored)
        assert hashlib.sha256(built.tobytes()).hexdigest() == expected["sha256"][index]


def hidden(sample: dict[str, Any]) -> Any:
    """Megatron's mask [1, S, S] of a sample: True where a token may not look."""
    documents = sample.get("document_ids", np.zeros(len(sample["tokens"])))
    later = np.triu(np.ones((len(documents),) * 2, bool), 1)
    return (later | (documents[:, None] != documents))[None]


def check_samples(dataset: GPTDataset, case: dict[str, Any], arrays: dict[str, Any], name: str) -> None:
    if f"{name}/samples/idx" not in arrays:
        assert len(dataset) == 0
        return
    first_masked = np.zeros(case["config"]["sequence_length"], bool)
    for row, item in enumerate(arrays[f"{name}/samples/idx"]):
        sample = dataset[int(item)]
        for field in ("tokens", "labels"):
            np.testing.assert_array_equal(sample[field], arrays[f"{name}/samples/{field}"][row])
        np.testing.assert_array_equal(sample["position_ids"], arrays[f"{name}/samples/position_ids"][row])
        if f"{name}/samples/attention_mask_packbits" in arrays:
            packed = arrays[f"{name}/samples/attention_mask_packbits"][row]
            np.testing.assert_array_equal(np.packbits(hidden(sample)), packed)
        loss_mask = sample["loss_mask"].copy()
        shares_its_masks = not any(
            case["config"][name] for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
        )
        if shares_its_masks:
            # Megatron's items share one mask, in which the padding of the first item read stays masked.
            first_masked = loss_mask == 0 if row == 0 else first_masked
            loss_mask[first_masked] = 0
        np.testing.assert_array_equal(loss_mask, arrays[f"{name}/samples/loss_mask"][row])


def test_every_golden_is_compared_or_has_an_owner(cases: dict[str, Any]) -> None:
    assert set(cases) == {*SINGLE, *OTHER, *BLENDS}


@pytest.mark.parametrize("name", SINGLE)
def test_single_dataset(name: str, folder: Path, cases: dict[str, Any], tmp_path: Path) -> None:
    case = cases[name]
    arrays = dict(np.load(folder / case["file"]))
    for _ in ("built", "loaded"):
        for number, split in enumerate(SPLIT_NAMES):
            expected = case["splits"][split]
            if expected is None:
                assert parse_split(case["config"]["split"])[number] is None
                continue
            dataset = dataset_of(case, number, tmp_path)
            check_indices(dataset, expected, arrays, split)
            check_samples(dataset, case, arrays, split)
        assert megatrons_files(tmp_path) == sorted(case["cache_files"])


def test_split_matrices(cases: dict[str, Any]) -> None:
    for name in SINGLE:
        expected = [None if interval is None else tuple(interval) for interval in cases[name]["split_matrix"]]
        assert parse_split(cases[name]["config"]["split"]) == expected


def test_the_default_cache_folder_lies_under_the_prefix(
    shared: Path, cases: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = shared / "golden" / "gpt_dataset"
    (tmp_path / "data").mkdir()
    for ending in (".bin", ".idx"):
        (tmp_path / f"data/shakes{ending}").write_bytes((golden / f"data/shakes{ending}").read_bytes())
    (tmp_path / "tok").symlink_to(golden / "tok")
    monkeypatch.chdir(tmp_path)
    case = cases["none_949"]
    data = DataConfig(seq_length=64, data_path=("data/shakes",), split=case["config"]["split"])
    build_gpt_datasets(data, tokenizer_of(case), sizes=(None, None, None), seed=1234)
    assert megatrons_files(Path("data/shakes/cache/GPTDataset_indices")) == sorted(case["cache_files"])


def test_mock_data(folder: Path, cases: dict[str, Any], tmp_path: Path) -> None:
    case = cases["mock"]
    arrays = dict(np.load(folder / case["file"]))
    data = DataConfig(seq_length=64, mock_data=True, data_cache_path=str(tmp_path))
    datasets = build_gpt_datasets(data, tokenizer_of(case), sizes=tuple(case["sizes"]), seed=1234)
    for name, dataset in zip(SPLIT_NAMES, datasets, strict=True):
        assert dataset is not None
        check_indices(dataset, case["splits"][name], arrays, name)
        check_samples(dataset, case, arrays, name)
    assert megatrons_files(tmp_path) == sorted(case["cache_files"])


def test_an_empty_split_is_an_error_where_megatron_hangs(folder: Path, cases: dict[str, Any], tmp_path: Path) -> None:
    case = cases["empty_split_hang"]
    assert case["error"] == "Hang"
    data = DataConfig(seq_length=64, data_path=("data/pylib",), split="949,50,1", data_cache_path=str(tmp_path))
    with pytest.raises(DataError) as caught:
        build_gpt_datasets(data, tokenizer_of(case), sizes=tuple(case["sizes"]), seed=1234)
    total = len(IndexedDataset("data/pylib"))
    for said in ("the test split of data/pylib has 0 tokens", "2 samples of 64 + 1 tokens"):
        assert said in str(caught.value)
    assert f"round(0.999 * {total}) = {total} to round(1 * {total}) = {total}" in str(caught.value)


def words_of(blend: list[Any] | None) -> tuple[str, ...]:
    """A blend as the words of a command line."""
    prefixes, weights = blend or ([], None)
    if weights is None:
        return tuple(prefixes)
    return tuple(word for weight, prefix in zip(weights, prefixes, strict=True) for word in (repr(weight), prefix))


@pytest.mark.parametrize("name", BLENDS)
def test_blend(name: str, folder: Path, cases: dict[str, Any], tmp_path: Path) -> None:
    case = cases[name]
    config, arrays = case["config"], dict(np.load(folder / case["file"]))
    data = DataConfig(
        seq_length=config["sequence_length"],
        data_cache_path=str(tmp_path),
        mid_level_dataset_surplus=config.get("mid_level_dataset_surplus", 0.005),
        eod_mask_loss=config["eod_mask_loss"],
        reset_position_ids=config["reset_position_ids"],
        reset_attention_mask=config["reset_attention_mask"],
    )
    if "blend" in config:
        data = replace(data, data_path=words_of(config["blend"]), split=config["split"])
    else:
        train, valid, test = map(words_of, config["blend_per_split"])
        data = replace(data, train_data_path=train, valid_data_path=valid, test_data_path=test)
    for threads in (1, 3):
        data = replace(data, num_dataset_builder_threads=threads)
        built = build_gpt_datasets(data, tokenizer_of(case), sizes=tuple(case["sizes"]), seed=config["random_seed"])
        for split, dataset in zip(SPLIT_NAMES, built, strict=True):
            expected = case["splits"][split]
            if expected is None:
                assert dataset is None
                continue
            assert dataset is not None
            check_blend(dataset, expected, arrays, split)
            check_samples(dataset, case, arrays, split)
        assert megatrons_files(tmp_path) == sorted(case["cache_files"])


def check_blend(dataset: Any, expected: dict[str, Any], arrays: dict[str, Any], split: str) -> None:
    if expected["type"] == "GPTDataset":
        check_indices(dataset, expected, arrays, split)
        return
    assert isinstance(dataset, BlendedDataset)
    assert dataset.description == expected["description"]
    assert len(dataset) == expected["len"]
    assert [float(weight).hex() for weight in dataset.weights] == expected["weights_hex"]
    for index in ("dataset_index", "dataset_sample_index"):
        np.testing.assert_array_equal(getattr(dataset, index), arrays[f"{split}/{index}"])
        assert getattr(dataset, index).dtype == arrays[f"{split}/{index}"].dtype
    for number, (child, wanted) in enumerate(zip(dataset.datasets, expected["children"], strict=True)):
        check_indices(child, wanted, arrays, f"{split}/child{number}")
    for row, item in enumerate(arrays[f"{split}/samples/idx"]):
        assert dataset[int(item)]["dataset_id"] == arrays[f"{split}/samples/dataset_id"][row]


def test_a_sample_that_fills_up_a_batch(folder: Path, cases: dict[str, Any]) -> None:
    compared = 0
    for case in (cases[name] for name in SINGLE):
        arrays = np.load(folder / case["file"])
        for number, split in enumerate(SPLIT_NAMES):
            if f"{split}/pad_sample/loss_mask" not in arrays or not case["splits"][split]["len"]:
                continue
            dataset = dataset_of(case, number, None)
            sampler = FullValidationSampler(1, micro_batch_size=2, num_micro_batches=1)
            batch = next(BatchLoader(dataset, 2, 0, sampler=sampler))
            np.testing.assert_array_equal(batch["loss_mask"][1], arrays[f"{split}/pad_sample/loss_mask"])
            compared += 1
    assert compared > 5


def test_index_functions(folder: Path, cases: dict[str, Any]) -> None:
    helpers = np.load(folder / cases["helpers"]["file"])
    compared = 0
    for case in cases["helpers"]["info"]:
        if "sample" not in case:
            check_blending(helpers, case)
            continue
        key = f"sample{case['sample']}"
        sizes, documents, expected = (helpers[f"{key}/{name}"] for name in ("sizes", "document_index", "sample_index"))
        tokens = int(sizes[documents].sum()) // case["epochs"]
        total = case["epochs"] * tokens - case["add_extra"]
        num_samples = total // case["seq"] if case["drop_last"] else -(-total // case["seq"])
        built = gpt_index.build_sample_index(sizes, documents, num_samples, case["seq"], extra=case["add_extra"])
        np.testing.assert_array_equal(built, expected)
        assert built.dtype == expected.dtype
        compared += 1
    assert compared == 6
    for number in range(3):
        rng = np.random.RandomState(100 + number)
        plan = EpochPlan(tokens=0, num_epochs=3, num_samples=50, shuffled_first=50, separate_last=bool(number % 2))
        index = gpt_index.build_document_index(range(5, 37), plan, rng)
        np.testing.assert_array_equal(index, helpers[f"docidx{number}"])
        plan = EpochPlan(0, 3, num_samples=70 if number else 50, shuffled_first=50, separate_last=bool(number))
        np.testing.assert_array_equal(gpt_index.build_shuffle_index(plan, rng), helpers[f"shuf{number}"])


def check_blending(helpers: Any, case: dict[str, Any]) -> None:
    number = case["i"]
    for kind, built in (
        ("blend", build_blending_index(helpers[f"blend{number}/weights"], case["size"])),
        ("exhaustive", build_exhaustive_blending_index(helpers[f"exhaustive{number}/sizes"])),
    ):
        for name, array in zip(("dataset_index", "dataset_sample_index"), built, strict=True):
            expected = helpers[f"{kind}{number}/{name}"]
            np.testing.assert_array_equal(array, expected)
            assert array.dtype == expected.dtype


@pytest.mark.parametrize("number", range(4))
def test_masks(number: int, folder: Path, cases: dict[str, Any]) -> None:
    helpers = np.load(folder / cases["helpers"]["file"])
    tokens = helpers[f"ltor{number}/data"]
    documents = gpt_index.document_ids(tokens, eod=0)
    positions = gpt_index.reset_positions(documents) if number & 1 else np.arange(len(tokens))
    np.testing.assert_array_equal(positions, helpers[f"ltor{number}/position_ids"])
    sample = {"tokens": tokens, "document_ids": documents if number & 2 else np.zeros_like(documents)}
    np.testing.assert_array_equal(hidden(sample), helpers[f"ltor{number}/attention_mask"])
    np.testing.assert_array_equal(tokens != 0, helpers[f"ltor{number}/loss_mask"])


def test_sequential_sampler(folder: Path) -> None:
    cases = _sampler_cases(folder, "single", "drop_last")
    assert len(cases) > 1
    for case in cases:
        sampler = SequentialSampler(case["total"], case["mbs"])
        for rank, expected in enumerate(case["ranks"]):
            assert [list(batch) for batch in sampler.micro_batches(case["consumed"], rank, case["dp"])] == expected


def test_cyclic_sampler(folder: Path) -> None:
    cases = _sampler_cases(folder, "cyclic", "data_sharding")
    assert len(cases) > 1
    for case in cases:
        sampler = CyclicSampler(case["total"], case["mbs"])
        for rank, expected in enumerate(case["ranks"]):
            batches = sampler.micro_batches(case["consumed"], rank, case["dp"])
            assert list(islice(batches, len(expected))) == expected


def _sampler_cases(folder: Path, kind: str, option: str) -> list[dict[str, Any]]:
    """The goldens of one kind of sampler, without those whose option is off: no flag turns it off."""
    cases = json.loads((folder / "samplers.json").read_text())
    return [case for case in cases if case["kind"] == kind and case[option]]
