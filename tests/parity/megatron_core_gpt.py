"""Run by `test_megatron_core_gpt` in a process of its own: what datasets of the real Megatron give for GPT.

    python megatron_core_gpt.py CASES.json FOLDER

A case is {"tokenizer": what its tokenizer tells of itself, "eod", "vocab_size", "sizes", "items", "config": fields of
`GPTDatasetConfig`}. FOLDER/N.npz gets `error`, or for each split SPLIT/PART/INDEX and /hash of every dataset, the two
indices, hash and size of a blend, and SPLIT/ITEM/FIELD of some samples. No model of Megalith runs here.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megalith.prove.megatron_core import join_alone

SECONDS = 2  # a split without tokens of which samples are asked keeps Megatron in a loop without end
INDICES = ("document_index", "sample_index", "shuffle_index")


def build(case: dict[str, Any]) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    fields = dict(case["config"])
    if "blend" in fields:
        fields["blend"] = tuple(fields["blend"])
    else:
        fields["blend_per_split"] = [None if blend is None else tuple(blend) for blend in fields["blend_per_split"]]
    tokenizer = SimpleNamespace(
        unique_identifiers=case["tokenizer"], eod=case["eod"], vocab_size=case["vocab_size"], pad=-1
    )
    config = GPTDatasetConfig(tokenizer=tokenizer, **fields)
    return BlendedMegatronDatasetBuilder(GPTDataset, case["sizes"], lambda: True, config).build()


def kept_of(dataset: Any, items: list[int]) -> dict[str, Any]:
    blends = not hasattr(dataset, "sample_index")
    kept: dict[str, Any] = {"length": len(dataset)}
    if blends:
        kept |= {"blend": dataset.dataset_index, "sample": dataset.dataset_sample_index}
        kept |= {"hash": dataset.unique_description_hash}
    for number, part in enumerate(dataset.datasets if blends else [dataset]):
        kept |= {f"{number}/{index}": np.array(getattr(part, index)) for index in INDICES}
        kept[f"{number}/hash"] = part.unique_description_hash
    for item in (item % len(dataset) for item in items if len(dataset)):
        kept |= {f"{item}/{field}": value.numpy() for field, value in dataset[item].items() if field != "dataset_id"}
    return kept


def write(case: dict[str, Any], path: Path) -> None:
    arrays: dict[str, Any] = {}
    join_alone()
    try:
        for name, dataset in zip(("train", "valid", "test"), build(case), strict=True):
            kept = {} if dataset is None else kept_of(dataset, case["items"])
            arrays |= {f"{name}/{key}": np.array(value) for key, value in kept.items()}
    except Exception as error:
        arrays = {"error": np.array(repr(error))}
    np.savez(path, **arrays)


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    importlib.import_module("megatron.core.datasets.gpt_dataset")  # once, not in each child
    for number, case in enumerate(cases):
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)  # whose default is to end the process, wherever it is
            write(case, folder / f"{number}.npz")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            np.savez(folder / f"{number}.npz", error=np.array(f"ended with {status}: it does not end, or crashed"))


if __name__ == "__main__":
    main()
