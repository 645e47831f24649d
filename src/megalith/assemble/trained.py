"""Trained model from its checkpoint: architecture, weights and tokenizer."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.assemble.model import params_dtype
from megalith.assemble.reading import require_text_model
from megalith.checkpoint import CheckpointContent, DirectoryStore, split_path
from megalith.checkpoint.base import open_base
from megalith.checkpoint.formats.torch_dist import WORD_EMBEDDINGS, model_chunks, stacking_of
from megalith.checkpoint.sources.source import listing, with_remedy
from megalith.checkpoint.store.store import nothing_in
from megalith.config.from_args import changed_sources, model_from_args, precision_from_args, tokenizer_from_args
from megalith.config.groups import TokenizerConfig
from megalith.device import capability_of, is_host
from megalith.distributed.context import ParallelContext
from megalith.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError, LayoutError
from megalith.hub import MODEL_FILES, fetched
from megalith.layout import shard_range
from megalith.models.families import model_class
from megalith.models.language_model import GenerativeModel, LanguageModel, Stage
from megalith.models.layer_options import for_any_batch
from megalith.models.plain import PlainModel
from megalith.models.saved import saved_tensors
from megalith.nn.lora import merge
from megalith.nn.placement import Placement
from megalith.parallel.tensor import TensorParallel
from megalith.registry import EMPTY, Registry
from megalith.tokenizers import Tokenizer, build_tokenizer
from megalith.tokenizers.build import with_files_in
from megalith.tokenizers.fingerprint import require_same

_OTHER_TOKENIZER = (
    "its ids are other tokens than those of the model; omit the tokenizer flags (the checkpoint holds the tokenizer of "
    "the training), or give the files of the training"
)


@dataclass(frozen=True)
class Trained:
    """Trained model with its tokenizer.

    Attributes:
        model: Whole model, or this rank's stage.
        notes: Warnings for the user: damaged checkpoints that were skipped, changed modules, experts without capacity.
        tokenizer_card: Fingerprint of the training's tokenizer; None without a manifest.
        imported: Whether the checkpoint was made of a Hugging Face folder, whose vocabulary table is padded by no rule.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    iteration: int
    notes: tuple[str, ...]
    args: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_card: Mapping[str, Any] | None = None
    from_huggingface: bool = False
    imported: bool = False

    @property
    def gpt(self) -> GenerativeModel | PlainModel:
        """Return the model if it continues text; ConfigError if it does not."""
        require_text_model(self.model.config, "the checkpoint", "this")
        return self.writer

    @property
    def writer(self) -> GenerativeModel | PlainModel:
        """Return the model if it generates text, as a continuation or answer; ConfigError if it does not."""
        require_text_model(self.model.config, "the checkpoint", "this", or_answers=True)
        if isinstance(self.model, GenerativeModel | PlainModel):
            return self.model
        name = self.model.config.title
        raise ConfigError(f"--model {name} has no decoder with a KV cache; derive {name} from megalith.api.GPT")


def load_trained(
    path: Path,
    device: torch.device,
    iteration: int | None = None,
    tokenizer: TokenizerConfig | None = None,
    *,
    context: ParallelContext | None = None,
    dtype: torch.dtype | None = None,
    registry: Registry = EMPTY,
) -> Trained:
    """Load a model from a save folder of any format, one `iter_*` folder of it, or a Hugging Face model folder.

    Args:
        path: Save folder, or the folder of one iteration in it, or `hf:ORG/NAME[@REVISION]`, which is fetched.
        context: Ranks over which the model is sharded, independent of the checkpoint's layout; all of them call this. A
            single process by default.
        registry: Registered objects that model and tokenizer may use.

    Raises:
        CheckpointError: It is missing or damaged, or does not describe its model.
        DataError: The tokenizer's files are missing or damaged.
        LayoutError: The model does not divide over the ranks.
    """
    context = context or ParallelContext.solo(device)
    folder, iteration = split_path(Path(fetched(str(path), MODEL_FILES)), iteration)
    store = DirectoryStore(folder, context)
    try:
        return _trained(store, *find_checkpoint(store, iteration), device, tokenizer, context, dtype, registry)
    except DamagedCheckpointError:
        pass  # the thorough search below verifies all files and reports the damage
    return _trained(
        store, *find_checkpoint(store, iteration, thorough=True), device, tokenizer, context, dtype, registry
    )


