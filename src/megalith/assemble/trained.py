"""A trained model out of its checkpoint alone: architecture, weights and tokenizer."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalith.assemble.model import params_dtype
from megalith.checkpoint import CheckpointContent, DirectoryStore, split_path
from megalith.checkpoint.formats.torch_dist import model_chunks
from megalith.config.foreign_args import model_of, precision_of, tokenizer_of
from megalith.config.groups import TokenizerConfig
from megalith.errors import CheckpointError
from megalith.models.gpt import GPT, named_placements
from megalith.tokenizers import Tokenizer, build_tokenizer
from megalith.tokenizers.huggingface import TOKENIZER_FILE


@dataclass(frozen=True)
class Trained:
    """A model that was trained, ready to be read from.

    Attributes:
        iteration: Of the checkpoint.
        notes: What the user must hear: damaged checkpoints passed over.
    """

    model: GPT
    tokenizer: Tokenizer
    iteration: int
    notes: tuple[str, ...]


def load_trained(
    path: Path, device: torch.device, iteration: int | None = None, tokenizer: TokenizerConfig | None = None
) -> Trained:
    """Load a model from a save folder of any format, one `iter_*` folder of it, or a Hugging Face model folder.

    Args:
        path: What --save named, or an iteration's folder below it.
        device: Where the model goes.
        iteration: Which checkpoint; the newest sound one if absent.
        tokenizer: Instead of the one that the checkpoint names.

    Raises:
        CheckpointError: There is none, it is damaged, or it says too little of its model.
    """
    folder, named = split_path(path)
    store = DirectoryStore(folder)
    found, notes = _find(store, named if iteration is None else iteration)
    args = vars(store.common(found).get("args", Namespace()))
    model_config, precision = model_of(args), precision_of(args)
    model = GPT(model_config, _vocab_size(args, store.folder(found)), dtype=params_dtype(precision), device=device)
    content = CheckpointContent(chunks=model_chunks(named_placements(model), model_config.num_layers))
    store.load(found, content, verify=False)  # found means verified
    model.requires_grad_(False)
    built = build_tokenizer(tokenizer or _with_files_of(store.folder(found), tokenizer_of(args)))
    return Trained(model.eval(), built, found, tuple(notes))


def _vocab_size(args: Mapping[str, Any], folder: Path) -> int:
    if not args.get("padded_vocab_size"):
        raise CheckpointError(f"{folder}: its args have no padded_vocab_size, so that its model cannot be known")
    return int(args["padded_vocab_size"])


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


def _with_files_of(folder: Path, config: TokenizerConfig) -> TokenizerConfig:
    """The tokenizer with the files that lie in the checkpoint, where they do: then it can be used alone."""
    if config.tokenizer_type == "HuggingFaceTokenizer":
        there = (folder / TOKENIZER_FILE).is_file()
        return dataclasses.replace(config, tokenizer_model=str(folder)) if there else config
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if config.vocab_file is None or not (vocabulary.is_file() and merges.is_file()):
        return config
    return dataclasses.replace(config, vocab_file=str(vocabulary), merge_file=str(merges))
