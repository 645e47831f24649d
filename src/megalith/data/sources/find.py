"""Search for inputs: from the files, folders and globs of `--input` to sources in order.

A folder is a Hugging Face dataset in any of its layouts, or holds files of one format.
"""

from __future__ import annotations

import glob
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megalith.data.sources.archives import ArchiveSource
from megalith.data.sources.documents import MESSAGES, dialogue_keys
from megalith.data.sources.formats import (
    ARRAY,
    ARROW,
    CSV,
    JSONL,
    NOT_DATA,
    PARQUET,
    TAR,
    TXT,
    ZIP,
    archive_of,
    find_separator,
    format_by_content,
    format_by_name,
    name_without_compression,
    natural_sort_key,
    resolve_format,
)
from megalith.data.sources.lines import ArraySource, TextSource
from megalith.data.sources.protocol import STDIN, Source, SourceOptions
from megalith.data.sources.streams import TextFile, open_text, raw_file
from megalith.data.sources.tables import ArrowSource, CsvPreview, CsvSource, ParquetSource, has_header, preview_csv
from megalith.errors import ConfigError, DataError
from megalith.hub import DATASET_FILES, fetched, is_named
from megalith.tokenizers.protocol import json_object

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")
_PREVIEW_BYTES = 1 << 28  # bytes; longer than any document
_PREVIEW_BYTES_OF_STDIN = 1 << 20  # they are kept
_SPLITS = re.compile(r"(?:^|[-_.])(train|training|test|testing|validation|valid|val|dev|eval)(?=$|[-_.\d])", re.I)
_ALIASES = {"training": "train", "testing": "test", "valid": "validation", "val": "validation", "dev": "validation"}
_NUMBERED = re.compile(r"(?:^|-)(?P<split>[A-Za-z_][\w]*)-\d{5}-of-\d{5}\.")
_OPENED_BY_THEIR_SOURCE = (PARQUET, ARROW, TAR, ZIP)
_ARCHIVES = (".tar", ".tgz", ".zip")
_MAX_NAMES = 5  # files that a note names
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


@dataclass
class SourcePlan:
    """Sources of a command in order, notes for the user, and the reasons why inputs cannot be read."""

    sources: list[Source] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @contextmanager
    def record_violations(self) -> Iterator[None]:
        """Record the DataError that a block raises as a violation."""
        try:
            yield
        except (DataError, ConfigError) as error:
            self.violations.append(f"--input {error}")


def find_sources(inputs: Sequence[str], options: SourceOptions) -> SourcePlan:
    """Find and open the inputs. Files of folders and globs come in natural order, 2 before 10."""
    plan = SourcePlan()
    paths: list[Path] = []
    for name in inputs:
        with plan.record_violations():
            paths += _files(name, options, plan)
    found: list[tuple[Path, str]] = []
    for path in paths:
        with plan.record_violations():
            found.append((path, _format(path, options)))
    texts: dict[Path, TextFile] = {}
    previews: dict[Path, CsvPreview] = {}
    for path, kind in found:
        if kind in _OPENED_BY_THEIR_SOURCE or path in texts:
            continue
        with plan.record_violations():
            texts[path] = open_text(path, options.encoding, options.limits)
            if kind == CSV:
                previews[path] = preview_csv(texts[path], options.csv_delimiter)
    for path, kind in found:
        text = texts.get(path)
        if (text is None and kind not in _OPENED_BY_THEIR_SOURCE) or (kind == CSV and path not in previews):
            continue
        with plan.record_violations():
            plan.sources.append(_source(path, kind, text, previews, options))
    packed = [str(source.kind) for source in plan.sources if isinstance(source, ArchiveSource)]
    plan.notes += _unused_options(options, [*(kind for _, kind in found), *packed])
    return plan


