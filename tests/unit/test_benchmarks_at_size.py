"""The corpus of a machine's text, and the trainings on it: what is chosen, taken in turns and written."""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "peers")


def module(name: str) -> Any:
    return importlib.import_module(name)


def test_the_tables_are_those_of_the_results() -> None:
    written = (ROOT / "docs/results/learning.md").read_text(encoding="utf-8")
    results = module("parts").read_results("at-size")
    assert results and module("at_size").page(written, results) == written, "run benchmarks/at_size.py --pages"
    for machine, result in results.items():
        assert all((ROOT / "docs/results" / f"{part}-{machine}.png").exists() for part in result["found"])


# --- the corpus ---------------------------------------------------------------------------------------------------


def text(number: int) -> str:
    return f"document {number} " + "of some length, " * 10


def debian_machine(root: Path) -> None:
    """Three packages: one with a copyright file in Debian's format, one of non-free, one without a copyright file."""
    files = {
        "good": "usr/share/doc/good/README",
        "closed": "usr/share/doc/closed/README",
        "bare": "usr/share/doc/bare/README",
    }
    for number, (package, file) in enumerate(files.items()):
        for path in (f"var/lib/dpkg/info/{package}:amd64.list", file):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text(number))
        (root / f"var/lib/dpkg/info/{package}:amd64.list").write_text(f"/.\n/usr/share\n/{file}\n")
    for package in ("good", "closed"):
        about = "Format: https://x\n\nFiles: *\nLicense: GPL-2+\n\nFiles: b\nLicense: MIT\n\nLicense: MIT\n ...\n"
        (root / f"usr/share/doc/{package}/copyright").write_text(about)
    sections = {"good": "libs", "closed": "non-free/libs", "bare": "libs"}
    status = (
        f"Package: {name}\nStatus: install ok\nDescription: x\n more\nSection: {of}\n" for name, of in sections.items()
    )
    (root / "var/lib/dpkg/status").write_text("\n".join(status))


def test_files_of_debian_have_an_owner_with_licences(tmp_path: Path) -> None:
    debian_machine(tmp_path)
    found = list(module("machine_text").debian(r"^/usr/share/doc/.*README", tmp_path))
    assert [(file.path.name, file.owner, file.licences) for file in found] == [("README", "good", ("GPL-2+", "MIT"))]


def test_equal_texts_occur_once_and_what_is_no_text_is_counted(tmp_path: Path) -> None:
    corpus = module("machine_text")
    contents = {
        "a.txt": text(1).encode(),
        "b.gz": gzip.compress(text(1).encode()),
        "c.txt": text(2).replace(" ", "\r\n").encode(),
        "d.txt": text(2).replace(" ", "\n").encode(),
        "e.txt": b"short",
        "f.txt": b"\xff" * 100,
        "g.txt": text(3).encode() + b"\x00",
        "h.html": text(4).encode(),
        "i.txt": text(5).encode(),
        "j.txt": b"x" * (corpus.LARGEST + 1),
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "link.txt").symlink_to(tmp_path / "i.txt")
    files = [corpus.Candidate(path, "owner", ("MIT",)) for path in sorted(tmp_path.iterdir())]
    found, about = corpus.collect({"one": files[:3], "two": files[3:]})
    assert sum(len(source.owners) for source in about.values()) == 2
    assert about["one"].counts == {"files": 3, "documents": 2, "duplicates": 1}
    rest = {"files": 7, "duplicates": 1, "too short": 1, "too long": 1, "not text": 3, "documents": 1}
    assert about["two"].counts == rest
    texts = [*corpus.texts_of(found, validation=False), *corpus.texts_of(found, validation=True)]
    assert sorted(texts) == sorted([text(1), text(2).replace(" ", "\n"), text(5)])
    assert about["one"].size + about["two"].size == sum(map(len, texts))


