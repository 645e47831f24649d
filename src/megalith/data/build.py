"""From the configuration to the training, validation and test datasets of a run, and a short name for their data.

The fingerprint lets resuming notice a changed dataset. It covers the header and the sequence lengths of the index, the
size of the tokens and a sample of their bytes, the split, the seed and the sample length: with the number of epochs,
what decides which tokens stand in sample i. Of a blend, all of this for each dataset, with its weight, in the order of
the blend. The path does not count.

The number of epochs is not in it, because a run may go on for longer than it was first asked to. It follows from the
samples asked for (--train-iters or --train-samples): where a larger number needs more epochs, all samples are shuffled
anew, as in Megatron.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from megalith.config import DataConfig
from megalith.config.data_sources import SPLIT_KEYS, Blend, data_sources
from megalith.data.blend import BlendedDataset, normalise
from megalith.data.gpt_dataset import Documents, GPTDataset, GPTDatasetOptions
from megalith.data.indexed import HEADER_SIZE, IndexedDataset, bin_path, idx_path
from megalith.data.mock import MOCK_SPLIT, MockDocuments
from megalith.data.own import build_own_datasets, description
from megalith.data.samples import Portion, SampleRule, Shares, Sizes, SplitDataset
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
    """The datasets of a run; None for a split without a share. Unpacks into training, validation and test.

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
        own = build_own_datasets(data, tokenizer, sizes=sizes, seed=seed)
        return Datasets(own[0], own[1], own[2])
    if not data.mock_data:
        rule = _GPTSamples(data, tokenizer, seed)
        return build_datasets(data, rule, sizes=sizes, cache_is_checked=cache_is_checked)
    mock, documents = _GPTSamples(data, tokenizer, seed, "MockGPTDataset"), MockDocuments(tokenizer)
    shares, folder = _shares(MOCK_SPLIT), _blend_cache(data)
    portions = [Portion(split, sizes[split], shares, None, folder, None, cache_is_checked) for split in range(3)]
    train, valid, test = (mock.dataset(documents, portion) for portion in portions)
    return _warned(Datasets(train, valid, test))


def build_datasets(data: DataConfig, rule: SampleRule, *, sizes: Sizes, cache_is_checked: bool = False) -> Datasets:
    """Build every split that has a share, whether samples are asked of it or not.

    Args:
        sizes: samples that the run draws from each split, None for one epoch.
        cache_is_checked: another rank of this start has built these datasets, and checked their index caches.

    Raises:
        ConfigError: no data, or no share for training.
        DataError: files are missing or damaged, or a split is too small for its size.
    """
    sources = data_sources(data)
    if sources.splits is not None:
        by_split = [
            _build_split(_Builder(data, rule, _shares(None), cache_is_checked), blend, split, sizes[split])
            for split, blend in enumerate(sources.splits)
        ]
        train, valid, test = (sets[0] if sets else None for sets in by_split)
        return _warned(Datasets(train, valid, test, tuple(by_split[_VALIDATION][1:])))
    if sources.whole is not None:
        builder = _Builder(data, rule, _shares(data.split), cache_is_checked)
        shares = builder.shares
        if shares.matrix is not None and shares.matrix[0] is None and sizes[0]:
            raise ConfigError(f"--split {shares.text} gives training no share, but {sizes[0]} samples are asked of it")
        train, valid, test = _build_blend(builder, sources.whole, sizes)
        return _warned(Datasets(train, valid, test))
    raise ConfigError("--data-path is missing: give the prefix of a .bin/.idx pair, or --mock-data")


def _warned(built: Datasets) -> Datasets:
    """The datasets; what they could not keep is said."""
    problems = [dataset.cache_problem for dataset in (*built, *built.further_valid) if dataset is not None]
    if problem := next(filter(None, problems), None):
        logger.warning(
            "cannot keep the index cache in %s; each start builds it anew, unless --data-cache-path names a folder "
            "that can be written",
            problem,
        )
    return built


def _shares(split: str | None) -> Shares:
    shares = Shares.parse(split)
    if split is not None:
        logger.info("Let split_matrix = %s", shares.matrix)
    return shares


def _blend_cache(data: DataConfig) -> Path | None:
    """Where the indices of blends are kept."""
    return Path(data.data_cache_path) if data.data_cache_path else None


@dataclass(frozen=True)
class _GPTSamples:
    """A `SampleRule`: running text, cut into samples of one length."""

    data: DataConfig
    tokenizer: Tokenizer
    seed: int
    class_name: str = "GPTDataset"

    def dataset(self, documents: Documents, portion: Portion) -> GPTDataset:
        data = self.data
        options = GPTDatasetOptions(
            sequence_length=data.seq_length,
            seed=self.seed,
            eod_mask_loss=data.eod_mask_loss,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            mask_between_documents=data.dataloader_inter_document_masking,
        )
        return GPTDataset(documents, portion, options=options, tokenizer=self.tokenizer, class_name=self.class_name)


