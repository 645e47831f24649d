"""`megalith checkpoint verify DIR` and `megalith checkpoint inspect DIR`.

DIR is a save folder (with `latest_checkpointed_iteration.txt` and `iter_*` folders) or one checkpoint folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.errors import CheckpointError

if TYPE_CHECKING:
    from megalith.checkpoint import DirectoryStore
    from megalith.checkpoint.fit import Contents
    from megalith.checkpoint.folder import CheckpointFolder

_DAMAGED = CheckpointError.exit_code
_ARGUMENTS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "max_position_embeddings",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "padded_vocab_size",
    "params_dtype",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "micro_batch_size",
    "global_batch_size",
    "consumed_train_samples",
    "lr",
    "tokenizer_type",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    verify = commands.add_parser("verify", help="compare every file with the hashes of the manifest")
    inspect = commands.add_parser("inspect", help="show files, settings and tensors")
    for command in (verify, inspect):
        command.add_argument("dir", type=Path, metavar="DIR", help="a save folder, or one iter_* folder in it")
        command.add_argument("--iteration", type=int, metavar="N", help="only this checkpoint of a save folder")
    inspect.add_argument("--all", action="store_true", help="list the optimizer's tensors too")


def run(argv: Sequence[str]) -> int:
    """Run the command; returns 4 if a checkpoint is damaged.

    Raises:
        CheckpointError: there is no checkpoint at the given place.
    """
    parser = argparse.ArgumentParser(prog="megalith checkpoint", description="List, inspect and verify checkpoints.")
    add_arguments(parser)
    options = parser.parse_args(argv)
    store, iterations = _selected(options.dir, options.iteration)
    if options.command == "verify":
        return _verify(store, iterations)
    _inspect(store, iterations[-1] if options.iteration is None else options.iteration, all_tensors=options.all)
    return 0


def _selected(path: Path, iteration: int | None) -> tuple[DirectoryStore, list[int]]:
    """The save folder and the checkpoints in it that the command line means; the one to inspect stands last."""
    from megalith.checkpoint import DirectoryStore, split_path

    folder, named = split_path(path)
    store = DirectoryStore(folder)
    if named is not None:
        return store, [named]
    there = store.iterations()
    if not there:
        raise CheckpointError(f"{path} holds no checkpoint: it has no folder iter_0000000 or the like")
    if iteration is not None:
        return store, [iteration]
    latest = store.latest()
    return store, sorted(there, key=lambda number: (number == latest, number))


def _verify(store: DirectoryStore, iterations: Sequence[int]) -> int:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    damaged = 0
    for iteration in sorted(iterations):
        problems = store.verify(iteration)
        name = escape(str(store.folder(iteration)))
        if problems:
            damaged += 1
            console.print(f"[bold red]damaged[/]  {name}")
            for problem in problems:
                console.print(f"         {escape(problem)}")
        elif store.manifest(iteration) is None:
            console.print(f"[yellow]readable[/] {name}: no manifest.json, so nothing to compare the contents with")
        else:
            console.print(f"[green]sound[/]    {name}")
    latest = store.latest()
    if latest is None or latest not in store.iterations():
        console.print(f"[yellow]tracker[/]  {escape(str(store.path))}: it names no checkpoint that is there")
    return _DAMAGED if damaged else 0


def _inspect(store: DirectoryStore, iteration: int, *, all_tensors: bool) -> None:
    from rich.console import Console

    from megalith.checkpoint.folder import CheckpointFolder

    folder = CheckpointFolder(store.folder(iteration))
    contents, common, manifest = folder.contents(), folder.common(), folder.manifest()
    width = None if sys.stdout.isatty() else 140
    console = Console(highlight=False, width=width)
    console.print(_tree(folder))
    console.print(_facts(common, manifest, contents))
    console.print(_tensors(contents, all_tensors=all_tensors))


def _tree(folder: CheckpointFolder) -> Any:
    from rich.filesize import decimal
    from rich.markup import escape
    from rich.tree import Tree

    sizes = folder.sizes()
    tree = Tree(f"[bold]{escape(str(folder.path))}[/]  {decimal(sum(sizes.values()))}")
    for name, size in sizes.items():
        tree.add(f"{escape(name)}  {decimal(size)}")
    return tree


def _facts(common: dict[str, Any], manifest: dict[str, Any] | None, contents: Contents) -> Any:
    from rich.table import Table

    args = vars(common["args"]) if "args" in common else {}
    wrote = f"Megalith {manifest['megalith_version']}, {manifest['created']}" if manifest else "another program"
    model = [key for key in contents.tensors if not key.startswith("optimizer.")]
    parameters = sum(contents.tensors[key].numel for key in model)
    rows = {
        "iteration": common.get("iteration", "?"),
        "written by": wrote,
        "parameters": f"{parameters:,}",
        "optimizer state": "yes" if len(model) < len(contents.tensors) else "no",
        "random states": "yes" if any(key.startswith("rng_state/") for key in contents.objects) else "no",
        **{name: args[name] for name in _ARGUMENTS if args.get(name) is not None},
    }
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


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
