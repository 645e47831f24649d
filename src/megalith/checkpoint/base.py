"""The frozen model that LoRA's adapters in a checkpoint belong to: recorded by path and hash, found and verified.

The hash is over names, sizes and digests of the files: those of the manifest, which a load compares with the files, or
of a folder without one of the weights and the configuration as they are. Adapters of other programs have no hash.
"""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalith.checkpoint.files import manifest as manifests
from megalith.checkpoint.files.hashing import hash_files
from megalith.checkpoint.store.store import DirectoryStore, nothing_in, split_path
from megalith.distributed.context import ParallelContext
from megalith.errors import CheckpointError

BASE = "lora_base"
"""Key of the record in a manifest, or in the common state of adapters of other programs."""
_OF_THE_MODEL = ("*.safetensors", "*.safetensors.index.json", "config.json", "*.pt", "*.distcp", ".metadata")


def record_of(store: DirectoryStore, iteration: int, known: str | None = None) -> dict[str, Any]:
    """Return path and hash, `known` or computed, of a checkpoint, to keep beside the adapters trained with it."""
    folder = store.folder(iteration) if iteration else store.path
    return {"path": str(folder.resolve()), "hash": known or _hash_of(store, iteration)}


def base_record(manifest: Mapping[str, Any] | None, common: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record of the model that the adapters of a checkpoint belong to; empty if it has none."""
    found: Mapping[str, Any] = (manifest or {}).get(BASE) or common.get(BASE) or {}
    return found


def open_base(
    store: DirectoryStore, iteration: int, context: ParallelContext, instead: str | None = None
) -> tuple[DirectoryStore, int, str | None]:
    """Return store, iteration and hash of the model that the adapters of a checkpoint belong to, verified by the hash.

    Args:
        instead: Where the model is now; by default, and if that holds adapters, where the checkpoint says.

    Raises:
        CheckpointError: It is missing or another model; names the remedy.
    """
    where = store.folder(iteration)
    record = base_record(store.manifest(iteration), store.common(iteration))
    if not (path := instead or record.get("path")):
        raise CheckpointError(f"{where} holds adapters, and does not say of which model; give --pretrained-checkpoint")
    folder, named = split_path(Path(path))
    base = DirectoryStore(folder, context)
    found = base.newest_verified(deferred=True)[0] if named is None else named
    remedy = "train on with its new place as --pretrained-checkpoint, or link it there: ln -s NEW_PLACE"
    if found not in base.iterations() or found is None:
        raise CheckpointError(
            f"{where} holds adapters of the model in {path}, which is not there ({nothing_in(folder)}); {remedy} {path}"
        )
    if vars(base.common(found).get("args", Namespace())).get("lora_rank"):
        if instead is not None:  # the adapters that the run started from
            return open_base(store, iteration, context)
        raise CheckpointError(f"{path} holds adapters too; give the model that they belong to")
    expected = record.get("hash")
    if expected is not None and (now := _hash_of(base, found)) != expected:
        raise CheckpointError(
            f"{base.folder(found)} is not the model that the adapters of {where} were trained with: its hash is {now} "
            f"instead of {expected}; {remedy} {path}"
        )
    return base, found, expected


def refuse_adapters(args: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for a checkpoint that holds LoRA adapters alone."""
    if args.get("lora_rank"):
        raise CheckpointError(
            f"{where} holds LoRA adapters alone; megalith checkpoint merge-lora makes a full checkpoint of them and "
            "their model, and megalith checkpoint export --to peft writes them for PEFT"
        )


def _hash_of(store: DirectoryStore, iteration: int) -> str:
    folder, body = store.folder(iteration), store.manifest(iteration)
    if body is not None:
        records = manifests.records_of(body)
    else:
        paths = sorted({path for pattern in _OF_THE_MODEL for path in folder.rglob(pattern) if path.is_file()})
        records = store.on_first(lambda: hash_files(paths, below=folder))
    lines = [f"{name} {record.size} {record.digest}\n" for name, record in sorted(records.items())]
    return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()
