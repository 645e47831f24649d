"""`megalith checkpoint inspect DIR`: what a checkpoint is, its files, its settings and its tensors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.config.values import local_path
from megalith.errors import MegalithError

if TYPE_CHECKING:
    from megalith.checkpoint.fit import Contents
    from megalith.checkpoint.folder import CheckpointFolder

_ARGUMENTS = (
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
)
_SIZES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "virtual stages": "virtual_pipeline_model_parallel_size",
    "EP": "expert_model_parallel_size",
}
_UNITS = "KMGTPE"


def add_arguments(commands: Any) -> None:
    """Declare the sub-command."""
    inspect = commands.add_parser("inspect", help="show files, settings and tensors")
    inspect.add_argument("dir", type=local_path, metavar="DIR", help="a save folder, or one checkpoint folder")
    inspect.add_argument("--iteration", type=int, metavar="N", help="of a save folder, this checkpoint")
    inspect.add_argument("--all", action="store_true", help="list the optimizer's tensors too")
    inspect.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show one checkpoint: of a save folder that of its tracker.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    from rich.console import Console
    from rich.markup import escape

    from megalith.checkpoint.folder import CheckpointFolder
    from megalith.checkpoint.locate import locate

    folder = CheckpointFolder(locate(options.dir, options.iteration))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(_tree(folder))
    try:
        contents, common = folder.contents(), folder.common()
    except MegalithError as error:
        console.print(f"[bold red]not readable[/]: {escape(str(error))}", soft_wrap=True)
        return error.exit_code
    console.print(_facts(folder, common, contents))
    console.print(_tensors(contents, all_tensors=options.all))
    return 0


def _tree(folder: CheckpointFolder) -> Any:
    """Files and folders as `tree -h` draws them."""
    from rich.markup import escape
    from rich.tree import Tree

    sizes = folder.sizes()
    tree = Tree(f"[bold]{escape(str(folder.path))}[/]  {human(sum(sizes.values()))}")
    branches: dict[Path, Any] = {Path(): tree}
    for name, size in sizes.items():
        parent = Path(name).parent
        for level in [*reversed(parent.parents), parent]:
            if level not in branches:
                branches[level] = branches[level.parent].add(f"[bold]{escape(level.name)}[/]")
        branches[parent].add(escape(f"[{human(size):>4}]  {Path(name).name}"))
    return tree


def human(size: int) -> str:
    """A number of bytes as `tree -h` writes it.

    >>> human(1023), human(1536), human(710 * 2**20), human(2**30)
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

    from megalith.checkpoint.adapted import args_of

    args, manifest = args_of(common), folder.manifest()
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
        "random states": "yes" if any(key.startswith("rng_state/") for key in contents.objects) else "no",
        **{name: args[name] for name in _ARGUMENTS if args.get(name) is not None and not _idle(name, args)},
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _layout(args: Mapping[str, Any]) -> str:
    """How the run was divided that wrote the checkpoint."""
    sizes = {name: args.get(argument) for name, argument in _SIZES.items()}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size and (size != 1 or name in ("TP", "PP")))


def _idle(name: str, args: Mapping[str, Any]) -> bool:
    """Whether an argument says nothing of this model: of experts that it does not have."""
    return name.startswith("moe_") and not args.get("num_experts")


def _tensors(contents: Contents, *, all_tensors: bool) -> Any:
    from rich.table import Table

    from megalith.checkpoint.fit import short

    shown = {
        key: stored
        for key, stored in sorted(contents.tensors.items())
        if all_tensors or not key.startswith("optimizer.")
    }
    left = len(contents.tensors) - len(shown)
    caption = f"{left} tensors of the optimizer are not shown; --all shows them" if left else None
    table = Table(title="tensors", title_justify="left", caption=caption, caption_justify="left")
    table.add_column("key", overflow="fold")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("chunks", justify="right")
    for key, stored in shown.items():
        table.add_row(key, " x ".join(map(str, stored.shape)) or "scalar", short(stored.dtype), str(stored.chunks))
    return table
