"""Construction of the training, validation and test datasets of a run, and their fingerprint.

The fingerprint lets a resume notice changed data. It covers all that determines the tokens of sample i, apart from the
number of epochs: the header and sequence lengths of the index, the size of the .bin and a sample of its bytes, the
split, the seed and the sequence length; for a blend, this of each dataset in order, with its weight. No paths.

The number of epochs is left out because a run may be continued beyond its first --train-iters or --train-samples. Where
a larger number needs more epochs, all samples are shuffled anew, as in Megatron.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from megalith.config import DataConfig
from megalith.config.data_sources import SPLIT_KEYS, Blend, data_sources
from megalith.data.blend import BlendedDataset, normalise
from megalith.data.gpt_dataset import Documents, GPTDataset, GPTDatasetOptions
from megalith.data.indexed import HEADER_SIZE, IndexedDataset, bin_path, idx_path
from megalith.data.mock import MOCK_SPLIT, MockDocuments
from megalith.data.registered import build_registered_datasets, fingerprint_entries
from megalith.data.samples import DatasetFactory, Sizes, SplitDataset, SplitRatios, SplitSpec
from megalith.data.sft_dataset import CLASS_NAME, SFTDataset, SFTDatasetOptions, has_mask, open_mask
from megalith.errors import ConfigError
from megalith.tokenizers import Tokenizer

logger = logging.getLogger(__name__)

_VALIDATION = 1

Dataset: TypeAlias = SplitDataset | BlendedDataset
_NUM_PROBES = 64
_PROBE_SIZE = 4096
_DIGEST_SIZE = 8


@dataclass(frozen=True)
class Datasets:
    """Datasets of a run; None for a split without a share. Unpacks into training, validation and test.

    With `--multiple-validation-sets` the first of the sets is `valid`, and `further_valid` are the other ones.
    """

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    further_valid: tuple[Dataset, ...] = ()

    def __iter__(self) -> Iterator[Dataset | None]:
        return iter((self.train, self.valid, self.test))


def build_gpt_datasets(
    data: DataConfig, tokenizer: Tokenizer, *, sizes: Sizes, seed: int, cache_is_checked: bool = False
) -> Datasets:
    """Build the datasets of GPT as `build_datasets` does; `seed` decides the order of documents and samples."""
    if data.data_source:
        own = build_registered_datasets(data, tokenizer, sizes=sizes, seed=seed)
        return Datasets(own[0], own[1], own[2])
    if not data.mock_data:
        factory = (_SFTDatasetFactory if data.sft else _GPTDatasetFactory)(data, tokenizer, seed)
        return build_datasets(data, factory, sizes=sizes, cache_is_checked=cache_is_checked)
    mock, documents = _GPTDatasetFactory(data, tokenizer, seed, "MockGPTDataset"), MockDocuments(tokenizer)
    ratios, folder = _parse_ratios(MOCK_SPLIT), _blend_cache(data)
    specs = [SplitSpec(split, sizes[split], ratios, None, folder, None, cache_is_checked) for split in range(3)]
    train, valid, test = (mock.build(documents, spec) for spec in specs)
    return _warn_unsaved_cache(Datasets(train, valid, test))


def build_datasets(
    data: DataConfig, factory: DatasetFactory, *, sizes: Sizes, cache_is_checked: bool = False
) -> Datasets:
    """Build every split that has a share, even if no samples are requested of it.

    Args:
        sizes: samples that the run draws from each split, None for one epoch.
        cache_is_checked: another rank of this start has built these datasets, and checked their index caches.

    Raises:
        ConfigError: no data, or no share for training.
        DataError: files are missing or damaged, or a split is too small for its size.
    """
    sources = data_sources(data)
    if sources.splits is not None:
        builder = _DatasetBuilder(data, factory, _parse_ratios(None), cache_is_checked)
        by_split = [_build_split(builder, blend, split, sizes[split]) for split, blend in enumerate(sources.splits)]
        train, valid, test = (sets[0] if sets else None for sets in by_split)
        return _warn_unsaved_cache(Datasets(train, valid, test, tuple(by_split[_VALIDATION][1:])))
    if sources.whole is not None:
        builder = _DatasetBuilder(data, factory, _parse_ratios(data.split), cache_is_checked)
        ratios = builder.ratios
        if ratios.matrix is not None and ratios.matrix[0] is None and sizes[0]:
            raise ConfigError(f"--split {ratios.text} gives training no share, but the run needs {sizes[0]} samples")
        train, valid, test = _build_blend(builder, sources.whole, sizes)
        return _warn_unsaved_cache(Datasets(train, valid, test))
    raise ConfigError("--data-path is missing: give the prefix of a .bin/.idx pair, or --mock-data")


def _warn_unsaved_cache(built: Datasets) -> Datasets:
    """Log a warning if an index cache could not be saved, and return the datasets."""
    problems = [dataset.cache_problem for dataset in (*built, *built.further_valid) if dataset is not None]
    if problem := next(filter(None, problems), None):
        logger.warning(
            "cannot write the index cache in %s; every start builds it again unless --data-cache-path names a "
            "writable folder",
            problem,
        )
    return built


def _parse_ratios(split: str | None) -> SplitRatios:
    ratios = SplitRatios.parse(split)
    if split is not None:
        logger.info("Let split_matrix = %s", ratios.matrix)
    return ratios


def _blend_cache(data: DataConfig) -> Path | None:
    """Return the cache folder for the indices of blends, None without --data-cache-path."""
    return Path(data.data_cache_path) if data.data_cache_path else None


@dataclass(frozen=True)
class _GPTDatasetFactory:
    """Factory of GPT datasets: running text cut into samples of one length (`samples.DatasetFactory`)."""

    data: DataConfig
    tokenizer: Tokenizer
    seed: int
    class_name: str = "GPTDataset"

    def build(self, documents: Documents, spec: SplitSpec) -> GPTDataset:
        data = self.data
        options = GPTDatasetOptions(
            sequence_length=data.seq_length,
            seed=self.seed,
            eod_mask_loss=data.eod_mask_loss,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            mask_between_documents=data.dataloader_inter_document_masking,
        )
        return GPTDataset(documents, spec, options=options, tokenizer=self.tokenizer, class_name=self.class_name)


@dataclass(frozen=True)
class _SFTDatasetFactory:
    """Factory of rows of whole conversations (`samples.DatasetFactory`)."""

    data: DataConfig
    tokenizer: Tokenizer
    seed: int
    class_name: str = CLASS_NAME

    def build(self, documents: IndexedDataset, spec: SplitSpec) -> SFTDataset:
        data, mask = self.data, open_mask(documents, mmap_bin=self.data.mmap_bin_files)
        options = SFTDatasetOptions(data.seq_length, self.seed, data.sft_packing, data.sft_overlong)
        digest = partial(dataset_digest, mask)
        return SFTDataset(documents, mask, spec, options=options, tokenizer=self.tokenizer, mask_digest=digest)


@dataclass(frozen=True)
class _DatasetBuilder:
    """Settings that all datasets of a run share."""

    data: DataConfig
    factory: DatasetFactory
    ratios: SplitRatios
    cache_is_checked: bool

    def build_splits(
        self, prefix: str, wanted: Sequence[int | None], only: int | None = None
    ) -> list[SplitDataset | None]:
        """Return a dataset for each split, None without a share; with `only` that split alone, of all documents."""
        documents = IndexedDataset(prefix, mmap_bin=self.data.mmap_bin_files)
        if has_mask(prefix) and not self.data.sft:
            logger.warning("%s has a loss mask, which has no effect without --sft: every token is predicted", prefix)
        folder = _blend_cache(self.data) or Path(prefix) / "cache" / f"{self.factory.class_name}_indices"
        written = idx_path(prefix).stat().st_mtime_ns
        where = (prefix, folder, written, self.cache_is_checked)
        return [
            self.factory.build(documents, SplitSpec(split, wanted[split], self.ratios, *where))
            if self._is_built(split, only)
            else None
            for split in range(3)
        ]

    def require_size(self, size: int | None, split: int, only: int | None) -> int:
        """Return the samples to divide by weight, 0 for a split that is not built. Raises ConfigError for None."""
        if not self._is_built(split, only):
            return 0
        if size is None:
            raise ConfigError(
                "--full-validation takes every sample, so its blend can have no weights: give the validation data "
                "without weights (--valid-data-path), or --multiple-validation-sets"
            )
        return size

    def blend(self, datasets: Sequence[SplitDataset], weights: Sequence[float], size: int | None) -> BlendedDataset:
        """Blend datasets of one split."""
        prefixes = [dataset.prefix for dataset in datasets if dataset.prefix is not None]
        written = max(idx_path(prefix).stat().st_mtime_ns for prefix in prefixes)
        return BlendedDataset(
            datasets,
            weights,
            size,
            cache_folder=_blend_cache(self.data),
            written_ns=written,
            cache_is_checked=self.cache_is_checked,
        )

    def _is_built(self, split: int, only: int | None) -> bool:
        if only is not None:
            return split == only
        return self.ratios.matrix is not None and self.ratios.matrix[split] is not None


def _build_split(builder: _DatasetBuilder, blend: Blend | None, split: int, size: int | None) -> list[Dataset]:
    """Build a split that has a blend of its own: one dataset, or several with `--multiple-validation-sets`."""
    if blend is None:
        return []
    apart = builder.data.multiple_validation_sets and split == _VALIDATION
    if apart or len(blend.prefixes) == 1:
        wanted = [size if number == split else 0 for number in range(3)]
        found = [builder.build_splits(prefix, wanted, split)[split] for prefix in blend.prefixes]
        return [dataset for dataset in found if dataset is not None]
    sizes = (size if split == 0 else 0, size if split == 1 else 0, size if split == 2 else 0)
    return [dataset for dataset in _build_blend(builder, blend, sizes, split) if dataset is not None]


def _build_blend(builder: _DatasetBuilder, blend: Blend, sizes: Sizes, only: int | None = None) -> list[Dataset | None]:
    """Build the three splits of a blend, or the `only` one, as Megatron's `BlendedMegatronDatasetBuilder` does."""
    if blend.is_single:
        return list(builder.build_splits(blend.prefixes[0], sizes, only))
    weights = None if blend.weights is None else normalise(blend.weights)
    wanted: list[list[int | None]] = [[None] * 3 for _ in blend.prefixes]
    targets: list[list[int]] = []
    if weights is not None:
        known = [builder.require_size(size, split, only) for split, size in enumerate(sizes)]
        targets = [[math.ceil(size * weight) for size in known] for weight in weights]
        surplus = builder.data.mid_level_dataset_surplus
        wanted = [[math.ceil(target * (1 + surplus)) for target in row] for row in targets]
    with ThreadPoolExecutor(builder.data.num_dataset_builder_threads, "megalith-index") as threads:
        rows = list(threads.map(lambda prefix, row: builder.build_splits(prefix, row, only), blend.prefixes, wanted))
    blends: list[Dataset | None] = []
    for split, column in enumerate(zip(*rows, strict=True)):
        datasets = [dataset for dataset in column if dataset is not None]
        size = sizes[split]
        if not datasets:
            blends.append(None)
        elif weights is not None:
            blends.append(builder.blend(datasets, weights, sum(row[split] for row in targets)))
        else:
            lengths = [len(dataset) for dataset in datasets]
            blends.append(builder.blend(datasets, lengths, None if size is None else min(size, sum(lengths))))
    return blends


