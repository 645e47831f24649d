"""`megalith report RUN`: one page of a run for the browser."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megalith.errors import ConfigError, DataError
from megalith.report import page, read_history

_HELP = """usage: megalith report RUN [-o FILE.html]

Writes one HTML page of a run: curves, restarts, skipped steps, checkpoints, what was changed in the configuration. It
needs no network and no server, and can be sent to someone. RUN is the folder of the checkpoints (--save), its run
folder, or a metrics.jsonl. The page goes to report.html in the run folder unless -o says where. A run that still goes
on can be looked at too."""


def run(argv: Sequence[str]) -> int:
    """Write the page and say where it is."""
    words = list(argv)
    if not words or "-h" in words or "--help" in words:
        print(_HELP)
        return 0
    target: str | None = None
    for flag in ("-o", "--output"):
        if flag in words:
            place = words.index(flag)
            if place + 1 == len(words):
                raise ConfigError(f"{flag} needs the name of a file")
            target = words[place + 1]
            del words[place : place + 2]
    if len(words) != 1:
        raise ConfigError(f"one RUN is needed, not {len(words)}: {' '.join(words)}")
    folder = _run_folder(Path(words[0]))
    history = read_history(folder)
    if not history.num_steps and not history.events:
        raise DataError(f"{folder / 'metrics.jsonl'} holds no record that can be read")
    output = Path(target) if target else folder / "report.html"
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    name = folder.resolve().parent.name if folder.name == "run" else folder.resolve().name
    try:
        temporary.write_text(page(history, name), encoding="utf-8")
        temporary.replace(output)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}; give another place by -o FILE") from error
    print(f"{output}: {history.num_steps:,} steps, {len(history.events):,} events")
    return 0


def _run_folder(path: Path) -> Path:
    """The folder that holds metrics.jsonl."""
    for folder in (path, path / "run", path.parent if path.name == "metrics.jsonl" else path):
        if (folder / "metrics.jsonl").is_file():
            return folder
    raise DataError(f"{path}: there is no metrics.jsonl in it, nor in {path / 'run'}; give the folder of --save")
