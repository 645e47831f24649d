"""Megatron's checkpoint converters with their flags: `tools/checkpoint_util.py` (2023), `tools/checkpoint/convert.py`.

Both take names of loader and saver plugins; here one converter detects the source format by itself. As in Megatron they
write weights only, keep the iteration, and pad the vocabulary anew. Their lines are printed as the work is done; there
is no second process and no queue.
Source: docs/reference/checkpoints.md#converters.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from megalith.checkpoint.content import Chunk
from megalith.checkpoint.convert import ConversionOptions, convert, known_tokens
from megalith.checkpoint.files.folder import CheckpointFolder
from megalith.checkpoint.formats.megatron_names import CORE
from megalith.checkpoint.sources.adapters import args_of
from megalith.checkpoint.sources.source import open_source
from megalith.checkpoint.store.store import locate
from megalith.compat.megatron import console_lines
from megalith.compat.megatron.tasks import ToolParser
from megalith.config import all_settings
from megalith.config.families import FAMILIES
from megalith.config.from_args import model_from_args, refuse_registered_parts
from megalith.config.values import local_path
from megalith.errors import ConfigError

_MEGATRON = ("core", "mcore", "megatron", "legacy")
_FAMILIES = {family.title: name for name, family in FAMILIES.items() if not family.encoder_decoder}
_HUGGINGFACE = ("llama_mistral", "llama2_hf", "mixtral_hf")
_NO_IMAGES = "models of images are not part of this program"
_REFUSED_LOADERS = {"llava": _NO_IMAGES}
_EXPORT = "`megalith checkpoint export SAVE_DIR HF_DIR` writes Hugging Face folders, with their tokenizer"
_REFUSED_SAVERS = {
    **dict.fromkeys(("hf_llava", "llava"), _NO_IMAGES),
    **dict.fromkeys(("hf", "llama_hf", "llama2_hf", "llama3_hf", "mixtral_hf", "qwen2_hf"), _EXPORT),
}
# Flags of unsupported plugins, of Megatron and its forks.
_REFUSED_FLAGS = {
    "hf_tokenizer_path": _EXPORT,
    "save_dtype": f"{_EXPORT}; --dtype says in which format",
    "vit_dummy_head_count": _NO_IMAGES,
}
# Arguments that the tools take from a checkpoint and report.
_INHERITED = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "num_attention_heads", "num_query_groups"),
    *("group_query_attention", "kv_channels", "max_position_embeddings", "position_embedding_type"),
    *("make_vocab_size_divisible_by", "padded_vocab_size", "tokenizer_type"),
)
_WITHOUT_EFFECT = {
    "max_queue_size": "there is no queue",
    "no_checking": "the checks are cheap",
    "megatron_path": "Megatron is not imported",
    "model_size": "it is read from config.json",
    "loader_transformer_impl": "it is detected from the names in the files",
    "sequential_save": "each tensor is read when it is written, and no whole model is held",
}


@dataclass(frozen=True)
class Tool:
    """Properties of one of Megatron's converters."""

    name: str
    plugin: str  # prefix of plugin names
    dtype: str | None  # dtype of the result; None: that of the checkpoint
    legacy: str  # generation of the weight names that `--saver legacy` writes


TOOLS = {
    "checkpoint_util.py": Tool("tools/checkpoint_util.py", "checkpoint_", "float32", "2023"),
    "convert.py": Tool("tools/checkpoint/convert.py", "", None, "0.12"),
}


