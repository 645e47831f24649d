"""A short name for the data that a run reads, so that a changed dataset is noticed at resume.

Covers the header and the sequence lengths of the index, the size of the tokens and a sample of their bytes, the
split, the seed and the sample length: with the number of epochs, what decides which tokens stand in sample i. Of a
blend, all of this for each dataset, with its weight, in the order of the blend. The path does not count.

The number of epochs is not in it, because a run may go on for longer than it was first asked to. It follows from the
samples asked for (--train-iters or --train-samples): where a larger number needs more epochs, all samples are shuffled
anew, as in Megatron.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from megalith.config import DataConfig
from megalith.config.data_sources import SPLIT_KEYS, Blend, data_sources
from megalith.data.indexed import HEADER_SIZE, IndexedDataset, bin_path, idx_path
from megalith.data.mock import MOCK_SPLIT
from megalith.errors import ConfigError

_NUM_PROBES = 64
_PROBE_SIZE = 4096
_DIGEST_SIZE = 8


def fingerprint(data: DataConfig, *, seed: int) -> dict[str, Any]:
    """What the run reads, JSON-able, with a `digest` of it all; equal for runs over the same data, however long.

    Raises:  ConfigError or DataError as `build_gpt_datasets` does.
    """
    content: dict[str, Any]
    sources = data_sources(data)
    if data.mock_data:
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
