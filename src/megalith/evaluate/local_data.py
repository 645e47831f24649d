"""The questions of a benchmark from files on this machine, in the forms in which they are distributed.

A folder may be a dataset of the Hugging Face Hub as it is downloaded (parquet files by subject and split, or a zip
archive), what is in the archive, or the jsonl files of the authors. Nothing is fetched: what is missing is named, with
the command that gets it.
"""

from __future__ import annotations

import csv
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith.errors import DataError
from megalith.tokenizers.protocol import import_for

Row = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """Questions with known answers that lm-eval asks.

    Attributes:
        task: lm-eval's name of it.
        tasks: lm-eval's folder of it; the descriptions of all take 15 s to read.
        repository: dataset of the Hugging Face Hub.
        columns: that each file has.
        of_subject: begins lm-eval's names of the parts about one subject; None where there are no parts.
    """

    about: str
    task: str
    tasks: str
    repository: str
    columns: tuple[str, ...]
    of_subject: str | None = None

    @property
    def download(self) -> str:
        return f"hf download {self.repository} --repo-type dataset --local-dir"


_LETTERS = ("A", "B", "C", "D")
BENCHMARKS = {
    "mmlu": Benchmark(
        "57 subjects, four choices each (Hendrycks et al. 2020, arXiv:2009.03300)",
        *("mmlu", "mmlu/default", "cais/mmlu", ("question", "choices", "answer"), "mmlu_"),
    ),
    "ceval": Benchmark(
        "52 subjects in Chinese, validation split (Huang et al. 2023, arXiv:2305.08322)",
        *("ceval-valid", "ceval", "ceval/ceval-exam", ("question", *_LETTERS, "answer"), "ceval-valid_"),
    ),
    "cmmlu": Benchmark(
        "67 subjects in Chinese (Li et al. 2023, arXiv:2306.09212)",
        *("cmmlu", "cmmlu", "haonan-li/cmmlu", ("Question", *_LETTERS, "Answer"), "cmmlu_"),
    ),
    "gsm8k": Benchmark(
        "school mathematics, the model writes the solution (Cobbe et al. 2021, arXiv:2110.14168)",
        *("gsm8k", "gsm8k", "openai/gsm8k", ("question", "answer")),
    ),
    "hellaswag": Benchmark(
        "which of four endings follows (Zellers et al. 2019, arXiv:1905.07830)",
        *("hellaswag", "hellaswag", "Rowan/hellaswag", ("activity_label", "ctx_a", "ctx_b", "endings", "label")),
    ),
}
"""Name of a task of `megalith evaluate` that lm-eval measures -> what it is and where its questions come from."""

_SPELLINGS = {"validation": "(?:validation|valid|val)", "val": "(?:validation|valid|val)"}
_SHARD = r"(?:-(?P<number>\d+)-of-(?P<count>\d+))?"
_END = r"\.(?:parquet|jsonl|json|csv)"


class LocalDataset:
    """The files of a benchmark in a folder, by part and split."""

    def __init__(self, folder: Path, benchmark: Benchmark) -> None:
        self.folder, self.benchmark = folder, benchmark
        self._files = dict(_files_in(folder))

    def rows(self, part: str | None, split: str) -> list[Row]:
        """Return the rows of a split; `part` is the subject or configuration, None where there is one only.

        Raises:
            DataError: No file has them, or a file is damaged or has other columns; names it.
        """
        names = self._names(part, split)
        rows = [row for name in names for row in _read(f"{self.folder}/{name}", name, self._files[name])]
        if not rows:
            raise DataError(f"{self.folder}/{names[0]} has no rows; get it again: {self._command}")
        if lacking := [column for column in self.benchmark.columns if column not in rows[0]]:
            raise DataError(
                f"{self.folder}/{names[0]} has no column {', '.join(lacking)}; it has {', '.join(map(str, rows[0]))}. "
                f"The form that is read is that of {self.benchmark.repository}: {self._command}"
            )
        return rows

    @property
    def _command(self) -> str:
        return f"{self.benchmark.download} {self.folder}"

    def _names(self, part: str | None, split: str) -> list[str]:
        """Return the names of the files with a split, all shards in order."""
        end, word = _SHARD + _END, _SPELLINGS.get(split, re.escape(split))
        of_part = re.escape(part or "default")
        for form in (rf"(?:.*/)?{of_part}/{word}{end}", rf"(?:.*/)?{word}/{of_part}(?:_{word})?{end}",
                     rf"(?:data/)?(?:{self.benchmark.task}_)?{word}{end}"):  # fmt: skip
            if form.startswith("(?:data") and self.benchmark.of_subject is not None:
                continue
            found = [(name, match) for name in sorted(self._files) if (match := re.fullmatch(form, name))]
            if not found:
                continue
            name, match = found[0]
            count = int(match["count"] or 1)
            shards = [name for name, other in found if other["count"] == match["count"]][:count]
            if len(shards) < count:
                raise DataError(
                    f"{self.folder}: {name} is one of {count} files, {len(shards)} are there; {self._command}"
                )
            return shards
        shown = f"{part}/{split}-00000-of-00001.parquet or {split}/{part}.csv" if part else f"{split}.jsonl"
        raise DataError(
            f"--data {self.folder} has no {split} split{f' of {part}' if part else ''} ({shown}, also in a zip "
            f"archive); get it: {self._command}"
        )


def _files_in(folder: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield the files of a folder, and those in its zip archives, by their path in it."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".zip" and path.is_file():
            try:
                names = [name for name in zipfile.ZipFile(path).namelist() if not name.startswith("__MACOSX")]
            except (zipfile.BadZipFile, OSError) as error:
                raise DataError(f"{path} is damaged: {error}") from error
            yield from ((name, _Member(path, name)) for name in names)
        elif path.is_file() and ".cache" not in path.parts:
            yield path.relative_to(folder).as_posix(), path.read_bytes


@dataclass(frozen=True)
class _Member:
    archive: Path
    name: str

    def __call__(self) -> bytes:
        return zipfile.ZipFile(self.archive).read(self.name)


def _read(where: str, name: str, content: Callable[[], bytes]) -> Sequence[Row]:
    """Return the rows of a file, by the end of its name."""
    try:
        if name.endswith(".parquet"):
            parquet = import_for(f"{where}: reading it", "pyarrow.parquet", "data")
            rows: list[Row] = parquet.read_table(io.BytesIO(content())).to_pylist()
            return rows
        text = content().decode("utf-8-sig")
        if name.endswith(".csv"):
            return list(csv.DictReader(io.StringIO(text, newline="")))
        if name.endswith(".json"):
            return list(json.loads(text))
        return [_object(where, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    except (OSError, ValueError, csv.Error, zipfile.BadZipFile) as error:
        raise DataError(f"{where} is damaged: {error}") from error


def _object(where: str, number: int, line: str) -> Row:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}, line {number}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{where}, line {number}: no JSON object")
    return found
