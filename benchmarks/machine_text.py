"""A corpus of the text that a Debian machine holds: sources and documents, and a card that says what is in it.

    python benchmarks/machine_text.py --out machine-text --wikitext wikitext-2/valid.txt

Writes train.jsonl, valid.jsonl, a byte-level BPE of them (vocab.json, merges.txt), licences.tsv and a card in
Markdown. The same files on a machine give the same bytes. Sources, in this order:

- this Python's standard library with its tests;
- the packages installed beside this Python under a licence of `LICENCES`;
- of each Debian package with a copyright file, outside non-free: Python sources, documents, English man pages;
- WikiText-2, if --wikitext names the file; keep its test part for measurements.

A document is a file of UTF-8 text. Texts that are equal to the byte occur once, under the first source. Documents are
in the order of their SHA-256, which also chooses those of valid.jsonl.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from megalith.tokenizers import train_byte_level_bpe

LICENCES = re.compile(r"\b(MIT|BSD|0BSD|Apache|PSF|Python Software|MPL|Mozilla|ISC|Zlib|CC0|BSL|HPND)\b", re.IGNORECASE)
SOURCES, TEXTS = {".py", ".pyi"}, {".md", ".rst", ".txt"}
MARKUP = {".html", ".htm", ".svg", ".css", ".xml", ".js", ".json", ".map", ".csv", ".po", ".ps", ".eps", ".pem", ".crt"}
SMALLEST, LARGEST = 64, 1 << 20  # bytes of a document: below are empty modules, above are mostly tables
CONTROL = re.compile(r"[^\t\n\f\r -~\u00a0-\U0010ffff]")
VALIDATION = 100  # one document in so many
TOKENIZER_BYTES, VOCABULARY = 32 << 20, 4096


class Candidate(NamedTuple):
    """A file that may become a document: where it lies, whose it is, and under which licences."""

    path: Path
    owner: str
    licences: tuple[str, ...]


@dataclass
class Source:
    """What became of the files of one source; sizes are bytes of the text."""

    counts: Counter[str] = field(default_factory=Counter)
    size: int = 0
    owners: dict[str, list[int]] = field(default_factory=dict)  # owner -> documents, bytes
    licences: dict[str, tuple[str, ...]] = field(default_factory=dict)  # owner -> names


# --- where files are ----------------------------------------------------------------------------------------------


def standard_library() -> Iterator[Candidate]:
    """Yield the modules of this Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts):
            yield Candidate(path, "python", ("PSF-2.0",))


def environment() -> Iterator[Candidate]:
    """Yield the sources and documents of the packages of this environment whose licence is in the list."""
    named = {distribution.metadata["Name"]: distribution for distribution in distributions()}
    for name, distribution in sorted(named.items(), key=lambda item: item[0].lower()):
        licence = licence_of(distribution)
        if LICENCES.search(licence) and "GPL" not in licence:
            files = (Path(str(file.locate())) for file in distribution.files or () if ".." not in file.parts)
            for path in sorted(file for file in files if file.suffix in SOURCES | TEXTS):
                yield Candidate(path, name, (licence,))


def licence_of(distribution: Distribution) -> str:
    """Return the licence that the metadata of a package name: an SPDX expression, classifiers, or a short text."""
    about = distribution.metadata
    if expression := about.get("License-Expression"):
        return str(expression)
    classifiers = [text.rpartition("::")[2].strip() for text in about.get_all("Classifier") or () if "License" in text]
    return ", ".join(classifiers) or str(about.get("License") or "not named").strip().split("\n")[0][:60]


def debian(pattern: str, root: Path = Path("/")) -> Iterator[Candidate]:
    """Yield the files of Debian packages whose path fits a pattern; none of packages without a copyright file."""
    dpkg, documents = root / "var/lib/dpkg", root / "usr/share/doc"
    status = (dpkg / "status").read_text(encoding="utf-8") if (dpkg / "status").exists() else ""
    sections = dict(re.findall(r"^Package: (\S+)\n(?:\S.*\n|\s.*\n)*?Section: (\S+)", status, re.MULTILINE))
    fits = re.compile(pattern)
    for listing in sorted((dpkg / "info").glob("*.list")):
        package = listing.stem.partition(":")[0]
        licences = debian_licences(documents / package / "copyright")
        if licences and not sections.get(package, "").startswith(("non-free", "contrib")):
            for line in sorted(listing.read_text(encoding="utf-8").splitlines()):
                if fits.search(line):
                    yield Candidate(root / line.lstrip("/"), package, licences)


