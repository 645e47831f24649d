"""Comparisons with what is not this program's training: Hugging Face's files and models, and Megatron's."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megalith.assemble.huggingface import compare_logits
from megalith.checkpoint.diff import compared, tensor_differences
from megalith.checkpoint.sources.adapters import InPrecision
from megalith.checkpoint.sources.source import open_source
from megalith.checkpoint.store.store import locate
from megalith.checkpoint.writers.huggingface import Description, ExportOptions, describe, export
from megalith.errors import CheckpointError
from megalith.prove.compare import Comparison, Difference
from megalith.prove.miniature import SAVED


@dataclass
class Outside:
    """What a checkpoint of a miniature was compared with.

    Attributes:
        uncovered: What this comparison does not show; a line each.
    """

    what: str
    comparison: Comparison = field(default_factory=Comparison)
    uncovered: list[str] = field(default_factory=list)


def compare_export(rank: int, checkpoints: Path, folder: Path, logits: bool) -> Outside:
    """Export the checkpoint of step `SAVED` to Hugging Face, read it again, and compare every tensor.

    Args:
        folder: To make.
        logits: Compare those of transformers too, where it is installed.
    """
    about = described(checkpoints)
    if isinstance(about, str):
        return Outside("", uncovered=[f"export to Hugging Face: {about}"])
    found = Outside(f"export to Hugging Face ({about.family.model_type}) and back")
    try:
        export(checkpoints, folder, _options(about), iteration=SAVED)
        _compare_files(checkpoints, folder, found.comparison)
        if logits and not found.comparison.differences:
            result = compare_logits(folder, about.weights, about.params, about.rows).difference
            if result is None:
                found.uncovered.append("logits of an export: transformers is not installed")
            else:
                found.comparison.add("logit", "all of a prompt, of transformers in fp32", None, result)
    except CheckpointError as error:  # a tensor is missing or of another shape, or logits differ
        lines = [line.strip() for line in str(error).splitlines()]
        name, _, what = next((line for line in lines if re.match(r"[\w.]+ (is|has) ", line)), "").partition(" ")
        wrong = (
            Difference("tensor", name, math.inf, what=what)
            if name
            else Difference("logit", "all", math.inf, what=lines[0])
        )
        found.comparison.add(wrong.kind, wrong.name, wrong, math.inf)
    return found


def described(checkpoints: Path) -> Description | str:
    """Return a checkpoint as a Hugging Face model with all rows of its vocabulary, or why there is none like it."""
    try:
        about = describe(checkpoints, ExportOptions("float32"), SAVED)
        return describe(checkpoints, _options(about), SAVED)
    except CheckpointError as error:
        reasons = [line.strip() for line in str(error).splitlines()]
        return min(reasons[1:] or reasons, key=lambda reason: ("model_family" in reason, reason.count(";")))


def _options(about: Description) -> ExportOptions:
    """Return options that keep the rows of padding, so that no element is left out."""
    return ExportOptions("float32", true_vocab_size=about.params.vocab_size)


def _compare_files(checkpoints: Path, folder: Path, found: Comparison) -> None:
    saved = InPrecision(open_source(locate(checkpoints, SAVED)), torch.float32)
    for one in tensor_differences(compared(saved, weights=True), compared(open_source(folder), weights=True)):
        what = str(one).removeprefix(f"{one.name}: ")
        wrong = None if one.is_none else Difference("tensor", one.name, one.relative, what=what)
        found.add("tensor", one.name, wrong, 0.0)
