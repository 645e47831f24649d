"""Tools for .bin/.idx datasets: merge, statistics and verification, in bounded memory.

Merging repeats Megatron's tools/merge_datasets.py.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.indexed import (
    LOSS_MASK,
    MASK_FILES,
    TEMPLATE,
    IndexedDataset,
    IndexedWriter,
    bin_path,
    idx_path,
    remove_side_files,
)
from megalith.errors import ConfigError, DataError
from megalith.progress import task
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.fingerprint import read_fingerprint, require_same, write_fingerprint

_SIDE_FILES = (".card", TEMPLATE)
_AT_ONCE = 1 << 20  # entries or tokens
_DECODED, _LONGEST = 1000, 5  # dialogues
_NAMED = 20  # datasets in a message


@dataclass(frozen=True)
class MergeReport:
    """Size of a merged dataset."""

    prefix: str
    num_documents: int
    num_tokens: int


def dataset_prefixes(folder: Path) -> list[str]:
    """Return the prefixes of all pairs in a folder, sorted. Raises ConfigError if there is none or a half lacks."""
    if not folder.is_dir():
        raise ConfigError(f"--input {folder}: no such folder")
    files = [path for path in folder.iterdir() if path.is_file() and path.suffix not in _SIDE_FILES]
    halves = [path for path in files if path.suffix in (".bin", ".idx")]
    problems = [f"--input {folder}: {path.name} is neither .bin nor .idx" for path in files if path not in halves]
    prefixes = sorted({str(path.with_suffix("")) for path in halves})
    for prefix in prefixes:
        missing = [path for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
        problems += [f"--input {folder}: {path.name} is missing beside its other half" for path in missing]
    if problems:
        raise ConfigError(problems)
    if not prefixes:
        raise ConfigError(f"--input {folder}: the folder has no .bin/.idx pair")
    return without_masks(prefixes)


def without_masks(prefixes: Iterable[str]) -> list[str]:
    """Return the prefixes without those of loss masks, which are merged with their datasets."""
    found = list(prefixes)
    return [name for name in found if not (name.endswith(LOSS_MASK) and name.removesuffix(LOSS_MASK) in found)]


def merge(
    prefixes: Sequence[str],
    output_prefix: str,
    *,
    multimodal: bool = False,
    on_progress: Callable[[str], None] = lambda prefix: None,
) -> MergeReport:
    """Concatenate datasets, and their loss masks, in the given order.

    Args:
        on_progress: receives each prefix before it is copied.

    Raises:
        ConfigError: the output is one of the inputs.
        DataError: inputs are damaged, have other dtypes or were made with other tokenizers or chat templates; only some
            have a loss mask; all of this is said at once, before anything is written. Or the disk is full.
    """
    whole = Path(output_prefix).resolve()
    # The loss mask of an earlier dataset of the output prefix is replaced or removed, so it cannot be an input either.
    replaced = (whole, Path(f"{whole}{LOSS_MASK}"))
    if taken := [prefix for prefix in prefixes if Path(prefix).resolve() in replaced]:
        raise ConfigError(
            f"--output-prefix {output_prefix}: the merge replaces its input {taken[0]}; give another prefix"
        )
    parts = _check_parts(prefixes, multimodal=multimodal)
    masks = [] if parts.unmasked else [prefix + LOSS_MASK for prefix in prefixes]
    whole.parent.mkdir(parents=True, exist_ok=True)
    total = sum(path.stat().st_size for path in map(bin_path, prefixes) if path.is_file())
    with (
        task("merging", total, "B", counts="bytes merged"),
        IndexedWriter(output_prefix, parts.dtype, multimodal=multimodal) as writer,
    ):
        for prefix in prefixes:
            on_progress(prefix)
            writer.add_index(prefix)
        writer.finalize()
        merged = MergeReport(output_prefix, writer.num_documents, writer.num_tokens)
    _write_side_files(output_prefix, parts, masks)
    return merged


@dataclass(frozen=True)
class _Parts:
    """What the datasets of a merge have in common.

    Attributes:
        fingerprint: of all of them, None if one has none.
        unmasked: whether they have no loss masks.
        template: content of the chat template, empty if there is none.
    """

    dtype: np.dtype[Any]
    fingerprint: dict[str, Any] | None
    unmasked: bool
    template: bytes


def _check_parts(prefixes: Sequence[str], *, multimodal: bool) -> _Parts:
    """Open all datasets of a merge and return what they share. Raises DataError with all that keeps them apart."""
    from megalith.data.sft_dataset import open_mask

    problems: list[str] = []
    dtypes: dict[str, np.dtype[Any]] = {}
    fingerprints: dict[str, dict[str, Any]] = {}
    has_masks: dict[str, bool] = {}
    for prefix in dict.fromkeys(prefixes):
        try:
            dataset = IndexedDataset(prefix, multimodal=multimodal)
            dtypes[prefix], has_masks[prefix] = dataset.dtype, idx_path(prefix + LOSS_MASK).is_file()
            if has_masks[prefix]:
                open_mask(dataset)
            fingerprint = read_fingerprint(prefix)
            if fingerprint is not None:
                fingerprints[prefix] = fingerprint
                start = next(iter(fingerprints))
                require_same((start, prefix), fingerprints[start], fingerprint, "merge datasets of one tokenizer only")
        except DataError as error:
            problems.append(str(error))
    first = next(iter(dtypes), prefixes[0])
    problems += [
        f"{prefix} holds {dtype.name} and {first} {dtypes[first].name}; merge datasets of one type only"
        for prefix, dtype in dtypes.items()
        if dtype != dtypes[first]
    ]
    unmasked = [prefix for prefix, masked in has_masks.items() if not masked]
    if 0 < len(unmasked) < len(has_masks):
        shown = ", ".join(unmasked[:_NAMED]) + (" ..." if len(unmasked) > _NAMED else "")
        problems.append(f"{shown}: no loss mask, and others have one; merge them apart")
    templates = {_content(Path(prefix + TEMPLATE)) for prefix in dtypes}
    if len(templates) > 1:
        problems.append(f"{first} and others were made with different chat templates; make all with one")
    if problems:
        raise DataError("\n".join(problems))
    fingerprint = fingerprints[first] if len(fingerprints) == len(dtypes) else None
    return _Parts(dtypes[first], fingerprint, bool(unmasked), templates.pop())


def _write_side_files(prefix: str, parts: _Parts, masks: Sequence[str]) -> None:
    """Write what lies beside a merged pair; remove what an earlier dataset of the prefix had and this one has not."""
    if parts.fingerprint is None:
        remove_side_files(prefix, ".card")
    else:
        write_fingerprint(prefix, parts.fingerprint)
    if masks:
        merge(masks, prefix + LOSS_MASK)
    else:
        remove_side_files(prefix, *MASK_FILES)
    if parts.template:
        Path(prefix + TEMPLATE).write_bytes(parts.template)
    else:
        remove_side_files(prefix, TEMPLATE)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


@dataclass(frozen=True)
class LengthBin:
    """Documents of `low` to `high` tokens, both included."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class DatasetStatistics:
    """Number and lengths of the documents of a dataset.

    Attributes:
        documents: documents, empty ones included.
        empty: documents without a token.
        sequences: sequences; as many as documents that are not empty, unless they are sentences.
        shortest: tokens of the shortest document that is not empty.
        histogram: documents by length, in powers of two.
    """

    documents: int
    empty: int
    sequences: int
    tokens: int
    shortest: int
    longest: int
    histogram: tuple[LengthBin, ...]