def debian_licences(copyright_file: Path) -> tuple[str, ...]:
    """Return the names of licences in a copyright file of Debian; empty if there is no such file."""
    if not copyright_file.is_file():
        return ()
    text = copyright_file.read_text(encoding="utf-8", errors="replace")
    names = re.findall(r"^License: *(\S.*)$", text, re.MULTILINE) if text.startswith("Format:") else []
    return tuple(sorted({name.strip() for name in names})) or ("in prose, see its copyright file",)


def wikitext(file: Path | None) -> Iterator[Candidate]:
    if file is not None:
        yield Candidate(file, "WikiText-2", ("CC-BY-SA-3.0", "GFDL-1.3"))


def all_sources(wikitext_file: Path | None) -> dict[str, Iterator[Candidate]]:
    """Return the candidates of each source by its name."""
    return {
        "Python's standard library": standard_library(),
        "packages of the environment": environment(),
        "Debian: Python sources": debian(r"^/usr/lib/python3[^ ]*\.pyi?$"),
        "Debian: documents": debian(r"^/usr/share/doc/."),
        "Debian: man pages": debian(r"^/usr/share/man/man[1-9]/."),
        "WikiText-2": wikitext(wikitext_file),
    }


# --- what becomes a document --------------------------------------------------------------------------------------


def read_text(path: Path) -> str | None:
    """Return the text of a file, which may be packed by gzip; None if it is not UTF-8 text, or markup or a table."""
    name = path.with_suffix("") if path.suffix == ".gz" else path
    if name.suffix.lower() in MARKUP:
        return None
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError):
        return None
    return None if CONTROL.search(text) else text.replace("\r\n", "\n")


def parts_of(candidate: Candidate) -> Iterator[str | None]:
    """Yield the documents of a file: the file itself, but of WikiText each article."""
    text = read_text(candidate.path)
    if text is None or candidate.owner != "WikiText-2":
        yield text
    else:
        yield from re.split(r"(?m)^(?= = [^=].* = $)", text)


def collect(sources: Mapping[str, Iterable[Candidate]]) -> tuple[dict[bytes, tuple[Candidate, int]], dict[str, Source]]:
    """Choose the documents.

    Returns:
        SHA-256 -> file and number of the part, and what became of each source.
    """
    found, about = dict[bytes, tuple[Candidate, int]](), {name: Source() for name in sources}
    for name, candidates in sources.items():
        source = about[name]
        for candidate in candidates:
            if candidate.path.is_symlink() or not candidate.path.is_file():
                continue
            source.counts["files"] += 1
            for number, text in enumerate(parts_of(candidate)):
                data = (text or "").encode()
                if what := reject(text, data):
                    source.counts[what] += 1
                elif (digest := hashlib.sha256(data).digest()) in found:
                    source.counts["duplicates"] += 1
                else:
                    found[digest] = (candidate, number)
                    source.counts["documents"] += 1
                    source.size += len(data)
                    owner = source.owners.setdefault(candidate.owner, [0, 0])
                    owner[:] = owner[0] + 1, owner[1] + len(data)
                    source.licences[candidate.owner] = candidate.licences
    return found, about


def reject(text: str | None, data: bytes) -> str:
    """Return why a text is left out; empty if it is not."""
    if text is None:
        return "not text"
    return "too short" if len(data) < SMALLEST else "too long" if len(data) > LARGEST else ""


def texts_of(found: Mapping[bytes, tuple[Candidate, int]], *, validation: bool) -> Iterator[str]:
    """Yield the documents of one part of the corpus, in the order of their hashes."""
    for digest in sorted(found):
        if (int.from_bytes(digest[:4], "big") % VALIDATION == 0) == validation:
            candidate, number = found[digest]
            text = [*parts_of(candidate)][number]
            assert text is not None, candidate.path
            yield text