def run_tool(name: str, argv: Sequence[str], say: Callable[[str], None] = print) -> int:
    """Convert a checkpoint as one of Megatron's tools does; return the exit code.

    Raises:
        ConfigError: a flag asks for what is not here.
        CheckpointError: the source is missing or damaged, or the result cannot be written.
        LayoutError: the model does not divide so.
    """
    tool, options = TOOLS[name], read_flags(name, argv)
    wanted = _wanted(tool, options)
    found = locate(options.load_dir)
    source = open_source(found)
    common = source.common()
    args = args_of(common)
    _check_source(options, source.format, args)
    say(f"Loaded {tool.plugin}loader_{options.loader} as the loader.")
    say(f"Loaded {tool.plugin}saver_{options.saver} as the saver.")
    for line in (*_inherited_lines(args), *_overwritten_lines(args)):
        say(line)
    for line in _without_effect(options):
        say(line)
    iteration = int(common.get("iteration") or 0)
    say(console_lines.loading_line(str(options.load_dir), iteration, distributed=source.format == "torch_dist"))
    if wanted.true_vocab_size is None and known_tokens(CheckpointFolder(found)) is None:
        say("Original vocab size not specified, leaving embedding table as-is.")
    progress = Progress(say)
    made = convert(options.load_dir, options.save_dir, wanted, on_read=progress)
    progress.finish()
    result = args_of(open_source(made.path).common())
    samples = [int(result.get(f"consumed_{split}_samples") or 0) for split in ("train", "valid")]
    say(f"Setting consumed_train_samples to {samples[0]} and consumed_valid_samples to {samples[1]}")
    for note in made.notes:
        say(note)
    tensor, pipeline = result["tensor_model_parallel_size"], result["pipeline_model_parallel_size"]
    say(console_lines.saved_line(iteration, str(options.save_dir), datetime.now(), tensor=tensor, pipeline=pipeline))
    for line in _closing_notes(tool, options):
        say(line)
    if "optimizer" in common:
        command = f"megalith checkpoint convert {shlex.quote(str(options.load_dir))} DIR --tp {tensor} --pp {pipeline}"
        say(f"weights only, as Megatron's tool writes them; with the optimizer: {command} [--format torch]")
    say("Done!")
    return 0


def read_flags(name: str, argv: Sequence[str], *, files: bool = True) -> argparse.Namespace:
    """Read and check the flags of one of Megatron's tools; with `files` the vocabulary file must exist."""
    options = _parser(TOOLS[name]).parse_args(argv)
    _refuse(options, files)
    return options


def _parser(tool: Tool) -> ToolParser:
    parser = ToolParser(
        prog=tool.name,
        allow_abbrev=False,
        description="Megatron's converter of checkpoints: weights only, one file for each tensor and pipeline place. "
        "`megalith checkpoint convert` keeps the optimizer and writes torch_dist too.",
    )
    add = parser.add_argument
    add("--model-type", required=True, metavar="TYPE", help="GPT or BERT")
    add("--loader", default="megatron", metavar="NAME", help=f"{', '.join(_MEGATRON)}; {', '.join(_HUGGINGFACE)}")
    add("--saver", default="megatron", metavar="NAME", help="core, mcore or megatron (equivalent), or legacy")
    add("--load-dir", required=True, type=local_path, metavar="DIR", help="save folder to convert")
    add("--save-dir", required=True, type=local_path, metavar="DIR", help="save folder to write")
    add("--max-queue-size", type=int, metavar="N", help="no effect")
    add("--no-checking", action="store_true", help="no effect")
    add("--megatron-path", metavar="DIR", help="no effect")
    add("--true-vocab-size", type=int, metavar="N", help="tokens of the vocabulary (the tokenizer's)")
    add("--vocab-file", type=local_path, metavar="FILE", help="vocabulary file whose tokens are counted")
    add("--target-tensor-parallel-size", type=int, metavar="N", help="tensor-parallel size (the checkpoint's)")
    add("--target-pipeline-parallel-size", type=int, metavar="N", help="pipeline-parallel size (the checkpoint's)")
    add("--target-expert-parallel-size", type=int, default=1, metavar="N", help="expert-parallel size (1)")
    add("--loader-transformer-impl", metavar="NAME", help="no effect")
    add("--saver-transformer-impl", metavar="NAME", help="local")
    add("--position-embedding-type", metavar="NAME", help="compared with that of the checkpoint")
    add("--checkpoint-type", metavar="NAME", help="with --loader llama_mistral: hf")
    add("--model-size", metavar="NAME", help="no effect")
    add("--tokenizer-model", metavar="FILE", help="accepted with --loader llama_mistral")
    add("--make-vocab-size-divisible-by", type=int, metavar="N", help="refused; use --true-vocab-size")
    add("--bf16", action="store_true", help="with --loader llama_mistral: write bfloat16")
    add("--fp16", action="store_true", help="with --loader llama_mistral: write float16")
    add("--sequential-save", action="store_true", help="no effect")
    for name in _REFUSED_FLAGS:
        add(f"--{name.replace('_', '-')}", help=argparse.SUPPRESS)
    return parser