def _trained(
    store: DirectoryStore,
    found: int,
    notes: Sequence[str],
    device: torch.device,
    tokenizer: TokenizerConfig | None,
    context: ParallelContext,
    dtype: torch.dtype | None,
    registry: Registry,
) -> Trained:
    """Load the checkpoint `found`; DamagedCheckpointError if a tensor file fails verification."""
    args = vars(store.common(found).get("args", Namespace()))
    precision = precision_from_args(args)
    saved_config = replace(model_from_args(args, registry), mtp_num_layers=None)  # these layers are for training only
    model_config, about_experts = for_any_batch(saved_config)
    weights, about_dtype = (dtype, ()) if dtype else _dtype_for(device, params_dtype(precision))
    model = model_class(model_config)(
        model_config,
        _vocab_size(args, store.folder(found)),
        region=TensorParallel(context.tp) if context.tp.size > 1 else None,
        stage=_stage(model_config.num_layers, context),
        dtype=weights,
        device=device,
    )
    _fill(model, store, found, context)
    model.requires_grad_(False)
    built = build_tokenizer(tokenizer) if tokenizer else _own_tokenizer(store.folder(found), args, registry)
    manifest = store.manifest(found) or {}
    if card := manifest.get("tokenizer"):
        require_same((f"the training ({store.folder(found)})", "here"), card, built.fingerprint(), _OTHER_TOKENIZER)
    if built.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"{store.folder(found)}: the tokenizer has {built.vocab_size} ids, and the embedding {model.vocab_size} "
            "rows; give the tokenizer that the model was trained with"
        )
    foreign = store.format(found) == "huggingface"
    said = (*notes, *changed_sources(args, registry), *about_experts, *about_dtype)
    return Trained(model.eval(), built, found, said, args, card, foreign, imported="huggingface" in manifest)


def _fill(model: LanguageModel, store: DirectoryStore, found: int, context: ParallelContext) -> None:
    """Load the weights; adapters are merged into those of the model that they belong to."""

    def content(tensors: Iterable[tuple[str, Tensor, Placement]]) -> CheckpointContent:
        return CheckpointContent(
            model_chunks(tensors, stacking_of(model.config), rank=context.tp.index, size=context.tp.size)
        )

    if model.config.lora_rank is None:
        store.load(found, content(stored_tensors(model)))
        return
    base, iteration, _ = open_base(store, found, context)
    base.load(iteration, content(item for item in stored_tensors(model) if not item[1].requires_grad))
    store.load(found, content(item for item in stored_tensors(model) if item[1].requires_grad))
    merge(model)
    model.config = replace(model.config, lora_rank=None)


def _dtype_for(device: torch.device, saved: torch.dtype) -> tuple[torch.dtype, tuple[str, ...]]:
    """Return the dtype to load weights in where none is given, and a note if it is not that of the checkpoint."""
    if saved != torch.bfloat16 or is_host(device) or saved in (able := capability_of(device)).half:
        return saved, ()
    note = f"{able.title} has no fast bf16: the weights are loaded as float32; --dtype float16 is faster and takes half"
    return torch.float32, (note,)


def _own_tokenizer(folder: Path, args: Mapping[str, Any], registry: Registry) -> Tokenizer:
    """Build the tokenizer of a checkpoint: its own copy, or the files that its args name; DataError if missing."""
    config = tokenizer_from_args(args, registry)
    try:
        return build_tokenizer(with_files_in(folder, config))
    except DataError as error:
        raise DataError(
            f"{error}; the checkpoint names this tokenizer but has no copy: give {config.flags_for_moved_files}"
        ) from error


def _stage(num_layers: int, context: ParallelContext) -> Stage:
    """Return the layers of this rank: nearly equal parts, as inference does not require an even division."""
    pipeline = context.pp
    if pipeline.size > num_layers:
        raise LayoutError(
            f"{num_layers} layers cannot form {pipeline.size} pipeline stages; use --pipeline-model-parallel-size "
            f"{num_layers} or less"
        )
    part = range(*shard_range(num_layers, pipeline.size, pipeline.index))
    return Stage(part, is_first=pipeline.is_first, is_last=pipeline.is_last)


def stored_tensors(model: LanguageModel) -> Iterator[tuple[str, Tensor, Placement]]:
    """Yield each parameter under its stored name: the second copy of a tied embedding is stored as the first."""
    for name, tensor, placement in saved_tensors(model):
        yield WORD_EMBEDDINGS if name == model.copied_weight else name, tensor, placement


def _vocab_size(args: Mapping[str, Any], folder: Path) -> int:
    if not args.get("padded_vocab_size"):
        raise CheckpointError(f"{folder}: its args lack padded_vocab_size")
    return int(args["padded_vocab_size"])


def find_checkpoint(store: DirectoryStore, iteration: int | None, *, thorough: bool = False) -> tuple[int, list[str]]:
    if iteration is not None:
        if problems := store.verify(iteration, deferred=not thorough):
            raise CheckpointError(listing(f"{store.folder(iteration)} is damaged", with_remedy(problems)))
        return iteration, []
    newest, notes = store.newest_verified(deferred=not thorough)
    if newest is None:
        if notes:
            raise CheckpointError(listing(f"{store.path} holds no sound checkpoint", with_remedy(notes)))
        raise CheckpointError(nothing_in(store.path))
    if notes and newest != store.latest():  # the notes name what was passed over
        notes = [*notes, f"iteration {newest} is loaded instead: {store.folder(newest)}"]
    return newest, notes