def first_bytes(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield texts until there are so many bytes of them."""
    for text in texts:
        if size <= 0:
            return
        yield text
        size -= len(text.encode())


# --- what is written ----------------------------------------------------------------------------------------------


def write_part(path: Path, texts: Iterable[str]) -> str:
    """Write a part of the corpus and return its row of the card."""
    digest, count, size = hashlib.sha256(), 0, 0
    with path.open("wb") as file:
        for text in texts:
            line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
            file.write(line)
            digest.update(line)
            count, size = count + 1, size + len(text.encode())
    return f"| {path.name} | {count:,} | {size:,} | `{digest.hexdigest()}` |"


def card(about: Mapping[str, Source], parts: Iterable[str], vocabulary: int) -> str:
    """Return the card in Markdown."""
    columns = ("files", "not text", "too short", "too long", "duplicates", "documents")
    lines = [
        "# The text of a machine",
        "",
        f"Written by `benchmarks/machine_text.py`. {system_name()}",
        "",
        f"| source | {' | '.join(columns)} | bytes | owners |",
        f"|---|{'---|' * (len(columns) + 2)}",
    ]
    for name, source in about.items():
        counts = " | ".join(f"{source.counts[column]:,}" for column in columns)
        lines.append(f"| {name} | {counts} | {source.size:,} | {len(source.owners):,} |")
    total = [sum(source.counts[column] for source in about.values()) for column in columns]
    size = sum(source.size for source in about.values())
    lines += [
        f"| all | {' | '.join(f'{number:,}' for number in total)} | {size:,} | |",
        "",
        f"Not text: no UTF-8, control characters, or markup and data by the name ({', '.join(sorted(MARKUP))}). "
        f"Documents have {SMALLEST} to {LARGEST:,} bytes. Duplicates are texts whose SHA-256 occurred before; near "
        "duplicates stay, and nothing else is filtered. An article of WikiText-2 is a document, elsewhere a file is.",
        "",
        "## Split",
        f"One document in {VALIDATION}, by its hash, is for validation. Documents are in the order of their hashes.",
        "",
        "| file | documents | bytes of text | SHA-256 |",
        "|---|---|---|---|",
        *parts,
        "",
        f"Tokenizer: byte-level BPE of {vocabulary:,} ids, of the first {TOKENIZER_BYTES >> 20} MiB of train.jsonl.",
        "",
        "## Licences",
        "The packages that name each licence, by their metadata or copyright file; licences.tsv has a line for each "
        "package with its documents. Files keep the licence that they have where they lie. The texts name authors and "
        "their addresses (change logs, copyright files): the corpus is for work on this machine, not for publication.",
        "",
        "| source | licence (packages) |",
        "|---|---|",
    ]
    for name, source in about.items():
        named = Counter(chain.from_iterable(source.licences.values()))
        common = sorted(named.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{licence.replace('|', '/')} ({count})" for licence, count in common[:12])
        rest = f", {len(common) - 12} others" if len(common) > 12 else ""
        lines.append(f"| {name} | {shown}{rest} |")
    return "\n".join(lines) + "\n"


def system_name() -> str:
    """Return the name of the system's release."""
    release = Path("/etc/os-release").read_text(encoding="utf-8") if Path("/etc/os-release").exists() else ""
    name = re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.MULTILINE)
    return f"System: {name[1] if name else 'not known'}; Python {sysconfig.get_python_version()}."


def licence_table(about: Mapping[str, Source]) -> str:
    """Return the text of licences.tsv."""
    rows = [
        f"{name}\t{owner}\t{'; '.join(source.licences[owner])}\t{count}\t{size}"
        for name, source in about.items()
        for owner, (count, size) in sorted(source.owners.items())
    ]
    return "\n".join(["source\towner\tlicences\tdocuments\tbytes", *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that is made")
    parser.add_argument("--wikitext", type=Path, help="WikiText-2's validation part, as text")
    options = parser.parse_args()
    if options.wikitext and not options.wikitext.is_file():
        parser.error(f"--wikitext {options.wikitext}: no such file")
    options.out.mkdir(parents=True, exist_ok=True)
    found, about = collect(all_sources(options.wikitext))
    rows = [
        write_part(options.out / f"{name}.jsonl", texts_of(found, validation=name == "valid"))
        for name in ("train", "valid")
    ]
    learned = first_bytes(texts_of(found, validation=False), TOKENIZER_BYTES)
    vocab_file, _ = train_byte_level_bpe(learned, VOCABULARY, options.out)
    vocabulary = len(json.loads(vocab_file.read_text(encoding="utf-8")))
    (options.out / "licences.tsv").write_text(licence_table(about), encoding="utf-8")
    (options.out / "card.md").write_text(card(about, rows, vocabulary), encoding="utf-8")
    print(f"{len(found):,} documents, {sum(s.size for s in about.values()) / 1e6:.1f} MB; {options.out / 'card.md'}")


if __name__ == "__main__":
    main()
