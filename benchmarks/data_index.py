"""Sample indices and reads of a large synthetic dataset.

Index: documents of made-up lengths (log-normal, 1000 tokens on average), one epoch and three epochs of 10 M documents
(10 G tokens), and a half and a quarter of them, to show that time and memory grow in proportion. Each size runs in a
process of its own, which reports seconds and the peak of its memory above what it had before; then the cached arrays
are loaded, as every later start does. Blend: the order of 10 M samples.

Reads: samples of 1024 + 1 tokens in shuffled order from a dataset on the disk, against copies of as many bytes at such
places out of a memory map, in turns; `batches` is the whole loader with its threads. The file is in the page cache.

python benchmarks/data_index.py --out benchmarks/results/data-index.json
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.blend import build_blending_index
from megalith.data.gpt_dataset import GPTDataset, GPTDatasetOptions
from megalith.data.indexed import IndexedDataset, IndexedWriter, bin_path
from megalith.data.samples import SplitRatios, SplitSpec
from megalith.tokenizers.null import NullTokenizer

SEQUENCE = 1024
VOCABULARY = 50_000


class Lengths:
    """Documents of which nothing but the lengths exists."""

    def __init__(self, count: int) -> None:
        drawn = np.random.default_rng(0).lognormal(6.3, 1.1, count)
        self.lengths: NDArray[np.int32] = np.maximum(1, drawn * (1000 / drawn.mean())).astype(np.int32)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        raise NotImplementedError


def dataset(documents: Any, requested: int | None, folder: Path | None) -> GPTDataset:
    return GPTDataset(
        documents,
        SplitSpec(0, requested, SplitRatios.parse(None), "synthetic", folder),
        options=GPTDatasetOptions(SEQUENCE, 1234),
        tokenizer=NullTokenizer(VOCABULARY),
    )


def _memory(field: str) -> int:
    """Bytes of this process: VmRSS is what it has, VmHWM the most it had since `_forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _index(count: int, epochs: int, folder: str, results: Any) -> None:
    documents = Lengths(count)
    tokens = int(documents.lengths.sum(dtype=np.int64))
    requested = None if epochs == 1 else int((epochs - 0.1) * tokens / SEQUENCE)
    _forget_peak()
    before, started = _memory("VmRSS"), time.perf_counter()
    built = dataset(documents, requested, Path(folder))
    middle, peak = time.perf_counter(), _memory("VmHWM")
    arrays = (built.document_index, built.sample_index, built.shuffle_index)
    size = sum(array.nbytes for array in arrays)
    del built, arrays
    again = time.perf_counter()
    dataset(documents, requested, Path(folder))
    results.put(
        {
            "documents": count,
            "tokens": tokens,
            "epochs": epochs,
            "build_and_save_seconds": round(middle - started, 4),
            "load_and_check_seconds": round(time.perf_counter() - again, 4),
            "peak_memory_mb": round((peak - before) / 1e6),
            "index_mb": round(size / 1e6),
        }
    )


def measure_index(count: int, epochs: int) -> dict[str, Any]:
    """Build the index of `count` documents in a fresh process."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        process = spawn.Process(target=_index, args=(count, epochs, folder, results))
        process.start()
        found: dict[str, Any] = results.get()
        process.join()
    return found


def measure_blend(size: int) -> dict[str, float]:
    """Seconds of the blending index of `size` samples, by number of datasets."""
    found = {}
    for number in (2, 8, 64):
        weights = np.random.default_rng(number).dirichlet(np.ones(number))
        started = time.perf_counter()
        build_blending_index(weights, size)
        found[f"{number} datasets"] = round(time.perf_counter() - started, 2)
    return found


def write_dataset(prefix: str, megabytes: int) -> None:
    """A .bin/.idx pair of random tokens in documents of the lengths above."""
    rng = np.random.default_rng(1)
    with IndexedWriter(prefix, "uint16") as writer:
        written = 0
        while written < megabytes * 10**6:
            lengths = Lengths(2000).lengths
            tokens = rng.integers(0, VOCABULARY, int(lengths.sum()), np.uint16)
            writer.add_documents(tokens, lengths, np.ones(len(lengths), np.int64))
            written += tokens.nbytes
        writer.finalize()


def measure_reads(megabytes: int, samples: int, rounds: int) -> dict[str, Any]:
    """Samples read in shuffled order against raw copies of the same number of bytes, MB/s, median of paired rounds."""
    from megalith.data.loader import BatchLoader

    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/data"
        write_dataset(prefix, megabytes)
        built = dataset(IndexedDataset(prefix), None, None)
        raw = np.memmap(bin_path(prefix), np.uint16, "r")
        raw.max()  # everything is in the page cache from here on
        wide = (SEQUENCE + 1) * 2
        samples = min(samples, len(built))
        rates: dict[str, list[float]] = {"raw": [], "samples": [], "batches": []}
        for _ in range(rounds):
            started = time.perf_counter()
            for item in range(samples):
                start = int(built.shuffle_index[item]) * SEQUENCE
                raw[start : start + SEQUENCE + 1].astype(np.int64)
            rates["raw"].append(samples * wide / 1e6 / (time.perf_counter() - started))
            started = time.perf_counter()
            for item in range(samples):
                built[item]
            rates["samples"].append(samples * wide / 1e6 / (time.perf_counter() - started))
            loader = BatchLoader(built, 8, 0, num_workers=2)
            started = time.perf_counter()
            for _batch in range(samples // 8):
                next(loader)
            rates["batches"].append(samples // 8 * 8 * wide / 1e6 / (time.perf_counter() - started))
            loader.close()
    median = {name: statistics.median(values) for name, values in rates.items()}
    paired = [mine / raw for mine, raw in zip(rates["samples"], rates["raw"], strict=True)]
    return {
        "samples": samples,
        "megabytes_per_second": {name: round(value) for name, value in median.items()},
        "tokens_per_second_of_batches": round(median["batches"] * 1e6 / wide * SEQUENCE),
        "samples_over_raw": round(statistics.median(paired), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--blend", type=int, default=10_000_000)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    logging.disable()
    result = {
        "what": __doc__,
        "index": [
            *(measure_index(options.documents // part, 1) for part in (4, 2, 1)),
            measure_index(options.documents, 3),
        ],
        "blend_seconds": measure_blend(options.blend),
        "reads": measure_reads(options.megabytes, options.samples, options.rounds),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