def fingerprint(data: DataConfig, *, seed: int) -> dict[str, Any]:
    """Describe the data of the run, JSON-able, with a `digest` of the whole; independent of the length of the run.

    Raises:  ConfigError or DataError as `build_gpt_datasets` does.
    """
    content: dict[str, Any]
    sources = data_sources(data)
    if data.data_source:
        content = {**fingerprint_entries(data.data_source), "weights": list(data.data_source_weights)}
    elif data.mock_data:
        content = {"source": "mock", "split": MOCK_SPLIT}
    elif sources.splits is not None:
        content = {
            name: value
            for key, blend in zip(SPLIT_KEYS, sources.splits, strict=True)
            if blend is not None
            for name, value in _blend_entries(data, blend, f"{key} ").items()
        }
    elif sources.whole is not None and not sources.whole.is_single:
        content = {**_blend_entries(data, sources.whole), "split": data.split}
    elif sources.whole is not None:
        dataset = IndexedDataset(sources.whole.prefixes[0], mmap_bin=False)
        content = {
            "source": _digest_of_run(data, dataset),
            "sequences": len(dataset),
            "tokens": dataset.num_tokens,
            "split": data.split,
        }
    else:
        raise ConfigError("--data-path is missing: give the prefix of a .bin/.idx pair, or --mock-data")
    if data.dataloader_type != "single":
        content["order"] = data.dataloader_type
    if data.sft:
        content |= {"sft": True, "packing": data.sft_packing, "overlong": data.sft_overlong}
    content |= {"seq_length": data.seq_length, "seed": seed}
    text = json.dumps(content, sort_keys=True).encode()
    return {"digest": hashlib.blake2b(text, digest_size=_DIGEST_SIZE).hexdigest(), **content}


