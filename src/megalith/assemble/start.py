"""Choice of the checkpoint that a training run starts from, and its restoration."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalith.assemble.observer import StartObserver
from megalith.checkpoint import CheckpointContent, DirectoryStore, split_path
from megalith.checkpoint.base import open_base, record_of
from megalith.config import RunConfig
from megalith.config.groups import CheckpointConfig
from megalith.distributed.context import ParallelContext
from megalith.errors import CheckpointError, ConfigError
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.protocol import padded_vocab_size
from megalith.train.checkpoint_content import frozen_chunks
from megalith.train.checkpoint_fit import FoundCheckpoint, find_checkpoint
from megalith.train.checkpoint_restore import restore
from megalith.train.faults import Probe
from megalith.train.state import TrainState


def find_start(
    config: RunConfig, context: ParallelContext, *, thorough: bool = False
) -> tuple[DirectoryStore | None, FoundCheckpoint | None]:
    """Return the store of --load and the newest checkpoint in it that passes verification, or None.

    Args:
        thorough: Verify every file now instead of when it is read.

    Raises:
        CheckpointError: There are checkpoints and none can be used, or one is required and missing.
    """
    settings = config.checkpoint
    store, found = None, None
    if settings.load is not None:
        store, found = _newest(settings, settings.load, context, thorough=thorough)
        if found is None and settings.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"--load {settings.load} holds no checkpoint, and --exit-on-missing-checkpoint is given"
            )
    if found is None and settings.pretrained_checkpoint is not None:
        pretrained, found = _checkpoint_in(settings.pretrained_checkpoint, None, context, thorough=thorough)
        if found is None:
            raise CheckpointError(f"--pretrained-checkpoint {settings.pretrained_checkpoint} holds no checkpoint")
        return pretrained, replace(found, weights_only=True)
    return store, found


def _newest(
    settings: CheckpointConfig, load: str, context: ParallelContext, *, thorough: bool
) -> tuple[DirectoryStore, FoundCheckpoint | None]:
    """Return the newest checkpoint in --load or, if newer, in the folder of ephemeral checkpoints."""
    folder, step = settings.ephemeral_dir(load), settings.ckpt_step
    if folder is None:
        return _checkpoint_in(load, step, context, thorough=thorough)
    passing, persistent = DirectoryStore(folder, context), DirectoryStore(load, context)
    if step is not None:
        there = step in passing.iterations() and step not in persistent.iterations()
        return _checkpoint_in(folder if there else load, step, context, thorough=thorough)
    last, saved = passing.latest(), persistent.latest()
    notes: tuple[str, ...] = ()
    if last is not None and (saved is None or last > saved):
        found, problems = passing.newest_verified(deferred=not thorough)
        if found is not None and (saved is None or found > saved):
            return _checkpoint_in(folder, found, context, thorough=thorough)
        notes = tuple(problems)
    store, older = _checkpoint_in(load, None, context, thorough=thorough)
    return store, older and replace(older, notes=notes + older.notes)


def _checkpoint_in(
    path: str, step: int | None, context: ParallelContext, *, thorough: bool
) -> tuple[DirectoryStore, FoundCheckpoint | None]:
    """Return the store that a path (save folder or checkpoint folder) names, and the checkpoint to start from."""
    folder, wanted = split_path(Path(path), step)
    store = DirectoryStore(folder, context)
    return store, find_checkpoint(store, wanted, thorough=thorough)


def padded_vocabulary(config: RunConfig, tokenizer: Tokenizer, found: FoundCheckpoint | None) -> int:
    """Return the number of rows of the embedding: that of the checkpoint, else as the flags say."""
    given = config.data.padded_vocab_size
    if found is not None:
        if given not in (None, found.padded_vocab_size):
            raise ConfigError(
                f"--padded-vocab-size {given}: the checkpoint has {found.padded_vocab_size} rows; "
                f"omit it, or use --padded-vocab-size {found.padded_vocab_size}"
            )
        return found.padded_vocab_size
    if given is not None:
        if given < tokenizer.vocab_size:
            raise ConfigError(
                f"--padded-vocab-size {given} is less than the {tokenizer.vocab_size} tokens of the tokenizer; use at "
                f"least {tokenizer.vocab_size}"
            )
        return given
    return padded_vocab_size(
        tokenizer.vocab_size, config.model.make_vocab_size_divisible_by, config.parallel.tensor_model_parallel_size
    )


def load_start(
    config: RunConfig,
    store: DirectoryStore | None,
    found: FoundCheckpoint | None,
    state: TrainState,
    observer: StartObserver,
    probe: Probe,
) -> Mapping[str, Any] | None:
    """Restore the checkpoint that `find_start` found, if any, and warn about checkpoints that the run will replace.

    Returns:
        Record of the frozen base of LoRA, which is loaded too; None without adapters.
    """
    load, save = config.checkpoint.load, config.checkpoint.save
    if store is None:
        if save and (held := DirectoryStore(save).iterations()):
            observer.warn(
                f"WARNING: {save} already holds checkpoints up to iteration {held[-1]}; without --load "
                f"{shlex.quote(save)} this run starts from random weights and replaces them"
            )
        return None
    if found is None:
        if config.model.lora_rank is not None:
            raise CheckpointError(
                f"--load {load} holds no adapters to continue, and there is no model to train new ones beside; give it "
                "by --pretrained-checkpoint"
            )
        observer.no_checkpoint(load)
        return None
    for note in found.notes:
        observer.warn(f"WARNING: {note}")
    path, iteration = str(store.path), found.iteration
    observer.loading(path, iteration, config, distributed=store.format(iteration) != "torch")
    resumed = restore(store, found, state, config, probe)
    base = _load_base(config, store, found, state)
    for note in resumed.notes:
        observer.warn(f"WARNING: {note}")
    observer.loaded(path, iteration, config, resumed, state)
    held = DirectoryStore(save).iterations() if save else []
    anew = config.checkpoint.finetune or config.checkpoint.ckpt_step is not None
    if save and held and held[-1] > state.iteration and (load != save or anew):
        observer.warn(
            f"WARNING: {save} already holds checkpoints up to iteration {held[-1]}; this run starts at iteration "
            f"{state.iteration} and replaces them. To resume from there, use --load {shlex.quote(save)} "
            "without --finetune or --ckpt-step"
        )
    return base


def _load_base(
    config: RunConfig, store: DirectoryStore, found: FoundCheckpoint, state: TrainState
) -> Mapping[str, Any] | None:
    """Load the frozen model of LoRA's adapters, unless it is what `restore` has loaded; return its record."""
    if config.model.lora_rank is None:
        return None
    if not found.has_adapters:
        return record_of(store, found.iteration)
    instead = None if found.weights_only else config.checkpoint.pretrained_checkpoint
    base, iteration, digest = open_base(store, found.iteration, state.context, instead)
    base.load(iteration, CheckpointContent(frozen_chunks(state, config)))
    return record_of(base, iteration, digest)