def dataset_statistics(dataset: IndexedDataset) -> DatasetStatistics:
    """Count documents, sequences and tokens, and build the histogram of document lengths."""
    counts, sums = np.zeros(64, np.int64), np.zeros(64, np.int64)
    shortest, longest = 0, 0
    for lengths in _document_lengths(dataset):
        filled = lengths[lengths > 0]
        if not len(filled):
            counts[0] += len(lengths)
            continue
        bins = np.zeros(len(lengths), np.int64)
        bins[lengths > 0] = np.frexp(filled.astype(np.float64))[1]  # 1 -> 1, 2 to 3 -> 2, 4 to 7 -> 3
        counts += np.bincount(bins, minlength=64)
        sums += np.bincount(bins, weights=lengths, minlength=64).astype(np.int64)
        shortest = min(shortest or int(filled.min()), int(filled.min()))
        longest = max(longest, int(filled.max()))
    histogram = tuple(
        LengthBin(1 << number - 1, (1 << number) - 1, int(counts[number]), int(sums[number]))
        for number in range(1, 64)
        if counts[number]
    )
    return DatasetStatistics(
        documents=dataset.num_documents,
        empty=int(counts[0]),
        sequences=len(dataset),
        tokens=dataset.num_tokens,
        shortest=shortest,
        longest=longest,
        histogram=histogram,
    )


