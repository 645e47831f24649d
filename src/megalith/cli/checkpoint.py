"""`megalith checkpoint COMMAND`: verify, inspect, compare and convert checkpoints.

Commands read checkpoints of any format: a save folder, one checkpoint folder in it, or a Hugging Face model folder.
Commands that write checkpoints are in checkpoint_convert.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.cli.checkpoint_convert import add_convert, add_huggingface, add_merge_lora
from megalith.config.values import local_path, model_path
from megalith.errors import CheckpointError, MegalithError, NewerFormatError
from megalith.progress import task

if TYPE_CHECKING:
    from megalith.checkpoint.files.folder import CheckpointFolder
    from megalith.checkpoint.sources.source import Contents

_TOOLS_OF_MEGATRON = ("checkpoint_util.py", "convert.py")
"""First arguments of Megatron's command lines, which the forwarders in `tools/` pass."""

_EXIT_DAMAGED = CheckpointError.exit_code
_SHOWN_ARGUMENTS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "max_position_embeddings",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "padded_vocab_size",
    "params_dtype",
    "data_parallel_size",
    "micro_batch_size",
    "global_batch_size",
    "consumed_train_samples",
    "lr",
    "tokenizer_type",
    *("lora_rank", "lora_alpha", "lora_targets"),
)
_SIZES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "virtual stages": "virtual_pipeline_model_parallel_size",
    "EP": "expert_model_parallel_size",
}
_UNITS = "KMGTPE"
_EXIT_DIFFERENT = 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megalith checkpoint", description="Verify, inspect, compare and convert checkpoints of any format."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_verify, _add_inspect, _add_diff, add_convert, add_huggingface, add_merge_lora):
        add(commands)
    return parser


def run(argv: Sequence[str]) -> int:
    """Run a sub-command and return its exit code: 1 if two checkpoints differ, 4 if one is damaged."""
    if argv and argv[0] in _TOOLS_OF_MEGATRON:
        from megalith.compat.megatron.convert import run_tool

        return run_tool(argv[0], argv[1:])
    options = make_parser().parse_args(argv)
    exit_code: int = options.run(options)
    return exit_code


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser("verify", help="compare every file with the hashes of the manifest")
    verify.add_argument("dir", type=local_path, metavar="DIR", help="a save folder, or one checkpoint folder")
    verify.add_argument("--iteration", type=int, metavar="N", help="verify only this iteration of a save folder")
    verify.set_defaults(run=_run_verify)


def _run_verify(options: argparse.Namespace) -> int:
    """Verify one checkpoint, or all of a save folder; return 4 if one is damaged or of a newer format."""
    from rich.console import Console
    from rich.markup import escape

    from megalith.checkpoint import DirectoryStore
    from megalith.checkpoint.store.store import is_checkpoint, locate

    console = Console(highlight=False, soft_wrap=True)
    single = options.iteration is not None or (options.dir.is_dir() and is_checkpoint(options.dir))
    first = locate(options.dir, options.iteration)
    store = DirectoryStore(options.dir)
    folders = [first] if single else [store.folder(iteration) for iteration in store.iterations()]
    sound = [_verify_folder(folder, console) for folder in folders]
    for note in [] if single else store.tracker_notes():
        console.print(f"[yellow]tracker[/]  {escape(note)}")
    return 0 if all(sound) else _EXIT_DAMAGED


def _verify_folder(path: Path, console: Any) -> bool:
    from rich.markup import escape

    from megalith.checkpoint.files.folder import CheckpointFolder

    name = escape(str(path))
    word = "[bold red]damaged[/]  "
    try:
        folder = CheckpointFolder(path)
        problems, manifest = folder.problems(), None
        if not problems:
            manifest = folder.manifest()
    except NewerFormatError as error:
        word, problems = "[bold yellow]newer[/]    ", [str(error)]
    except CheckpointError as error:
        problems = [str(error)]
    if problems:
        console.print(f"{word}{name}")
        for problem in problems:
            console.print(f"         {escape(problem)}")
    elif manifest is None:
        checked = "the checksums inside its files agree" if folder.source.format == "torch" else "no checksums"
        console.print(f"[yellow]readable[/] {name}: no manifest.json; {checked}")
    else:
        console.print(f"[green]sound[/]    {name}")
    return not problems


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser("inspect", help="print files, settings and tensors")
    add = inspect.add_argument
    add("dir", type=local_path, metavar="DIR", help="a save folder, or one checkpoint folder")
    add("--iteration", type=int, metavar="N", help="iteration to read from a save folder (default: the tracker's)")
    add("--all", action="store_true", help="also list the optimizer's tensors")
    inspect.set_defaults(run=_run_inspect)


