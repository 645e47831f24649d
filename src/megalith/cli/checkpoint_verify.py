"""`megalith checkpoint verify DIR`: whether every file is what was saved."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megalith.config.values import local_path
from megalith.errors import CheckpointError, NewerFormatError

_DAMAGED = CheckpointError.exit_code


def add_arguments(commands: Any) -> None:
    """Declare the sub-command."""
    verify = commands.add_parser("verify", help="compare every file with the hashes of the manifest")
    verify.add_argument("dir", type=local_path, metavar="DIR", help="a save folder, or one checkpoint folder")
    verify.add_argument("--iteration", type=int, metavar="N", help="only this checkpoint of a save folder")
    verify.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Verify one checkpoint, or all of a save folder; returns 4 if one is damaged or of a newer format.

    Raises:
        CheckpointError: there is no checkpoint at the given place.
    """
    from rich.console import Console
    from rich.markup import escape

    from megalith.checkpoint import DirectoryStore
    from megalith.checkpoint.locate import is_checkpoint, locate

    console = Console(highlight=False, soft_wrap=True)
    single = options.iteration is not None or (options.dir.is_dir() and is_checkpoint(options.dir))
    first = locate(options.dir, options.iteration)
    store = DirectoryStore(options.dir)
    folders = [first] if single else [store.folder(iteration) for iteration in store.iterations()]
    sound = [_verify(folder, console) for folder in folders]
    if not single and store.latest() not in store.iterations():
        console.print(f"[yellow]tracker[/]  {escape(str(store.path))}: it names no checkpoint that is there")
    return 0 if all(sound) else _DAMAGED


def _verify(path: Path, console: Any) -> bool:
    """Say how one checkpoint is."""
    from rich.markup import escape

    from megalith.checkpoint.folder import CheckpointFolder

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
        checked = "its files' own checksums agree" if folder.source.format == "torch" else "nothing to compare with"
        console.print(f"[yellow]readable[/] {name}: no manifest.json; {checked}")
    else:
        console.print(f"[green]sound[/]    {name}")
    return not problems
