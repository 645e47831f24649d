"""`megalith checkpoint convert|import|export`, and `--ckpt-convert-format` of a training command line.

Checkpoints are converted file by file, without a model in memory. Import and export compare logits with transformers
if it is installed, and write nothing if they differ.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.config import RunConfig
from megalith.config.saved_args import megatron_args
from megalith.config.tokenizer_flags import add_import_flag, imported_by
from megalith.config.values import local_path, model_path
from megalith.errors import CheckpointError, ConfigError
from megalith.progress import task
from megalith.train.streams import warn

if TYPE_CHECKING:
    from megalith.assemble.gguf import GgufComparison
    from megalith.assemble.huggingface import Comparison
    from megalith.checkpoint.convert import ConversionResult
    from megalith.checkpoint.writers.huggingface import ExportOptions


def add_convert(commands: Any) -> None:
    """Add the `convert` sub-command."""
    convert = commands.add_parser(
        "convert",
        help="write a checkpoint in another format, layout or precision",
        description="Reads a checkpoint of any format and writes it in another format, layout or precision, one tensor "
        "at a time. The source is not changed.",
    )
    add = convert.add_argument
    add("source", type=local_path, metavar="SRC", help="a save folder, or one checkpoint folder")
    add("destination", type=local_path, metavar="DST", help="save folder to write to")
    add("--format", default="torch_dist", metavar="F", help="format: torch_dist (default) or torch")
    add("--tp", type=int, metavar="N", help="tensor-parallel size (default: that of SRC)")
    add("--pp", type=int, metavar="N", help="pipeline-parallel size (default: that of SRC)")
    add("--ep", type=int, metavar="N", help="expert-parallel size (default: that of SRC)")
    add("--no-optim", action="store_true", help="omit optimizer and RNG states")
    add("--dtype", metavar="D", help="dtype of the weights: float32, bfloat16 or float16 (default: that of the source)")
    add("--iteration", type=int, metavar="N", help="iteration to read from a save folder (default: the tracker's)")
    add("--true-vocab-size", type=int, metavar="N", help="unpadded vocabulary size (default: that of SRC's tokenizer)")
    add("--release", action="store_true", help="write a release checkpoint: weights only, without an iteration")
    add("--upcycle", type=int, metavar="N", help="copy the MLPs of a dense model to N experts each; weights only")
    add("--moe-router-topk", type=int, default=2, metavar="K", help="with --upcycle: experts per token (default: 2)")
    add("--replace", action="store_true", help="replace a checkpoint of the same iteration in DST")
    add("--no-verify", action="store_true", help="do not verify the hashes of SRC first")
    add_import_flag(convert)
    convert.set_defaults(run=_run_convert)


def _run_convert(options: argparse.Namespace) -> int:
    from megalith.checkpoint.convert import ConversionOptions, check_options, convert
    from megalith.checkpoint.sources.adapters import Upcycling

    top_k = options.moe_router_topk
    upcycling = None if options.upcycle is None else Upcycling(options.upcycle, top_k)
    wanted = ConversionOptions(
        format=options.format,
        tp=options.tp,
        pp=options.pp,
        ep=options.ep,
        optimizer=not (options.no_optim or options.release or upcycling),
        dtype=options.dtype,
        true_vocab_size=options.true_vocab_size,
        release=options.release or upcycling is not None,
        replace=options.replace,
        upcycling=upcycling,
        registry=imported_by(options),
    )
    if top_k != Upcycling.top_k and upcycling is None:
        check_options(wanted, [f"--moe-router-topk {top_k} applies with --upcycle N only; add that, or leave it out"])
    made = convert(
        options.source, options.destination, wanted, iteration=options.iteration, verify=not options.no_verify
    )
    _show(made)
    return 0


def add_huggingface(commands: Any) -> None:
    """Add the `import` and `export` sub-commands."""
    bring = commands.add_parser(
        "import",
        help="convert a Hugging Face model folder to a checkpoint",
        description="Reads safetensors of a model type that docs/huggingface.md lists and writes a release checkpoint, "
        "SAVE_DIR/release, from which --load SAVE_DIR starts. (--load HF_DIR works as well.)",
    )
    add = bring.add_argument
    add("source", type=model_path, metavar="HF_DIR", help="folder with config.json and safetensors, or hf:ORG/NAME")
    add("destination", type=local_path, metavar="SAVE_DIR", help="save folder to write to")
    add(
        "--iteration",
        type=int,
        metavar="N",
        help="write iter_N instead of release, for programs that do not read release; start with --finetune",
    )
    add("--replace", action="store_true", help="replace existing weights")
    bring.set_defaults(run=run_import)
    take = commands.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face model folder, as GGUF for llama.cpp and ollama, or for PEFT",
        description="Writes the weights of a checkpoint of any format as safetensors, with config.json and the "
        "tokenizer's files; with --to gguf as one GGUF file, with a Modelfile for ollama; with --to peft the adapters "
        "of a LoRA run.",
    )
    add = take.add_argument
    add("source", type=model_path, metavar="DIR", help="a save folder, or one checkpoint folder")
    add("destination", type=local_path, metavar="OUT", help="folder to create")
    add("--to", choices=("hf", "gguf", "peft"), default="hf", help="format; peft for LoRA adapters (default: hf)")
    add("--iteration", type=int, metavar="N", help="iteration to read from a save folder (default: the tracker's)")
    add(
        "--dtype",
        metavar="D",
        help="dtype of the weights: float32, bfloat16, float16, or q8_0 of gguf (default: that of the source)",
    )
    add("--max-shard-size", default="5GB", metavar="SIZE", help="maximum size of a weights file of hf (default: 5GB)")
    add("--true-vocab-size", type=int, metavar="N", help="vocabulary size before padding (default: the tokenizer's)")
    add("--model-type", metavar="T", help="model_type to write, such as llama or mixtral (default: the one that fits)")
    take.set_defaults(run=run_export)
    for command in (bring, take):
        command.add_argument(
            "--no-compare",
            action="store_true",
            help="do not compare with transformers or llama.cpp, which needs memory for the whole model in fp32",
        )


def _show(made: ConversionResult) -> None:
    for note in made.notes:
        warn(f"note: {note}")
    print(f"{made.path}: {made.bytes / 2**20:.1f} MiB in {made.seconds:.1f} s")


def run_import(options: argparse.Namespace) -> int:
    """Import a Hugging Face model, compare logits, and print the result."""
    from megalith.checkpoint.convert import ConversionOptions, convert
    from megalith.checkpoint.sources.source import is_huggingface

    if not is_huggingface(options.source):
        raise CheckpointError(
            f"{options.source} is not a Hugging Face model folder: it lacks config.json or safetensors files (in the "
            "hub's cache, give models--NAME/snapshots/REVISION)"
        )
    compared: list[Comparison] = []

    def check(folder: Path) -> None:
        if not options.no_compare:
            with task("comparing logits with transformers"):
                compared.append(_compare(folder, options.source))

    wanted = ConversionOptions(release=True, iteration=options.iteration, replace=options.replace)
    made = convert(options.source, options.destination, wanted, check=check)
    _show(made)
    _say(compared[0] if compared else None)
    finetune = "" if options.iteration is None else " --finetune"
    print(f"start with these weights: --load {shlex.quote(str(options.destination))}{finetune}")
    return 0


def _compare(made: Path, folder: Path) -> Comparison:
    from megalith.assemble.huggingface import compare_logits
    from megalith.checkpoint.global_parameters import GlobalParameters
    from megalith.checkpoint.sources.adapters import args_of
    from megalith.checkpoint.sources.huggingface import HuggingFaceSource
    from megalith.checkpoint.sources.source import open_source
    from megalith.checkpoint.writers.huggingface import Weights

    source = open_source(made)
    params = GlobalParameters.from_args(args_of(source.common()), str(made))
    return compare_logits(folder, Weights(source), params, HuggingFaceSource(folder).about.vocab_size)


def run_export(options: argparse.Namespace) -> int:
    """Export to Hugging Face's format or to GGUF, compare with transformers or llama.cpp, and print the result."""
    from megalith.assemble.huggingface import compare_logits
    from megalith.checkpoint.writers.huggingface import ExportOptions, export

    wanted = ExportOptions(options.dtype, options.max_shard_size, options.true_vocab_size, options.model_type)
    if options.to == "gguf":
        return _export_gguf(options, wanted)
    if options.to == "peft":
        return _export_peft(options, wanted)
    compared: list[Comparison] = []
    made = export(
        options.source,
        options.destination,
        wanted,
        iteration=options.iteration,
        check=None if options.no_compare else lambda *model: compared.append(compare_logits(*model)),
    )
    for note in made.notes:
        warn(f"note: {note}")
    files = "1 file" if made.shards == 1 else f"{made.shards} files"
    print(f"{made.path}: {made.architecture}, {made.bytes / 2**20:.1f} MiB in {files}")
    _say(compared[0] if compared else None)
    return 0


