"""From the configuration to the training, validation and test datasets of a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from megalith.config import DataConfig
from megalith.data.gpt_dataset import Documents, GPTDataset, GPTDatasetOptions
from megalith.data.indexed import IndexedDataset, idx_path
from megalith.data.mock import MOCK_SPLIT, MockDocuments
from megalith.data.splits import Sizes, parse_split
from megalith.errors import ConfigError
from megalith.tokenizers import Tokenizer

logger = logging.getLogger(__name__)


class Datasets(NamedTuple):
    """The datasets of a run; None for a split without a share."""

    train: GPTDataset | None
    valid: GPTDataset | None
    test: GPTDataset | None


def build_gpt_datasets(data: DataConfig, tokenizer: Tokenizer, *, sizes: Sizes, seed: int) -> Datasets:
    """Build every split that has a share, whether samples are asked of it or not.

    Args:
        data: paths, split and sample length.
        tokenizer: the tokenizer that made the data.
        sizes: samples that the run draws from each split, None for one epoch.
        seed: seed of the sample order.

    Raises:
        ConfigError: no data, no share for training, or several prefixes, which this version cannot blend.
        DataError: files are missing or damaged, or a split is too small for its size.
    """
    documents: Documents
    written_ns = None
    if data.mock_data:
        path, documents, split, class_name = None, MockDocuments(tokenizer), MOCK_SPLIT, "MockGPTDataset"
    else:
        path, split, class_name = single_prefix(data), data.split, "GPTDataset"
        documents = IndexedDataset(path, mmap_bin=data.mmap_bin_files)
        written_ns = idx_path(path).stat().st_mtime_ns
    options = GPTDatasetOptions(
        sequence_length=data.seq_length,
        seed=seed,
        split=split,
        split_matrix=parse_split(split),
        eod_mask_loss=data.eod_mask_loss,
    )
    if options.split_matrix[0] is None and sizes[0]:
        raise ConfigError(f"--split {split} gives training no share, but {sizes[0]} samples are asked of it")
    logger.info("Let split_matrix = %s", options.split_matrix)
    built = [
        None
        if interval is None
        else GPTDataset(
            documents,
            path=path,
            split=number,
            requested=sizes[number],
            options=options,
            tokenizer=tokenizer,
            cache_folder=_cache_folder(data, path, class_name),
            written_ns=written_ns,
            class_name=class_name,
        )
        for number, interval in enumerate(options.split_matrix)
    ]
    problem = next((dataset.cache_problem for dataset in built if dataset and dataset.cache_problem), None)
    if problem:
        logger.warning(
            "cannot keep the index cache in %s; each start builds it anew, unless --data-cache-path names a folder "
            "that can be written",
            problem,
        )
    return Datasets(*built)


def single_prefix(data: DataConfig) -> str:
    """The one prefix of `--data-path`.

    Raises:  ConfigError if there is none or more than one word.
    """
    if not data.data_path:
        raise ConfigError("--data-path is missing: give the prefix of a .bin/.idx pair, or --mock-data")
    if len(data.data_path) > 1:
        words = " ".join(data.data_path)
        raise ConfigError(
            f"--data-path {words}: blending several datasets needs the complete data path, not in this version; "
            f"give one prefix without a weight"
        )
    return data.data_path[0]


def _cache_folder(data: DataConfig, path: str | None, class_name: str) -> Path | None:
    if data.data_cache_path:
        return Path(data.data_cache_path)
    return None if path is None else Path(path) / "cache" / f"{class_name}_indices"
