"""Make the pictures of the documentation with the commands that users have: `make pictures`.

Text pictures stand in pages between `<!-- picture: COMMAND -->` and `<!-- end -->`; tests/unit/test_site.py holds them
current. Pages are photographed by Chromium (Debian: chromium), 1280 and 390 pixels wide, light and dark.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs/pictures"
TEXT = re.compile(r"(<!-- picture: (megalith [^\n]*) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PLAN = "plan --config recipes/gpt3-1.3b-8gpu.toml --pipeline-model-parallel-size 4 --gpus 8xH100 --html"
RUN = (
    "train --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 8 --train-iters 300 "
    "--lr 0.005 --lr-decay-style cosine --lr-warmup-iters 30 --eval-interval 50 --eval-iters 2 --save-interval 100 "
    "--log-interval 10"
)


def megalith(words: str, *more: str) -> str:
    """Run a command in the repository; return what it prints."""
    command = [sys.executable, "-m", "megalith", *shlex.split(words), *more]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def drawn(page: str) -> str:
    """Return a page with its text pictures made again."""

    def draw(found: re.Match[str]) -> str:
        text = megalith(found[2].removeprefix("megalith ")).rstrip()
        return f"{found[1]}```text\n$ {found[2]}\n{text}\n```\n{found[4]}"

    return TEXT.sub(draw, page)


def photograph(folder: Path, pages: dict[str, Path]) -> None:
    """Take pictures of HTML files, in both widths and colours."""
    from tests.e2e.chromium import Chromium, find_chromium

    program = find_chromium()
    if program is None:
        sys.exit("make pictures needs Chromium (Debian: apt-get install --no-install-recommends chromium)")
    os.environ["PAGE_PICTURES"] = str(PICTURES)
    browser = Chromium(program, folder / "profile")
    try:
        for name, file in pages.items():
            for width, height in ((1280, 900), (390, 844)):
                for scheme in ("light", "dark"):
                    browser.resize(width, height, scheme)
                    browser.call("Page.navigate", url=file.as_uri())
                    browser.wait("document.readyState == 'complete'")
                    browser.picture(f"{name}-{scheme}-{width}.webp")
    finally:
        browser.close()


def main() -> None:
    """Make all of them."""
    for file in (ROOT / "docs").rglob("*.md"):
        page = file.read_text("utf-8")
        if TEXT.search(page):
            file.write_text(drawn(page), "utf-8")
    PICTURES.mkdir(exist_ok=True)
    with TemporaryDirectory() as name:
        folder = Path(name)
        megalith(PLAN, str(folder / "plan.html"))
        megalith(RUN, "--save", str(folder / "C"))
        megalith("report", str(folder / "C"))
        photograph(folder, {"plan": folder / "plan.html", "report": folder / "C/run/report.html"})


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
