"""A short name for the data that a run reads, so that a changed dataset is noticed at resume.

Covers the header and the sequence lengths of the index, the size of the tokens and a sample of their bytes, the
split, the seed and the sample length: with the number of epochs, what decides which tokens stand in sample i. The path
does not count.

The number of epochs is not in it, because a run may go on for longer than it was first asked to. It follows from the
samples asked for (--train-iters or --train-samples): where a larger number needs more epochs, all samples are shuffled
anew, as in Megatron.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from megalith.config import DataConfig
from megalith.data.build import single_prefix
from megalith.data.indexed import HEADER_SIZE, IndexedDataset, bin_path, idx_path
from megalith.data.mock import MOCK_SPLIT

_NUM_PROBES = 64
_PROBE_SIZE = 4096
_DIGEST_SIZE = 8


def fingerprint(data: DataConfig, *, seed: int) -> dict[str, Any]:
    """What the run reads, JSON-able, with a `digest` of it all; equal for runs over the same data, however long.

    Raises:  ConfigError or DataError as `build_gpt_datasets` does.
    """
    content: dict[str, Any]
    if data.mock_data:
        content = {"source": "mock", "split": MOCK_SPLIT}
    else:
        dataset = IndexedDataset(single_prefix(data), mmap_bin=False)
        content = {
            "source": digest_of(dataset),
            "sequences": len(dataset),
            "tokens": dataset.num_tokens,
            "split": data.split,
        }
    content |= {"seq_length": data.seq_length, "seed": seed}
    text = json.dumps(content, sort_keys=True).encode()
    return {"digest": hashlib.blake2b(text, digest_size=_DIGEST_SIZE).hexdigest(), **content}


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
