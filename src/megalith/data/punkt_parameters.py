"""What the Punkt algorithm needs to know of a language: read from nltk's data or from a JSON file.

nltk's older data (`punkt`) are pickles, which are not read: loading one runs code. Its newer ones (`punkt_tab`) are
text. Nothing is downloaded.
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megalith.data.punkt import PunktParameters
from megalith.errors import DataError

_TABLES = ("abbrev_types.txt", "collocations.tab", "sent_starters.txt", "ortho_context.tab")


def find_parameters(language: str, file: str | None, folders: Sequence[str] = ()) -> PunktParameters:
    """The parameters of a language.

    Args:
        language: as nltk names it, such as english.
        file: a JSON file, or a folder with nltk's tables, that the user names; None looks where nltk looks.
        folders: where nltk looks first, those of the environment's NLTK_DATA.

    Raises:
        DataError: there are none, or they are damaged.
    """
    if file is not None:
        path = Path(file)
        return _from_tables(path) if path.is_dir() else _from_json(path)
    for folder in _places(folders):
        tables = folder / "tokenizers" / "punkt_tab" / language
        if tables.is_dir():
            return _from_tables(tables)
        archive = folder / "tokenizers" / "punkt_tab.zip"
        if archive.is_file():
            found = _from_archive(archive, language)
            if found is not None:
                return found
    raise DataError(_missing(language, folders))


def _places(folders: Sequence[str]) -> Iterator[Path]:
    """Where nltk looks for its data."""
    yield from map(Path, folders)
    yield Path.home() / "nltk_data"
    for base in (Path(sys.prefix), Path("/usr"), Path("/usr/local")):
        yield from (base / part / "nltk_data" for part in ("", "share", "lib"))


def _missing(language: str, folders: Sequence[str]) -> str:
    pickles = [folder / "tokenizers" / "punkt" for folder in _places(folders)]
    old = next((str(folder) for folder in pickles if folder.is_dir()), None)
    found = f" ({old} is nltk's older format, a pickle, which is not loaded)" if old else ""
    return (
        f"--split-sentences needs nltk's punkt_tab data for {language} (--lang), and they are not on this "
        f"machine{found}. On one with a network: pip install nltk && python -m nltk.downloader -d DIR punkt_tab; bring "
        "DIR here and set NLTK_DATA=DIR. Or give parameters of your own with --punkt-parameters FILE, or "
        "--sentence-splitter marks, which goes by punctuation alone (and is the one for Chinese)"
    )


def _from_tables(folder: Path) -> PunktParameters:
    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    return _tables(str(folder), read)


def _from_archive(archive: Path, language: str) -> PunktParameters | None:
    try:
        with zipfile.ZipFile(archive) as content:
            base = f"punkt_tab/{language}/"
            if base + _TABLES[0] not in content.namelist():
                return None

            def read(name: str) -> str:
                with content.open(base + name) as file:
                    return io.TextIOWrapper(file, encoding="utf-8").read()

            return _tables(str(archive), read)
    except zipfile.BadZipFile as error:
        raise DataError(f"{archive} is damaged: {error}") from error


def _tables(where: str, read: Callable[[str], str]) -> PunktParameters:
    try:
        abbreviations, collocations, starters, orthography = (read(name).split("\n") for name in _TABLES)
        pairs = (line.split("\t") for line in collocations if line)
        counts = (line.rsplit("\t", 1) for line in orthography if line)
        return PunktParameters(
            abbreviations=frozenset(filter(None, abbreviations)),
            collocations=frozenset((first, second) for first, second in pairs),
            starters=frozenset(filter(None, starters)),
            orthography={word: int(flags) for word, flags in counts},
        )
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{where}: the punkt tables are missing or damaged: {error}") from error


def _from_json(path: Path) -> PunktParameters:
    try:
        found = json.loads(path.read_bytes())
        return PunktParameters(
            abbreviations=frozenset(found["abbrev_types"]),
            collocations=frozenset((first, second) for first, second in found["collocations"]),
            starters=frozenset(found["sent_starters"]),
            orthography={word: int(flags) for word, flags in found["ortho_context"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"--punkt-parameters {path}: expected JSON with abbrev_types, collocations, sent_starters and "
            f"ortho_context ({error!r})"
        ) from error
