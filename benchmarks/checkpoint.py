"""Speed of saving and loading a checkpoint, against the disk, torch.save and plain torch.distributed.checkpoint.

    python benchmarks/checkpoint.py --out benchmarks/results/checkpoint-cpu.json

A GPT of `--size` parameters with its Adam state in fp32 (350M: 4.2 GB), on one process, hashing on. Each of `--pairs`
rounds measures, in turns and in the same folder of the same disk:

  raw write         the bytes of the checkpoint's data files, from memory, into as many files, one thread a file, fsync
  save              `CheckpointSaver.save`, as `megalith train` does it
  async             `AsyncSaver`: how long the training stands still, and all until the checkpoint is in its place;
                    matrix products go on beside it, and what they lose of their speed is given too. They stand for
                    steps of `--step-seconds`, after each of which the optimizer would change what is saved; a step of
                    the 350M model takes some 20 s on this machine. `at once` is how long the copies take if a step
                    waits for them at its begin
  torch.save        the state dict into one file, fsync
  dcp.save          torch.distributed.checkpoint with its defaults (two files, fsync)
  raw read          the same files into memory, one thread a file, none of it in the system's cache
  load              `restore` of the checkpoint, files verified, none of it in the cache
  torch.load, dcp.load

A ratio is the median over rounds of the ratio within a round. Bounds: save and load at least 0.8 of raw, the stall of
an asynchronous save at most 0.1 of the time of a synchronous one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from megalith.assemble.model import build_chunks, build_run_optimizer
from megalith.assemble.schedule import build_schedule
from megalith.checkpoint import DirectoryStore
from megalith.config import RunConfig, load
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.models.initialise import initialise
from megalith.train.checkpoint_fit import Identity, find_checkpoint
from megalith.train.checkpoint_restore import restore
from megalith.train.checkpoint_saver import AsyncSaver, CheckpointSaver
from megalith.train.state import TrainState

VOCABULARY = 50304
SIZES = {"350M": (24, 1024, 16), "124M": (12, 768, 12), "50M": (8, 512, 8), "10M": (4, 160, 4)}
"""Name -> layers, hidden size, heads."""
BLOCK = 2**20  # larger ones are slower on the machine that was measured


def configuration(size: str, folder: Path, rank: int = 0, world: int = 1) -> RunConfig:
    """Return the run of a GPT whose tensors are sharded over all of its ranks."""
    layers, hidden, heads = SIZES[size]
    words = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --max-position-embeddings 1024 "
        "--seq-length 1024 --micro-batch-size 1 --train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer "
        f"--vocab-size {VOCABULARY - 1} --save {folder} --load {folder} --save-interval 1 --eval-iters 0 "
        f"--tensor-model-parallel-size {world}"
    )
    return load(words.split(), {"RANK": str(rank), "WORLD_SIZE": str(world)}, files=False)


def build_state(run: RunConfig, context: ParallelContext | None = None) -> TrainState:
    """A model with weights and moments that are no zeros."""
    context = context or ParallelContext.solo()
    streams = RandomStreams(run.train.seed, context)
    chunks = build_chunks(run, VOCABULARY, context, streams.own)
    for chunk in chunks:
        initialise(chunk, 1)
    optimizer = build_run_optimizer(run, chunks, context)
    for box in optimizer.state_boxes():
        box.tensor.normal_()
    return TrainState(chunks, optimizer, streams, build_schedule(run), context=context)


def seconds_of(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# --- the disk -----------------------------------------------------------------------------------------------------


def write_raw(folder: Path, sizes: Iterable[int], source: memoryview) -> None:
    """Write files of these sizes out of one piece of memory, a thread each, and wait until they are on the disk."""
    folder.mkdir()

    def write(job: tuple[int, int]) -> None:
        number, size = job
        fd = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for start in range(0, size, BLOCK):
            piece = source[start : min(start + BLOCK, size)]
            while piece:
                piece = piece[os.write(fd, piece) :]
        os.fsync(fd)
        os.close(fd)

    jobs = list(enumerate(sizes))
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(write, jobs))


def read_raw(paths: list[Path], target: memoryview) -> None:
    """Read whole files into memory, a thread each."""

    def read(path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            start = 0
            while got := file.readinto(target[start : start + BLOCK]):
                start += got

    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(read, paths))


def forget(folder: Path) -> None:
    """Drop the files of a folder from the system's cache; they are on the disk already."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def data_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that hold its tensors."""
    return sorted(folder.glob("*.distcp"))


