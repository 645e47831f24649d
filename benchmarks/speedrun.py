"""The speedrun: a validation loss of 1.47 on the characters of Tiny Shakespeare, by as little arithmetic as possible.

    python benchmarks/speedrun.py --text input.txt                          train the recipe, and add it to the table
    python benchmarks/speedrun.py --text input.txt --folder DIR             the same; killed, it continues from DIR
    python benchmarks/speedrun.py --run SAVE_FOLDER --change 'no dropout'   add a run that was trained by hand
    python benchmarks/speedrun.py --pages                                   write the table only

`input.txt` is Tiny Shakespeare (docs/results/learning.md). Words behind `--` go to `megalith train`: `-- --seed 2`.
Runs with the same change are seeds of one row. What a run spent until its first evaluation at the target is counted as
`megalith compare` counts it; a run that never gets there stays in the table with its lowest loss. The evaluations
themselves are not counted. Longer windows than the reference's make the loss lower; the lowest evaluation of such a run
is measured again in windows of the reference's length (`megalith evaluate`). Runs go to
benchmarks/results/speedrun.json, the table to docs/results/learning.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from learn import PAGE, ROOT, preprocess
from machine import commit, describe, name_of
from parts import RESULTS

from megalith.config import load
from megalith.report.comparison import AXES, read_run

RECIPE = ROOT / "recipes" / "shakespeare-speedrun.toml"
RUNS = RESULTS / "speedrun.json"
TARGET = 1.47  # nanoGPT's README: 1.4697
REFERENCE = "the reference, `recipes/shakespeare-char.toml`"
EXPECTED_FLOPS = 1750 * 16384 * 67.4e6
"""Of the reference until its target, while no run of it is in the table: in karpathy/nanoGPT issue 211 its lowest loss,
1.48, after 1,750 iterations."""
BEGIN, END = "<!-- written by benchmarks/speedrun.py -->\n", "<!-- end -->\n"
WINDOW = 256  # characters, the reference's
Record = Mapping[str, Any]


def loss_in_short_windows(folder: Path, iteration: int) -> float:
    """Return the loss of a checkpoint over the validation text beside its folder, in windows of `WINDOW` characters."""
    with TemporaryDirectory() as place:
        file = Path(place) / "found.json"
        words = f"--iteration {iteration} --task text --seq-length {WINDOW} --overlapping-eval {WINDOW} --device cpu"
        text = folder.parent / "shakespeare-valid.txt"
        command = ["megalith", "evaluate", str(folder), *words.split(), "--data", str(text), "--json", str(file)]
        subprocess.run([sys.executable, "-m", *command], check=True)
        return float(json.loads(file.read_text(encoding="utf-8"))["result"]["mean"])


def record_of(
    folder: Path, change: str, measure: Callable[[Path, int], float] = loss_in_short_windows
) -> dict[str, Any]:
    """Return what a run spent until its first evaluation at the target, or its lowest; ValueError if it has none.

    `loss` is that of this evaluation in windows of at most `WINDOW` characters, `loss_of_run` as the run itself
    evaluates; `flops` are the model's, `muon_flops` those of Newton-Schulz iterations, which the former lack.
    """
    run = read_run(folder, folder.name)
    iterations, losses = run.validation
    if not len(losses):
        raise ValueError(f"{folder}: the run has no evaluation yet; continue it")
    reached, is_longer = bool((losses <= TARGET).any()), run.settings["seq_length"] > WINDOW
    at = int((losses <= TARGET).argmax() if reached and not is_longer else losses.argmin())
    loss = measure(folder, int(iterations[at])) if is_longer else float(losses[at])
    spent = {axis: float(np.interp(iterations[at], *run.spent[axis])) for axis in AXES}
    return {
        "change": change,
        "seed": run.settings["seed"],
        "reached": loss <= TARGET,
        "loss": round(loss, 4),
        "loss_of_run": round(float(losses[at]), 4),
        "iteration": int(iterations[at]),
        "tokens": int(spent["tokens"]),
        "flops": float(f"{spent['FLOPs']:.4g}"),
        "muon_flops": float(f"{spent['steps'] * newton_schulz_flops(run.settings):.4g}"),
        "seconds": round(spent["time"]),
        "unfinished": run.unfinished and f"{run.iteration} of {run.settings['train_iters']} iterations done",
        "date": time.strftime("%Y-%m-%d"),
        "machine": name_of(describe()),
        "commit": commit(),
    }


def newton_schulz_flops(settings: Record) -> float:
    """Return the operations of a step of Muon in its matrix products, of a dense model; 0 for other optimizers."""
    if "muon" not in settings["optimizer"]:
        return 0.0
    hidden, ffn, layers = (settings[name] for name in ("hidden_size", "ffn_hidden_size", "num_layers"))
    heads = settings["num_attention_heads"]
    groups = settings["num_query_groups"] if settings["group_query_attention"] else heads
    queries, keys = settings["kv_channels"] * heads, settings["kv_channels"] * groups
    first = ffn * (2 if settings["swiglu"] or settings["geglu"] else 1)
    total = 0.0
    for rows in (queries, keys, keys, queries, first, ffn):  # q, k, v, output, and the two of the feed-forward layer
        short, long = sorted((rows, hidden))
        total += 4.0 * short**2 * long + 2.0 * short**3
    return total * layers * settings["muon_num_ns_steps"]


def table(runs: Iterable[Record]) -> list[str]:
    """Return the lines of the table: a row for each change, in order of time."""
    runs = list(runs)
    references = [run for run in runs if run["change"] == REFERENCE and run["reached"]]
    whole = mean(references, "flops") if references else EXPECTED_FLOPS
    lines = [
        "| date | change | tokens, M | FLOPs, T | of the reference | with Muon's, T | minutes | loss | seeds | on |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for change, seeds in groupby(runs, key=lambda run: str(run["change"])):
        lines.append(row(change, list(seeds), whole))
    note = "FLOPs of the reference: " + (
        "those in the table."
        if references
        else f"{EXPECTED_FLOPS / 1e12:,.0f} T are expected, 1,750 iterations; its run here has not reached the target."
    )
    return [*lines, "", note]


def row(change: str, seeds: Sequence[Record], whole: float) -> str:
    """Return the row of a change: means over its seeds, and the standard deviation of the loss."""
    flops, muon = mean(seeds, "flops"), mean(seeds, "muon_flops")
    losses = [run["loss"] for run in seeds]
    spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
    missed = sum(not run["reached"] for run in seeds)
    outcome = f"{statistics.fmean(losses):.4f}{spread}" + (", not reached" if missed == len(seeds) else "")
    outcome += f", {missed} of {len(seeds)} not reached" if 0 < missed < len(seeds) else ""
    unfinished = "; ".join(sorted({run["unfinished"] for run in seeds} - {""}))
    cells = (
        max(run["date"] for run in seeds),
        change + (f" ({unfinished})" if unfinished else ""),
        f"{mean(seeds, 'tokens') / 1e6:.1f}",
        f"{flops / 1e12:,.0f}",
        "" if missed == len(seeds) else f"1/{whole / flops:.1f}" if flops < whole else f"{flops / whole:.2f}",
        f"{(flops + muon) / 1e12:,.0f}",
        f"{mean(seeds, 'seconds') / 60:.0f}",
        outcome,
        str(len(seeds)),
        ", ".join(sorted({run["machine"] for run in seeds})),
    )
    return f"| {' | '.join(cells)} |"


def mean(runs: Sequence[Record], name: str) -> float:
    """Return the mean of a number over runs."""
    return statistics.fmean(run[name] for run in runs)


def page(text: str, runs: Iterable[Record]) -> str:
    """Return the text of the page with the table of these runs in its place."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE} has lost a mark of the table"
    return before + begin + "\n".join(table(runs)) + "\n" + end + after


