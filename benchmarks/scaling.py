"""How time and memory grow with the work, beside what one could run instead and beside the law that they should follow.

    make bench-scaling                                        all parts, 25 minutes on two cores
    python benchmarks/scaling.py sizes ranks --points 3       some of them, the three smallest of each

  sizes       a step over the size of the model, 1M to 350M parameters, 2 x 256 tokens
  sequences   a step of 10M over the sequence, 256 to 8192 tokens
  batches     a step of 10M over the micro-batch, 1 to 64 samples of 256 tokens
  preprocess  `megalith preprocess` over 10 to 2000 MiB of jsonl, with one and two workers
  resume      `megalith train` over a dataset of 10^6 to 10^9 tokens: its first start (the index is built), a resume,
              and the index alone. The tokens are the zeros of a sparse file
  streams     `megalith serve` over 1 to 64 streams, 10M, 64 tokens after a prompt of 64
  ranks       `megalith train --nproc` over 1 to 16 data-parallel ranks: start, memory of the largest, step

Peers: peers/train.py eager, peers/preprocess.py, peers/generate.py huggingface, as many `import torch`. A law is the
work itself: FLOPs, bytes of weights, gradients and moments, tokens, ranks per core. Fixed costs make small work grow
less than its law, so that the verdict is of the last two points: an exponent more than 0.1 above the law's is
superlinear.

Results go to scaling-NAME.json in benchmarks/results as soon as there are any, page and pictures to docs/results.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from commands import (
    ITERATION,
    ROOT,
    Preprocessing,
    Size,
    import_torch,
    peer,
    save_model,
    start_ranks,
    train_command,
)
from contender import Contender, alternate, in_turns, run_seconds
from data_index import measure_index
from machine import is_disturbed, num_cores
from parts import Clock, Found, Part, measure_chosen, parse_options, read_results

PAGE = ROOT / "docs" / "results" / "scaling.md"
LAW, TOLERANCE = "law", 0.1
"""Name of the law among the contenders of a line; of an exponent above the law's."""
VOCABULARY = 8192
MODELS = {"1M": (5, 128, 4), "3M": (4, 256, 4), "10M": (6, 384, 6), "30M": (10, 512, 8), "85M": (12, 768, 12)}
MODELS |= {"300M": (24, 1024, 16)}
"""Layers, hidden size, heads; named without embeddings."""
SEQUENCES, BATCHES, STREAMS = (256, 512, 1024, 2048, 4096, 8192), (1, 4, 16, 64), (1, 2, 4, 8, 16, 32, 64)
MEBIBYTES, TOKENS, RANKS = (10, 50, 250, 1000, 2000), (10**6, 10**7, 10**8, 10**9), (1, 2, 4, 8, 16)
LENGTH = 1000
"""Tokens of a document."""


@dataclass
class Line:
    """One figure of several contenders over the size of the work; the first contender is ours."""

    over: str
    unit: str
    points: list[dict[str, Any]] = field(default_factory=list)

    def add(self, x: float, law: float, values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Add what was measured at `x`, where the work is `law` in any unit; returns the line so far."""
        self.points.append({"x": x, "law": law, "values": {name: list(found) for name, found in values.items()}})
        return {"over": self.over, "unit": self.unit, "points": self.points}


def curve(line: Mapping[str, Any], contender: str) -> tuple[list[float], list[float]]:
    """Return the places and medians of a contender, or the law's."""
    there = [point for point in line["points"] if contender == LAW or contender in point["values"]]
    values = [
        float(point["law"]) if contender == LAW else statistics.median(point["values"][contender]) for point in there
    ]
    return [float(point["x"]) for point in there], values


def contenders(line: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for point in line["points"] for name in point["values"]))


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return b of the power law y = a x^b that fits best: the slope of the logarithms by least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0]) if len(x) > 1 else math.nan


def last_exponent(line: Mapping[str, Any], contender: str) -> float:
    x, y = curve(line, contender)
    return exponent(x[-2:], y[-2:])


def is_superlinear(line: Mapping[str, Any]) -> bool:
    """Return whether ours grew faster than its law between the last two points."""
    return last_exponent(line, contenders(line)[0]) > last_exponent(line, LAW) + TOLERANCE


# --- parts --------------------------------------------------------------------------------------------------------


