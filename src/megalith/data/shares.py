"""Shares of the input: the part that each process takes when several machines run the same command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from megalith.config.environment import checked_launch, read_launch
from megalith.data.sources import Chunk, Source
from megalith.errors import ConfigError
from megalith.tokenizers.fingerprint import read_run_digests

_NAME = re.compile(r"_share(?P<number>\d+)of(?P<count>\d+)(?P<rest>_.+)\.idx")


@dataclass(frozen=True)
class Share:
    """Part `number`, counted from 0, of `count` equal parts of the input, by bytes on disk; messages show `reason`."""

    number: int = 0
    count: int = 1
    reason: str = ""

    @property
    def suffix(self) -> str:
        """Return the suffix of the output prefix, empty if there is one share."""
        return f"_share{self.number:05d}of{self.count:05d}" if self.count > 1 else ""

    def bounds(self, total: int) -> tuple[int, int]:
        """Return the range of bytes, in all files put together, in which the chunks of this share begin."""
        return total * self.number // self.count, total * (self.number + 1) // self.count


def read_share(text: str | None, environ: Mapping[str, str]) -> Share:
    """Return the share set by `--share K/N` or the launcher, else all. Raises ConfigError if invalid or ambiguous."""
    if text is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(f"--share {text}: give K/N with K from 1 to N, such as 2/8")
        return Share(int(match[1]) - 1, int(match[2]), f"--share {text}")
    launch = checked_launch(read_launch(environ))
    rank, world = int(launch.get("RANK", 0)), int(launch.get("WORLD_SIZE", 1))
    task, tasks = _slurm_array_task(environ)
    if world > 1 and tasks > 1:
        raise ConfigError(
            f"rank {rank} of {world} (RANK, WORLD_SIZE) within task {task} of {tasks} of a SLURM array: it is unclear "
            "which of the two divides the input; set --share K/N"
        )
    if world > 1:
        return Share(rank, world, f"RANK={rank}, WORLD_SIZE={world}")
    return Share(task, tasks, f"SLURM array task {task + 1} of {tasks}" if tasks > 1 else "")


def _slurm_array_task(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the number, from 0, and the count of the tasks of a SLURM array, whatever its ids are."""
    names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP")
    task, count, least, step = (environ.get(name, "") for name in names)
    if not (task.isdigit() and count.isdigit()) or int(count) < 2:
        return 0, 1
    number = (int(task) - int(least or 0)) // int(step or 1)
    if not 0 <= number < int(count):
        raise ConfigError(f"SLURM_ARRAY_TASK_ID={task} is not one of the {count} tasks of the array")
    return number, int(count)


@dataclass(frozen=True)
class LocatedChunk:
    """Chunk with its position in the input.

    Attributes:
        source: number of its source.
        disk: where it ends in all sources put together, in bytes on disk.
        units: units of its source before it, None if the chunks do not tell.
    """

    source: int
    chunk: Chunk
    disk: int
    units: int | None


def chunks_of_share(sources: Sequence[Source], share: Share, start: tuple[int, int]) -> Iterator[LocatedChunk]:
    """Yield the chunks of all sources that belong to a share, in order, from `start` (source, place) on.

    A chunk belongs to the share in which its first byte lies. All processes cut chunks alike, so that each chunk
    belongs to exactly one share and the shares together are the whole input.
    """
    before = [0, *accumulate(source.disk_bytes for source in sources)]
    low, high = share.bounds(before[-1])
    for number, source in enumerate(sources):
        if number < start[0] or before[number + 1] <= low or before[number] >= high:
            continue
        begin = start[1] if number == start[0] else 0
        units: int | None = None if begin else 0
        for chunk in source.chunks(begin):
            # A chunk that begins after the last byte read belongs to the share of the file's last byte.
            position = before[number] + min(chunk.disk_start, source.disk_bytes - 1)
            if position >= high:
                break
            if position >= low:
                yield LocatedChunk(number, chunk, before[number] + chunk.disk_end, units)
            units = None if units is None or chunk.num_units is None else units + chunk.num_units


def find_shares(prefix: str) -> dict[str, list[str]]:
    """Return the prefixes of the finished shares, in order, for each dataset of an output prefix.

    Raises:
        ConfigError: there are none, some are missing, there are shares of different counts or of different runs.
        DataError: the fingerprint of a share is damaged.
    """
    folder, stem = Path(prefix).parent, Path(prefix).name
    found: dict[str, dict[int, dict[int, str]]] = {}
    for path in folder.glob("*.idx"):
        match = _NAME.fullmatch(path.name[len(stem) :]) if path.name.startswith(stem) else None
        if match:
            counts = found.setdefault(prefix + match["rest"], {})
            counts.setdefault(int(match["count"]), {})[int(match["number"])] = str(path)[: -len(".idx")]
    if not found:
        raise ConfigError(f"{prefix}: no share of this output prefix exists ({prefix}_share...)")
    shares = {dataset: _require_complete(dataset, counts) for dataset, counts in sorted(found.items())}
    if violations := [problem for dataset in shares for problem in _other_runs(dataset, shares[dataset])]:
        raise ConfigError(violations)
    return shares


def _other_runs(dataset: str, shares: Sequence[str]) -> list[str]:
    """Return a message if shares were made from another input or by other settings; those of older versions pass."""
    runs = {number: run for number, prefix in enumerate(shares, start=1) if (run := read_run_digests(prefix))}
    if not runs:
        return []
    first, expected = next(iter(runs.items()))
    others = [number for number, run in runs.items() if run != expected]
    if not others:
        return []
    names = dict.fromkeys(name for number in others for name in (*expected, *runs[number]))
    differing = [name for name in names if any(runs[number].get(name) != expected.get(name) for number in others)]
    shown = ", ".join(map(str, others[:20])) + (f" and {len(others) - 20} more" if len(others) > 20 else "")
    return [
        f"{dataset}: of {len(shares)} shares, {shown} had another {', another '.join(differing)} than share {first}: "
        "run the same command again for those that are outdated (--share K/N). Where the inputs are copies that differ "
        "in path or time only, name all shares in order in place of --shares (megalith data merge PREFIX ...)"
    ]


def _require_complete(dataset: str, counts: dict[int, dict[int, str]]) -> list[str]:
    if len(counts) > 1:
        kinds = " and ".join(str(count) for count in sorted(counts))
        raise ConfigError(f"{dataset}: shares of {kinds} parts exist; remove those of the outdated run")
    ((count, shares),) = counts.items()
    missing = [number + 1 for number in range(count) if number not in shares]
    if missing:
        shown = ", ".join(map(str, missing[:20]))
        raise ConfigError(
            f"{dataset}: of {count} shares, {len(missing)} are missing ({shown}): their runs are not finished; run the "
            "same command again for them (--share K/N), which continues where it stopped"
        )
    return [shares[number] for number in range(count)]
