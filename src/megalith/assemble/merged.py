"""A full checkpoint of a model and its LoRA adapters, which are added to its weights."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch

from megalith.assemble.trained import load_trained
from megalith.checkpoint import CheckpointContent, DirectoryStore, split_path
from megalith.checkpoint.base import base_record
from megalith.checkpoint.convert import refuse_other_model
from megalith.checkpoint.files.folder import CheckpointFolder
from megalith.checkpoint.formats.torch_dist import (
    CHECKPOINT_VERSION,
    CONTENT_METADATA,
    model_chunks,
    stacking_of,
)
from megalith.checkpoint.sources.adapters import args_of
from megalith.checkpoint.store.store import locate
from megalith.config.from_args import LORA_SETTINGS
from megalith.errors import CheckpointError
from megalith.models.saved import saved_tensors
from megalith.registry import EMPTY, Registry
from megalith.tokenizers.huggingface import CHAT_TEMPLATE_FILE


def merge_lora(
    source: Path,
    destination: Path,
    *,
    iteration: int | None = None,
    replace: bool = False,
    registry: Registry = EMPTY,
) -> Path:
    """Write the weights that adapters and their model make together, in fp32 and then rounded to the model's dtype.

    Args:
        source: A save folder of a LoRA run, one checkpoint in it, or a folder of PEFT.
        destination: Save folder to write to; the checkpoint has weights and tokenizer, and no optimizer state.
        replace: Replace a checkpoint of the same iteration.

    Raises:
        CheckpointError: There are no adapters, their model is missing or another, or the destination has a checkpoint,
            belongs to another run, or is the save folder of the adapters or of their model.
    """
    found = locate(source, iteration)
    _check_sources(found, destination)
    trained = load_trained(found, torch.device("cpu"), registry=registry)
    store, model = DirectoryStore(destination, claimed=True), trained.model
    stacking = stacking_of(model.config)
    chunks = model_chunks(saved_tensors(model), stacking)
    args = {name: value for name, value in trained.args.items() if name not in LORA_SETTINGS}
    paths = trained.tokenizer.files()
    if paths:
        paths = {CHAT_TEMPLATE_FILE: next(iter(paths.values())).with_name(CHAT_TEMPLATE_FILE), **paths}
    files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    content = CheckpointContent(
        chunks=chunks,
        written_as=stacking.written_keys(chunk.key for chunk in chunks),
        objects=dict(stacking.extra_state_objects()),
        common={
            "args": Namespace(**args),
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": trained.iteration,
            "content_metadata": CONTENT_METADATA,
        },
    )
    manifest = {
        "tokenizer": dict(trained.tokenizer.fingerprint()),
        "tokenizer_files": sorted(files),
        "merged_from": str(found.resolve()),
    }
    with store.claim():
        if trained.iteration in store.iterations() and not replace:
            raise CheckpointError(f"{store.folder(trained.iteration)} exists; give another folder, or --replace")
        refuse_other_model(store.folder(trained.iteration), {chunk.key: chunk.global_shape for chunk in chunks})
        store.save(trained.iteration, content, manifest, files=files)
    return store.folder(trained.iteration)


def _check_sources(found: Path, destination: Path) -> None:
    """Raise CheckpointError if a checkpoint has no adapters, or if its folder or its model's is the destination."""
    folder = CheckpointFolder(found)
    common = folder.source.common()
    if not args_of(common).get("lora_rank"):
        raise CheckpointError(f"{found} holds a full model, no adapters to merge")
    base = base_record(folder.manifest(), common).get("path")
    for what, path in (("the adapters", found), ("their model", base)):
        if path and split_path(Path(path))[0].resolve() == destination.resolve():
            raise CheckpointError(f"{destination} is the save folder of {what}; give another folder for the result")