def flops(size: Size) -> float:
    """Return the FLOPs of a step: 6 for each weight and token; scores and their sums over half of the square."""
    layers, hidden, _, sequence, batch, vocabulary = size
    weights = 12 * layers * hidden**2 + hidden * vocabulary
    return 6.0 * batch * sequence * (weights + layers * hidden * sequence)


def state_mib(size: Size) -> float:
    """Return what weights, gradients and two moments take in fp32."""
    layers, hidden, _, sequence, _, vocabulary = size
    return 16 * (12 * layers * hidden**2 + hidden * (vocabulary + sequence)) / 2**20


def _steps(sizes: Sequence[tuple[float, Size]], over: str, name: str, clock: Clock) -> Found:
    """Measure a step of each size; memory follows the state over the size of the model, else the number of tokens."""
    time_line, memory_line = Line(over, "s"), Line(over, "MiB")
    costs = [flops(size) for _, size in sizes]
    for number, (x, size) in enumerate(sizes):
        keys = ("layers", "hidden", "heads", "sequence", "batch", "vocabulary")
        sized = [text for key, value in zip(keys, size, strict=True) for text in (f"--{key}", value)]
        commands = {"megalith train": train_command(size, "fp32"), "eager": peer("train.py", "eager", *sized)}
        until, peaks = clock.until(costs[number] / sum(costs[number:])), dict[str, float]()
        left_out: dict[str, str] = {}
        pattern = rf"{ITERATION}|^step \d+:"
        seconds = in_turns(commands, pattern, until, rounds=clock.turns(7), left_out=left_out, peaks=peaks)
        yield f"step over {name}", {**time_line.add(x, costs[number], seconds), "left_out": left_out}
        law = state_mib(size) if name == "model size" else x
        yield f"memory over {name}", memory_line.add(x, law, {kind: [mib] for kind, mib in peaks.items()})


