"""What is learnt beside a minimal PyTorch loop: the recipe for a CPU on Tiny Shakespeare, five seeds each.

    python benchmarks/learn.py --text input.txt                  until all seeds are there; two minutes a run
    python benchmarks/learn.py --text input.txt --folder DIR     the same; killed, it continues with what is in DIR

`input.txt` is Tiny Shakespeare (docs/results/learning.md). Its first nine tenths of characters are the training text.
Ours is the recipe through `megalith preprocess`, `train` and `evaluate`; the peer is peers/characters.py, which reads
its hyperparameters from the recipe. Losses are of the weights after the last iteration, in nats a character, on all of
the validation text but its first character, in windows of the training length that do not overlap.

Results go to learning-NAME.json in benchmarks/results as soon as there are any, the page to docs/results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from parts import Clock, Found, Part, measure_chosen, parse_options, read_results

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGE = ROOT / "docs" / "results" / "learning.md"
RECIPE = ROOT / "recipes" / "shakespeare-char-cpu.toml"
OURS, PEER = "megalith", "PyTorch loop"
SEEDS = range(1, 6)
TRAINING_SHARE = 0.9  # of the characters, as in nanoGPT
FLAGS = ("--eval-interval", "1000", "--save-interval", "100")  # of both, beside the recipe
PUBLISHED = "1.88"  # of nanoGPT's README, an estimate from 20 random batches of one run
MARK = "<!-- from here on written by benchmarks/learn.py -->\n"


def preprocess(text_file: Path, folder: Path) -> None:
    """Write both texts and their datasets, under the names that the recipe has, with the documented commands."""
    text = text_file.read_bytes().decode()
    cut = int(TRAINING_SHARE * len(text))
    for name, part in (("train", text[:cut]), ("valid", text[cut:])):
        prefix = f"shakespeare-{name}"
        (folder / f"{prefix}.txt").write_bytes(part.encode())
        vocabulary = ["--vocab-file", "shakespeare-train_vocab.json"] if name == "valid" else []
        words = ["--input", f"{prefix}.txt", "--one-document-per-file", "--output-prefix", prefix, "--workers", "1"]
        run(folder, "-m", "megalith", "preprocess", *words, "--tokenizer-type", "CharacterTokenizer", *vocabulary)


def run(folder: Path, *words: str) -> str:
    """Run a Python program on one core in a folder and return its output."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    ran = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(words)}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return ran.stdout


def train_ours(folder: Path, seed: int) -> dict[str, Any]:
    """Train with the recipe; return the loss and the course of the validation loss."""
    save, result = f"megalith-{seed}", folder / f"megalith-{seed}.json"
    train = ("-m", "megalith", "train", "--config", str(RECIPE), *FLAGS)
    run(folder, *train, "--seed", str(seed), "--save", save, "--load", save)
    windows = ("--seq-length", "64", "--overlapping-eval", "64")
    words = ("--task", "text", "--data", "shakespeare-valid.txt", *windows, "--json", str(result))
    run(folder, "-m", "megalith", "evaluate", save, *words)
    lines = (folder / save / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for line in lines if (record := json.loads(line))["event"] == "evaluation"]
    course = {str(record["iteration"]): record["loss"] for record in records}
    measured = json.loads(result.read_text(encoding="utf-8"))["result"]
    return {"loss": measured["mean"], "characters": measured["num_tokens"], "course": course}


def train_peer(folder: Path, seed: int) -> dict[str, Any]:
    """Train the peer; as `train_ours`."""
    texts = ("shakespeare-train.txt", "shakespeare-valid.txt")
    peer = str(HERE / "peers" / "characters.py")
    words = (str(RECIPE), *texts, "--seed", str(seed), "--state", f"peer-{seed}.pt")
    found = json.loads(run(folder, peer, *words, *FLAGS))
    return {"loss": [*found["losses"].values()][-1], "course": found["losses"]}


CONTENDERS = {OURS: train_ours, PEER: train_peer}


def train_seeds(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    """Train all seeds that have no result; both contenders of a seed side by side, on a core each."""
    done, folder = read_results("learning").get(options.name, {"found": {}})["found"], options.folder or folder
    if not (folder / "shakespeare-valid_text_document.idx").exists():
        preprocess(options.text, folder)
    for seed in SEEDS:
        names = {who: f"{RECIPE.stem}, {who}, seed {seed}" for who in CONTENDERS}
        with ThreadPoolExecutor() as pool:
            missing = {who: name for who, name in names.items() if name not in done}
            futures = {pool.submit(CONTENDERS[who], folder, seed): who for who in missing}
            for future in as_completed(futures):
                who = futures[future]
                yield names[who], {"recipe": RECIPE.stem, "who": who, "seed": seed, **future.result()}


def losses_of(found: Mapping[str, Mapping[str, Any]], who: str) -> list[float]:
    """Return the losses of a contender, by seed."""
    runs = (result for result in found.values() if result["who"] == who)
    return [result["loss"] for result in sorted(runs, key=lambda result: result["seed"])]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error; NaN where there are too few values."""
    mean = statistics.fmean(values) if values else math.nan
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page: what stands before the mark stays, the tables follow."""
    lines = [
        "| machine | trained by | seeds | validation loss, mean | standard error | each seed |",
        "|---|---|---|---|---|---|",
    ]
    for machine, result in results.items():
        found = result["found"]
        for who in (OURS, PEER):
            losses = losses_of(found, who)
            mean, error = mean_and_error(losses)
            each = ", ".join(f"{loss:.3f}" for loss in losses)
            shown = " | ".join("" if math.isnan(value) else f"{value:.4f}" for value in (mean, error))
            lines.append(f"| {machine} | {who} | {len(losses)} | {shown} | {each} |")
    lines += ["", *(f"{machine}: {verdict(result['found'])}" for machine, result in results.items())]
    return PAGE.read_text(encoding="utf-8").partition(MARK)[0] + MARK + "\n" + "\n".join(lines) + "\n"


def verdict(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a sentence on the difference of the means, in standard errors of the difference."""
    (ours, our_error), (theirs, their_error) = (mean_and_error(losses_of(found, who)) for who in (OURS, PEER))
    error = math.hypot(our_error, their_error)
    if not error > 0:
        return "there are too few seeds to compare the means."
    return f"the means differ by {ours - theirs:+.4f}, which is {abs(ours - theirs) / error:.1f} standard errors of it."


def summary(name: str, result: Mapping[str, Any]) -> str:
    """Return a line for the screen."""
    return f"{name}: {result['loss']:.4f}"


PARTS = {"seeds": Part(train_seeds, 1.0)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="Tiny Shakespeare; not needed with --pages")
    options, failed = parse_options(parser, PARTS, 60.0), list[str]()
    if not options.pages:
        if options.text is None or not options.text.is_file():
            parser.error(f"--text {options.text}: no such file")
        failed = measure_chosen("learning", PARTS, options, summary)
    PAGE.write_text(page(read_results("learning")), encoding="utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
