"""GPT-2's ids by what preprocessing calls and by each library that is installed: the same text, cores and vocabulary.

    python benchmarks/data.py --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt \
        --out benchmarks/results/data-encode-cpu.json

Text in memory to ids. As many processes as cores encode a share each; they load, warm up on a part of it, and start
together; the time is that of the last. Rounds alternate between the contenders, medians count. The ids of all must be
the same, or the run fails. gigatoken has two entries, as which of its two ways is faster depends on the machine: a
batch at a time, and a text at a time. The whole command is measured by `benchmarks/commands.py preprocess`.

The text is real and does not repeat: files that are given, else the sources and documents of this Python. What its
documents are called does not matter to any contender.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MEBIBYTE = 1 << 20
WARM_UP = 0.1  # of a process's share
LONGEST_DOCUMENT = 20_000  # characters; files are cut into documents of the web's size

Encode = Callable[[list[str]], list[NDArray[Any]]]


@dataclass(frozen=True)
class Vocabulary:
    """The two files of GPT-2."""

    vocab_file: str
    merge_file: str


def _megalith(vocabulary: Vocabulary) -> Encode:
    from megalith.tokenizers.fast_bpe import BytePairArrays, array_encoder
    from megalith.tokenizers.gpt2_bpe import GPT2BPETokenizer

    encode = array_encoder(GPT2BPETokenizer(vocabulary.vocab_file, vocabulary.merge_file))
    assert isinstance(encode, BytePairArrays)
    encode.use_gigatoken()
    return encode


def _library(vocabulary: Vocabulary) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    made = Tokenizer(BPE.from_file(vocabulary.vocab_file, vocabulary.merge_file))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return made


def _tokenizers(vocabulary: Vocabulary) -> Encode:
    made = _library(vocabulary)
    return lambda texts: [np.array(encoding.ids, np.uint32) for encoding in made.encode_batch_fast(texts)]


def _gigatoken(vocabulary: Vocabulary) -> Encode:
    import gigatoken

    made = gigatoken.Tokenizer.from_json(_library(vocabulary).to_str())

    def encode(texts: list[str]) -> list[NDArray[Any]]:
        layout = made.encode_batch(texts, parallel=False).layout
        return [layout.content.data[: layout.offsets.data[-1]]]  # all ids in one array, as the library keeps them

    return encode


def _gigatoken_text_by_text(vocabulary: Vocabulary) -> Encode:
    import gigatoken

    encode_one = gigatoken.Tokenizer.from_json(_library(vocabulary).to_str()).encode
    return lambda texts: [encode_one(text) for text in texts]


def _tiktoken(vocabulary: Vocabulary) -> Encode:
    import tiktoken

    from megalith.tokenizers.byte_level import read_byte_pair_vocabulary

    read = read_byte_pair_vocabulary(vocabulary.vocab_file, vocabulary.merge_file)
    ranks = {token: rank for rank, token in enumerate(read.tokens_by_rank)}
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    made = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return lambda texts: [made.encode_to_numpy(text, disallowed_special=()) for text in texts]


CONTENDERS: dict[str, Callable[[Vocabulary], Encode]] = {
    "megalith": _megalith,
    "gigatoken": _gigatoken,
    "gigatoken, text by text": _gigatoken_text_by_text,
    "tiktoken": _tiktoken,
    "tokenizers": _tokenizers,
}


def texts_of(paths: Sequence[Path], megabytes: int) -> list[str]:
    """Documents of together at most so many megabytes; fewer where there is less text."""
    texts, left = list[str](), megabytes * MEBIBYTE
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        for begin in range(0, len(text), LONGEST_DOCUMENT):
            texts.append(text[begin : begin + LONGEST_DOCUMENT])
            left -= len(texts[-1].encode())
            if left <= 0:
                return texts
    return texts


def text_of_this_python() -> list[Path]:
    """Sources and documents of the standard library and of what is installed beside it, in an order of chance."""
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = {
        path for folder in folders for ending in ("*.py", "*.txt", "*.rst", "*.md") for path in folder.rglob(ending)
    }
    return sorted(files, key=lambda path: hashlib.sha256(path.name.encode()).digest())


def _encode_share(name: str, vocabulary: Vocabulary, texts: list[str], parent: Connection[Any, Any]) -> None:
    """A process: load and warm up, wait for the start, encode, tell the time and what came out."""
    encode = CONTENDERS[name](vocabulary)
    encode(texts[: max(1, int(len(texts) * WARM_UP))])
    parent.send(None)
    parent.recv()
    start = time.perf_counter()
    arrays = encode(texts)
    seconds = time.perf_counter() - start
    ids = np.concatenate([array.astype(np.uint16) for array in arrays])
    parent.send((seconds, len(ids), hashlib.sha256(ids.tobytes()).hexdigest()))


def encode_once(name: str, vocabulary: Vocabulary, texts: list[str], cores: int) -> tuple[float, int, list[str]]:
    """Seconds until the last share is done, ids, and a hash of the ids of each share."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for share in range(cores):
        here, there = context.Pipe()
        process = context.Process(target=_encode_share, args=(name, vocabulary, texts[share::cores], there))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send(None)
    done = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return max(one[0] for one in done), sum(one[1] for one in done), [one[2] for one in done]


def _package(contender: str) -> str:
    return contender.split(",")[0]


def _installed(name: str) -> bool:
    try:
        metadata.version(_package(name))
    except metadata.PackageNotFoundError:
        return name == "megalith"
    return True


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Speeds of all contenders, in MiB/s of text.

    Raises:
        SystemExit: the ids of two contenders differ.
    """
    texts = texts_of([Path(path) for path in options.text] or text_of_this_python(), options.megabytes)
    size = sum(len(text.encode()) for text in texts)
    vocabulary, names = (
        Vocabulary(options.vocab_file, options.merge_file),
        [name for name in CONTENDERS if _installed(name)],
    )
    seconds: dict[str, list[float]] = {name: [] for name in names}
    hashes: dict[str, list[str]] = {}
    num_ids = 0
    for _ in range(options.rounds):
        for name in names:
            taken, num_ids, hashes[name] = encode_once(name, vocabulary, texts, options.cores)
            seconds[name].append(taken)
            print(f"{name:12} {size / MEBIBYTE / taken:8.1f} MiB/s", flush=True)
    other = [name for name in names if hashes[name] != hashes[names[0]]]
    if other:
        raise SystemExit(f"the ids of {', '.join(other)} are not those of {names[0]}")
    speeds = {name: size / MEBIBYTE / statistics.median(times) for name, times in seconds.items()}
    return {
        "documents": len(texts),
        "bytes": size,
        "ids": num_ids,
        "cores": options.cores,
        "rounds": options.rounds,
        "ids_identical": True,
        "mib_per_second": {name: round(speed, 2) for name, speed in speeds.items()},
        "share_of_the_fastest": round(speeds["megalith"] / max(speeds.values()), 3),
        "versions": {_package(name): metadata.version(_package(name)) for name in names if name != "megalith"},
    }


def main() -> None:
    """Measure; print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--merge-file", required=True)
    parser.add_argument("--text", nargs="*", default=[], help="files; those of this Python by default")
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    record = {"machine": machine, "encode": measure(options)}
    print(json.dumps(record, indent=2))
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
