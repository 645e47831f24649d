"""`megalith preprocess` by a tokenizer.json with gigatoken, beside the same command by the library `tokenizers` alone.

    python benchmarks/tokenizer_json.py --out benchmarks/results/tokenizer-json-cpu.json

Start to exit, with one and two workers; the bytes of .bin and .idx must be the same. The tokenizer is of Qwen's kind
with 32,000 tokens, trained on the sources of this Python, unless --tokenizer names a folder. Rounds alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
import tempfile
from functools import partial
from pathlib import Path

from commands import digest, write_jsonl
from contender import alternate, megalith, run
from data import text_of_this_python, texts_of
from dialogues import make_tokenizer
from machine import describe

NAMES = ("gigatoken", "tokenizers")


def preprocess(name: str, folder: Path, tokenizer: Path, workers: int) -> float:
    """Return the seconds of the command; `tokenizers` alone means that gigatoken cannot be imported."""
    os.environ["PYTHONPATH"] = "" if name == "gigatoken" else str(folder / "without")
    for path in folder.glob(f"{name}_text_document.*"):
        path.unlink()
    places = ["--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / name), "--workers", str(workers)]
    chosen = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    return run(megalith("preprocess", *places, *chosen)).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json")
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {"machine": describe(), "megabytes": options.megabytes, "workers": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizer, without = options.tokenizer or folder / "tokenizer", folder / "without"
        without.mkdir()
        (without / "gigatoken.py").write_text("raise ImportError\n")
        if options.tokenizer is None:
            tokenizer.mkdir()
            sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
            make_tokenizer([path.read_text(encoding="utf-8", errors="ignore") for path in sources], tokenizer)
        write_jsonl(folder / "in.jsonl", texts_of(text_of_this_python(), options.megabytes), options.megabytes)
        for workers in (1, 2):
            turns = {name: partial(preprocess, name, folder, tokenizer, workers) for name in NAMES}
            seconds = alternate(turns, 0.0, (options.rounds, options.rounds))
            for ending in (".bin", ".idx"):
                if len({digest(folder / f"{name}_text_document{ending}") for name in NAMES}) > 1:
                    raise SystemExit(f"the {ending} of both differ")
            ratios = [slow / fast for fast, slow in zip(*map(seconds.get, NAMES), strict=True)]
            result["workers"][workers] = {"seconds": seconds, "ratios": ratios, "median": statistics.median(ratios)}
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
