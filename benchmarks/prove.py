"""`megalith prove` of recipes and lists of command lines; of recipes it writes a page of results.

python benchmarks/prove.py                                  # the recipes
python benchmarks/prove.py --configs configs.json --shard 0/8   # prints rows of [{name, family, world, argv}]
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from megalith.config import load
from megalith.errors import MegalithError
from megalith.prove.proof import Proof, prove

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# What `megalith prove` says of the recipes

Written by `benchmarks/prove.py`; `docs/prove.md` says what is compared, and what is not. "worst" is the largest
relative difference from one process, of all that is compared, in fp64; the bound is 1e-10.

| configuration | GPUs | verdict | miniatures | compared | worst |
|---|---|---|---|---|---|
"""


def recipes() -> Iterator[tuple[str, list[str], int]]:
    """Yield name, command line and GPUs of each recipe."""
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        said = re.search(r"^# GPUs: (\d+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        yield path.name, ["--config", str(path)], max(1, int(said[1])) if said else 1


def listed(path: Path, shard: str) -> Iterator[tuple[str, list[str], int]]:
    """Yield those of every n-th entry of a JSON list, from `shard` of n on."""
    first, step = map(int, shard.split("/"))
    for entry in json.loads(path.read_text(encoding="utf-8"))[first::step]:
        family = ["--model-family", entry["family"]] if entry["family"] in ("bert", "t5") else []
        yield entry["name"], [*family, *entry["argv"]], entry["world"]


def row(name: str, argv: list[str], gpus: int) -> str:
    """Prove one configuration and return its row."""
    try:
        run = load(argv, {"RANK": "0", "WORLD_SIZE": str(gpus)}, files=False)
        proof = prove(run, argv)
    except MegalithError as error:
        return f"| {name} | {gpus} | {type(error).__name__}: {' '.join(str(error).split())[-300:]} | | | |"
    return f"| {name} | {gpus} | {verdict(proof)} |"


def verdict(proof: Proof) -> str:
    """Return the last columns of a row."""
    compared = [result.comparison for result in proof.results]
    worst = max(error for one in compared for error, _ in [*one.worst.values(), (0.0, "")])
    causes = [str(result.cause or result.failure[-300:]) for result in proof.results if not result.holds]
    said = "proven" if proof.holds else "mismatch: " + " ".join("; ".join(causes).split())
    names = ", ".join(str(result.miniature) for result in proof.results)
    return f"{said} | {names} | {sum(sum(one.counts.values()) for one in compared)} | {worst:.1e}"


def main() -> None:
    """Print rows as they are found; of the recipes also write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--shard", default="0/1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, argv, gpus in listed(options.configs, options.shard) if options.configs else recipes():
        began = time.perf_counter()
        rows.append(row(name, argv, gpus))
        print(rows[-1], f"{time.perf_counter() - began:.1f} s", flush=True)
    if not options.configs:
        (ROOT / "docs" / "results" / "prove.md").write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