def _run_inspect(options: argparse.Namespace) -> int:
    """Print one checkpoint; of a save folder, the one that the tracker file names."""
    from rich.console import Console
    from rich.markup import escape

    from megalith.checkpoint.files.folder import CheckpointFolder
    from megalith.checkpoint.store.store import locate

    folder = CheckpointFolder(locate(options.dir, options.iteration))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(_tree(folder))
    try:
        contents, common = folder.source.contents(), folder.source.common()
    except MegalithError as error:
        console.print(f"[bold red]not readable[/]: {escape(str(error))}", soft_wrap=True)
        return error.exit_code
    console.print(_facts(folder, common, contents))
    console.print(_tensors(contents, all_tensors=options.all))
    return 0


def _tree(folder: CheckpointFolder) -> Any:
    """Return the files and folders as `tree -h` draws them."""
    from rich.markup import escape
    from rich.tree import Tree

    sizes = folder.sizes()
    tree = Tree(f"[bold]{escape(str(folder.path))}[/]  {human_size(sum(sizes.values()))}")
    branches: dict[Path, Any] = {Path(): tree}
    for name, size in sizes.items():
        parent = Path(name).parent
        for level in [*reversed(parent.parents), parent]:
            if level not in branches:
                branches[level] = branches[level.parent].add(f"[bold]{escape(level.name)}[/]")
        branches[parent].add(escape(f"[{human_size(size):>4}]  {Path(name).name}"))
    return tree


def human_size(size: int) -> str:
    """Format a number of bytes as `tree -h` does.

    >>> human_size(1023), human_size(1536), human_size(710 * 2**20), human_size(2**30)
    ('1023', '1.5K', '710M', '1.0G')
    """
    if size < 1024:
        return str(size)
    unit = 0
    while size >= 1024 * 1024:
        size, unit = size // 1024, unit + 1
    return f"{size / 1024:.0f}{_UNITS[unit]}" if size // 1024 >= 10 else f"{size / 1024:.1f}{_UNITS[unit]}"


