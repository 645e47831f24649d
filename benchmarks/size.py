"""How large the source is, and how many of its files take part in five everyday things.

    python benchmarks/size.py [--src OTHER/src] [--list] [--sizes-only]

Sizes count the Python files of `src`: lines, code (neither blank, comment nor docstring), comments, functions and the
median length of a function. The five questions of a reader are answered by running small commands under a profiler
and listing the files whose functions are entered: within one training step, one save, one request to a server, and
the preprocessing of a text; of a flag (`--clip-grad`) the files that name its setting. `--src` measures another tree
by the same means.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
SETTING = "clip_grad"

MODEL = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 64"
TRAIN = (
    f"train {MODEL} --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --eval-iters 0 --lr 1e-3 "
    "--data-path DATA_text_document --split 100,0,0 --vocab-file VOCAB --merge-file MERGES --save C --save-interval 2"
)
QUESTIONS = {
    "where is a step?": "train_step",
    "what happens at a save?": "save",
    "how does text become ids?": "preprocess",
}
"""Question -> the function that answers it: the files that are entered within it count."""


def sizes(source: Path) -> dict[str, float]:
    """Count the Python files below `source`."""
    files = [file.read_text("utf-8") for file in sorted(source.rglob("*.py"))]
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for text in files
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return {
        "files": len(files),
        "lines": sum(text.count("\n") for text in files),
        "code": sum(len(code_lines(text)) for text in files),
        "comments": sum(token.type == tokenize.COMMENT for text in files for token in tokens_of(text)),
        "functions": len(functions),
        "median function": statistics.median(functions),
    }


def tokens_of(text: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(text).readline)


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines that hold code; docstrings are statements of a string alone."""
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = {
        line for token in tokens_of(text) if token.type not in blank for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


class Entered:
    """The files of the package whose functions are called within a function, or while `always` is set."""

    def __init__(self, source: Path, function: str = "") -> None:
        self.files: set[str] = set()
        self.always = False
        self._source, self._function, self._depth = f"{source}{os.sep}", function, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self._source):
            return
        is_it = code.co_name == self._function
        self._depth += is_it and event == "call"
        if self._depth or self.always:
            self.files.add(code.co_filename[len(self._source) :])
        self._depth -= is_it and event == "return"

    def watch(self) -> None:
        """Follow this thread and those that it starts."""
        threading.setprofile(self)
        sys.setprofile(self)


def run_command(source: Path, function: str, words: list[str]) -> set[str]:
    """Run a command of Megalith in this process; the files entered within `function`."""
    from megalith.cli.main import main

    entered = Entered(source, function)
    entered.watch()
    main(words)
    sys.setprofile(None)
    return entered.files


def run_server(source: Path, words: list[str]) -> set[str]:
    """Serve one request in this process; the files entered between asking and the answer."""
    from megalith.cli.main import main

    entered = Entered(source)
    port = words[words.index("--port") + 1]

    def ask() -> None:
        while True:
            time.sleep(0.2)
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").read()
                break
            except OSError:
                continue
        body = json.dumps({"prompt": "a", "max_tokens": 4, "model": "C"}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        entered.always = True
        urllib.request.urlopen(request).read()
        entered.always = False
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    entered.watch()
    main(words)
    sys.setprofile(None)
    return entered.files


def opened(source: Path) -> dict[str, set[str]]:
    """Answer the five questions, each command in a process of its own."""
    word = re.compile(rf"\b{SETTING}\b")
    naming = {str(file.relative_to(source)) for file in source.rglob("*.py") if word.search(file.read_text("utf-8"))}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "texts.jsonl").write_text('{"text": "' + "to be or not to be " * 40 + '"}\n')
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2 writes the other bytes as 256 and on
        characters = map(chr, [*printable, *range(256, 256 + 256 - len(printable))])
        vocab = {character: number for number, character in enumerate((*characters, "<|endoftext|>"))}
        (place / "VOCAB").write_text(json.dumps(vocab))
        (place / "MERGES").write_text("#version: 0.2\n")
        encode = (
            "preprocess --input texts.jsonl --output-prefix DATA --vocab-file VOCAB --merge-file MERGES --workers 1"
        )
        ran = {
            question: _child(source, place, function, words.split())
            for (question, function), words in zip(
                sorted(QUESTIONS.items(), key=lambda item: item[1]), (encode, TRAIN, TRAIN), strict=True
            )
        }
        answered = _child(source, place, "", ["serve", "C", "--port", "5317"])
    return {**ran, "where does a flag act?": naming, "how does a request become a token?": answered}


def _child(source: Path, place: Path, function: str, words: list[str]) -> set[str]:
    command = [sys.executable, __file__, "--src", str(source), "--within", function or "-", *words]
    environ = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True, timeout=600)
    if not (place / "entered.json").exists() or done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found = set(json.loads((place / "entered.json").read_text()))
    (place / "entered.json").unlink()
    return found


def main() -> None:
    """Print the sizes, and the number of files that each question leads to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--src", type=Path, default=SOURCE, help="the folder that holds `megalith`")
    parser.add_argument("--list", action="store_true", help="name the files")
    parser.add_argument("--sizes-only", action="store_true", help="run nothing")
    parser.add_argument("--within", help=argparse.SUPPRESS)
    options, words = parser.parse_known_args()
    source = options.src.resolve()
    if options.within:
        run: Callable[[], set[str]] = (
            (lambda: run_server(source, words))
            if options.within == "-"
            else (lambda: run_command(source, options.within, words))
        )
        found = run()
        Path("entered.json").write_text(json.dumps(sorted(found)))
        sys.exit(not found)
    for name, value in sizes(source).items():
        print(f"{name:40} {value:10g}")
    for question, files in ({} if options.sizes_only else opened(source)).items():
        print(f"{question:40} {len(files):10d} files")
        for file in sorted(files) if options.list else ():
            print(f"    {file}")


if __name__ == "__main__":
    main()
