"""`megalith checkpoint import HF_DIR SAVE_DIR` and `megalith checkpoint export DIR HF_DIR`.

Both end with a comparison of logits with those of transformers, where it is installed, and leave nothing if they
differ.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.config.values import local_path
from megalith.errors import CheckpointError

if TYPE_CHECKING:
    from megalith.assemble.huggingface import Comparison


def add_arguments(commands: Any) -> None:
    """Declare the two sub-commands."""
    bring = commands.add_parser(
        "import",
        help="make a checkpoint of a Hugging Face model folder",
        description="Reads a model of a family that docs/huggingface.md names from safetensors and writes weights to "
        "begin from: SAVE_DIR/release, which --load SAVE_DIR starts with. (--load takes such a folder itself, too.)",
    )
    bring.add_argument(
        "source", type=local_path, metavar="HF_DIR", help="a folder with config.json and safetensors files"
    )
    bring.add_argument(
        "destination", type=local_path, metavar="SAVE_DIR", help="the save folder to put the result into"
    )
    bring.add_argument(
        "--iteration",
        type=int,
        metavar="N",
        help="put them into iter_N instead of release, for programs that know no release; start with --finetune",
    )
    bring.add_argument("--replace", action="store_true", help="replace the weights that are there")
    bring.set_defaults(run=run_import)
    take = commands.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face model folder",
        description="Writes the weights of a checkpoint of any format as safetensors, with config.json and the "
        "tokenizer's files.",
    )
    take.add_argument("source", type=local_path, metavar="DIR", help="a save folder, or one checkpoint folder")
    take.add_argument("destination", type=local_path, metavar="HF_DIR", help="the folder to make")
    take.add_argument("--iteration", type=int, metavar="N", help="of a save folder, this checkpoint")
    take.add_argument("--dtype", metavar="D", help="of the weights: float32, bfloat16 or float16")
    take.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="the weights in files of at most this (default: 5GB)"
    )
    take.add_argument(
        "--true-vocab-size", type=int, metavar="N", help="tokens of the vocabulary; by default the tokenizer's"
    )
    take.add_argument(
        "--model-type", metavar="T", help="its model_type, such as llama or mixtral; by default the one that fits"
    )
    take.set_defaults(run=run_export)
    for command in (bring, take):
        command.add_argument(
            "--no-compare",
            action="store_true",
            help="do not compare logits with transformers, which takes memory for the whole model in fp32",
        )


def run_import(options: argparse.Namespace) -> int:
    """Import, compare, and say what was made.

    Raises:
        CheckpointError: HF_DIR cannot be read, SAVE_DIR cannot be written, or the logits differ.
    """
    from megalith.checkpoint.convert import Wanted, convert
    from megalith.checkpoint.source import is_huggingface

    if not is_huggingface(options.source):
        raise CheckpointError(
            f"{options.source} is no Hugging Face model folder: it has no config.json beside safetensors files (of the "
            "hub's cache give models--NAME/snapshots/REVISION)"
        )
    compared: list[Comparison] = []

    def check(folder: Path) -> None:
        if not options.no_compare:
            compared.append(_compare(folder, options.source))

    wanted = Wanted(release=True, iteration=options.iteration, replace=options.replace)
    made = convert(options.source, options.destination, wanted, check=check)
    print(f"{made.path}: {made.bytes / 2**20:.1f} MiB in {made.seconds:.1f} s")
    _say(compared[0] if compared else None)
    finetune = "" if options.iteration is None else " --finetune"
    print(f"start with these weights: --load {shlex.quote(str(options.destination))}{finetune}")
    return 0


def _compare(made: Path, folder: Path) -> Comparison:
    from megalith.assemble.huggingface import compare_logits
    from megalith.checkpoint.adapted import args_of
    from megalith.checkpoint.huggingface_export import Weights
    from megalith.checkpoint.huggingface_source import HuggingFaceSource
    from megalith.checkpoint.source import open_source

    source = open_source(made)
    space = _space(args_of(source.common()), made)
    return compare_logits(folder, Weights(source), space, HuggingFaceSource(folder).about.vocab_size)


def _space(args: dict[str, Any], where: Path) -> Any:
    from megalith.checkpoint.model_space import model_space_of

    return model_space_of(args, str(where))


def run_export(options: argparse.Namespace) -> int:
    """Export, compare, and say what was made.

    Raises:
        CheckpointError: DIR is damaged or no model of Hugging Face, HF_DIR cannot be written, or the logits differ.
        ConfigError: nonsense is asked.
    """
    from megalith.assemble.huggingface import compare_logits
    from megalith.checkpoint.huggingface_export import Export, export
    from megalith.train.streams import warn

    wanted = Export(options.dtype, options.max_shard_size, options.true_vocab_size, options.model_type)
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