def test_the_card_and_the_files_do_not_depend_on_the_order_of_a_source(tmp_path: Path) -> None:
    corpus = module("machine_text")
    for number in range(300):
        (tmp_path / f"{number}.txt").write_text(text(number))
    files = [corpus.Candidate(path, "owner", ("MIT",)) for path in sorted(tmp_path.iterdir())]
    rows = []
    for order in (files, files[::-1]):
        found, about = corpus.collect({"all": order})
        parts = [
            corpus.write_part(tmp_path / f"{v}.jsonl", corpus.texts_of(found, validation=v)) for v in (False, True)
        ]
        rows.append(corpus.card(about, parts, 300))
    assert rows[0] == rows[1]
    written = [(tmp_path / f"{part}.jsonl").read_text().splitlines() for part in (False, True)]
    assert len(written[0]) + len(written[1]) == 300 and 0 < len(written[1]) < 15
    assert {json.loads(line)["text"] for part in written for line in part} == {text(number) for number in range(300)}


def test_packages_under_other_licences_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    corpus = module("machine_text")

    def package(name: str, licence: str) -> Any:
        path = tmp_path / f"{name}.py"
        metadata = Message()
        metadata["Name"], metadata["License-Expression"] = name, licence
        return SimpleNamespace(metadata=metadata, files=[SimpleNamespace(locate=lambda: path, parts=(path.name,))])

    named = {"a": "MIT", "b": "GPL-3.0-only", "c": "Proprietary", "d": "BSD-3-Clause AND MIT", "e": "MIT AND LGPL-2.1"}
    monkeypatch.setattr(corpus, "distributions", lambda: [package(*item) for item in named.items()])
    assert [file.owner for file in corpus.environment()] == ["a", "d"]


# --- curves and turns ---------------------------------------------------------------------------------------------


def test_the_distance_of_two_curves_is_that_of_the_worst_step() -> None:
    at_size = module("at_size")
    one = {step: 2.0 for step in range(1, 101)}
    found = at_size.differences({**one, 7: 2.5, 60: 1.75}, one)
    assert found == {"step": 7, "worst": 0.5, "worst_mean": 0.01, "mean": 0.0075}


SAVES = """
import pathlib, sys, time
folder, ours = pathlib.Path(sys.argv[1]), sys.argv[2] == "ours"
tracker = folder / "latest_checkpointed_iteration.txt"
saved = [int(path.name[11:]) for path in folder.glob("checkpoint-*")]
done = int(tracker.read_text()) if tracker.exists() else max(saved, default=0)
for step in range(done + 1, 7):
    time.sleep(0.01)
    print(f"step {step}: loss", flush=True)
    if step % 2 == 0:
        tracker.write_text(str(step)) if ours else (folder / f"checkpoint-{step}").mkdir()
"""


def test_sessions_end_behind_a_checkpoint_and_the_next_one_continues(tmp_path: Path) -> None:
    at_size = module("at_size")
    pair = at_size.Pair.__new__(at_size.Pair)
    pair.folder, pair.run = tmp_path, SimpleNamespace(train_iters=6, checkpoint=SimpleNamespace(save_interval=2))
    pair.commands = {}
    for name, folder in ((at_size.OURS, "megalith"), (at_size.PEER, "trainer")):
        (tmp_path / folder).mkdir()
        kind = "ours" if name == at_size.OURS else "peer"
        pair.commands[name] = [sys.executable, "-c", SAVES, str(tmp_path / folder), kind]
    sessions = []
    while min(pair.saved().values()) < 6:
        sessions.append([(name, step) for name, step, seconds in pair.take_turns(0.0) if seconds > 0])
        assert len(set(pair.saved().values())) == 1
    steps = [sorted({step for _, step in session}) for session in sessions]
    assert steps == [[2, 3], [4, 5], [6]]
    assert all(len(session) == 2 * len(taken) for session, taken in zip(sessions, steps, strict=True))


def test_the_peer_reads_the_labels_of_the_run(tmp_path: Path) -> None:
    rows = np.arange(20, dtype=np.uint16).reshape(2, 10)
    np.save(tmp_path / "samples.npy", rows)
    samples = module("trainer").Samples(tmp_path / "samples.npy")
    assert len(samples) == 2
    assert samples[1]["input_ids"].tolist() == list(range(10, 19))
    assert samples[1]["labels"].tolist() == samples[1]["shift_labels"].tolist() == list(range(11, 20))