def _refuse(options: argparse.Namespace, files: bool) -> None:
    """Raise a ConfigError that names every flag that is not supported."""
    wrong = []
    if options.model_type not in _FAMILIES:
        wrong.append(f"--model-type {options.model_type} is not converted by this version; it converts GPT and BERT")
    for flag, name, known, refused in (
        ("--loader", options.loader, (*_MEGATRON, *_HUGGINGFACE), _REFUSED_LOADERS),
        ("--saver", options.saver, _MEGATRON, _REFUSED_SAVERS),
    ):
        if name in refused:
            wrong.append(f"{flag} {name}: {refused[name]}")
        elif name not in known:
            wrong.append(f"{flag} {name} is not known; use {', '.join(each for each in known if each not in refused)}")
    if options.loader == "llama_mistral" and options.checkpoint_type != "hf":
        given = options.checkpoint_type or "is not given and"
        wrong.append(f"--checkpoint-type {given} cannot be read; use hf, and --load-dir a Hugging Face folder")
    for name, reason in _REFUSED_FLAGS.items():
        if (value := getattr(options, name)) is not None:
            wrong.append(f"--{name.replace('_', '-')} {value}: {reason}")
    if files and options.vocab_file is not None and not options.vocab_file.is_file():
        wrong.append(f"--vocab-file {options.vocab_file} does not exist")
    if options.make_vocab_size_divisible_by is not None:
        wrong.append("--make-vocab-size-divisible-by is not supported by this tool; give --true-vocab-size")
    if wrong:
        raise ConfigError(wrong)


def _wanted(tool: Tool, options: argparse.Namespace) -> ConversionOptions:
    dtype = tool.dtype
    if options.loader in _HUGGINGFACE:
        dtype = "bfloat16" if options.bf16 else "float16" if options.fp16 else "float32"
    return ConversionOptions(
        format="torch",
        tp=options.target_tensor_parallel_size,
        pp=options.target_pipeline_parallel_size,
        ep=options.target_expert_parallel_size,
        optimizer=False,
        dtype=dtype,
        true_vocab_size=_true_vocab_size(options),
        names=tool.legacy if options.saver == "legacy" else CORE,
        replace=True,
    )


