"""Predicted beside measured times of training steps.

    export OMP_NUM_THREADS=1   # rates of one thread, as the processes have
    megalith doctor --measure && python benchmarks/plan_time.py --number 40 --seed 1   # random, of 1 and 2 CPU ranks
    python benchmarks/plan_time.py --published                                         # of published runs on GPUs

With `--markdown docs/results/plan.md` the table of that page is replaced.

Each random configuration (`plan_memory.draw`) is planned, then trained by as many processes of one thread; the time is
the median of its steps after the first, of the slowest rank. Nothing else may run on the machine meanwhile, nor
while it is measured.

Of published runs (`benchmarks/plan_published.json`) the model FLOPs utilisation is planned with the table that is
shipped for their GPUs, then once more with one factor for each GPU: the median of published over planned.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path

from plan_memory import BASE, SECONDS, draw, sound, write

from megalith.config import load
from megalith.distributed.forked import run_forked
from megalith.plan.devices import DEVICES
from megalith.plan.plan import plan_run
from megalith.plan.rates import step_seconds
from megalith.plan.time import step_time

STEPS = 6  # of `step_seconds`
WITHIN, SHARE = 0.20, 0.80  # of random configurations
BESIDE = 0.15  # of published runs
COMMON = (
    "--bf16 --train-iters 1 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --hidden-dropout 0"
)
PUBLISHED = Path(__file__).with_name("plan_published.json")


def random_runs(number: int, seed: int) -> tuple[str, float]:
    """Return predicted beside measured times as Markdown, and the share that is near."""
    chance, drawn = random.Random(seed), list[tuple[int, list[str]]]()
    while len(drawn) < number:
        ranks, words = draw(chance)
        words = [word if word != "3" else str(STEPS) for word in words]  # --train-iters of BASE
        if ranks in (1, 2) and sound(ranks, words):
            drawn.append((ranks, words))
    medians = [max(run_forked(ranks, step_seconds, words, ranks, seconds=SECONDS)) for ranks, words in drawn]
    lines, near = list[str](), 0
    for (ranks, words), median in zip(drawn, medians, strict=True):
        planned = plan_run(words, DEVICES["CPU"], world_size=ranks).time.step_seconds
        near += abs(planned / median - 1) <= WITHIN
        flags = " ".join(words[len(BASE.split()) :])
        lines.append(f"| {ranks} | {1e3 * median:.0f} | {planned / median - 1:+.0%} | `{flags}` |")
        print(lines[-1], flush=True)
    head = [
        f"Of {number} configurations the predicted time of {near} is within {WITHIN:.0%} of the measured one "
        f"({near / number:.0%}; wanted: {SHARE:.0%}).",
        "",
        "| ranks | measured ms | predicted | flags |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *lines]), near / number


def published() -> tuple[str, float]:
    """Return predicted beside published rates as Markdown, and the share that one factor for each GPU brings near."""
    rows, ratios = json.loads(PUBLISHED.read_text(encoding="utf-8")), dict[str, list[float]]()
    planned = []
    for row in rows:
        words = [*row["flags"].split(), *COMMON.split()]
        run = load(words, {"RANK": "0", "WORLD_SIZE": str(row["gpus"])}, files=False)
        time = step_time(run, row["vocabulary"], DEVICES[row["device"]], nodes=max(1, row["gpus"] // 8))
        planned.append(time.mfu)
        if "tokens_per_second" in row:  # of a GPU
            row["mfu"] = time.mfu * row["tokens_per_second"] * row["gpus"] / time.tokens_per_second
        elif "step_seconds" in row:
            row["mfu"] = time.mfu * time.step_seconds / row["step_seconds"]
        ratios.setdefault(row["hardware"], []).append(row["mfu"] / time.mfu)
    factors = {name: statistics.median(values) for name, values in ratios.items()}
    lines, near = list[str](), 0
    for row, mfu in zip(rows, planned, strict=True):
        scaled = mfu * factors[row["hardware"]]
        near += abs(scaled / row["mfu"] - 1) <= BESIDE
        shown = f"| {row['mfu']:.1%} | {mfu:.1%} | {scaled:.1%} | {scaled / row['mfu'] - 1:+.0%} |"
        where = f"{row['source']}; assumed: {row['assumed']}"
        lines.append(f"| {row['run']} | {row['gpus']} {row['hardware']} {shown} {where} |")
    named = ", ".join(f"{name} {factor:.2f}" for name, factor in factors.items())
    head = [
        f"Of {len(rows)} runs the predicted MFU of {near} is within {BESIDE:.0%} of the published one, with a factor "
        f"for each GPU: {named}.",
        "",
        "| run | GPUs | published MFU | predicted | with the factor | difference | source |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *lines]), near / len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--number", type=int, default=10, help="random configurations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (default: %(default)s)")
    parser.add_argument("--published", action="store_true", help="plan published runs instead")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="replace the table of a page")
    options = parser.parse_args()
    if options.published:
        name, (text, share), wanted = "published", published(), 1.0
    else:
        name, (text, share), wanted = "times", random_runs(options.number, options.seed), SHARE
    print(text)
    if options.markdown:
        write(options.markdown, name, text)
    return 0 if share >= wanted else 1


if __name__ == "__main__":
    sys.exit(main())
