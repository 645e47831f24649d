"""Run by `test_megatron_core_masked` in a process of its own: what datasets of the real Megatron give for BERT and T5.

    python megatron_core_masked.py CASES.json FOLDER

A case is {"family", "vocabulary": a vocab.txt, "extra_ids", "sizes", "items", "config": fields of its dataset's
config}. FOLDER/N.npz gets for each split SPLIT/PART/index and /hash of every dataset, SPLIT/blend and SPLIT/sample of
a blend's two indices, and SPLIT/ITEM/FIELD of some samples, or SPLIT/ITEM/error. No model of Megalith runs here.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megalith.prove.megatron_core import join_alone


class WordPieces:
    """What the datasets ask of `_BertWordPieceTokenizer`, which stands outside of megatron.core."""

    def __init__(self, path: str, extra_ids: int) -> None:
        tokens = Path(path).read_text(encoding="utf-8").splitlines()
        extra = [f"<extra_id_{number}>" for number in range(extra_ids)]
        tokens += [token for token in ("[BOS]", "[EOS]", *extra) if token not in tokens]
        self.inv_vocab = dict(enumerate(tokens))
        ids = {token: number for number, token in self.inv_vocab.items()}
        self.cls, self.sep, self.pad, self.mask = (ids[token] for token in ("[CLS]", "[SEP]", "[PAD]", "[MASK]"))
        self.bos, self.eos, self.eod = ids["[BOS]"], ids["[EOS]"], ids["[EOS]"]
        self.additional_special_tokens_ids = [ids[token] for token in extra]
        self.unique_identifiers = OrderedDict(
            {"class": "_BertWordPieceTokenizer", "tokenizer_path": [path], "lower_case": "True"},
            vocab_extra_ids=str(extra_ids),
        )


def choose_repeatably(values: Any, p: Any) -> Any:
    """In place of `numpy.random.choice`, which nobody seeds: from a copy of the sample's own generator."""
    asks = sys._getframe(1)
    if asks.f_locals["candidate_idx"] == 0:
        choose_repeatably.random = copy.deepcopy(asks.f_locals["numpy_random_state"])  # type: ignore[attr-defined]
    return choose_repeatably.random.choice(values, p=p)  # type: ignore[attr-defined]


def build(case: dict[str, Any]) -> Any:
    from megatron.core.datasets import bert_dataset, t5_dataset
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    module, name = (bert_dataset, "BERT") if case["family"] == "bert" else (t5_dataset, "T5")
    fields = {**case["config"], "blend": tuple(case["config"]["blend"])}
    tokenizer = WordPieces(case["vocabulary"], case["extra_ids"])
    config = getattr(module, f"{name}MaskedWordPieceDatasetConfig")(tokenizer=tokenizer, **fields)
    kind = getattr(module, f"{name}MaskedWordPieceDataset")
    return BlendedMegatronDatasetBuilder(kind, case["sizes"], lambda: True, config).build()


def kept_of(dataset: Any, items: list[int]) -> dict[str, Any]:
    blends = not hasattr(dataset, "sample_index")
    kept = {"blend": dataset.dataset_index, "sample": dataset.dataset_sample_index} if blends else {}
    for number, part in enumerate(dataset.datasets if blends else [dataset]):
        kept |= {f"{number}/index": np.array(part.sample_index), f"{number}/hash": part.unique_description_hash}
    kept["length"] = len(dataset)
    for item in [item % len(dataset) for item in items] if len(dataset) else []:
        try:
            kept |= {f"{item}/{field}": value for field, value in dataset[item].items() if field != "dataset_id"}
        except (AssertionError, IndexError) as error:
            kept[f"{item}/error"] = repr(error)
    return kept


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    join_alone()
    np.random.choice = choose_repeatably  # type: ignore[assignment]
    for number, case in enumerate(cases):
        splits = dict(zip(("train", "valid", "test"), build(case), strict=True))
        kept = {name: kept_of(dataset, case["items"]) for name, dataset in splits.items() if dataset is not None}
        arrays = {f"{name}/{key}": np.array(value) for name, own in kept.items() for key, value in own.items()}
        np.savez(folder / f"{number}.npz", **arrays)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