@dataclass(frozen=True)
class _Builder:
    """What all datasets of a run have in common."""

    data: DataConfig
    rule: SampleRule
    shares: Shares
    cache_is_checked: bool

    def splits_of(
        self, prefix: str, wanted: Sequence[int | None], only: int | None = None
    ) -> list[SplitDataset | None]:
        """The splits of one dataset that have a share; with `only` this one, which takes all of it."""
        documents = IndexedDataset(prefix, mmap_bin=self.data.mmap_bin_files)
        folder = _blend_cache(self.data) or Path(prefix) / "cache" / f"{self.rule.class_name}_indices"
        written = idx_path(prefix).stat().st_mtime_ns
        where = (prefix, folder, written, self.cache_is_checked)
        return [
            self.rule.dataset(documents, Portion(split, wanted[split], self.shares, *where))
            if self._is_built(split, only)
            else None
            for split in range(3)
        ]

    def known_size(self, size: int | None, split: int, only: int | None) -> int:
        """Samples that the weights of a blend share out; 0 for a split not built. Raises ConfigError for all."""
        if not self._is_built(split, only):
            return 0
        if size is None:
            raise ConfigError(
                "weights share out a number of samples, and --full-validation asks for all there are: give the "
                "validation data without weights (--valid-data-path), or --multiple-validation-sets"
            )
        return size

    def blended(self, datasets: Sequence[SplitDataset], weights: Sequence[float], size: int | None) -> BlendedDataset:
        """A blend of datasets of one split."""
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
        return self.shares.matrix is not None and self.shares.matrix[split] is not None


def _build_split(builder: _Builder, blend: Blend | None, split: int, size: int | None) -> list[Dataset]:
    """The datasets of one split that has a blend of its own; one, or those of `--multiple-validation-sets`."""
    if blend is None:
        return []
    apart = builder.data.multiple_validation_sets and split == _VALIDATION
    if apart or len(blend.prefixes) == 1:
        wanted = [size if number == split else 0 for number in range(3)]
        found = [builder.splits_of(prefix, wanted, split)[split] for prefix in blend.prefixes]
        return [dataset for dataset in found if dataset is not None]
    sizes = (size if split == 0 else 0, size if split == 1 else 0, size if split == 2 else 0)
    return [dataset for dataset in _build_blend(builder, blend, sizes, split) if dataset is not None]


def _build_blend(builder: _Builder, blend: Blend, sizes: Sizes, only: int | None = None) -> list[Dataset | None]:
    """The splits of a blend, or the `only` one, as Megatron-LM's `BlendedMegatronDatasetBuilder` makes them."""
    if blend.is_single:
        return list(builder.splits_of(blend.prefixes[0], sizes, only))
    weights = None if blend.weights is None else normalise(blend.weights)
    wanted: list[list[int | None]] = [[None] * 3 for _ in blend.prefixes]
    targets: list[list[int]] = []
    if weights is not None:
        known = [builder.known_size(size, split, only) for split, size in enumerate(sizes)]
        targets = [[math.ceil(size * weight) for size in known] for weight in weights]
        surplus = builder.data.mid_level_dataset_surplus
        wanted = [[math.ceil(target * (1 + surplus)) for target in row] for row in targets]
    with ThreadPoolExecutor(builder.data.num_dataset_builder_threads, "megalith-index") as threads:
        rows = list(threads.map(lambda prefix, sizes: builder.splits_of(prefix, sizes, only), blend.prefixes, wanted))
    blends: list[Dataset | None] = []
    for split, column in enumerate(zip(*rows, strict=True)):
        datasets = [dataset for dataset in column if dataset is not None]
        size = sizes[split]
        if not datasets:
            blends.append(None)
        elif weights is not None:
            blends.append(builder.blended(datasets, weights, sum(row[split] for row in targets)))
        else:
            lengths = [len(dataset) for dataset in datasets]
            blends.append(builder.blended(datasets, lengths, None if size is None else min(size, sum(lengths))))
    return blends


def fingerprint(data: DataConfig, *, seed: int) -> dict[str, Any]:
    """What the run reads, JSON-able, with a `digest` of it all; equal for runs over the same data, however long.

    Raises:  ConfigError or DataError as `build_gpt_datasets` does.
    """
    content: dict[str, Any]
    sources = data_sources(data)
    if data.data_source:
        content = {**description(data.data_source), "weights": list(data.data_source_weights)}
    elif data.mock_data:
        content = {"source": "mock", "split": MOCK_SPLIT}
    elif sources.splits is not None:
        content = {
            name: value
            for key, blend in zip(SPLIT_KEYS, sources.splits, strict=True)
            if blend is not None
            for name, value in _of_blend(blend, f"{key} ").items()
        }
    elif sources.whole is not None and not sources.whole.is_single:
        content = {**_of_blend(sources.whole), "split": data.split}
    elif sources.whole is not None:
        dataset = IndexedDataset(sources.whole.prefixes[0], mmap_bin=False)
        content = {
            "source": digest_of(dataset),
            "sequences": len(dataset),
            "tokens": dataset.num_tokens,
            "split": data.split,
        }
    else:
        raise ConfigError("--data-path is missing: there is no data to name")
    if data.dataloader_type != "single":
        content["order"] = data.dataloader_type
    content |= {"seq_length": data.seq_length, "seed": seed}
    text = json.dumps(content, sort_keys=True).encode()
    return {"digest": hashlib.blake2b(text, digest_size=_DIGEST_SIZE).hexdigest(), **content}


def _of_blend(blend: Blend, kind: str = "") -> dict[str, Any]:
    """One entry for each dataset, so that a difference names it, and their number."""
    weights = blend.weights or (None,) * len(blend.prefixes)
    content: dict[str, Any] = {f"{kind}datasets": len(blend.prefixes)}
    for number, (prefix, weight) in enumerate(zip(blend.prefixes, weights, strict=True), start=1):
        dataset = IndexedDataset(prefix, mmap_bin=False)
        share = "" if weight is None else f", weight {weight:.12g}"
        content[f"{kind}dataset {number}"] = (
            f"{digest_of(dataset)} of {len(dataset)} sequences, {dataset.num_tokens} tokens{share}"
        )
    return content


def digest_of(dataset: IndexedDataset) -> str:
    """Hash of one .bin/.idx pair: all of the index, and 64 pages of the tokens spread over the file."""
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