def _digest_of_run(data: DataConfig, dataset: IndexedDataset) -> str:
    masks = [open_mask(dataset, mmap_bin=False)] if data.sft else []
    return "+".join(map(dataset_digest, [dataset, *masks]))


def _blend_entries(data: DataConfig, blend: Blend, kind: str = "") -> dict[str, Any]:
    """Return the number of datasets and one entry for each, so that a difference names the dataset."""
    weights = blend.weights or (None,) * len(blend.prefixes)
    content: dict[str, Any] = {f"{kind}datasets": len(blend.prefixes)}
    for number, (prefix, weight) in enumerate(zip(blend.prefixes, weights, strict=True), start=1):
        dataset = IndexedDataset(prefix, mmap_bin=False)
        share = "" if weight is None else f", weight {weight:.12g}"
        content[f"{kind}dataset {number}"] = (
            f"{_digest_of_run(data, dataset)} of {len(dataset)} sequences, {dataset.num_tokens} tokens{share}"
        )
    return content


def dataset_digest(dataset: IndexedDataset) -> str:
    """Hash a .bin/.idx pair: the whole index, and 64 pages of tokens spread over the .bin."""
    digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    with idx_path(dataset.prefix).open("rb") as index:
        digest.update(index.read(HEADER_SIZE))
    digest.update(dataset.lengths.data)
    digest.update(dataset.document_index.data)
    size = bin_path(dataset.prefix).stat().st_size
    with bin_path(dataset.prefix).open("rb") as tokens:
        for probe in range(_NUM_PROBES):
            tokens.seek(max(0, size - _PROBE_SIZE) * probe // (_NUM_PROBES - 1))
            digest.update(tokens.read(_PROBE_SIZE))
    return digest.hexdigest()