# --- contenders ---------------------------------------------------------------------------------------------------


class Bench:
    """The state, the folder, and what is measured with them."""

    def __init__(self, size: str, folder: Path, step_seconds: float) -> None:
        self.folder, self.checkpoints, self.step_seconds = folder, folder / "checkpoints", step_seconds
        self.run = configuration(size, self.checkpoints)
        self.state = build_state(self.run)
        self.state.iteration = 1
        identity = Identity({}, {}, {})
        self.saver = CheckpointSaver(DirectoryStore(self.checkpoints), self.run, identity)
        self.background = AsyncSaver(self.saver)
        self.plain = self._plain_state()
        self.nbytes = sum(tensor.nbytes for tensor in self.plain.values())
        room = torch.empty(self.nbytes // 2 + 2**26, dtype=torch.uint8).random_()
        self.memory = memoryview(room.numpy())

    def _plain_state(self) -> dict[str, torch.Tensor]:
        weights = {f"model.{box.name}": box.tensor for box in self.state.optimizer.weight_boxes()}
        return weights | {f"optimizer.{box.name}": box.tensor for box in self.state.optimizer.state_boxes()}

    def fresh(self, name: str) -> Path:
        """A folder of this name that is not there."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        os.sync()
        return self.folder / name

    def save(self) -> float:
        self.fresh("checkpoints")
        return seconds_of(lambda: self.saver.save(self.state))

    def raw_write(self) -> float:
        sizes = [path.stat().st_size for path in data_files(self.checkpoints / "iter_0000001")]
        folder = self.fresh("raw")
        return seconds_of(lambda: write_raw(folder, sizes, self.memory))

    def torch_save(self) -> float:
        path = self.fresh("torch.pt")
        path.unlink(missing_ok=True)

        def save() -> None:
            with path.open("wb") as file:
                torch.save(self.plain, file)
                file.flush()
                os.fsync(file.fileno())

        return seconds_of(save)

    def dcp_save(self) -> float:
        folder = self.fresh("dcp")
        writer = dcp.FileSystemWriter(folder, thread_count=2)
        return seconds_of(lambda: dcp.save(self.plain, storage_writer=writer, no_dist=True))

    def raw_read(self) -> float:
        paths = data_files(self.checkpoints / "iter_0000001")
        forget(self.checkpoints)
        return seconds_of(lambda: read_raw(paths, self.memory))

    def load(self) -> float:
        forget(self.checkpoints)
        store = DirectoryStore(self.checkpoints)

        def restored() -> None:
            found = find_checkpoint(store)
            assert found is not None
            restore(store, found, self.state, self.run)

        return seconds_of(restored)

    def torch_load(self) -> float:
        forget(self.folder)
        _drop(self.folder / "torch.pt")
        return seconds_of(lambda: torch.load(self.folder / "torch.pt", weights_only=True))

    def dcp_load(self) -> float:
        forget(self.folder / "dcp")
        return seconds_of(lambda: dcp.load(self.plain, checkpoint_id=self.folder / "dcp", no_dist=True))

    def asynchronous(self) -> dict[str, float]:
        """A save beside matrix products, which stand for steps: after each it may go on."""
        self.fresh("checkpoints")
        self.background.reserve(self.state)
        quiet = [products() for _ in range(5)]
        started = time.perf_counter()
        saved, beside, scheduling = None, [], self.background.schedule(self.state).stall_seconds
        while saved is None:
            until = time.perf_counter() + self.step_seconds
            while time.perf_counter() < until:
                beside.append(products())
            self.background.wait_for_copies()
            if not self.background.busy:
                saved = self.background.advance()
        usual = statistics.median(quiet)
        return {
            "stall": saved.stall_seconds,
            "scheduling": scheduling,
            "total": time.perf_counter() - started,
            "lost beside it": sum(seconds - usual for seconds in beside),
            "slower by": statistics.mean(beside) / usual - 1 if beside else 0.0,
            "at once": self.copies_at_once(),
        }

    def copies_at_once(self) -> float:
        """The copies with nothing beside them."""
        chunks, staging = self.saver.chunks_of(self.state), self.background._staging
        staging.plan(chunks)
        return seconds_of(lambda: (staging.begin(), staging.wait_for_copies()))


def _drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


_LEFT, _RIGHT = torch.randn(1024, 1024), torch.randn(1024, 1024)


def products() -> float:
    """Seconds of some matrix products: about 0.1."""
    return seconds_of(lambda: [torch.mm(_LEFT, _RIGHT) for _ in range(8)])


# --- the measurement ----------------------------------------------------------------------------------------------


def measure(bench: Bench, pairs: int, *, peers: bool) -> Iterator[dict[str, Any]]:
    """What was found so far, after each round."""
    rounds: list[dict[str, float]] = []
    asynchronous: list[dict[str, float]] = []
    bench.save()  # warm up, and the sizes of the files
    for number in range(pairs):
        disk_first = number % 2 == 0
        found: dict[str, float] = {}
        found["raw write"] = bench.raw_write() if disk_first else 0.0
        found["save"] = bench.save()
        found["raw write"] = found["raw write"] or bench.raw_write()
        shutil.rmtree(bench.folder / "raw")
        found["raw read"] = bench.raw_read() if disk_first else 0.0
        found["load"] = bench.load()
        found["raw read"] = found["raw read"] or bench.raw_read()
        asynchronous.append(bench.asynchronous())
        if peers:
            found["torch.save"], found["torch.load"] = bench.torch_save(), bench.torch_load()
            (bench.folder / "torch.pt").unlink()
            found["dcp.save"], found["dcp.load"] = bench.dcp_save(), bench.dcp_load()
            shutil.rmtree(bench.folder / "dcp")
        rounds.append(found)
        print(json.dumps({name: round(seconds, 3) for name, seconds in found.items()}), flush=True)
        print(json.dumps({name: round(seconds, 3) for name, seconds in asynchronous[-1].items()}), flush=True)
        yield summary(rounds, asynchronous, bench.nbytes, peers=peers)


def summary(
    rounds: list[dict[str, float]], asynchronous: list[dict[str, float]], nbytes: int, *, peers: bool
) -> dict[str, Any]:
    """Medians over the rounds of the ratios within them."""

    def ratio(over: str, under: str) -> float:
        return round(statistics.median(found[over] / found[under] for found in rounds), 3)

    pairs_of_saves = zip(asynchronous, rounds, strict=True)
    result: dict[str, Any] = {
        "gigabytes": round(nbytes / 1e9, 3),
        "seconds": {name: [round(found[name], 4) for found in rounds] for name in rounds[0]},
        "async_seconds": {name: [round(found[name], 4) for found in asynchronous] for name in asynchronous[0]},
        "gigabytes_per_second": {
            name: round(nbytes / 1e9 / statistics.median(found[name] for found in rounds), 2) for name in rounds[0]
        },
        "save_share_of_raw": ratio("raw write", "save"),
        "load_share_of_raw": ratio("raw read", "load"),
        "stall_share_of_save": round(
            statistics.median(there["stall"] / found["save"] for there, found in pairs_of_saves), 3
        ),
    }
    if peers:
        result["speed_over"] = {name: ratio(name, name.partition(".")[2]) for name in rounds[0] if "." in name}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="350M")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--step-seconds", type=float, default=2.0, help="of the steps beside which a save is made")
    parser.add_argument("--folder", type=Path, default=Path(), help="a temporary folder is made in it (here)")
    parser.add_argument("--no-peers", action="store_true", help="without torch.save and plain DCP")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-bench-") as folder:
        bench = Bench(options.size, Path(folder), options.step_seconds)
        free = shutil.disk_usage(folder).free
        if free < 3 * bench.nbytes:
            parser.error(
                f"{folder} has {free / 1e9:.1f} GB free; --size {options.size} needs {3 * bench.nbytes / 1e9:.1f}"
            )
        about: dict[str, Any] = {
            "what": __doc__,
            "machine": {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count()},
            "load_before": os.getloadavg(),
            "torch": torch.__version__,
            "threads": options.threads,
            "step_seconds": options.step_seconds,
            "size": options.size,
        }
        for found in measure(bench, options.pairs, peers=not options.no_peers):
            result = {**about, **found, "load_after": os.getloadavg()}
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "what"}, indent=1))


if __name__ == "__main__":
    main()
