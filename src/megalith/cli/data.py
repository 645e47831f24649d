"""`megalith data COMMAND`: inspect, measure, verify and merge .bin/.idx datasets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.cli.arguments import CommandParser, below_one, below_zero
from megalith.config.tokenizer_flags import add_import_flag, add_tokenizer_flags, tokenizer_of_flags
from megalith.config.values import local_name, local_path
from megalith.errors import ConfigError, DataError
from megalith.progress import task
from megalith.train.streams import warn

if TYPE_CHECKING:
    from megalith.config import TokenizerConfig
    from megalith.data.dataset_tools import DatasetStatistics
    from megalith.data.indexed import IndexedDataset
    from megalith.tokenizers import Tokenizer

_BAR = 40
_SHOWN_TOKENS = 200
_SHOWN_OF_DIALOGUE = 2000


def run(argv: Sequence[str]) -> int:
    """Run a sub-command and return its exit code; 3 if a dataset is damaged."""
    options = make_parser().parse_args(argv)
    exit_code: int = options.run(options)
    return exit_code


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all sub-commands."""
    parser = CommandParser(
        prog="megalith data",
        description="Inspect, verify and merge .bin/.idx datasets; `megalith preprocess` writes them.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_inspect, _add_stats, _add_verify, _add_merge):
        add(commands)
    return parser


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="print counts, lengths, tokenizer card and documents of a dataset")
    parser.add_argument(
        "--first", type=int, default=0, metavar="I", help="first document to print, from 0 (default: 0)"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="of dialogues with a loss mask: what is learnt, the rest in grey (without colours: in [[ ]])",
    )
    parser.add_argument(
        "--seq-length",
        type=int,
        metavar="N",
        help="with --chat: what does not fit rows of N tokens, and how full they get",
    )
    _add_dataset(parser)
    parser.set_defaults(sample=None)


def _add_stats(commands: Any) -> None:
    parser = commands.add_parser(
        "stats",
        help="as inspect, of all of the content: duplicates, scripts of the letters, and documents from all over it",
        description="Print what inspect prints, the documents that equal an earlier one, and with a tokenizer the "
        "scripts of the letters in a sample.",
    )
    parser.add_argument(
        "--sample", type=int, default=1000, metavar="N", help="documents for the scripts (default: 1000)"
    )
    _add_dataset(parser)
    parser.set_defaults(first=None, chat=False, seq_length=None)


def _add_dataset(parser: CommandParser) -> None:
    add = parser.add_argument
    add("prefix", type=local_name, metavar="PREFIX", help="path of the dataset without .bin and .idx")
    add("--documents", type=int, default=3, metavar="N", help="number of documents to print (default: 3)")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add_import_flag(parser)
    add_tokenizer_flags(parser, about="to show documents as text instead of ids")
    parser.set_defaults(run=_run_inspect)


def _run_inspect(options: argparse.Namespace) -> int:
    from megalith.data.dataset_tools import dataset_statistics, dialogue_statistics
    from megalith.data.indexed import IndexedDataset
    from megalith.tokenizers import build_tokenizer
    from megalith.tokenizers.fingerprint import read_fingerprint, require_tokenizer_of_data

    config = _check_inspect(options)
    dataset = IndexedDataset(options.prefix, mmap_bin=False)
    if options.first and options.first >= dataset.num_documents:
        raise ConfigError(
            f"--first {options.first}: {options.prefix} has {dataset.num_documents} documents, counted from 0; give a "
            "smaller number"
        )
    tokenizer = None if config is None else build_tokenizer(config)
    if tokenizer is not None:
        note = require_tokenizer_of_data(options.prefix, tokenizer.fingerprint())
        if note:
            warn(f"note: {note}")
    found, card = dataset_statistics(dataset), read_fingerprint(options.prefix)
    content = {} if options.sample is None else _content(dataset, found, options.sample, tokenizer)
    mask = None
    if options.chat and tokenizer is not None:
        from megalith.data.sft_dataset import open_mask

        mask = open_mask(dataset)
        content = dialogue_statistics(dataset, mask, tokenizer, options.seq_length)
    if options.json:
        print(json.dumps(_record(dataset, found, card) | content))
        return 0
    _print_counts(dataset, found)
    if mask is None:
        _print_content(found, content)
    else:
        _print_dialogue_statistics(found, content)
    print("tokenizer " + (json.dumps(card) if card else "unknown: no .card beside the files"))
    shown = range(options.first or 0, min((options.first or 0) + options.documents, found.documents))
    for number in shown if options.first is not None else _spread(found.documents, options.documents):
        if mask is None or tokenizer is None:
            _print_document(dataset, number, tokenizer)
        else:
            _print_dialogue(dataset, mask, number, tokenizer)
    return 0


