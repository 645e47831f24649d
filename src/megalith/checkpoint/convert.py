"""Conversion of a checkpoint of any format and layout: `megalith checkpoint convert` and Megatron's tools.

A conversion is a stack of adapters (`adapt`) over the source, written by the writer of a format. No process group,
no device and no model are needed, and memory is bounded by the largest tensor.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalith.checkpoint.base import refuse_adapters
from megalith.checkpoint.content import Chunk
from megalith.checkpoint.files.commit import claimed, replace_durably
from megalith.checkpoint.files.folder import CheckpointFolder, open_verified
from megalith.checkpoint.files.safe_loading import ForeignEnum
from megalith.checkpoint.formats.megatron_names import CORE
from megalith.checkpoint.formats.per_rank_layout import OWN_KEYS
from megalith.checkpoint.formats.torch_dist import (
    CHECKPOINT_VERSION,
    CONTENT_METADATA,
    OPTIMIZER_PREFIX,
    WORD_EMBEDDINGS,
    is_rng_object,
)
from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.checkpoint.sources.adapters import (
    InPrecision,
    Repadded,
    Upcycled,
    Upcycling,
    Watched,
    WeightsOnly,
    WithCommon,
    WithExpertOptimizer,
    args_of,
    has_vocabulary_rows,
)
from megalith.checkpoint.sources.huggingface import HuggingFaceSource, files_of_tokenizer
from megalith.checkpoint.sources.source import Source, open_source
from megalith.checkpoint.store.store import RELEASE, TRACKER_FILE, DirectoryStore, locate, manifest_fields_of
from megalith.checkpoint.writers.torch_dist import no_check, rng_keys, write_torch, write_torch_dist
from megalith.config import ModelConfig
from megalith.config.from_args import refuse_registered_parts
from megalith.errors import CheckpointError, ConfigError, LayoutError
from megalith.layout import Layout, predictions_last
from megalith.progress import task
from megalith.registry import EMPTY, Registry
from megalith.tokenizers.protocol import padded_vocab_size

FORMATS = ("torch", "torch_dist")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_KEPT_FACTS = ("config", "tokenizer", "tokenizer_files", "data", "huggingface", "threads", "matrix_products")
_USUAL_TENSOR_PARALLEL = (1, 2, 4, 8, 16, 32, 64)
_COMMON = (
    "args",
    "checkpoint_version",
    "iteration",
    "optimizer",
    "opt_param_scheduler",
    "num_floating_point_operations_so_far",
)
# Megatron's arguments, of all versions, that describe the layout, and their values without virtual stages.
_UNDIVIDED: dict[str, Any] = {
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "pipeline_model_parallel_layout": None,
    "context_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "transformer_pipeline_model_parallel_size": None,
    "rank": 0,
    "local_rank": 0,
}
_UNEVEN: dict[str, Any] = {
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "standalone_embedding_stage": False,
}
_DIVIDING = (*_UNDIVIDED, *_UNEVEN)


@dataclass(frozen=True)
class ConversionOptions:
    """Format, layout, precision and vocabulary of the result of a conversion."""

    format: str = "torch_dist"  # torch or torch_dist
    # degrees of parallelism; by default those of the source
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    optimizer: bool = True  # include the optimizer state if the source has any
    dtype: str | None = None  # dtype of the weights: float32, bfloat16 or float16; by default that of the source
    # number of tokens, which is padded for the layout as in Megatron; by default that of the checkpoint's tokenizer
    true_vocab_size: int | None = None
    # Megatron's arguments of a run whose pipeline layout the result takes; they include tp, pp and ep
    run_args: Mapping[str, Any] = field(default_factory=dict)
    release: bool = False  # write weights without an iteration, under `release/`
    iteration: int | None = None  # of the result; by default that of the source
    names: str = CORE  # of the weights in format torch: `CORE` or a generation of `LEGACY`
    replace: bool = False  # replace an existing checkpoint
    upcycling: Upcycling | None = None  # how to convert a dense model to MoE; None: not at all
    registry: Registry = EMPTY  # registered objects that the model may use


@dataclass
class ConversionResult:
    """Path, size, duration and notes of a conversion."""

    path: Path  # the new checkpoint folder
    bytes: int
    seconds: float
    notes: list[str] = field(default_factory=list)  # for the user: parts that were not converted, and why


def convert(
    source_path: Path,
    destination: Path,
    wanted: ConversionOptions,
    *,
    iteration: int | None = None,
    verify: bool = True,
    on_read: Callable[[Chunk], None] | None = None,
    check: Callable[[Path], None] = no_check,
) -> ConversionResult:
    """Convert one checkpoint, found by `locate(source_path, iteration)`.

    Args:
        destination: save folder of the result; its tracker file then names the result.
        verify: compare every file of the source with its manifest's hashes first.
        on_read: called with each chunk before it is read.
        check: called with the finished folder before it is renamed; if it raises, the destination is unchanged.

    Raises:
        LayoutError: the model cannot be divided over the layout.
        ConfigError: an option has an invalid value.
    """
    started = time.perf_counter()
    check_options(wanted)
    found = locate(source_path, iteration)
    folder = open_verified(found) if verify else CheckpointFolder(found)
    refuse_adapters(args_of(folder.source.common()), str(found))
    _check_tokens(folder, wanted)
    notes: list[str] = []
    source, layout = adapt(folder.source, wanted, str(found), notes, known_tokens(folder))
    if on_read is not None:
        source = Watched(source, on_read)
    if wanted.iteration is not None:
        source = _numbered(source, wanted.iteration)
    number = int(source.common().get("iteration") or 0)
    weights = wanted.release or found.name == RELEASE or folder.source.format == "huggingface"
    released = weights and wanted.iteration is None
    name = RELEASE if released else f"iter_{number:07d}"
    final = destination / name
    _check_place(final, found, replace=wanted.replace)
    refuse_other_model(final, {key: stored.shape for key, stored in source.contents().tensors.items()})

    def update_tracker() -> None:
        replace_durably(
            destination / TRACKER_FILE, (RELEASE if released else str(number)).encode("ascii"), claimed=True
        )

    with claimed(destination):
        before, now = DirectoryStore(destination).latest(), 0 if released else number
        if before is not None and before > now:
            notes.append(f"{destination / TRACKER_FILE} named iteration {before}, and names {name} now")
        fields, files = _manifest_fields(folder, number, layout), further_files(folder)
        write = (
            partial(write_torch_dist, registry=wanted.registry)
            if wanted.format == "torch_dist"
            else partial(write_torch, names=wanted.names)
        )
        with task("converting", _bytes_to_read(folder.source, source), "B", counts="bytes read"):
            size = write(source, final, manifest_fields=fields, files=files, update_tracker=update_tracker, check=check)
    return ConversionResult(final, size, time.perf_counter() - started, notes)


def _bytes_to_read(held: Source, adapted: Source) -> int:
    """Return the bytes of the tensors that a conversion reads, in the dtypes that the source holds them in."""
    stored = held.contents().tensors
    read = [stored.get(key, tensor) for key, tensor in adapted.contents().tensors.items()]
    return sum(tensor.numel * tensor.dtype.itemsize for tensor in read)


def check_options(wanted: ConversionOptions, found: Sequence[str] = ()) -> None:
    """Raise a ConfigError that names all invalid options, `found` by others too, before any file is opened."""
    wrong = [*found]
    if wanted.format not in FORMATS:
        wrong.append(f"--format {wanted.format} cannot be written; use {' or '.join(FORMATS)}")
    if wanted.dtype is not None and wanted.dtype not in DTYPES:
        wrong.append(f"--dtype {wanted.dtype} is not supported; use {', '.join(DTYPES)}")
    if wanted.iteration is not None and wanted.iteration < 0:
        wrong.append(f"--iteration {wanted.iteration} is less than 0")
    sizes = {"--tp": wanted.tp, "--pp": wanted.pp, "--ep": wanted.ep, "--true-vocab-size": wanted.true_vocab_size}
    wrong += [f"{flag} {size} is less than 1" for flag, size in sizes.items() if size is not None and size < 1]
    if wanted.upcycling is not None:
        wrong += wanted.upcycling.violations()
    if wrong:
        raise ConfigError(wrong)


def _check_tokens(folder: CheckpointFolder, wanted: ConversionOptions) -> None:
    """Raise a CheckpointError if the new vocabulary would drop tokens."""
    tokens = _tokenizer_size(folder)
    if wanted.true_vocab_size is not None and tokens is not None and wanted.true_vocab_size < tokens:
        raise CheckpointError(
            f"--true-vocab-size {wanted.true_vocab_size} is less than the {tokens} tokens of the tokenizer of "
            f"{folder.path}; give {tokens} or more"
        )


def _tokenizer_size(folder: CheckpointFolder) -> int | None:
    """Return the number of tokens of the checkpoint's tokenizer; None if its manifest does not record it."""
    size = ((folder.manifest() or {}).get("tokenizer") or {}).get("vocab_size")
    return None if size is None else int(size)


