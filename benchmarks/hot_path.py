"""How much of the source lies between the training loop and the first matrix product of a plain dense step on a CPU.

    python benchmarks/hot_path.py [--markdown]

One step of a small GPT is run under a profiler. At the first product of matrices the frames of this package that are
on the stack are listed, from the loop downwards: one line for each function, its file and its length. The exit code is
1 where they are more than the limits below, or where the table in docs/tour.md lists others.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from megalith.api import load, train, training  # noqa: E402

SOURCE = ROOT / "src" / "megalith"
TOUR = ROOT / "docs" / "tour.md"
MOST_FRAMES, MOST_LINES, MOST_FILES = 12, 500, 8
PRODUCTS = {"linear", "mm", "addmm", "matmul", "bmm", "baddbmm", "__matmul__"}
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 1 --lr 1e-3 --eval-iters 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100"
)

Place = tuple[str, str]
"""A file below src/megalith, and the qualified name of a function in it."""


def stack_at_first_product() -> list[Place]:
    """Train one step; return the frames of the package at its first product of matrices, the loop first."""
    found: list[Place] = []

    def watch(frame: FrameType, event: str, what: Any) -> None:
        if event != "c_call" or found or what.__name__ not in PRODUCTS:
            return
        places, above = [], frame
        while above is not None:
            file = Path(above.f_code.co_filename)
            if file.is_relative_to(SOURCE):
                places.append((file.relative_to(SOURCE).as_posix(), name_of(above)))
            above = above.f_back  # type: ignore[assignment]
        if ("train/step.py", "train_step") in places:
            found.extend(reversed(places))

    with training(load(FLAGS.split())) as run:
        sys.setprofile(watch)
        try:
            next(train(run))
        finally:
            sys.setprofile(None)
    return found


@cache
def functions(file: Path) -> dict[tuple[str, int], tuple[str, int]]:
    """Return the name and first line of each function of a file -> its qualified name and number of lines."""
    found: dict[tuple[str, int], tuple[str, int]] = {}

    def search(parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef):
                search(node, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                length = (node.end_lineno or node.lineno) - first + 1
                found[node.name, first] = f"{prefix}{node.name}", length

    search(ast.parse(file.read_text("utf-8")), "")
    return found


def name_of(frame: FrameType) -> str:
    """Return the qualified name of the function of a frame (`co_qualname`, which Python 3.10 lacks)."""
    code = frame.f_code
    return functions(Path(code.co_filename)).get((code.co_name, code.co_firstlineno), (code.co_name, 0))[0]


def length_of(place: Place) -> int:
    """Return the lines of a function, decorators and docstring included; 0 for one inside another that counts."""
    file, name = place
    return dict(functions(SOURCE / file).values()).get(name, 0)


def rows(places: list[Place]) -> list[str]:
    """Return the table of the tour."""
    numbered = [f"| {number} | `{name}` | `{file}` |" for number, (file, name) in enumerate(places, 1)]
    return ["| # | function | file |", "|---|---|---|", *numbered]


def told_by_the_tour() -> list[Place]:
    """Return the functions and files that docs/tour.md lists."""
    listed = re.findall(r"^\| \d+ \| `([\w.<>]+)` \| `([\w/.]+)` \|", TOUR.read_text("utf-8"), re.MULTILINE)
    return [(file, name) for name, file in listed]


def main() -> int:
    """Print the frames; exit code 1 where they are too many or the tour is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/tour.md")
    markdown = parser.parse_args().markdown
    places = stack_at_first_product()
    lines, files = sum(map(length_of, dict.fromkeys(places))), len({file for file, _ in places})
    for number, place in enumerate(places, 1):
        if not markdown:
            print(f"{number:3}  {place[1]:40} {place[0]:32} {length_of(place):4} lines")
    if markdown:
        print("\n".join(rows(places)))
    print(f"\n{len(places)} frames, {lines} lines, {files} files")
    problems = [
        f"{what}: {count}, at most {most}"
        for what, count, most in (
            ("frames", len(places), MOST_FRAMES),
            ("lines", lines, MOST_LINES),
            ("files", files, MOST_FILES),
        )
        if count > most
    ]
    if told_by_the_tour() != places:
        problems.append(f"docs/tour.md lists other frames: {told_by_the_tour()}; see --markdown")
    print("\n".join(problems) or "as docs/tour.md says")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
