"""Files of a folder: a Hugging Face dataset in any of its layouts, or just files of one format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megalith.data.sources.formats import format_by_name, natural
from megalith.errors import DataError

_SPLITS = re.compile(r"(?:^|[-_.])(train|training|test|testing|validation|valid|val|dev|eval)(?=$|[-_.\d])", re.I)
_SAME = {"training": "train", "testing": "test", "valid": "validation", "val": "validation", "dev": "validation"}
_NUMBERED = re.compile(r"(?:^|-)(?P<split>[A-Za-z_][\w]*)-\d{5}-of-\d{5}\.")
_OF_NO_DATA = re.compile(r"(readme|license|licence|copying|changelog|notice|requirements)\b.*|cache-.*\.arrow", re.I)
_NAMED = 5  # files that a note names
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def files_of(folder: Path, split: str) -> tuple[list[Path], str]:
    """The files of a folder in natural order, and what the folder was found to be.

    Args:
        folder: with data.
        split: to take where there are several.

    Raises:
        DataError: it has no data, several formats, or no such split.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _object(folder / "dataset_dict.json").get("splits") or sorted(
            path.name for path in folder.iterdir() if (path / "state.json").is_file()
        )
        chosen = _choose(folder, splits, split)
        return _saved(folder / chosen), f"Hugging Face dataset, split {chosen}"
    if (folder / "state.json").is_file():
        return _saved(folder), "Hugging Face dataset"
    return _loose(folder, split)


def _saved(folder: Path) -> list[Path]:
    """The Arrow files that `save_to_disk` wrote, in its order."""
    state = _object(folder / "state.json")
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder} was saved with a selection of its rows (_indices_data_files of state.json); save it once more "
            "with dataset.flatten_indices().save_to_disk(...)"
        )
    names = [entry["filename"] for entry in state.get("_data_files", []) if isinstance(entry, dict)]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise DataError(f"{folder}: {', '.join(missing) or 'data files'} named by state.json are not there")
    return [folder / name for name in names]


def _loose(folder: Path, split: str) -> tuple[list[Path], str]:
    files = sorted(
        (path for path in folder.rglob("*") if _is_data(path, folder)),
        key=lambda path: natural(str(path.relative_to(folder))),
    )
    formats: dict[str, list[Path]] = {}
    for path in files:
        formats.setdefault(format_by_name(path) or "", []).append(path)
    if not formats:
        raise DataError(f"{folder} holds no jsonl, json, txt, csv, parquet or arrow file")
    if len(formats) > 1:
        counts = ", ".join(f"{len(found)} {name} ({found[0].name}, ...)" for name, found in formats.items())
        raise DataError(
            f"{folder} holds several kinds of files: {counts}; say which, such as '{folder}/*.{{}}'".format(
                next(iter(formats))
            )
        )
    splits = {path: _split_of(path) for path in files}
    found = sorted({name for name in splits.values() if name})
    others = _left_out(folder, files)
    if len(found) < 2:
        return files, f"folder with {len(files)} files{others}"
    chosen = _choose(folder, found, split)
    taken = [path for path in files if splits[path] == chosen]
    return taken, f"folder, split {chosen} with {len(taken)} of {len(files)} files{others}"


def _is_data(path: Path, folder: Path) -> bool:
    is_description = path.name in _DESCRIPTIONS or _OF_NO_DATA.fullmatch(path.name)
    return not _is_hidden(path, folder) and not is_description and format_by_name(path) is not None and path.is_file()


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _left_out(folder: Path, files: Iterable[Path]) -> str:
    """The files of a folder that are not data, for the note about it."""
    data = set(files)
    others = [path for path in folder.rglob("*") if path not in data and not _is_hidden(path, folder)]
    names = sorted((str(path.relative_to(folder)) for path in others if path.is_file()), key=natural)
    more = ", ..." if len(names) > _NAMED else ""
    return f"; left out: {', '.join(names[:_NAMED])}{more} ({len(names)} in all)" if names else ""


def _split_of(path: Path) -> str | None:
    """The split that a name tells, as the hub and the cache of datasets number and name their files."""
    numbered = _NUMBERED.search(path.name)
    if numbered:
        name = numbered["split"]
        return _SAME.get(name.lower(), name)
    found = _SPLITS.search(path.name.split(".")[0])
    return _SAME.get(found[1].lower(), found[1].lower()) if found else None


def _choose(folder: Path, splits: Iterable[str], wanted: str) -> str:
    have = list(splits)
    if wanted not in have:
        raise DataError(f"{folder} has no split {wanted}; --dataset-split names one of {', '.join(have)}")
    return wanted


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is damaged: it holds no JSON object")
    return found