def known_tokens(folder: CheckpointFolder) -> int | None:
    """Return the unpadded vocabulary size of a checkpoint; None if it is unknown.

    A row count chosen by --padded-vocab-size or by a Hugging Face model is not padding. A run that started from such a
    model has its row count, which Megatron's padding yields for no layout.
    """
    manifest = folder.manifest() or {}
    chosen = ((manifest.get("config") or {}).get("data") or {}).get("padded_vocab_size")
    foreign = isinstance(folder.source, HuggingFaceSource) or manifest.get("huggingface")
    tokens = None if chosen or foreign else _tokenizer_size(folder)
    args = args_of(folder.source.common())
    rows = int(args.get("padded_vocab_size") or 0)
    if tokens is None or rows < tokens:
        return tokens
    sizes = (_size(args, "tensor"), *_USUAL_TENSOR_PARALLEL)
    return tokens if any(padded_vocab_size(tokens, _divisor(args), tp) == rows for tp in sizes) else None


def _divisor(args: Mapping[str, Any]) -> int:
    return int(args.get("make_vocab_size_divisible_by") or 128)


def _check_place(final: Path, found: Path, *, replace: bool) -> None:
    if final.resolve() == found.resolve():
        raise CheckpointError(f"{final} is the source itself; give another folder for the result")
    if final.exists() and not replace:
        raise CheckpointError(f"{final} exists; give another folder, or --replace to overwrite it")


