"""The data path against the libraries that it stands on, in one run: the same text, cores and vocabulary (GPT-2's).

    python benchmarks/data.py encode --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt \
        --out benchmarks/results/data-encode-cpu.json
    python benchmarks/data.py command encode --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt \
        --out benchmarks/results/data-cpu.json

`encode`: text in memory to ids, by each library that is installed and by what preprocessing calls. As many processes as
cores encode a share each; they load, warm up on a part of it, and start together; the time is that of the last. Rounds
alternate between the contenders, medians count. The ids of all must be the same, or the run fails. gigatoken has two
entries, as which of its two ways is faster depends on the machine: a batch at a time, and a text at a time.

`command`: the whole of `megalith preprocess` on the same text as jsonl, from the start of the program to the finished
files on the disk, with 1 worker and with as many as cores, on several sizes of input, with the largest resident memory
of any of its processes, and the bytes of all runs compared. Beside each run gigatoken encodes the same texts in memory,
with as many processes as the command has workers, started and warm, with nothing to read, parse or write. Its time
over that of the command is the `share`; `further` has both for what the largest input has more than the smallest,
where starting no longer counts. Input larger than the text is the text over and over, which the library gets as often.
Two more references of the same round. First, gigatoken doing the same job by itself, from the start of a program: it
reads the jsonl by its own reader, with as many threads as the command has workers, and the tokens are written; all in
memory at once, no index, no line is checked. Second, the disk: as many bytes as the .bin has, written and brought to
it. Where the disk is slower than the encoding, `--folder /dev/shm` tells what the command could do.

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
import subprocess
import sys
import sysconfig
import tempfile
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
    from megalith.tokenizers.gpt2_bpe import tokens_by_rank

    tokens = tokens_by_rank(read_byte_pair_vocabulary(vocabulary.vocab_file, vocabulary.merge_file))
    ranks = {token: rank for rank, token in enumerate(tokens)}
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


def encode_section(options: argparse.Namespace) -> dict[str, Any]:
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


@dataclass(frozen=True)
class CommandRun:
    """One run of the command: seconds, largest memory of a process in MiB, hash of what it wrote."""

    seconds: float
    largest_mib: float
    sha256: str
    bin_bytes: int


def _write_jsonl(path: Path, texts: list[str], megabytes: int) -> tuple[int, int]:
    """Write the texts over and over until the file has its size; returns the bytes, and how many texts it holds."""
    lines = [(json.dumps({"text": text}, ensure_ascii=False) + "\n").encode() for text in texts]
    size = count = 0
    with path.open("wb") as file:
        while size < megabytes * MEBIBYTE:
            for line in lines:
                size += file.write(line)
                count += 1
                if size >= megabytes * MEBIBYTE:
                    break
    return size, count


_RUN = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.stderr.write(done.stderr)
"""


def _run_command(path: Path, folder: Path, vocabulary: Vocabulary, workers: int) -> CommandRun:
    prefix = folder / f"{path.stem}-{workers}"
    command = [sys.executable, "-m", "megalith", "preprocess", "--input", str(path), "--output-prefix", str(prefix)]
    command += ["--vocab-file", vocabulary.vocab_file, "--merge-file", vocabulary.merge_file, "--append-eod"]
    command += ["--workers", str(workers)]
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _RUN, *command], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    code, largest = done.stdout.split()
    if code != "0":
        raise SystemExit(done.stderr)
    digest, bin_bytes = hashlib.sha256(), Path(f"{prefix}_text_document.bin").stat().st_size
    for ending in (".bin", ".idx"):
        written = Path(f"{prefix}_text_document{ending}")
        with written.open("rb") as file:
            while block := file.read(MEBIBYTE):
                digest.update(block)
        written.unlink()
    return CommandRun(seconds, int(largest) / 1024, digest.hexdigest(), bin_bytes)


_BY_ITSELF = """
import sys, gigatoken, numpy
tokenizer = gigatoken.Tokenizer.from_json(open(sys.argv[1], encoding="utf-8").read())
layout = tokenizer.encode_files(gigatoken.gigatoken_rs.JsonlFileSource([sys.argv[2]]), parallel=True).layout
layout.content.data[: layout.offsets.data[-1]].astype(numpy.uint16).tofile(sys.argv[3])
"""


def _run_library(path: Path, folder: Path, tokenizer: Path, threads: int) -> tuple[float, float, int]:
    """Seconds and MiB of gigatoken reading the jsonl and writing the tokens by itself, and how many bytes it wrote."""
    out = folder / "library.bin"
    command = [sys.executable, "-c", _BY_ITSELF, str(tokenizer), str(path), str(out)]
    start = time.perf_counter()
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, "-c", _RUN, *command], capture_output=True, text=True, env=environment)
    seconds = time.perf_counter() - start
    code, largest = done.stdout.split()
    if code != "0":
        raise SystemExit(done.stderr)
    size = out.stat().st_size
    out.unlink()
    return seconds, int(largest) / 1024, size