def _check_inspect(options: argparse.Namespace) -> TokenizerConfig | None:
    """Return the tokenizer of the flags, None without any. Raises ConfigError with all that is wrong with the flags."""
    violations = below_zero(options, "--first", "--documents", "--sample") + below_one(options, "--seq-length")
    config = None
    try:
        config = tokenizer_of_flags(options)
        if options.chat and config is None:
            violations.append("--chat shows dialogues as text: give the flags of the tokenizer (--tokenizer-type ...)")
    except ConfigError as error:
        violations += error.violations
    if options.seq_length is not None and not options.chat:
        violations.append(f"--seq-length {options.seq_length} needs --chat")
    if violations:
        raise ConfigError(violations)
    return config


def _record(dataset: IndexedDataset, found: DatasetStatistics, card: dict[str, Any] | None) -> dict[str, Any]:
    histogram = [[part.low, part.high, part.documents, part.tokens] for part in found.histogram]
    return {
        "prefix": dataset.prefix,
        "dtype": dataset.dtype.name,
        "documents": found.documents,
        "empty_documents": found.empty,
        "sequences": found.sequences,
        "tokens": found.tokens,
        "shortest": found.shortest,
        "longest": found.longest,
        "lengths": histogram,
        "tokenizer": card,
    }


def _print_counts(dataset: IndexedDataset, found: DatasetStatistics) -> None:
    print(dataset.prefix)
    print(f"documents {found.documents:,} ({found.empty:,} of them empty)")
    print(f"sequences {found.sequences:,}")
    print(f"tokens    {found.tokens:,} as {dataset.dtype.name} ({found.tokens * dataset.dtype.itemsize:,} bytes)")
    filled = found.documents - found.empty
    if not filled:
        return
    print(f"lengths   {found.shortest:,} to {found.longest:,} tokens, {found.tokens / filled:,.1f} on average")
    most = max(part.documents for part in found.histogram)
    for part in found.histogram:
        bar = "#" * max(1, round(_BAR * part.documents / most))
        print(f"  {part.low:>9,} to {part.high:>9,}  {part.documents:>11,}  {part.tokens / found.tokens:6.1%}  {bar}")
    print("  (tokens of a document, documents, share of all tokens)")