def _true_vocab_size(options: argparse.Namespace) -> int | None:
    """Return the number of tokens if given. Raises ConfigError if the file is not a vocabulary."""
    if options.vocab_file is None:
        size: int | None = options.true_vocab_size
        return size
    try:
        tokens = json.loads(options.vocab_file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--vocab-file {options.vocab_file} is not a JSON vocabulary: {error}") from error
    if options.true_vocab_size not in (None, len(tokens)):
        raise ConfigError(
            f"--true-vocab-size {options.true_vocab_size} contradicts --vocab-file {options.vocab_file}, which has "
            f"{len(tokens)} tokens; give one of them"
        )
    return len(tokens)


def _check_source(options: argparse.Namespace, form: str, args: dict[str, Any]) -> None:
    """Raise ConfigError if format, family or positions of the source contradict the flags."""
    if (form == "huggingface") != (options.loader in _HUGGINGFACE):
        use = "--loader llama_mistral --checkpoint-type hf" if form == "huggingface" else "--loader core"
        raise ConfigError(f"--loader {options.loader}: {options.load_dir} is of format {form}; use {use}")
    refuse_registered_parts(args, str(options.load_dir), "megalith checkpoint convert --import converts such a model")
    held = model_from_args(args).model_family if args else _FAMILIES[options.model_type]
    if held != _FAMILIES[options.model_type]:
        raise ConfigError(f"--model-type {options.model_type}: the model in {options.load_dir} is {held.upper()}")
    given, positions = options.position_embedding_type, args.get("position_embedding_type", "learned_absolute")
    if given is not None and given != positions:
        raise ConfigError(f"--position-embedding-type {given}: the model in {options.load_dir} has {positions}")


def _inherited_lines(args: dict[str, Any]) -> list[str]:
    return [
        f"Setting {name} to {args[name]} from checkpoint"
        if args.get(name) is not None
        else f"Checkpoint did not provide arguments {name}"
        for name in _INHERITED
    ]


def _overwritten_lines(args: dict[str, Any]) -> list[str]:
    """Return the non-default arguments of the checkpoint, in the wording of Megatron's savers."""
    settings = all_settings()
    known = {name: settings[name].default for name in sorted(args) if name in settings and not settings[name].required}
    return [
        f"Overwriting default {name} value {_display(default)} with value from checkpoint {_display(args[name])}."
        for name, default in known.items()
        if name not in _INHERITED and _display(args[name]) != _display(default)
    ]


def _display(value: Any) -> str:
    """Format a value for a line: a list of one as its element, an empty one as None."""
    if isinstance(value, list | tuple) and len(value) < 2:
        value = value[0] if value else None
    return str(list(value) if isinstance(value, tuple) else None if value == "" else value)


def _without_effect(options: argparse.Namespace) -> list[str]:
    given = vars(options)
    return [
        f"--{name.replace('_', '-')} is not needed: {reason}"
        for name, reason in _WITHOUT_EFFECT.items()
        if given.get(name) not in (None, False)
    ]


def _closing_notes(tool: Tool, options: argparse.Namespace) -> list[str]:
    """Return how these files differ from those of Megatron's tool."""
    lines = []
    if options.saver == "legacy":
        reader = "Megatron-LM 23.06" if tool.legacy == "2023" else "Megatron-Core 0.8 to 0.12 with --use-legacy-models"
        lines.append(f"the names in the files are those from before Megatron-Core, for {reader}")
    elif tool.plugin:
        lines.append(
            "the names in the files are those of Megatron-Core; Megatron-LM 23.06 and older know others, which --saver "
            "legacy writes"
        )
    if options.saver_transformer_impl not in (None, "local"):
        lines.append(f"--saver-transformer-impl {options.saver_transformer_impl}: the names are those of local")
    return lines


class Progress:
    """Console lines about the part of the model that is being read, and about its arrival."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._seen = set[str]()
        self._current: str | None = None

    def __call__(self, chunk: Chunk) -> None:
        part = _part_of(chunk)
        if part not in self._seen:
            self.finish()
            self._seen.add(part)
            self._current = part
            self._say(f"sending {part}")

    def finish(self) -> None:
        """Print that the current part has arrived."""
        if self._current is not None:
            self._say(f"received {self._current}")
            self._current = None


def _part_of(chunk: Chunk) -> str:
    """Return the part of the model that holds a tensor, by the path of its module in the model."""
    match chunk.key.split("."):
        case ["encoder" | "decoder", "layers", layer, *_]:
            # A stacked tensor has its layers on the first axis, not in its key.
            return f"transformer layer {layer if layer.isdigit() else chunk.offset[0]}"
        case ["mtp", "layers", layer, *_]:
            return f"layer {layer} of multi-token prediction"
        case ["encoder" | "decoder", "final_layernorm", *_]:
            return "final layernorm"
        case ["embedding", *_]:
            return "embeddings"
    return "output layer"
