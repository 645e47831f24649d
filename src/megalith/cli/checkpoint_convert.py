"""`megalith checkpoint convert|import|export`, and `--ckpt-convert-format` of a training command line.

Checkpoints are converted file by file, without a model in memory. Import and export end with a comparison of logits
with those of transformers, where it is installed, and leave nothing if they differ.
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
from megalith.config.values import local_path
from megalith.errors import CheckpointError
from megalith.train.streams import warn

if TYPE_CHECKING:
    from megalith.assemble.huggingface import Comparison
    from megalith.checkpoint.convert import ConversionResult


def add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="write a checkpoint in another format, layout or precision",
        description="Reads a checkpoint of any format and writes it in another format, layout or precision, one tensor "
        "at a time. The source is not changed.",
    )
    add = convert.add_argument
    add("source", type=local_path, metavar="SRC", help="a save folder, or one checkpoint folder")
    add("destination", type=local_path, metavar="DST", help="the save folder to put the result into")
    add("--format", default="torch_dist", metavar="F", help="torch_dist (default) or torch")
    add("--tp", type=int, metavar="N", help="tensor-parallel size; by default that of SRC")
    add("--pp", type=int, metavar="N", help="pipeline-parallel size; by default that of SRC")
    add("--ep", type=int, metavar="N", help="expert-parallel size; by default that of SRC")
    add("--no-optim", action="store_true", help="leave the optimizer and the random states out")
    add("--dtype", metavar="D", help="of the weights: float32, bfloat16 or float16")
    add("--iteration", type=int, metavar="N", help="of a save folder, this checkpoint")
    add(
        "--true-vocab-size",
        type=int,
        metavar="N",
        help="tokens of the vocabulary, which are padded for --tp; by default those of SRC's tokenizer",
    )
    add("--release", action="store_true", help="write weights to begin from, without an iteration")
    add(
        "--upcycle",
        type=int,
        metavar="N",
        help="make a mixture of N experts of a dense model, each a copy; weights only",
    )
    add("--moe-router-topk", type=int, default=2, metavar="K", help="of --upcycle: experts for each token (2)")
    add("--replace", action="store_true", help="replace a checkpoint of DST with the same iteration")
    add("--no-verify", action="store_true", help="do not compare SRC with its hashes first")
    add_import_flag(convert)
    convert.set_defaults(run=_run_convert)


def _run_convert(options: argparse.Namespace) -> int:
    from megalith.checkpoint.convert import ConversionOptions, convert
    from megalith.checkpoint.sources.adapters import Upcycling

    upcycling = None if options.upcycle is None else Upcycling(options.upcycle, options.moe_router_topk)
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
    made = convert(
        options.source, options.destination, wanted, iteration=options.iteration, verify=not options.no_verify
    )
    _show(made)
    return 0


def add_huggingface(commands: Any) -> None:
    bring = commands.add_parser(
        "import",
        help="make a checkpoint of a Hugging Face model folder",
        description="Reads a model of a family that docs/huggingface.md names from safetensors and writes weights to "
        "begin from: SAVE_DIR/release, which --load SAVE_DIR starts with. (--load takes such a folder itself, too.)",
    )
    add = bring.add_argument
    add("source", type=local_path, metavar="HF_DIR", help="a folder with config.json and safetensors files")
    add("destination", type=local_path, metavar="SAVE_DIR", help="the save folder to put the result into")
    add(
        "--iteration",
        type=int,
        metavar="N",
        help="put them into iter_N instead of release, for programs that know no release; start with --finetune",
    )
    add("--replace", action="store_true", help="replace the weights that are there")
    bring.set_defaults(run=run_import)
    take = commands.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face model folder",
        description="Writes the weights of a checkpoint of any format as safetensors, with config.json and the "
        "tokenizer's files.",
    )
    add = take.add_argument
    add("source", type=local_path, metavar="DIR", help="a save folder, or one checkpoint folder")
    add("destination", type=local_path, metavar="HF_DIR", help="the folder to make")
    add("--iteration", type=int, metavar="N", help="of a save folder, this checkpoint")
    add("--dtype", metavar="D", help="of the weights: float32, bfloat16 or float16")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="the weights in files of at most this (default: 5GB)")
    add("--true-vocab-size", type=int, metavar="N", help="tokens of the vocabulary; by default the tokenizer's")
    add("--model-type", metavar="T", help="its model_type, such as llama or mixtral; by default the one that fits")
    take.set_defaults(run=run_export)
    for command in (bring, take):
        command.add_argument(
            "--no-compare",
            action="store_true",
            help="do not compare logits with transformers, which takes memory for the whole model in fp32",
        )


def _show(made: ConversionResult) -> None:
    for note in made.notes:
        warn(f"note: {note}")
    print(f"{made.path}: {made.bytes / 2**20:.1f} MiB in {made.seconds:.1f} s")


def run_import(options: argparse.Namespace) -> int:
    """Import, compare, and say what was made."""
    from megalith.checkpoint.convert import ConversionOptions, convert
    from megalith.checkpoint.sources.source import is_huggingface

    if not is_huggingface(options.source):
        raise CheckpointError(
            f"{options.source} is no Hugging Face model folder: it has no config.json beside safetensors files (of the "
            "hub's cache give models--NAME/snapshots/REVISION)"
        )
    compared: list[Comparison] = []

    def check(folder: Path) -> None:
        if not options.no_compare:
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
    from megalith.checkpoint.model_space import model_space_of
    from megalith.checkpoint.sources.adapters import args_of
    from megalith.checkpoint.sources.huggingface import HuggingFaceSource
    from megalith.checkpoint.sources.source import open_source
    from megalith.checkpoint.writers.huggingface import Weights

    source = open_source(made)
    space = model_space_of(args_of(source.common()), str(made))
    return compare_logits(folder, Weights(source), space, HuggingFaceSource(folder).about.vocab_size)


def run_export(options: argparse.Namespace) -> int:
    """ExportOptions, compare, and say what was made."""
    from megalith.assemble.huggingface import compare_logits
    from megalith.checkpoint.writers.huggingface import ExportOptions, export

    wanted = ExportOptions(options.dtype, options.max_shard_size, options.true_vocab_size, options.model_type)
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


def _say(compared: Comparison | None) -> None:
    print("logits not compared (--no-compare)" if compared is None else str(compared))


def convert_instead(config: RunConfig) -> int:
    """Convert the checkpoint of `--load` as the run would save it."""
    if config.launch.rank != 0:
        return 0
    from megalith.checkpoint.convert import ConversionOptions, convert
    from megalith.checkpoint.sources.adapters import args_of
    from megalith.checkpoint.sources.source import open_source
    from megalith.checkpoint.store.store import locate
    from megalith.compat.megatron import console

    settings = config.checkpoint
    form, load, save = settings.ckpt_convert_format, settings.load, settings.ckpt_convert_save
    assert form is not None and load is not None and save is not None, "a rule of the configuration"
    found = locate(Path(load), settings.ckpt_step)
    source = open_source(found)
    common = source.common()
    _check_architecture(config, args_of(common), found)
    iteration = int(common.get("iteration") or 0)
    print(console.loading_line(load, iteration, distributed=source.format == "torch_dist"))
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
    """Refuse to write the checkpoint of one model under the command line of another."""
    from megalith.config.foreign_args import model_of
    from megalith.train.checkpoint_fit import ARCHITECTURE, architecture

    was, now = architecture(model_of(args, config.registry)), architecture(config.model)
    lines = [
        f"{flag}: {was[name]} in the checkpoint, {now[name]} here"
        for name, flag in ARCHITECTURE.items()
        if was[name] != now[name]
    ]
    if lines:
        raise CheckpointError("\n  ".join([f"{found} is of another model:", *lines, "give the flags of that run"]))