def _spread(documents: int, count: int) -> list[int]:
    """Return up to `count` numbers of documents, evenly spread over all."""
    count = min(documents, max(0, count))
    return [(2 * at + 1) * documents // (2 * count) for at in range(count)]


def _content(
    dataset: IndexedDataset, found: DatasetStatistics, sample: int, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return what only reading the tokens tells."""
    from megalith.data.dataset_tools import count_duplicates, letters_by_script

    with task("hashing documents", found.tokens, " tokens") as hashing:
        documents, tokens = count_duplicates(dataset, hashing.advance)
    content: dict[str, Any] = {"duplicate_documents": documents, "duplicate_tokens": tokens}
    if tokenizer is not None:
        texts = (
            tokenizer.decode(dataset.get(sequence).tolist())
            for number in _spread(found.documents, sample)
            for sequence in range(*map(int, dataset.document_index[number : number + 2]))
        )
        content["letters_by_script"] = letters_by_script(texts)
    return content


def _print_content(found: DatasetStatistics, content: dict[str, Any]) -> None:
    if not content:
        return
    documents, tokens = content["duplicate_documents"], content["duplicate_tokens"]
    print(f"repeated  {documents:,} documents equal an earlier one ({tokens / max(1, found.tokens):.1%} of the tokens)")
    scripts = content.get("letters_by_script")
    if scripts is None:
        print("scripts   unknown without the tokenizer's flags")
        return
    total = sum(scripts.values())
    print("scripts   " + (", ".join(f"{name} {n / total:.1%}" for name, n in scripts.items()) or "no letter"))


def _print_document(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> None:
    first, last = (int(entry) for entry in dataset.document_index[number : number + 2])
    ids: list[int] = []
    length = int(dataset.lengths[first:last].sum(dtype="int64"))
    for sequence in range(first, last):
        ids += dataset.get(sequence, 0, min(int(dataset.lengths[sequence]), _SHOWN_TOKENS - len(ids))).tolist()
        if len(ids) >= _SHOWN_TOKENS:
            break
    sentences = f", {last - first} sequences" if last - first > 1 else ""
    more = f" ... {length - len(ids):,} tokens more" if length > len(ids) else ""
    shown = " ".join(map(str, ids)) if tokenizer is None else repr(tokenizer.decode(ids))
    print(f"document {number}: {length:,} tokens{sentences}\n  {shown}{more}")


def _print_dialogue_statistics(found: DatasetStatistics, content: dict[str, Any]) -> None:
    characters = f"{content['characters_per_token']:.2f} characters a token"
    print(f"learnt    {content['learnt_tokens']:,} tokens, {content['learnt_share']:.1%}; {characters}")
    print("longest   " + ", ".join(f"document {number}: {length:,} tokens" for number, length in content["longest"]))
    if rows := content.get("rows"):
        cut, tokens = content["cut_documents"], content["cut_tokens"]
        print(f"cut       {cut:,} documents, {tokens:,} of their tokens ({tokens / max(1, found.tokens):.1%})")
        print(f"rows      {rows:,} of {content['seq_length']:,} tokens, {content['fill']:.2%} filled by packing")


def _print_dialogue(dataset: IndexedDataset, mask: IndexedDataset, number: int, tokenizer: Tokenizer) -> None:
    """Print a dialogue with what is not learnt in grey; where there are no colours, with marks around what is."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    ids, learnt = dataset.get(number)[:_SHOWN_OF_DIALOGUE], mask.get(number)[:_SHOWN_OF_DIALOGUE]
    length = int(dataset.lengths[number])
    text = Text(f"document {number}: {length:,} tokens, {int(mask.get(number).sum()):,} learnt\n")
    edges = [0, *(1 + (learnt[1:] != learnt[:-1]).nonzero()[0]).tolist(), len(ids)]
    for begin, end in zip(edges, edges[1:], strict=False):
        part = tokenizer.decode(ids[begin:end].tolist())
        if console.color_system is not None and not console.no_color:
            text.append(part, None if learnt[begin] else "bright_black")
        else:
            text.append(f"[[{part}]]" if learnt[begin] else part)
    text.append(f" ... {length - len(ids):,} tokens more" if length > len(ids) else "")
    console.print(text)


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="check the structure of datasets, their tokens against the vocabulary, loss masks and index caches",
        description="Check every field of the index, the size of the .bin file, the loss mask, the checksums of the "
        "index caches and, if the dataset has a card or --vocab-size is given, every token. Memory use is bounded.",
    )
    add = parser.add_argument
    add("prefixes", nargs="+", type=local_name, metavar="PREFIX", help="paths of datasets without .bin and .idx")
    add("--vocab-size", type=int, metavar="N", help="upper bound of the ids (default: that of the card)")
    add("--structure-only", action="store_true", help="do not read the .bin files")
    add(
        "--data-cache-path",
        type=local_path,
        metavar="DIR",
        help="also check index caches here, besides those at the data",
    )
    add("--multimodal", action="store_true", help="the indices have modes at their end")
    parser.set_defaults(run=_run_verify)


def _run_verify(options: argparse.Namespace) -> int:
    """Verify datasets and index caches; return 3 if one is damaged."""
    if violations := below_one(options, "--vocab-size"):
        raise ConfigError(violations)
    sound = [_verify_dataset(prefix, options) for prefix in options.prefixes]
    folders = [folder for prefix in options.prefixes for folder in sorted(Path(prefix, "cache").glob("*_indices"))]
    if options.data_cache_path is not None:
        folders.append(options.data_cache_path)
    sound += [_verify_caches(folder) for folder in folders]
    return 0 if all(sound) else DataError.exit_code


def _verify_dataset(prefix: str, options: argparse.Namespace) -> bool:
    from megalith.data.dataset_tools import documents_without_end, verify_mask, verify_tokens
    from megalith.data.indexed import MASK_FILES, IndexedDataset
    from megalith.tokenizers.fingerprint import read_fingerprint

    try:
        dataset = IndexedDataset(prefix, multimodal=options.multimodal, mmap_bin=False)
        card = read_fingerprint(prefix)
        size = (card or {}).get("vocab_size") if options.vocab_size is None else options.vocab_size
        results = ["structure sound"]
        if options.structure_only or dataset.dtype.kind not in "iu":
            results.append("tokens not read")
        elif not isinstance(size, int):
            results.append("tokens not checked: no card and no --vocab-size")
        else:
            with task("verifying tokens", dataset.num_tokens, " tokens") as verifying:
                largest = verify_tokens(dataset, size, verifying.reach)
            results.append(f"largest id {largest} of {size}" if largest >= 0 else "no token")
            eod = (card or {}).get("special", {}).get("eod")
            if isinstance(eod, int):
                missing = documents_without_end(dataset, eod)
                filled = dataset.num_documents - _empty(dataset)
                results.append(f"{filled - missing} of {filled} documents end with {eod} (end of document)")
        if any(Path(prefix + ending).exists() for ending in MASK_FILES):
            learnt = verify_mask(dataset, read=not options.structure_only)
            results.append("loss mask not read" if learnt is None else f"loss mask: {learnt} tokens learnt")
    except DataError as error:
        print(f"damaged  {error}")
        return False
    print(f"sound    {prefix}: {dataset.num_documents} documents, {dataset.num_tokens} tokens; {'; '.join(results)}")
    return True


def _verify_caches(folder: Path) -> bool:
    """Verify the index caches of a folder, print the result, and return whether all are intact."""
    from megalith.data.index_cache import verify_caches

    try:
        if not folder.is_dir():
            raise NotADirectoryError(0, "no such folder")
        with task("verifying index caches"):
            found = verify_caches(folder)
    except OSError as error:
        print(f"damaged  {folder}: {error.strerror}")
        return False
    for path in found.damaged:
        what = "differs from its checksum" if path.exists() else "is missing"
        print(f"damaged  {path}: {what}; the next run that reads it rebuilds it")
    without = f"; {found.without_checksums} have no checksums; the next run that reads them checks them"
    more = without if found.without_checksums else ""
    print(f"{'damaged' if found.damaged else 'sound  '}  {folder}: {found.intact} index caches intact{more}")
    return not found.damaged


def _empty(dataset: Any) -> int:
    entries = dataset.document_index
    return int((entries[1:] == entries[:-1]).sum())


def _add_merge(commands: Any) -> None:
    parser = commands.add_parser(
        "merge",
        help="concatenate datasets",
        description="Concatenate datasets: those of a folder in the order of their names, those named in the order "
        "given, or the shares that several machines wrote.",
    )
    add = parser.add_argument
    add("prefixes", nargs="*", type=local_name, metavar="PREFIX", help="paths of datasets without .bin and .idx")
    add("--input", type=local_path, metavar="DIR", help="folder whose datasets are merged")
    add("--output-prefix", type=local_name, required=True, metavar="PREFIX", help="result, without .bin and .idx")
    add("--shares", action="store_true", help="merge the shares that `megalith preprocess` wrote for this prefix")
    add("--remove", action="store_true", help="with --shares: remove the shares after the merge")
    add("--multimodal", action="store_true", help="the indices have modes at their end")
    parser.set_defaults(run=_run_merge)


def check_merge(options: argparse.Namespace) -> None:
    """Check the combination of flags without opening files; ConfigError if it is invalid."""
    ways = [bool(options.prefixes), options.input is not None, options.shares]
    if sum(ways) != 1:
        raise ConfigError("give one of PREFIX ..., --input DIR and --shares")
    if options.remove and not options.shares:
        raise ConfigError("--remove needs --shares; datasets named by PREFIX or --input are kept")


def _run_merge(options: argparse.Namespace) -> int:
    from megalith.data.dataset_tools import dataset_prefixes, merge, without_masks
    from megalith.data.indexed import LOSS_MASK, TEMPLATE
    from megalith.data.shares import find_shares

    check_merge(options)
    if options.shares:
        wanted = find_shares(options.output_prefix)
    else:
        wanted = {options.output_prefix: options.prefixes or dataset_prefixes(options.input)}
    for output_prefix in without_masks(wanted):
        prefixes = wanted[output_prefix]
        merged = merge(
            prefixes,
            output_prefix,
            multimodal=options.multimodal,
            on_progress=lambda prefix: print(f"adding {prefix}", flush=True),
        )
        print(f"Wrote {merged.prefix}.bin and .idx: {merged.num_documents} documents, {merged.num_tokens} tokens")
        if options.remove:
            for prefix in prefixes:
                for ending in (".idx", ".bin", ".card", TEMPLATE, f"{LOSS_MASK}.idx", f"{LOSS_MASK}.bin"):
                    Path(prefix + ending).unlink(missing_ok=True)
    return 0