def _unused_options(options: SourceOptions, kinds: Sequence[str]) -> list[str]:
    """Return notes on options for formats that no input has."""
    said = {
        "--text-column": (options.text_column is not None, {CSV, PARQUET, ARROW}, "table"),
        "--csv-header": (options.csv_header != "auto", {CSV}, "csv"),
        "--csv-delimiter": (options.csv_delimiter is not None, {CSV}, "csv"),
        "--document-separator": (options.document_separator is not None, {TXT}, "txt"),
        "--one-document-per-file": (options.one_document_per_file, {TXT}, "txt"),
        "--encoding": (options.encoding != "auto", {CSV, JSONL, ARRAY, TXT}, "text"),
    }
    return [
        f"{flag}: has no effect, no input is a {name}"
        for flag, (given, wanted, name) in said.items()
        if given and kinds and not wanted & set(kinds)
    ]


def _files(name: str, options: SourceOptions, plan: SourcePlan) -> list[Path]:
    """Return the files that one word of `--input` names."""
    if name == str(STDIN):
        return [STDIN]
    if is_named(name):
        plan.notes.append(f"{name} is read from {(name := fetched(name, DATASET_FILES, 'dataset'))}")
    if url := _URL.match(name):
        raise DataError(f"{name}: only local files are read; download it first{_download_hint(name, url['scheme'])}")
    path = Path(name)
    if path.is_dir():
        files, about = dataset_files(path, options.dataset_split)
        plan.notes.append(f"{name}: {about}")
        return files
    if path.exists():
        if not path.is_file():
            raise DataError(
                f"{name} is a device or a pipe; write its content to a file first, or send it to standard input (-)"
            )
        return [path]
    if glob.has_magic(name):
        return _matching_files(name, plan)
    hint = ""
    if name.count("/") == 1 and not path.suffix:
        hint = f"; a dataset of the Hugging Face Hub is fetched by --input hf:{name}"
    raise DataError(f"{name}: no such file{hint}")


def _matching_files(pattern: str, plan: SourcePlan) -> list[Path]:
    """Return the files that a glob matches, and note the folders. Raises DataError if no file matches."""
    matched = [Path(match) for match in sorted(glob.glob(pattern, recursive=True), key=natural_sort_key)]
    files = [path for path in matched if path.is_file()]
    # `**` matches folders besides the files that are in them.
    entered = {parent for path in files for parent in path.parents}
    folders = [str(path) for path in matched if path.is_dir() and path not in entered]
    others = f"{_left_out(folders)}; give folders by their names" if folders else ""
    if not files:
        raise DataError(f"{pattern}: no file matches{others}")
    if others:
        plan.notes.append(f"{pattern}: {len(files)} files{others}")
    return files


def _download_hint(url: str, scheme: str) -> str:
    """Return the command that downloads a URL, for an error message."""
    commands = {
        "http": f"curl -LO {url}",
        "https": f"curl -LO {url}",
        "ftp": f"curl -O {url}",
        "s3": f"aws s3 cp --recursive {url} DIR",
        "gs": f"gcloud storage cp --recursive {url} DIR",
    }
    if scheme.lower() == "hf":
        return ", or give --input hf:ORG/NAME"
    command = commands.get(scheme.lower())
    return f": {command}" if command else " and give its path"


def _format(path: Path, options: SourceOptions) -> str:
    """Return the format of a file, as given or by name and content. Raises DataError if it cannot be used."""
    if path != STDIN and not os.access(path, os.R_OK):
        raise DataError(f"{path}: no permission to read it")
    if path.stat().st_size == 0 if path != STDIN else not raw_file(path, options.limits).beginning(1):
        raise DataError(f"{path}: the file is empty")
    if packing := _archive(path, options):
        return packing
    if options.input_format not in ("auto", JSONL):
        return options.input_format
    by_name = JSONL if options.input_format == JSONL else format_by_name(path)
    if by_name in (TXT, CSV, PARQUET, ARROW):
        return by_name
    # Before `open_text`, which takes the bytes of a table for text in an encoding that it cannot detect.
    binary = format_by_content(raw_file(path, options.limits).beginning(8))
    if by_name is None and binary in (PARQUET, ARROW):
        return binary
    beginning = open_text(path, options.encoding, options.limits).beginning(1024)
    found = resolve_format(by_name, format_by_content(beginning))
    if found is None:
        raise DataError(
            f"{path}: neither the name nor the beginning of the file tells its format; give --input-format (jsonl, "
            "json for one array, txt, csv, parquet or arrow)"
        )
    return found


