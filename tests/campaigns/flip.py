"""Single-bit flips in the files of a run: each is found, or makes no difference to losses and weights."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from ..e2e.checkpoints import assert_same, curve_of, state_of
from ..e2e.warm import WarmProcess
from .material import TRAIN, finish_within, last_lines, prepare_data

LAST = 8
FILES = {
    "checkpoint": ("c/iter_*/**/*", "c/latest_checkpointed_iteration.txt"),
    "index cache": ("cache/**/*",),
    "tokens (.bin)": ("data/*.bin",),
    "index (.idx)": ("data/*.idx",),
    "card": ("data/*.card",),
    "tokenizer": ("data/vocab.json", "data/merges.txt"),
}
"""Kind of file -> patterns of paths in the folder of a run."""
OUTCOMES = ("refused", "same", "found by verify", "not checked", "SILENT", "CRASHED")
_ERRORS_OF_OURS = (2, 3, 4, 5)
_PATIENCE_SECONDS = 120.0


def run(flips: int, seed: int, folder: Path) -> tuple[list[list[str]], list[str]]:
    """Flip that many bits, each in files of their own; returns the table and the findings."""
    chance = random.Random(f"flip {seed}")
    warm = WarmProcess(folder)
    counts, findings = Counter[tuple[str, str]](), list[str]()
    try:
        whole, half = folder / "whole", folder / "half"
        prepare_data(whole)
        shutil.copytree(whole, half)
        for place, flags in ((whole, []), (half, ["--exit-interval", "4"])):
            ended = _train(warm, place, flags)
            assert ended is not None and ended[0] == 0, ended
        clean = folder / "clean"
        shutil.copytree(half, clean)
        if (found := _outcome(_train(warm, clean, []), clean, whole, "checkpoint"))[0] != "same":
            return [["file"]], [f"without a flip a resumed run is not the uninterrupted one: {found}"]
        for number in range(flips):
            kind = chance.choice(list(FILES))
            resumes = kind == "checkpoint" or chance.random() < 0.5
            place = folder / "trial"
            shutil.copytree(half, place)
            if not resumes:
                shutil.rmtree(place / "c")
            where = _flip(place, kind, chance)
            outcome, said = _outcome(_train(warm, place, []), place, whole, kind)
            counts[kind, outcome] += 1
            if outcome.isupper():
                findings.append(f"flip {number}, {where}, {'resumed' if resumes else 'fresh'}: {outcome}: {said}")
            shutil.rmtree(place)
    finally:
        warm.close()
    return [["file", *OUTCOMES], *([kind, *(str(counts[kind, name]) for name in OUTCOMES)] for kind in FILES)], findings


def _train(warm: WarmProcess, place: Path, flags: list[str]) -> tuple[int, str] | None:
    """Train, and resume where there is a checkpoint; returns exit code and output, None where it hung."""
    words = [*TRAIN, "--train-iters", LAST, "--save-interval", 2, "--save", "c", "--load", "c", *flags]
    ended = finish_within(warm.start(words, place), _PATIENCE_SECONDS)
    return None if ended is None else (ended.code, ended.text)


def _flip(place: Path, kind: str, chance: random.Random) -> str:
    """Flip a bit of a random file of a kind; returns where."""
    paths = sorted(path for pattern in FILES[kind] for path in place.glob(pattern) if path.is_file())
    path = chance.choice([path for path in paths if path.stat().st_size])
    content = bytearray(path.read_bytes())
    byte, bit = chance.randrange(len(content)), chance.randrange(8)
    content[byte] ^= 1 << bit
    path.write_bytes(content)
    return f"{path.relative_to(place)}, byte {byte}, bit {bit}"


def _outcome(ended: tuple[int, str] | None, place: Path, whole: Path, kind: str) -> tuple[str, str]:
    """What became of a flip, and what the run said."""
    if ended is None:
        return "CRASHED", f"no end within {_PATIENCE_SECONDS:.0f} s"
    code, text = ended
    if code != 0:
        ours = code in _ERRORS_OF_OURS and "Traceback" not in text
        return "refused" if ours else "CRASHED", f"exit code {code}: {last_lines(text)}"
    try:
        assert_same(state_of(whole / "c", LAST), state_of(place / "c", LAST))
        assert curve_of(whole / "c") == curve_of(place / "c"), "other losses"
    except Exception as error:
        if not kind.startswith(("tokens", "index (")):
            return "SILENT", str(error) or "another state"
        command = [sys.executable, "-m", "megalith", "data", "verify", "data/text_text_document"]
        verified = subprocess.run(command, cwd=place, capture_output=True)
        # A token that becomes another one of the vocabulary: Megatron's format has no checksum.
        silent = "not checked" if kind.startswith("tokens") else "SILENT"
        return ("found by verify" if verified.returncode == 3 else silent), str(error)
    return "same", ""