def _write_plainly(folder: Path, size: int) -> float:
    """Seconds to write so many bytes and to bring them to the disk."""
    block, start = os.urandom(MEBIBYTE), time.perf_counter()
    with (folder / "plain").open("wb") as file:
        for _ in range(size // MEBIBYTE):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    (folder / "plain").unlink()
    return seconds


def command_section(options: argparse.Namespace) -> dict[str, Any]:
    """Speed and memory of the whole command.

    Raises:
        SystemExit: a run fails, or two runs write different bytes.
    """
    texts = texts_of([Path(path) for path in options.text] or text_of_this_python(), options.megabytes)
    vocabulary = Vocabulary(options.vocab_file, options.merge_file)
    record: dict[str, Any] = {"rounds": options.rounds, "cores": options.cores, "runs": [], "further": []}
    times: dict[tuple[int, int], tuple[float, float, float]] = {}
    libraries = ("gigatoken", "gigatoken, text by text")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        tokenizer = Path(folder) / "tokenizer.json"
        tokenizer.write_text(_library(vocabulary).to_str(), encoding="utf-8")
        for megabytes in options.command_megabytes:
            path = Path(folder) / f"{megabytes}.jsonl"
            size, count = _write_jsonl(path, texts, megabytes)
            whole, rest = divmod(count, len(texts))
            held = texts * whole + texts[:rest]
            runs: dict[int, list[CommandRun]] = {}
            in_memory: dict[tuple[int, str], list[float]] = {}
            by_itself: dict[int, list[tuple[float, float, int]]] = {}
            plain: list[float] = []
            for _ in range(options.rounds):
                for workers in sorted({1, options.cores}):
                    runs.setdefault(workers, []).append(_run_command(path, Path(folder), vocabulary, workers))
                    print(f"{megabytes} MiB, {workers} workers: {runs[workers][-1]}", flush=True)
                    by_itself.setdefault(workers, []).append(_run_library(path, Path(folder), tokenizer, workers))
                    print(f"gigatoken by itself: {by_itself[workers][-1]}", flush=True)
                    for name in libraries:
                        taken = encode_once(name, vocabulary, held, workers)[0]
                        in_memory.setdefault((workers, name), []).append(taken)
                        print(f"{name}: {taken:.2f} s", flush=True)
                plain.append(_write_plainly(Path(folder), runs[1][-1].bin_bytes))
                print(f"plain write: {plain[-1]:.2f} s", flush=True)
            if len({run.sha256 for found in runs.values() for run in found}) > 1:
                raise SystemExit(f"the runs over {megabytes} MiB wrote different bytes")
            for workers, found in runs.items():
                seconds = statistics.median(run.seconds for run in found)
                library = min(statistics.median(in_memory[workers, name]) for name in libraries)
                times[megabytes, workers] = size, seconds, library
                largest = max(run.largest_mib for run in found)
                record["runs"].append(
                    {
                        **{"input_bytes": size, "workers": workers, "largest_process_mib": round(largest, 1)},
                        **_speeds(size, seconds, library),
                        "library_by_itself_mib_per_second": _speed(size, [one[0] for one in by_itself[workers]]),
                        "library_by_itself_mib": round(max(one[1] for one in by_itself[workers]), 1),
                        "bin_bytes": found[0].bin_bytes,
                        "plain_write_mib_per_second": _speed(found[0].bin_bytes, plain),
                    }
                )
            path.unlink()
    low, high = min(options.command_megabytes), max(options.command_megabytes)
    for workers in sorted({1, options.cores}) if low < high else ():
        more = [b - a for a, b in zip(times[low, workers], times[high, workers], strict=True)]
        record["further"].append({"workers": workers, **_speeds(*more)})
    return record


def _speed(size: float, seconds: list[float]) -> float:
    return round(size / MEBIBYTE / statistics.median(seconds), 1)


def _speeds(size: float, seconds: float, library: float) -> dict[str, float]:
    """MiB/s of the command and of the library, and the first over the second."""
    speeds = {"mib_per_second": size / MEBIBYTE / seconds, "library_mib_per_second": size / MEBIBYTE / library}
    return {**{name: round(speed, 1) for name, speed in speeds.items()}, "share": round(library / seconds, 3)}


SECTIONS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "encode": encode_section,
    "command": command_section,
}


def main() -> None:
    """Measure the sections that are named; print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=tuple(SECTIONS))
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--merge-file", required=True)
    parser.add_argument("--text", nargs="*", default=[], help="files; those of this Python by default")
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--command-megabytes", type=int, nargs="+", default=[10, 1000], help="sizes of input")
    parser.add_argument("--folder", help="where input and output of the command lie; the folder for temporary files")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    record = {"machine": machine, **{name: SECTIONS[name](options) for name in options.sections}}
    print(json.dumps(record, indent=2))
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