def read_runs() -> list[dict[str, Any]]:
    """Return the runs that are in the table."""
    found: list[dict[str, Any]] = json.loads(RUNS.read_text(encoding="utf-8")) if RUNS.exists() else []
    return found


def add(runs: list[dict[str, Any]], record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs with one more, beside the other seeds of its change; it replaces an earlier state of itself."""
    key = record["change"], record["seed"]
    if key in (known := [(run["change"], run["seed"]) for run in runs]):
        return [record if key == other else run for other, run in zip(known, runs, strict=True)]
    last = max((place for place, (change, _) in enumerate(known) if change == record["change"]), default=len(runs) - 1)
    return [*runs[: last + 1], record, *runs[last + 1 :]]


def train(text: Path, folder: Path, words: Sequence[str]) -> tuple[int, Path]:
    """Train the recipe in a folder, or continue it; return the exit code and the folder of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "shakespeare-valid_text_document.idx").exists():
        preprocess(text, folder)
    words = ["--config", str(RECIPE), *words]
    save = folder / str(load(words, {}, files=False).checkpoint.save)
    return subprocess.call([sys.executable, "-m", "megalith", "train", *words], cwd=folder, env={**os.environ}), save


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path("input.txt"), help="Tiny Shakespeare (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "speedrun", help="of data and checkpoints (%(default)s)"
    )
    parser.add_argument("--run", type=Path, help="save folder of a run to add, instead of training")
    parser.add_argument("--change", default="", help="what the run tries, against the row above; the recipe's name")
    parser.add_argument("--pages", action="store_true", help="write the table only")
    parser.add_argument("words", nargs="*", help="behind --: flags of megalith train")
    options, code = parser.parse_args(), 0
    if not options.pages:
        folder = options.run
        if folder is None:
            if not options.text.is_file():
                parser.error(f"--text {options.text}: no such file; docs/results/learning.md says where to get it")
            code, folder = train(options.text, options.folder, options.words)
        if not code:
            record = record_of(folder, options.change or f"`recipes/{RECIPE.name}`")
            print(json.dumps(record))
            RUNS.write_text(json.dumps(add(read_runs(), record), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), read_runs()), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