def _archive(path: Path, options: SourceOptions) -> str | None:
    """Return tar or zip if a file, after decompression, is one; DataError if it is another archive or unreadable."""
    file = raw_file(path, options.limits)
    kind = archive_of(file.beginning(tarfile.BLOCKSIZE))
    if kind in (None, TAR) or (kind == ZIP and not file.compression):
        return kind
    named = f"{kind} archive" + (f", compressed with {file.compression}" if file.compression else "")
    raise DataError(f"{path} is a {named}, which is not read; unpack it first and give the folder: --input DIR")


def _source(
    path: Path, kind: str, text: TextFile | None, previews: dict[Path, CsvPreview], options: SourceOptions
) -> Source:
    if kind in (PARQUET, ARROW) and path == STDIN:
        raise DataError(f"-: {kind} is not read from standard input; write it to a file and give its path")
    if kind == PARQUET:
        return ParquetSource(path, options)
    if kind == ARROW:
        return ArrowSource(path, options)
    if kind in (TAR, ZIP):
        source = ArchiveSource(path, kind, options)
        if source.kind == TXT:
            _refuse_keys(path, options)
        return source
    assert text is not None
    if kind == CSV:
        others = [preview for other, preview in previews.items() if other != path]
        wanted = [*options.keys, *([options.text_column] if options.text_column else [])]
        if options.keys == (MESSAGES,):
            wanted += dialogue_keys(previews[path].names)
        header = {"yes": True, "no": False}.get(options.csv_header)
        if header is None:
            header = has_header(previews[path], others, wanted)
        if header is None:
            raise DataError(_header_unknown(path, previews[path], len(others)))
        return CsvSource(text, previews[path], options, header=header)
    if kind == ARRAY:
        return ArraySource(text, options.keys)
    if kind == JSONL:
        return TextSource(text, is_json=True, separator="\n")
    _refuse_keys(path, options)
    if options.one_document_per_file:
        return TextSource(text, is_json=False, separator=None)
    separator = options.document_separator or find_separator(_beginning(text))
    return TextSource(text, is_json=False, separator=separator)


def _refuse_keys(path: Path, options: SourceOptions) -> None:
    if options.keys != ("text",):
        raise DataError(f"{path} is plain text, which has no keys; leave out --json-keys {' '.join(options.keys)}")


def _header_unknown(path: Path, preview: CsvPreview, num_others: int) -> str:
    row = ", ".join(repr(cell[:40]) for cell in preview.rows[0])
    mixed = "; the flag holds for every csv of the command, so first give files of the other kind the same header"
    return (
        f"{path}: its first row ({row}) may be a header or text, and nothing in the files decides; give --csv-header "
        f"yes or --csv-header no{mixed if num_others else ''}"
    )


def _beginning(text: TextFile) -> Iterator[bytes]:
    """Yield enough of a text to contain its separator, if it has one."""
    seen = 0
    for block, _ in text.blocks():
        yield block
        seen += len(block)
        if seen > (_PREVIEW_BYTES_OF_STDIN if text.path == STDIN else _PREVIEW_BYTES):
            return


