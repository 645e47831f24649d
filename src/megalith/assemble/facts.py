"""Facts that must be equal on all ranks of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megalith.assemble.model import params_dtype
from megalith.config import RunConfig
from megalith.config.run import all_settings
from megalith.distributed.consistency import versions
from megalith.nn.precision import product_dtype_on
from megalith.tokenizers.fingerprint import shown_entries

_OF_EACH_RANK = ("launch",)
# Paths may differ between machines; the content of the files is compared instead.
_PLACES = (
    "data_path",
    "data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "per_split_data_args_path",
    "data_cache_path",
    "vocab_file",
    "merge_file",
    "tokenizer_model",
)


def facts_of(run: RunConfig, device: torch.device) -> dict[str, str]:
    """Return settings by flag, software versions, and the dtype in which half-precision products are computed."""
    settings = {
        setting.flag: setting.as_given(getattr(getattr(run, setting.group), setting.name))
        for setting in all_settings().values()
        if setting.group not in _OF_EACH_RANK and setting.name not in _PLACES
    }
    return {**settings, **versions(), **_products(run, device)}


def _products(run: RunConfig, device: torch.device) -> dict[str, str]:
    dtype = params_dtype(run.precision)
    computed = product_dtype_on(device, dtype)
    if not run.precision.bf16:
        return {}
    how = "in bf16" if computed == dtype else "in fp32, without fast bf16 instructions"
    return {"bf16 products (ONEDNN_MAX_CPU_ISA=AVX2 on all ranks: in fp32)": how}


def content_facts(tokenizer: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprints of tokenizer (with hashes of its files) and data."""
    return {
        **{f"tokenizer {name}": value for name, value in shown_entries(tokenizer).items()},
        **{f"data {name}": str(value) for name, value in data.items()},
    }