def _export_gguf(options: argparse.Namespace, wanted: ExportOptions) -> int:
    from megalith.assemble.gguf import compare_with_llama_cpp
    from megalith.checkpoint.writers.gguf import MODELFILE, export_gguf
    from megalith.checkpoint.writers.huggingface import MAX_SHARD_SIZE

    if options.max_shard_size != MAX_SHARD_SIZE:
        raise ConfigError(f"--max-shard-size {options.max_shard_size}: --to gguf writes one file; leave it out")
    compared: list[GgufComparison] = []

    def check(*model: Any) -> None:
        with task("comparing greedy tokens with llama.cpp"):
            compared.append(compare_with_llama_cpp(*model))

    made = export_gguf(
        options.source,
        options.destination,
        wanted,
        iteration=options.iteration,
        check=None if options.no_compare else check,
    )
    notes = list(made.notes)
    if compared and not compared[0].same_ids:
        notes.append(
            "llama.cpp makes other ids of a test text than the tokenizer of the checkpoint; see docs/after-training.md"
        )
    for note in notes:
        warn(f"note: {note}")
    print(f"{made.file}: {made.architecture}, {made.dtype}, {made.bytes / 2**20:.1f} MiB; beside it {MODELFILE}")
    print(compared[0] if compared else "greedy tokens not compared (--no-compare)")
    return 0