def dataset_files(folder: Path, split: str) -> tuple[list[Path], str]:
    """Return the files of a folder in natural order, and a description of the folder.

    Raises:  DataError if it has no data, several formats, or no such split.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = json_object(folder / "dataset_dict.json").get("splits") or sorted(
            path.name for path in folder.iterdir() if (path / "state.json").is_file()
        )
        chosen = _choose(folder, splits, split)
        return _save_to_disk_files(folder / chosen), f"Hugging Face dataset, split {chosen}"
    if (folder / "state.json").is_file():
        return _save_to_disk_files(folder), "Hugging Face dataset"
    return _folder_files(folder, split)


def _save_to_disk_files(folder: Path) -> list[Path]:
    """Return the Arrow files that `save_to_disk` wrote, in its order."""
    state = json_object(folder / "state.json")
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder} was saved with an indices mapping (_indices_data_files of state.json); save it again with "
            "dataset.flatten_indices().save_to_disk(...)"
        )
    names = [entry["filename"] for entry in state.get("_data_files", []) if isinstance(entry, dict)]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise DataError(f"{folder}: {', '.join(missing) or 'data files'} named by state.json are missing")
    return [folder / name for name in names]


def _folder_files(folder: Path, split: str) -> tuple[list[Path], str]:
    present = sorted(_walk(folder), key=lambda path: natural_sort_key(str(path.relative_to(folder))))
    files = [path for path in present if _is_data(path)]
    formats: dict[str, list[Path]] = {}
    for path in files:
        formats.setdefault(format_by_name(path) or "", []).append(path)
    if not formats:
        files = [path for path in present if Path(name_without_compression(path)).suffix in _ARCHIVES]
        if not files:
            raise DataError(f"{folder} holds no jsonl, json, txt, csv, parquet or arrow file, and no tar or zip")
    if len(formats) > 1:
        counts = ", ".join(f"{len(found)} {name} ({found[0].name}, ...)" for name, found in formats.items())
        one = f"'{folder}/*.{next(iter(formats))}'"
        raise DataError(f"{folder} holds files of several formats: {counts}; name those of one, such as {one}")
    splits = {path: _split_of(path) for path in files}
    found = sorted({name for name in splits.values() if name})
    data = set(files)
    others = _left_out([str(path.relative_to(folder)) for path in present if path not in data])
    if len(found) < 2:
        return files, f"folder with {len(files)} files{others}"
    chosen = _choose(folder, found, split)
    taken = [path for path in files if splits[path] == chosen]
    return taken, f"folder, split {chosen} with {len(taken)} of {len(files)} files{others}"


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that are not hidden, following links to folders.

    Each folder is read once, by its own name if it has one in `folder`: links may form a loop, or lead to one folder
    several times.
    """
    seen: set[str] = set()
    waiting = [str(folder)]
    while waiting:
        links = []
        for start in waiting:
            for base, subfolders, files in os.walk(start):
                if (real := os.path.realpath(base)) in seen:
                    subfolders.clear()
                    continue
                seen.add(real)
                yield from (Path(base, name) for name in files if not name.startswith("."))
                subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
                links += [path for name in subfolders if os.path.islink(path := os.path.join(base, name))]
        waiting = links


def _is_data(path: Path) -> bool:
    is_description = path.name in _DESCRIPTIONS or NOT_DATA.fullmatch(path.name)
    return not is_description and format_by_name(path) is not None and path.is_file()


def _left_out(names: Sequence[str]) -> str:
    """Describe what is not read; empty if there is nothing."""
    more = ", ..." if len(names) > _MAX_NAMES else ""
    return f"; left out: {', '.join(names[:_MAX_NAMES])}{more} ({len(names)} in all)" if names else ""


def _split_of(path: Path) -> str | None:
    """Return the split in a file name, as the Hugging Face hub and cache write it; None if there is none."""
    numbered = _NUMBERED.search(path.name)
    if numbered:
        name = numbered["split"]
        return _ALIASES.get(name.lower(), name)
    found = _SPLITS.search(path.name.split(".")[0])
    return _ALIASES.get(found[1].lower(), found[1].lower()) if found else None


def _choose(folder: Path, splits: Iterable[str], wanted: str) -> str:
    have = list(splits)
    if wanted not in have:
        raise DataError(f"{folder} has no split {wanted}; --dataset-split names one of {', '.join(have)}")
    return wanted
