"""Rules of the data."""

from __future__ import annotations

import re

from megalith.config.rule import Draft, Rule, rule, show

_SEPARATORS_OF_SPLIT = re.compile(r"[.0-9]+")


@rule("data_path", "mock_data")
def one_source_of_data(draft: Draft) -> str:
    data = draft.run.data
    if not data.data_path and not data.mock_data:
        return "data is required: --data-path PREFIX (of PREFIX.bin and PREFIX.idx), or --mock-data to try without"
    if data.data_path and data.mock_data:
        return f"{show(draft, 'data_path')} and --mock-data exclude each other; use one of them"
    return ""


@rule("data_path")
def one_dataset(draft: Draft) -> str:
    paths = draft.run.data.data_path
    if len(paths) < 2:
        return ""
    return (
        f"{show(draft, 'data_path')}: blends and weights come with the complete data path; not in this version, "
        "give one prefix"
    )


@rule("split")
def split_is_three_parts(draft: Draft) -> str:
    split = draft.run.data.split
    remedy = "; write three parts like 949,50,1"
    try:
        parts = [float(part) for part in _SEPARATORS_OF_SPLIT.findall(split)]
    except ValueError:
        return f"--split {split}: not numbers{remedy}"
    if _SEPARATORS_OF_SPLIT.sub("", split).strip(",/ "):
        return f"--split {split}: not numbers with commas between{remedy}"
    if not 1 <= len(parts) <= 3:
        return f"--split {split or chr(39) * 2}: {len(parts)} parts{remedy}"
    if parts[0] == 0:
        return f"--split {split}: nothing is left for training{remedy}"
    return ""


@rule("split")
def split_without_validation(draft: Draft) -> str:
    parts = [float(part) for part in _SEPARATORS_OF_SPLIT.findall(draft.run.data.split)]
    if len(parts) > 1 and parts[1] > 0:
        return ""
    return f"--split {draft.run.data.split} has no part for validation: there is no evaluation while training"


@rule("split", "data_path")
def split_by_default(draft: Draft) -> str:
    if "split" in draft.given or not draft.run.data.data_path:
        return ""
    return f"no --split is given: {draft.run.data.split} (training, validation, test), as in Megatron"


DATA_RULES: tuple[Rule, ...] = (
    one_source_of_data,
    one_dataset,
    split_is_three_parts,
)

DATA_NOTICES: tuple[Rule, ...] = (
    split_by_default,
    split_without_validation,
)