def count_duplicates(dataset: IndexedDataset, on_read: Callable[[int], None] = lambda done: None) -> tuple[int, int]:
    """Count the documents, and their tokens, that equal an earlier one by a hash of 128 bits; empty ones do not count.

    Memory: 16 bytes a document, and those of a sort. `on_read` receives the tokens of each document.
    """
    digests, lengths = bytearray(), np.concatenate([np.zeros(0, np.int64), *_document_lengths(dataset)])
    lengths = lengths[lengths > 0]
    bounds = dataset.document_index.tolist()
    for first, last in zip(bounds, bounds[1:], strict=False):
        if content := b"".join(dataset.get(sequence).tobytes() for sequence in range(first, last)):
            digests += hashlib.blake2b(content, digest_size=16).digest()
            on_read(len(content) // dataset.dtype.itemsize)
    _, earliest = np.unique(np.frombuffer(digests, "S16"), return_index=True)
    return len(lengths) - len(earliest), int(lengths.sum() - lengths[earliest].sum())


def letters_by_script(texts: Iterable[str]) -> dict[str, int]:
    """Count letters by script, the most frequent first: the first word of their names in Unicode, Han for CJK."""
    characters: Counter[str] = Counter()
    for text in texts:
        characters.update(text)
    scripts: Counter[str] = Counter()
    for character, count in characters.items():
        if character.isalpha():
            name = unicodedata.name(character, "unnamed").split()[0].capitalize()
            scripts["Han" if name == "Cjk" else name] += count
    return dict(scripts.most_common())


def dialogue_statistics(
    dataset: IndexedDataset, mask: IndexedDataset, tokenizer: Tokenizer, seq_length: int | None
) -> dict[str, Any]:
    """Measure dialogues, one a sequence: what is learnt, the longest, and with a `seq_length` what rows of it hold.

    Characters a token are those of `_DECODED` dialogues from all over the dataset.
    """
    lengths = np.asarray(dataset.lengths, np.int64)
    sample = np.unique(np.linspace(0, len(lengths) - 1, min(len(lengths), _DECODED)).astype(int)).tolist()
    characters = sum(len(tokenizer.decode(dataset.get(number).tolist())) for number in sample)
    learnt = sum(int(np.count_nonzero(part)) for part in _tokens(mask))
    longest = np.argsort(-lengths, kind="stable")[:_LONGEST].tolist()
    found: dict[str, Any] = {
        "learnt_tokens": learnt,
        "learnt_share": learnt / max(1, dataset.num_tokens),
        "characters_per_token": characters / max(1, int(lengths[sample].sum())),
        "longest": [[number, int(lengths[number])] for number in longest],
    }
    if seq_length is not None:
        from megalith.data.sft_dataset import pack

        over = lengths[lengths > seq_length + 1]  # the last token of a dialogue is only predicted
        sizes = np.minimum(lengths - 1, seq_length)
        rows = pack(sizes, seq_length).num_rows
        found |= {"seq_length": seq_length, "cut_documents": len(over)}
        found |= {"cut_tokens": int((over - seq_length - 1).sum()), "rows": rows}
        found["fill"] = int(sizes.sum()) / max(1, rows * seq_length)
    return found


def verify_tokens(dataset: IndexedDataset, vocab_size: int, on_read: Callable[[int], None] = lambda done: None) -> int:
    """Check every token against the vocabulary and return the largest; `on_read` receives the tokens read so far.

    Raises:  DataError naming the first id outside the vocabulary, its sequence and its byte in the .bin.
    """
    largest, done = -1, 0
    for tokens in _tokens(dataset):
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocab_size:
            at = int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
            byte = (done + at) * dataset.dtype.itemsize
            sequence = int(np.searchsorted(dataset.pointers, byte, side="right")) - 1
            raise DataError(
                f"{bin_path(dataset.prefix)}: token {int(tokens[at])} at byte {byte} (sequence {sequence}) is outside "
                f"the vocabulary of {vocab_size}; the file is damaged or was made with another tokenizer"
            )
        largest, done = max(largest, high), done + len(tokens)
        on_read(done)
    return largest


def verify_mask(dataset: IndexedDataset, *, read: bool = True) -> int | None:
    """Check the loss mask beside a dataset, and return the tokens that are learnt; None if it is not to be `read`.

    Raises:  DataError if a file is missing or damaged, the mask is of another dataset, or a value is not 0 or 1.
    """
    from megalith.data.sft_dataset import open_mask

    prefix = dataset.prefix + LOSS_MASK
    IndexedDataset(prefix, mmap_bin=False)  # names the half that is missing
    mask = open_mask(dataset, mmap_bin=False)
    if not read:
        return None
    learnt, done = 0, 0
    for part in _tokens(mask):
        if part.max() > 1:
            at = int(np.argmax(part > 1))
            raise DataError(
                f"{bin_path(prefix)}: the value at byte {done + at} is {int(part[at])}, and a loss mask has 0 and 1 "
                "only; preprocess the conversations again"
            )
        learnt, done = learnt + int(np.count_nonzero(part)), done + len(part)
    return learnt


def documents_without_end(dataset: IndexedDataset, eod: int) -> int:
    """Count the non-empty documents whose last token is not `eod`."""
    missing, size = 0, dataset.dtype.itemsize
    for start in range(0, dataset.num_documents, _AT_ONCE):
        bounds = dataset.document_index[start : start + _AT_ONCE + 1]
        last = bounds[1:][np.diff(bounds) > 0] - 1
        if len(last):
            ends = dataset.pointers[last] // size + dataset.lengths[last]
            # Mapped anew for each block, so that the pages of the last one are freed.
            tokens = np.memmap(bin_path(dataset.prefix), dataset.dtype, mode="r")
            missing += int((tokens[ends - 1] != eod).sum())
    return missing


def _document_lengths(dataset: IndexedDataset) -> Iterator[NDArray[np.int64]]:
    """Yield the tokens of each document, in blocks of at most `_AT_ONCE` documents."""
    for start in range(0, dataset.num_documents, _AT_ONCE):
        bounds = dataset.document_index[start : start + _AT_ONCE + 1]
        first = int(bounds[0])
        ends = np.concatenate([[0], np.cumsum(dataset.lengths[first : int(bounds[-1])], dtype=np.int64)])
        yield np.diff(ends[bounds - first])


def _tokens(dataset: IndexedDataset) -> Iterator[NDArray[Any]]:
    with bin_path(dataset.prefix).open("rb") as file:
        while content := file.read(_AT_ONCE * dataset.dtype.itemsize):
            yield np.frombuffer(content, dataset.dtype)