def _export_peft(options: argparse.Namespace, wanted: ExportOptions) -> int:
    from megalith.checkpoint.writers.huggingface import MAX_SHARD_SIZE, check_options
    from megalith.checkpoint.writers.peft import export_adapters

    useless = {
        "--max-shard-size": options.max_shard_size != MAX_SHARD_SIZE,
        "--true-vocab-size": options.true_vocab_size is not None,
        "--no-compare": options.no_compare,
    }
    check_options(wanted, [f"{flag} has no effect with --to peft; leave it out" for flag in useless if useless[flag]])
    made = export_adapters(options.source, options.destination, wanted, iteration=options.iteration)
    for note in made.notes:
        warn(f"note: {note}")
    print(f"{made.path}: adapters for PEFT, {made.tensors} tensors, {made.bytes / 2**20:.1f} MiB")
    return 0


def add_merge_lora(commands: Any) -> None:
    """Add the `merge-lora` sub-command."""
    merge = commands.add_parser(
        "merge-lora",
        help="write a full checkpoint of LoRA adapters and their model",
        description="Adds the adapters of a LoRA run, or of a folder of PEFT, to the weights of their model and writes "
        "a full checkpoint without optimizer state. The sources are not changed.",
    )
    add = merge.add_argument
    add(
        "source",
        type=local_path,
        metavar="DIR",
        help="save folder of a LoRA run, one checkpoint in it, or PEFT's folder",
    )
    add("destination", type=local_path, metavar="OUT", help="save folder to write to")
    add("--iteration", type=int, metavar="N", help="iteration to read from a save folder (default: the tracker's)")
    add("--replace", action="store_true", help="replace a checkpoint of the same iteration in OUT")
    merge.set_defaults(run=_run_merge_lora)


def _run_merge_lora(options: argparse.Namespace) -> int:
    from megalith.assemble.merged import merge_lora

    with task("merging the adapters"):
        made = merge_lora(options.source, options.destination, iteration=options.iteration, replace=options.replace)
    print(f"{made}: adapters merged; start with these weights: --pretrained-checkpoint {shlex.quote(str(made))}")
    return 0


def _say(compared: Comparison | None) -> None:
    print("logits not compared (--no-compare)" if compared is None else str(compared))


def convert_instead(config: RunConfig) -> int:
    """Convert the checkpoint of `--load` to the layout and precision of the run (`--ckpt-convert-format`)."""
    if config.launch.rank != 0:
        return 0
    from megalith.checkpoint.convert import ConversionOptions, convert
    from megalith.checkpoint.sources.adapters import args_of
    from megalith.checkpoint.sources.source import open_source
    from megalith.checkpoint.store.store import locate
    from megalith.compat.megatron import console_lines

    settings = config.checkpoint
    form, load, save = settings.ckpt_convert_format, settings.load, settings.ckpt_convert_save
    assert form is not None and load is not None and save is not None, "a rule of the configuration"
    found = locate(Path(load), settings.ckpt_step)
    source = open_source(found)
    common = source.common()
    _check_architecture(config, args_of(common), found)
    iteration = int(common.get("iteration") or 0)
    print(console_lines.loading_line(load, iteration, distributed=source.format == "torch_dist"))
    wanted = ConversionOptions(
        format=form,
        tp=config.parallel.tensor_model_parallel_size,
        pp=config.parallel.pipeline_model_parallel_size,
        ep=config.parallel.expert_model_parallel_size,
        optimizer=not (settings.no_load_optim or settings.no_save_optim or settings.finetune),
        dtype=config.precision.params_dtype,
        run_args=megatron_args(config),
        registry=config.registry,
    )
    made = convert(Path(load), Path(save) / form, wanted, iteration=settings.ckpt_step)
    print(f"> converted checkpoint: {source.format} -> {form}.")
    _show(made)
    return 0


def _check_architecture(config: RunConfig, args: Mapping[str, Any], found: Path) -> None:
    """Raise CheckpointError if the checkpoint's architecture differs from the command line's."""
    from megalith.config.from_args import model_from_args
    from megalith.train.checkpoint_fit import ARCHITECTURE, architecture

    was, now = architecture(model_from_args(args, config.registry)), architecture(config.model)
    lines = [
        f"{flag}: {was[name]} in the checkpoint, {now[name]} on the command line"
        for name, flag in ARCHITECTURE.items()
        if was[name] != now[name]
    ]
    if lines:
        raise CheckpointError(
            "\n  ".join([f"{found} has another architecture:", *lines, "give the flags of the run that wrote it"])
        )
