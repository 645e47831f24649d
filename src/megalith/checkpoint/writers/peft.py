"""Writer of the adapters of a checkpoint as a folder of PEFT: adapter_config.json beside adapter_model.safetensors.

The tokenizer and the chat template lie beside them, as TRL's trainers write them: the template is that of the
fine-tuning, which the model may lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith.checkpoint.base import base_record
from megalith.checkpoint.files.commit import temp_folder, write_durably
from megalith.checkpoint.files.folder import open_verified
from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.checkpoint.sources.adapters import args_of
from megalith.checkpoint.sources.huggingface import files_of_tokenizer
from megalith.checkpoint.sources.peft import adapter_tensors
from megalith.checkpoint.sources.source import is_huggingface, open_source
from megalith.checkpoint.store.store import locate
from megalith.checkpoint.writers.huggingface import (
    Description,
    ExportOptions,
    TensorReader,
    Weights,
    _json,
    _Layout,
    _write_safetensors,
    refuse_existing,
)
from megalith.config import ModelConfig
from megalith.config.rules.file import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megalith.errors import CheckpointError
from megalith.models.huggingface import family_for


@dataclass(frozen=True)
class AdapterExport:
    """Folder, bytes and number of tensors of exported adapters, and notes for the user."""

    path: Path
    bytes: int
    tensors: int
    notes: tuple[str, ...]


def export_adapters(
    path: Path, destination: Path, wanted: ExportOptions, *, iteration: int | None = None
) -> AdapterExport:
    """Write the adapters of a checkpoint, given as for `locate`, as a folder of PEFT.

    Args:
        destination: The folder to make; it may exist if it is empty.
        wanted: Dtype and family; the other options have no meaning for adapters.
    """
    refuse_existing(destination)
    found = locate(path, iteration)
    folder = open_verified(found)
    common = folder.source.common()
    if not args_of(common).get("lora_rank"):
        raise CheckpointError(f"{found} holds a full model, no adapters; export it by --to hf")
    params = GlobalParameters.from_args(args_of(common), str(found))
    base = Path(base_record(folder.manifest(), common).get("path") or "unknown")
    original = getattr(open_source(base), "config", {}) if is_huggingface(base) else {}
    family = family_for(params.model, wanted.model_type or original.get("model_type"))
    table = list(adapter_tensors(family.tensors(params.model, params.vocab_size), params.model))
    weights = Weights(folder.source, wanted.dtype)
    about = Description(family, params, params.vocab_size, weights, table, _config(params.model, base), {}, [])
    layout = _Layout.of(table, params, weights.contents(), 2**62)
    notes = (
        ()
        if is_huggingface(base)
        else (
            f"base_model_name_or_path is {base}, which PEFT cannot read: megalith checkpoint export makes a folder of "
            "Hugging Face of it, whose path belongs there",
        )
    )
    destination = destination.resolve()
    with temp_folder(destination, layout.bytes) as new:
        _write_safetensors(new.path / ADAPTER_WEIGHTS, layout.shards[0], TensorReader(about))
        for name, file in files_of_tokenizer(found).items():
            write_durably(new.path / name, file.read_bytes())
        write_durably(new.path / ADAPTER_CONFIG, _json(about.config))
        new.commit()
    return AdapterExport(destination, layout.bytes, len(table), notes)


def _config(model: ModelConfig, base: Path) -> Mapping[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": model.lora_rank,
        "lora_alpha": int(model.lora_alpha) if model.lora_alpha.is_integer() else model.lora_alpha,
        "lora_dropout": model.lora_dropout,
        "use_rslora": model.lora_use_rslora,
        "target_modules": list(model.lora_projections),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
