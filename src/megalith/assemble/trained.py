"""A trained model out of its checkpoint alone: architecture, weights and tokenizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from megalith.assemble.model import params_dtype
from megalith.checkpoint import CheckpointContent, DirectoryStore, split_path
from megalith.checkpoint.formats.torch_dist import model_chunks
from megalith.config import RunConfig
from megalith.errors import CheckpointError
from megalith.models.gpt import GPT, named_placements
from megalith.tokenizers import Tokenizer, build_tokenizer


@dataclass(frozen=True)
class Trained:
    """A model that was trained, ready to be read from.

    Attributes:
        run: The configuration of the run that wrote it.
        iteration: Of the checkpoint.
        notes: What the user must hear: damaged checkpoints passed over.
    """

    model: GPT
    tokenizer: Tokenizer
    run: RunConfig
    iteration: int
    notes: tuple[str, ...]


def load_trained(path: Path, device: torch.device, iteration: int | None = None) -> Trained:
    """Load a model from a save folder, or from one `iter_*` folder of it.

    Args:
        path: What --save named, or an iteration's folder below it.
        device: Where the model goes.
        iteration: Which checkpoint; the newest sound one if absent.

    Raises:
        CheckpointError: There is none, it is damaged, or it was not written by Megalith.
    """
    folder, named = split_path(path)
    store = DirectoryStore(folder)
    found, notes = _find(store, named if iteration is None else iteration)
    manifest = store.manifest(found)
    if manifest is None or "config" not in manifest:
        raise CheckpointError(
            f"{store.folder(found)} was not written by Megalith: it says too little of its model and tokenizer. "
            "Reading foreign checkpoints needs the work on checkpoint formats, not in this version"
        )
    run = RunConfig.from_dict(manifest["config"])
    vocab_size = int(vars(store.common(found)["args"])["padded_vocab_size"])
    model = GPT(run.model, vocab_size, dtype=params_dtype(run.precision), device=device)
    content = CheckpointContent(chunks=model_chunks(named_placements(model), run.model.num_layers))
    store.load(found, content, verify=False)  # found means verified
    model.requires_grad_(False)
    return Trained(model.eval(), _tokenizer(run, store.folder(found)), run, found, tuple(notes))


def _find(store: DirectoryStore, iteration: int | None) -> tuple[int, list[str]]:
    if iteration is not None:
        if problems := store.verify(iteration):
            raise CheckpointError("\n  ".join([f"{store.folder(iteration)} is damaged:", *problems]))
        return iteration, []
    newest, notes = store.newest_verified()
    if newest is None:
        what = "holds no sound checkpoint" if notes else "holds no checkpoint; give the folder that --save named"
        raise CheckpointError("\n  ".join([f"{store.path} {what}", *notes]))
    return newest, notes


def _tokenizer(run: RunConfig, folder: Path) -> Tokenizer:
    """The tokenizer of the run, out of the files that lie in its checkpoint."""
    config = run.tokenizer
    if config.vocab_file is not None:
        config = dataclasses.replace(
            config, vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt")
        )
    return build_tokenizer(config)