def part_sizes(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    sizes = [(layers, hidden, heads, 256, 2, VOCABULARY) for layers, hidden, heads in MODELS.values()]
    points = [(state_mib(size) * 2**20 / 16, size) for size in sizes]
    yield from _steps(points[: options.points], "parameters", "model size", clock)


def part_sequences(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    points = [(float(length), (*MODELS["10M"], length, 1, VOCABULARY)) for length in SEQUENCES]
    yield from _steps(points[: options.points], "tokens of a sequence", "sequence", clock)


def part_batches(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    points = [(float(batch), (*MODELS["10M"], 256, batch, VOCABULARY)) for batch in BATCHES]
    yield from _steps(points[: options.points], "samples of a micro-batch", "micro-batch", clock)


def part_preprocess(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    work, most = Preprocessing(folder), max(MEBIBYTES[: options.points])
    work.ours(1, 1), work.script(1, 1)  # they warm the page cache up
    time_lines = {workers: Line("MiB of jsonl", "s") for workers in (1, 2)}
    memory_lines = {workers: Line("MiB of jsonl", "MiB") for workers in (1, 2)}
    over_workers = Line("workers", "s")
    rows = [(size, workers) for size in MEBIBYTES[: options.points] for workers in (1, 2)] + [(most, 4)]
    for number, (size, workers) in enumerate(rows):
        work.source(size)
        peaks: dict[str, list[float]] = {"megalith preprocess": [], "script": []}

        def turn(name: str, size: int = size, workers: int = workers, peaks: dict[str, list[float]] = peaks) -> float:
            ran = (work.script if name == "script" else work.ours)(size, workers)
            peaks[name].append(ran.peak_mib)
            return ran.seconds

        until = clock.until(size / sum(size for size, _ in rows[number:]))
        turns = {name: lambda name=name, turn=turn: turn(name) for name in peaks}
        seconds = alternate(turns, until, clock.turns(5, least=1))
        if workers < 3:
            plural = "s" * (workers > 1)
            yield f"preprocess by {workers} worker{plural}", time_lines[workers].add(size, size, seconds)
            yield f"preprocess by {workers} worker{plural}: memory", memory_lines[workers].add(size, size, peaks)
        if size == most:
            yield "preprocess over workers", over_workers.add(workers, 1 / min(workers, num_cores()), seconds)


def write_zeros(prefix: Path, tokens: int) -> None:
    """Write a .bin/.idx pair of documents of `LENGTH` zeros, which take no room on the disk."""
    count = tokens // LENGTH
    with prefix.with_suffix(".bin").open("wb") as data:
        data.truncate(2 * LENGTH * count)
    with prefix.with_suffix(".idx").open("wb") as index:
        index.write(b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x08")
        index.write(np.array([count, count + 1], "<u8").tobytes())
        index.write(np.full(count, LENGTH, "<i4").tobytes())
        index.write((np.arange(count, dtype="<i8") * 2 * LENGTH).tobytes())
        index.write(np.arange(count + 1, dtype="<i8").tobytes())


def part_resume(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    """The law of a start is the number of tokens, although most of it is fixed."""
    first, resume, index = Line("tokens", "s"), Line("tokens", "s"), Line("tokens", "s")
    loading, memory = Line("tokens", "s"), Line("tokens", "MiB")
    for number, tokens in enumerate(TOKENS[: options.points]):
        place = folder / str(tokens)
        place.mkdir()
        write_zeros(place / "zeros", tokens)
        flags = f"--data-path {place}/zeros --split 100,0,0 --data-cache-path {place}/cache "
        flags += f"--save {place}/C --load {place}/C --save-interval 1"
        command = train_command((1, 64, 2, 1024, 1, 256), "fp32", *flags.split())
        command.remove("--mock-data")
        command[command.index("--train-iters") + 1] = str(tokens // 1024)
        contender, began = Contender([*command, "--exit-interval", "1"], ITERATION), time.perf_counter()
        try:
            contender.wait(1)
            yield "first start", first.add(tokens, tokens, {"megalith train": [contender.times[0] - began]})
            contender.wait_for_end()
        finally:
            contender.close()
        until = clock.until(1 / (len(TOKENS[: options.points]) - number))
        again = alternate({"megalith train": lambda command=command: run_seconds(command, ITERATION)}, until, (2, 5))
        yield "resume", resume.add(tokens, tokens, again)
        found = measure_index(tokens // LENGTH, 1)
        yield "index built", index.add(tokens, tokens, {"GPTDataset": [found["build_and_save_seconds"]]})
        yield "index loaded", loading.add(tokens, tokens, {"GPTDataset": [found["load_and_check_seconds"]]})
        yield "index built: memory", memory.add(tokens, tokens, {"GPTDataset": [max(1, found["peak_memory_mb"])]})


def part_streams(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    counts, line, left_out = STREAMS[: options.points], Line("streams", "s"), dict[str, str]()
    saved, exported = save_model((*MODELS["10M"], 256, 1, VOCABULARY), folder)
    commands = {
        kind: peer("generate.py", kind, place, "--uniform", "--streams", *counts)
        for kind, place in (("http", saved), ("huggingface", exported))
    }
    least, most = clock.turns(7)
    rounds = (least * len(counts), most * len(counts))
    pattern = r"^(warm-up|round \d+):"
    found = in_turns(commands, pattern, clock.until(), rounds=rounds, left_out=left_out)
    for place, streams in enumerate(counts):
        values = {kind: seconds[place :: len(counts)] for kind, seconds in found.items()}
        yield "answers over streams", {**line.add(streams, streams, values), "left_out": left_out}


def part_ranks(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    start, memory, step = Line("ranks", "s"), Line("ranks", "MiB"), Line("ranks", "s")
    for number, ranks in enumerate(RANKS[: options.points]):
        until = clock.until(ranks / sum(RANKS[: options.points][number:]))
        others: dict[str, list[float]] = {"step": [], "memory": []}

        def ours(ranks: int = ranks, others: dict[str, list[float]] = others) -> float:
            first, third, largest = start_ranks(ranks)
            others["step"].append(third)
            others["memory"].append(largest)
            return first

        turns = {"megalith train": ours, "import torch": lambda ranks=ranks: import_torch(ranks)}
        seconds = alternate(turns, until, clock.turns(5, least=1))
        yield "start over ranks", start.add(ranks, max(1.0, ranks / num_cores()), seconds)
        yield "largest rank", memory.add(ranks, 1.0, {"megalith train": others["memory"]})
        yield "step over ranks", step.add(ranks, 1 / min(ranks, num_cores()), {"megalith train": others["step"]})


PARTS = {
    "sizes": Part(part_sizes, 22),
    "sequences": Part(part_sequences, 18),
    "batches": Part(part_batches, 12),
    "preprocess": Part(part_preprocess, 15),
    "resume": Part(part_resume, 10),
    "streams": Part(part_streams, 10),
    "ranks": Part(part_ranks, 13),
}
"""Shares of the time in percent."""


# --- pages --------------------------------------------------------------------------------------------------------

HEAD = """# Cost as the work grows

Written by `make bench-scaling` from `scaling-*.json` in benchmarks/results (conditions: `benchmarks/scaling.py`). An
exponent b means growth with the b-th power of the work: fitted over all points, and between the last two. The law is
that of the work itself. **Superlinear**: ours grew faster than its law between the last two points, by more than 0.1.
*loaded*: measured beside other work.

Where ranks share cores, a step grows faster than its law. The likely cause, by counting: a ring all-reduce of n ranks
passes 2n(n - 1) messages, and each wakes a process that may have to wait for a core.
"""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of all machines, each with its picture and its table."""
    lines = [HEAD]
    for name, result in results.items():
        about = result["machine"]
        dates = ", ".join(sorted({line["date"] for line in result["found"].values() if line.get("date")}))
        commits = ", ".join(sorted({line["commit"] for line in result["found"].values() if line.get("commit")}))
        lines += [
            f"## {name}",
            f"{about['processor']} ({', '.join(about['features'])}), {about['cores']} cores, torch "
            f"{about['versions'].get('torch')}; {dates}; commit {commits}.",
            "",
            f"![Time and memory over the work on {name}](scaling-{name}.png)",
            "",
            "| what | over | from | to | all | last | law, last | peer, last | peer's over ours at the end | |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(_table_row(what, line) for what, line in result["found"].items()),
            "",
        ]
    return "\n".join(lines)


def _table_row(what: str, line: Mapping[str, Any]) -> str:
    ours, *others = contenders(line)
    x, y = curve(line, ours)
    peers, ratio = "", ""
    if others and len(curve(line, others[0])[0]) == len(x):
        peers = f"{others[0]} {_digits(last_exponent(line, others[0]))}"
        ratio = f"{curve(line, others[0])[1][-1] / y[-1]:.2f}"
    remarks = ["**superlinear**"] * is_superlinear(line) + ["*loaded*"] * is_disturbed(line)
    ends = (f"{where:.3g}: {value:.3g} {line['unit']}" for where, value in ((x[0], y[0]), (x[-1], y[-1])))
    exponents = exponent(x, y), last_exponent(line, ours), last_exponent(line, LAW)
    cells = [what, line["over"], *ends, *map(_digits, exponents), peers, ratio, ", ".join(remarks)]
    return f"| {' | '.join(cells)} |"


def _digits(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def draw(path: Path, name: str, result: Mapping[str, Any]) -> None:
    """Draw each line with its peer, and its law through the last point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = result["found"]
    columns = 4
    rows = math.ceil(len(lines) / columns)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (what, line) in zip(figure.subplots(rows, columns, squeeze=False).flat, lines.items(), strict=False):
        for kind, style in zip(contenders(line), ("o-", "s--", "^--"), strict=False):
            axes.plot(*curve(line, kind), style, label=kind, markersize=4)
        (x, law), (_, ours) = curve(line, LAW), curve(line, contenders(line)[0])
        axes.plot(x, [value * ours[-1] / law[-1] for value in law], ":", color="grey", label=LAW)
        axes.set(title=what, xlabel=line["over"], ylabel=line["unit"], xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    for axes in list(figure.axes)[len(lines) :]:
        axes.remove()
    figure.suptitle(f"{name}: {result['machine']['processor']}, {result['machine']['cores']} cores")
    figure.savefig(path, dpi=80)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, help="only the first so many points of each line")
    options, failed = parse_options(parser, PARTS, 25.0), list[str]()
    if options.points is not None and options.points < 1:
        parser.error(f"--points {options.points}: at least 1")
    if not options.pages:
        failed = measure_chosen("scaling", PARTS, options, summary)
    results = read_results("scaling")
    PAGE.write_text(page(results), encoding="utf-8")
    for machine, result in results.items():
        if options.pages or machine == options.name:
            draw(PAGE.with_name(f"scaling-{machine}.png"), machine, result)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def summary(what: str, line: Mapping[str, Any]) -> str:
    """Return a line for the screen: the last point."""
    last, unit = line["points"][-1], line["unit"]
    medians = (f"{kind} {statistics.median(values):.3g} {unit}" for kind, values in last["values"].items())
    return f"{what}, {last['x']:.3g} {line['over']}: {', '.join(medians)}"


if __name__ == "__main__":
    sys.exit(main())
