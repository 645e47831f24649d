"""`megalith prove` of recipes, walkthroughs, public launch scripts and lists of command lines, and the page of results.

python benchmarks/prove.py --seconds 200                # goes on where the record ends; the page is written each time
python benchmarks/prove.py --configs configs.json       # also those of a list [{name, family, world, argv}]
python benchmarks/prove.py --only wild --again          # anew
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megalith.config import load
from megalith.config.reading import tomllib
from megalith.errors import MegalithError
from megalith.prove.proof import Proof, prove

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "prove.jsonl"
PAGE = ROOT / "docs" / "results" / "prove.md"
HEAD = """# What `megalith prove` says of the recipes and of others' command lines

Written by `benchmarks/prove.py`; `docs/prove.md` says what is compared, and what is not. "worst" is the largest
relative difference from one process, of all that is compared, in fp64; the bound is 1e-10. "rounding" is the largest
share of its bound of a difference in the run's own precision. "quick": only the first miniature, without checkpoints.
"refused": `megalith train` refuses the command line too, with this message. "one process": a run of one GPU, which is
compared with itself, trained a second time.
"""
TITLES = {
    "recipe": "Recipes of this repository",
    "walkthrough": "Command lines of the walkthroughs",
    "wild": "Public launch scripts (benchmarks/prove_runs.toml has their flags)",
    "list": "Command lines of Megatron-LM's own functional tests, August 2026, as far as they are text models",
}
COLUMNS = (
    "| configuration | GPUs | verdict | miniatures | compared | worst | rounding |\n|---|---|---|---|---|---|---|\n"
)


class Case(NamedTuple):
    """A configuration to prove."""

    group: str
    name: str
    argv: list[str]
    gpus: int


def cases(configs: Path | None) -> Iterator[Case]:
    """Yield the recipes, the command lines of prove_runs.toml, and those of a JSON list."""
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        said = re.search(r"^# GPUs: (\d+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        yield Case("recipe", path.name, ["--config", str(path)], max(1, int(said[1])) if said else 1)
    runs = tomllib.loads((ROOT / "benchmarks" / "prove_runs.toml").read_text(encoding="utf-8"))
    for group, entries in runs.items():
        for entry in entries:
            source = f" ({entry['source']})" if "source" in entry else ""
            yield Case(group, entry["name"] + source, entry["flags"].split(), entry["gpus"])
    for entry in json.loads(configs.read_text(encoding="utf-8")) if configs else []:
        family = ["--model-family", entry["family"]] if entry["family"] in ("bert", "t5") else []
        yield Case("list", entry["name"], [*family, *entry["argv"]], entry["world"])


def proven(case: Case, quick: bool) -> dict[str, Any]:
    """Prove one configuration and return its entry of the record."""
    began = time.perf_counter()
    entry = {"group": case.group, "name": case.name, "gpus": case.gpus, "quick": quick}
    try:
        run = load(case.argv, {"RANK": "0", "WORLD_SIZE": str(case.gpus)}, files=False)
    except MegalithError as error:
        return entry | {"verdict": "refused", "why": _line(str(error).splitlines()[0])}
    try:
        found = outcome(prove(run, case.argv, quick=quick))
    except MegalithError as error:
        found = {"verdict": f"no miniature ({type(error).__name__})", "why": _line(str(error)[-1000:])}
    return entry | found | {"seconds": round(time.perf_counter() - began, 1)}


def outcome(proof: Proof) -> dict[str, Any]:
    """Return what a proof says, for the record."""
    compared = proof.compared
    causes = [str(result.cause or result.failure[-600:]) for result in proof.results if not result.holds]
    return {
        "verdict": "proven" if proof.holds else "mismatch",
        "why": _line("; ".join(causes)),
        "miniatures": ", ".join(str(result.miniature) for result in proof.results),
        "compared": sum(compared.counts.values()),
        "worst": compared.largest(rounded=False),
        "rounding": compared.largest(rounded=True),
    }


def _line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def page(record: list[dict[str, Any]]) -> str:
    """Return the page for all entries of the record, the last one of each configuration."""
    last = {(entry["group"], entry["name"]): entry for entry in record}
    parts = [HEAD]
    for group, title in TITLES.items():
        entries = [entry for entry in last.values() if entry["group"] == group]
        said = [entry["verdict"].partition(" (")[0] for entry in entries]
        counts = ", ".join(f"{said.count(one)} {one}" for one in dict.fromkeys(sorted(said)))
        parts.append(f"\n## {title}\n\n{counts or 'None yet'}.\n\n{COLUMNS}" + "".join(map(_row, entries)))
    return "".join(parts)


def _row(entry: dict[str, Any]) -> str:
    why = entry["why"] if len(entry["why"]) <= 240 else entry["why"][:237] + "..."
    verdict = f"{entry['verdict']}{', quick' if entry['quick'] and 'worst' in entry else ''}{f': {why}' if why else ''}"
    worst = f"{entry['worst']:.1e}" if "worst" in entry else ""
    rounding = f"{entry['rounding']:.2f}" if entry.get("rounding") else ""
    shown = (entry.get("miniatures", ""), entry.get("compared", ""), worst, rounding)
    columns = (entry["name"], entry["gpus"], verdict, *shown)
    return f"| {' | '.join(map(str, columns))} |\n"


def main() -> None:
    """Prove what the record lacks, within the time; write record and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--only", choices=TITLES, help="of one group")
    parser.add_argument("--match", default="", help="those whose name has this")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true", help="also those that the record has")
    parser.add_argument("--seconds", type=float, default=1e9, help="start none after this time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []
    record = [json.loads(line) for line in lines]
    known = {(entry["group"], entry["name"]) for entry in record if not options.again}
    began = time.monotonic()
    for case in cases(options.configs):
        chosen = options.only in (None, case.group) and options.match in case.name
        if not chosen or (case.group, case.name) in known or time.monotonic() - began > options.seconds:
            continue
        record.append(proven(case, options.quick))
        print(_row(record[-1]), end="", flush=True)
        with RECORD.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record[-1]) + "\n")
    PAGE.write_text(page(record), encoding="utf-8")


if __name__ == "__main__":
    main()
