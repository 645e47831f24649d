"""Datasets put together into one, in bounded memory: what Megatron's tools/merge_datasets.py does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalith.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path
from megalith.errors import ConfigError
from megalith.tokenizers.card import read_card, require_same, write_card

_SIDE_FILES = (".card",)


@dataclass(frozen=True)
class Merged:
    """What was put together.

    Attributes:
        prefix: of the whole.
        num_documents: documents.
        num_tokens: tokens.
    """

    prefix: str
    num_documents: int
    num_tokens: int


def pairs_in(folder: Path) -> list[str]:
    """The prefixes of all pairs of a folder, in the order of their names.

    Raises:
        ConfigError: there is none, or a file is half of a pair.
    """
    if not folder.is_dir():
        raise ConfigError(f"--input {folder}: no such folder")
    files = [path for path in folder.iterdir() if path.is_file() and path.suffix not in _SIDE_FILES]
    halves = [path for path in files if path.suffix in (".bin", ".idx")]
    problems = [f"--input {folder}: {path.name} is no half of a .bin/.idx pair" for path in files if path not in halves]
    prefixes = sorted({str(path.with_suffix("")) for path in halves})
    for prefix in prefixes:
        missing = [path for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
        problems += [f"--input {folder}: {path.name} is missing, its other half is there" for path in missing]
    if problems:
        raise ConfigError(problems)
    if not prefixes:
        raise ConfigError(f"--input {folder}: there is no .bin/.idx pair in it")
    return prefixes


def merge(
    prefixes: Sequence[str],
    output_prefix: str,
    *,
    multimodal: bool = False,
    advanced: Callable[[str], None] = lambda prefix: None,
) -> Merged:
    """Put datasets together, in the order given.

    Args:
        prefixes: of the parts.
        output_prefix: of the whole.
        multimodal: whether the indices end with modes.
        advanced: told of each part before it is copied.

    Raises:
        ConfigError: the whole is one of its parts.
        DataError: a part is damaged, has another dtype or was made with another tokenizer; the disk is full.
    """
    whole = Path(output_prefix).absolute()
    if any(Path(prefix).absolute() == whole for prefix in prefixes):
        raise ConfigError(f"--output-prefix {output_prefix} is one of the parts; give another one")
    # All parts are looked at before anything is written.
    first = IndexedDataset(prefixes[0], multimodal=multimodal)
    cards = {prefix: card for prefix in prefixes if (card := read_card(prefix)) is not None}
    for prefix, card in cards.items():
        start = next(iter(cards))
        require_same((start, prefix), cards[start], card, "merge only what one tokenizer made")
    whole.parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(output_prefix, first.dtype, multimodal=multimodal) as writer:
        for prefix in prefixes:
            advanced(prefix)
            writer.add_index(prefix)
        writer.finalize()
        merged = Merged(output_prefix, writer.num_documents, writer.num_tokens)
    if len(cards) == len(prefixes):
        write_card(output_prefix, cards[prefixes[0]])
    return merged