def refuse_other_model(final: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError if the last other checkpoint beside `final` has weights of other keys or shapes."""
    store = DirectoryStore(final.parent)
    others = [path for path in map(store.folder, store.iterations()) if path != final]
    try:
        held = open_source(others[-1]).contents().tensors if others else {}
    except CheckpointError:  # a damaged one says nothing
        return
    own, other = _without_rows(shapes), _without_rows({key: stored.shape for key, stored in held.items()})
    if others and own != other:
        key = next(key for key in (*own, *other) if own.get(key) != other.get(key))
        there, here = (list(table[key]) if key in table else "missing" for table in (other, own))
        raise CheckpointError(
            f"{others[-1]} is a checkpoint of another model ({key}: {there} there, {here} here); give another "
            f"folder than {final.parent}"
        )


def _without_rows(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights, with 0 rows for those of the vocabulary, which may be padded."""
    return {
        key: (0, *shape[1:]) if has_vocabulary_rows(key) else shape
        for key, shape in shapes.items()
        if not key.startswith(OPTIMIZER_PREFIX)
    }


def adapt(
    source: Source, wanted: ConversionOptions, where: str, notes: list[str], tokens: int | None = None
) -> tuple[Source, Layout]:
    """Wrap a source in the adapters of a conversion; return the wrapped source and the layout of the result.

    Args:
        where: Name of the source in errors.
        notes: Extended by notes for the user: parts that are not converted, and why.
        tokens: Unpadded vocabulary size (`known_tokens`).

    Raises:
        LayoutError: The model cannot be divided over the layout.
    """
    args = args_of(source.common())
    if not args:
        raise CheckpointError(
            f"{where} has no args, which describe its model; convert it with the program that wrote it"
        )
    if wanted.format == "torch":
        refuse_registered_parts(args, where, "format torch supports Megatron's models only; use torch_dist")
        if wanted.optimizer:
            why = "format torch supports the state of AdamW only; use torch_dist, or --no-optim"
            refuse_registered_parts(args, where, why, group="optimizer")
    model = GlobalParameters.from_args(args, where, wanted.registry).model
    if wanted.upcycling is not None:
        source = Upcycled(WeightsOnly(source), wanted.upcycling, model, where)
        notes.append("experts are copies and routers are new, so the result has weights only")
    layout = _layout_of_result(args_of(source.common()), model, wanted, where)
    result: Source = InPrecision(source, DTYPES[wanted.dtype] if wanted.dtype else None)
    if not _keeps_optimizer(source, wanted, layout, notes):
        result = WeightsOnly(result)
    result = _repadded(result, wanted, layout.tp, where, tokens, notes)
    if layout.ep > 1:
        result = WithExpertOptimizer(result)
    of_run = {name: value for name, value in wanted.run_args.items() if name in _DIVIDING}
    generation = _generation(args, wanted)

    def own(common: dict[str, Any], args: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of the common state that this version writes, with the args of the result."""
        made = {**divided_args(args, layout, wanted.format), **of_run, **generation}
        kept = {key: value for key, value in common.items() if key in _COMMON or str(key).startswith(OWN_KEYS)}
        return {
            **kept,
            "args": Namespace(**made),
            "checkpoint_version": CHECKPOINT_VERSION,
            "content_metadata": CONTENT_METADATA,
        }

    return WithCommon(result, own), layout


def _layout_of_result(args: Mapping[str, Any], model: ModelConfig, wanted: ConversionOptions, where: str) -> Layout:
    """Return the requested layout, by default that of the args; LayoutError if the model cannot be divided over it."""
    pp, ep = _size(args, "pipeline"), wanted.ep or _size(args, "expert")
    layout = Layout(tp=wanted.tp or _size(args, "tensor"), dp=ep, pp=wanted.pp or pp, ep=ep)
    _check_experts(args, ep, where)
    _check_divides(model.num_attention_heads, "attention heads", "--tp", layout.tp, where)
    if layout.pp != pp and not wanted.run_args:
        _check_divides(int(args["num_layers"]), "layers", "--pp", layout.pp, where)
    if layout.pp > 1 and model.predictions and model.position_embedding_type == "learned_absolute":
        raise CheckpointError(
            f"the model in {where} has --mtp-num-layers and --position-embedding-type learned_absolute, which "
            f"exclude pipeline stages (--pp {layout.pp}); use --pp 1"
        )
    return layout


def _keeps_optimizer(source: Source, wanted: ConversionOptions, layout: Layout, notes: list[str]) -> bool:
    """Return whether the optimizer state is converted; add notes if it, or the RNG state, is not."""
    if not wanted.optimizer or wanted.upcycling is not None:
        return False
    held = source.contents()
    if "optimizer" not in source.common() or not any(key.startswith(OPTIMIZER_PREFIX) for key in held.tensors):
        why = "; ".join(held.unreadable) or "the checkpoint has no optimizer state"
        notes.append(f"{why}: the result has weights only")
        return False
    if any(map(is_rng_object, held.objects)) and rng_keys(layout) != set(filter(is_rng_object, held.objects)):
        notes.append(
            "the RNG states belong to another layout and are left out: dropout restarts from --seed, and Megatron "
            "needs --no-load-rng"
        )
    return True


def _check_experts(args: Mapping[str, Any], ep: int, where: str) -> None:
    """Raise a LayoutError if the experts cannot be divided over `ep` ranks."""
    experts = int(args.get("num_experts") or 0)
    if ep > 1 and not experts:
        raise LayoutError(f"--ep {ep}: the model in {where} has no experts; leave --ep out")
    _check_divides(experts, "experts", "--ep", ep, where)


def _check_divides(count: int, what: str, flag: str, size: int, where: str) -> None:
    if count % size:
        sizes = ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)
        raise LayoutError(f"the {count} {what} of {where} cannot be divided over {flag} {size}; use {sizes}")


def _generation(args: Mapping[str, Any], wanted: ConversionOptions) -> dict[str, Any]:
    """Return the args that record legacy or core names; empty if the names are core's and the args lack them."""
    legacy = wanted.names != CORE
    said = {"use_legacy_models": legacy, "use_mcore_models": not legacy}
    return {name: value for name, value in said.items() if legacy or name in args}


def _repadded(
    source: Source, wanted: ConversionOptions, tp: int, where: str, known: int | None, notes: list[str]
) -> Source:
    """Return the source with its vocabulary padded for `tp` ranks; add notes on changes and unknown sizes."""
    args = args_of(source.common())
    rows, tokens = int(args["padded_vocab_size"]), wanted.true_vocab_size
    if WORD_EMBEDDINGS not in source.contents().tensors:  # a registered model
        if tokens is not None or rows % tp:
            flag = "--tp" if tokens is None else "--true-vocab-size"
            raise CheckpointError(f"{flag}: the model of {where} has no {WORD_EMBEDDINGS} to pad; leave {flag} out")
        return source
    if tokens is None and known is not None and known <= rows and not wanted.run_args:
        tokens = known
    if tokens is None and rows % tp:
        raise CheckpointError(
            f"the embedding of {where} has {rows} rows, which is not divisible by --tp {tp}; give the number of tokens "
            "by --true-vocab-size to pad it anew"
        )
    padded = rows if tokens is None else padded_vocab_size(tokens, _divisor(args), tp)
    if padded != rows:
        notes.append(f"the vocabulary is padded to {padded} rows instead of {rows}")
        return Repadded(source, padded, repeat_last=wanted.true_vocab_size is None and rows > (known or rows))
    if wanted.true_vocab_size is None and known is None and tp != _size(args, "tensor"):
        notes.append(
            f"the vocabulary keeps its {rows} rows, as the checkpoint does not record the unpadded size; Megatron may "
            f"expect another number of rows at --tp {tp}: --true-vocab-size N pads N tokens for it"
        )
    return source


def _size(args: Mapping[str, Any], kind: str) -> int:
    """Return the degree of one parallelism; tensor parallelism had another name before checkpoint version 3."""
    older = args.get("model_parallel_size") if kind == "tensor" else None
    return int(args.get(f"{kind}_model_parallel_size") or older or 1)


def divided_args(args: Mapping[str, Any], layout: Layout, kind: str) -> dict[str, Any]:
    """Return Megatron's arguments for a checkpoint in another layout and format.

    Uneven pipeline stages are kept if the number of stages is. Enum values are dropped, as a load refuses them.
    """
    undivided: dict[str, Any] = {**_UNDIVIDED, **_UNEVEN}
    if _size(args, "pipeline") == layout.pp:
        undivided = dict(_UNDIVIDED)
        if stages := args.get("pipeline_model_parallel_layout"):
            undivided["pipeline_model_parallel_layout"] = predictions_last(str(stages))
            del undivided["virtual_pipeline_model_parallel_size"]
    kept = {name: value for name, value in args.items() if not isinstance(value, ForeignEnum)}
    changed = {name: value for name, value in undivided.items() if name in kept}
    sizes = {"world_size": layout.world_size, "data_parallel_size": layout.dp, "expert_model_parallel_size": layout.ep}
    changed |= {name: size for name, size in sizes.items() if name in kept}
    if layout.ep > 1:
        changed["expert_model_parallel_size"] = layout.ep
    if "expert_tensor_parallel_size" in kept:
        changed["expert_tensor_parallel_size"] = layout.tp
    if "transformer_pipeline_model_parallel_size" in kept:
        changed["transformer_pipeline_model_parallel_size"] = layout.pp
    if kept.get("sequence_parallel"):
        changed["sequence_parallel"] = layout.tp > 1
    return {
        **kept,
        **changed,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "ckpt_format": kind,
        "ckpt_convert_format": None,
        "use_dist_ckpt": kind == "torch_dist",
    }


def _numbered(source: Source, iteration: int) -> Source:
    """Return a source with another iteration."""

    def counted(common: dict[str, Any], args: dict[str, Any]) -> dict[str, Any]:
        samples = {"consumed_train_samples": 0, "consumed_valid_samples": 0}
        return {**common, "iteration": iteration, "args": Namespace(**{**samples, **args})}

    return WithCommon(source, counted)


def _manifest_fields(folder: CheckpointFolder, iteration: int, layout: Layout) -> dict[str, Any]:
    """Return the manifest's entries: those of the source that a resume compares, and the origin."""
    body = folder.manifest() or {}
    kept = {key: body[key] for key in _KEPT_FACTS if key in body}
    if isinstance(folder.source, HuggingFaceSource):
        kept = folder.source.facts()
    origin = {"path": str(folder.path.resolve()), "format": folder.source.format}
    return {"iteration": iteration, **manifest_fields_of(layout), **kept, "converted_from": origin}


def further_files(folder: CheckpointFolder) -> dict[str, bytes]:
    """Return name -> bytes of the tokenizer files of a native checkpoint or a Hugging Face folder."""
    if isinstance(folder.source, HuggingFaceSource):
        return {name: path.read_bytes() for name, path in files_of_tokenizer(folder.path).items()}
    return {name: folder.read_file(name) for name in (folder.manifest() or {}).get("tokenizer_files", ())}