def _facts(folder: CheckpointFolder, common: Mapping[str, Any], contents: Contents) -> Any:
    from rich.table import Table

    from megalith.checkpoint.base import base_record
    from megalith.checkpoint.sources.adapters import args_of

    args, manifest = args_of(common), folder.manifest()
    base = base_record(manifest, common)
    wrote = f"Megalith {manifest['megalith_version']}, {manifest['created']}" if manifest else "another program"
    if manifest and "converted_from" in manifest:
        wrote += f", from {manifest['converted_from']['path']}"
    model = [key for key in contents.tensors if not key.startswith("optimizer.")]
    parameters = sum(contents.tensors[key].numel for key in model)
    rows = {
        "format": folder.source.format,
        "layout": _layout(args),
        "iteration": common.get("iteration", "?"),
        "written by": wrote,
        "parameters": f"{parameters:,}",
        "optimizer state": "yes" if len(model) < len(contents.tensors) else "no",
        **_registered(args),
        **({"adapters of": base["path"]} if base else {}),
        **({"proven": f"certificate {manifest['certificate']}"} if manifest and "certificate" in manifest else {}),
        "random states": "yes" if any(key.startswith("rng_state/") for key in contents.objects) else "no",
        **{
            name: args[name]
            for name in _SHOWN_ARGUMENTS
            if args.get(name) is not None and not _is_irrelevant(name, args)
        },
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _registered(args: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the names of the registered parts, and the modules that register them."""
    from megalith.config.saved_args import REGISTERED

    about = args.get(REGISTERED)
    return {"registered parts": f"{', '.join(about['names'])} (--import {' '.join(about['imports'])})"} if about else {}


def _layout(args: Mapping[str, Any]) -> str:
    sizes = {name: args.get(argument) for name, argument in _SIZES.items()}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size and (size != 1 or name in ("TP", "PP")))


def _is_irrelevant(name: str, args: Mapping[str, Any]) -> bool:
    """Return whether an argument does not apply to this model, such as MoE settings of a dense one."""
    return name.startswith("moe_") and not args.get("num_experts")


def _tensors(contents: Contents, *, all_tensors: bool) -> Any:
    from rich.table import Table

    from megalith.checkpoint.sources.source import short

    shown = {
        key: stored
        for key, stored in sorted(contents.tensors.items())
        if all_tensors or not key.startswith("optimizer.")
    }
    left = len(contents.tensors) - len(shown)
    caption = f"{left} optimizer tensors not shown; use --all" if left else None
    table = Table(title="tensors", title_justify="left", caption=caption, caption_justify="left")
    table.add_column("key", overflow="fold")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("chunks", justify="right")
    for key, stored in shown.items():
        table.add_row(key, " x ".join(map(str, stored.shape)) or "scalar", short(stored.dtype), str(stored.chunks))
    return table


def _add_diff(commands: Any) -> None:
    diff = commands.add_parser(
        "diff",
        help="compare two checkpoints tensor by tensor, whatever their formats and layouts",
        description="Compares tensors layer by layer, and the other state. Exit code 0: bit-identical; 1: different.",
    )
    add = diff.add_argument
    add("one", type=model_path, metavar="A", help="a save folder, or one checkpoint folder, of any format")
    add("other", type=model_path, metavar="B", help="the checkpoint to compare with")
    add("--iteration", type=int, metavar="N", help="iteration to read from save folders (default: the tracker's)")
    add("--weights", action="store_true", help="compare only weights and architecture")
    add("--all", action="store_true", help="print every difference instead of the first 20 of each kind")
    diff.set_defaults(run=_run_diff)


def _run_diff(options: argparse.Namespace) -> int:
    """Compare two sound checkpoints and print the differences; return 0 if there are none, else 1."""
    from megalith.checkpoint.diff import compared, state_differences, tensor_differences, with_equal_precision
    from megalith.checkpoint.files.folder import open_verified
    from megalith.checkpoint.store.store import locate

    given = (options.one, options.other)
    either = any(not _is_single(path) for path in given)  # is a save folder, to which alone the flag applies
    paths = [locate(path, None if either and _is_single(path) else options.iteration) for path in given]
    sources = [open_verified(path).source for path in paths]
    for letter, path, source in zip("AB", paths, sources, strict=True):
        print(f"{letter}  {path} ({source.format})")
    first, second = (source.common() for source in sources)
    states = state_differences(first, second, _architecture, weights=options.weights)
    *pair, main = with_equal_precision(*sources)
    if main is not None:
        print(
            f"{'AB'[main]} has half-precision weights: its fp32 master weights are compared with the float32 weights "
            f"of {'BA'[main]}"
        )
    one, other = (compared(source, weights=options.weights) for source in pair)
    names, elements, tensors = set[str](), 0, []
    with task("comparing", unit=" elements") as comparing:
        for difference in tensor_differences(one, other):
            names.add(difference.name)
            elements += difference.elements
            comparing.reach(elements)
            if not difference.is_none:
                tensors.append(str(difference))
    shown = None if options.all else 20
    _print_list("beside the tensors", [str(state) for state in states], shown)
    _print_list("tensors", tensors, shown)
    optimizer = any(name.startswith("optimizer.") for name in names)
    what = "weights and optimizer state" if optimizer else "weights"
    alike = f"{len(names) - len(tensors)} of {len(names)} tensors (counted per layer) are bit-identical"
    if not states and not tensors:
        print(f"equal: {alike}, {elements:,} elements of {what}")
        return 0
    print(f"different: {alike}")
    return _EXIT_DIFFERENT


def _is_single(path: Path) -> bool:
    from megalith.checkpoint.store.store import is_checkpoint

    return path.is_dir() and is_checkpoint(path)


def _print_list(head: str, lines: list[str], shown: int | None) -> None:
    if lines:
        print(f"{head}:")
        print("\n".join(f"  {line}" for line in lines[:shown]))
        if shown is not None and len(lines) > shown:
            print(f"  and {len(lines) - shown} more; use --all")


def _architecture(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the architecture settings that the args determine."""
    from megalith.config.from_args import model_from_args
    from megalith.config.saved_args import REGISTERED
    from megalith.errors import CheckpointError
    from megalith.train.checkpoint_fit import ARCHITECTURE, architecture

    if of_user := args.get(REGISTERED):  # compared by names and settings, for which no code of theirs is run
        return {name: args.get(name) for name in ARCHITECTURE} | dict(of_user.get("settings", {}))
    try:
        return architecture(model_from_args(args))
    except (CheckpointError, KeyError):
        return {name: args.get(name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
