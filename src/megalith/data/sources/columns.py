"""Which columns of a table hold the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megalith.data.sources.protocol import SourceOptions
from megalith.errors import DataError


def choose_columns(path: Path, names: Sequence[str] | None, count: int, options: SourceOptions) -> list[int]:
    """The number, from 0, of the column of each key.

    Args:
        path: the file, for the messages.
        names: of its columns; None for a csv without a header.
        count: of its columns.
        options: keys and `--text-column`.

    Raises:
        DataError: a column is not there, or several could be meant.
    """
    if options.text_column is not None:
        return [_one(path, names, count, options.text_column)]
    if names is None:
        if count == 1 and len(options.keys) == 1:
            return [0]
        raise DataError(
            f"{path}: no row names its {count} columns; give the number of the one with the text, such as "
            f"--text-column {min(2, count)} (or --csv-header yes if the first row does name them)"
        )
    missing = [key for key in options.keys if key not in names]
    if not missing:
        return [list(names).index(key) for key in options.keys]
    if count == 1 and len(options.keys) == 1:
        return [0]
    raise DataError(
        f"{path}: no column {', '.join(missing)}; its columns are {', '.join(names)}. Name the one with the text with "
        "--text-column"
    )


def _one(path: Path, names: Sequence[str] | None, count: int, wanted: str) -> int:
    if names is not None and wanted in names:
        return list(names).index(wanted)
    if wanted.isdigit() and 1 <= int(wanted) <= count:
        return int(wanted) - 1
    have = f"its columns are {', '.join(names)}" if names is not None else f"it has {count} columns and no header"
    raise DataError(f"--text-column {wanted}: {path} has no such column; {have}")
