"""The course of a preprocessing run: killed and gone on with, shared among machines, bad documents passed over."""

from __future__ import annotations

import gzip
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalith.cli.main import main
from megalith.cli.preprocess import parse
from megalith.config import TokenizerConfig
from megalith.data.indexed import IndexedDataset
from megalith.data.preprocess import PreprocessOptions, preprocess
from megalith.data.preprocess_options import ProgressListener, ProgressSnapshot
from megalith.data.shares import Share, find_shares, read_share
from megalith.data.sources import Limits, SourceOptions
from megalith.errors import ConfigError, DataError

NUMBERS = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=60_000)
SMALL = SourceOptions(limits=Limits(chunk_bytes=100))


def write(path: Path, documents: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        for number in range(documents):
            text = " ".join(str(rng.randrange(60_000)) for _ in range(rng.randrange(1, 9)))
            file.write(json.dumps({"id": str(number), "text": text}) + "\n")


def options_for(folder: Path, name: str = "out", **more: Any) -> PreprocessOptions:
    given = {"inputs": (str(folder / "in.jsonl"),), "tokenizer": NUMBERS, "source": SMALL, "append_eod": True, **more}
    return PreprocessOptions(output_prefix=str(folder / name), **given)


def files(folder: Path, name: str, *keys: str) -> list[bytes]:
    return [
        (folder / f"{name}_{key}_document{end}").read_bytes() for key in keys or ("text",) for end in (".bin", ".idx")
    ]


class Recorder(ProgressListener):
    """Notes what is said, and ends the run as a kill does after so many chunks."""

    def __init__(self, dies_after: int = 1 << 30, how: str = "exit") -> None:
        self.notes: list[str] = []
        self.places: list[str] = []
        self._left, self._how = dies_after, how

    def note(self, text: str) -> None:
        self.notes.append(text)

    def skipped(self, place: str, reason: str, count: int) -> None:
        self.places.append(f"{count} {place}: {reason}")

    def advanced(self, snapshot: ProgressSnapshot) -> None:
        self._left -= 1
        if self._left == 0:
            if self._how == "exit":
                os._exit(9)  # nothing is flushed, nothing tidied up: what a kill leaves
            raise KeyboardInterrupt


def killed_after(chunks: int, options: PreprocessOptions) -> None:
    pid = os.fork()
    if pid == 0:
        preprocess(options, Recorder(chunks))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("kind", ["in.jsonl", "in.jsonl.gz"])
@pytest.mark.parametrize("partitions", [1, 3])
def test_a_killed_run_goes_on_where_it_was(kind: str, partitions: int, tmp_path: Path) -> None:
    """F15: killed again and again."""
    write(tmp_path / kind, 60)
    source = replace(SMALL, keys=("text", "id"))
    options = options_for(
        tmp_path, inputs=(str(tmp_path / kind),), source=source, partitions=partitions, journal_interval=0.0
    )
    preprocess(replace(options, output_prefix=str(tmp_path / "clean")))
    expected = files(tmp_path, "clean", "text", "id")
    rng = random.Random(partitions)
    killed_after(1, options)  # before the first note: this one begins anew
    for _ in range(5):
        killed_after(rng.randrange(2, 6), options)
    with pytest.raises(KeyboardInterrupt):
        preprocess(options, Recorder(2, "interrupt"))
    last = Recorder()
    report = preprocess(options, last)
    assert files(tmp_path, "out", "text", "id") == expected
    assert f"{tmp_path}/out" in last.notes[0]
    assert report.num_documents == 60
    assert not [
        path.name for path in tmp_path.iterdir() if path.suffix not in (".bin", ".idx", ".card", ".jsonl", ".gz")
    ]


def test_a_run_that_is_another_begins_anew_and_says_why(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", 40)
    options = options_for(tmp_path, journal_interval=0.0)
    for other, reason in (
        (
            replace(options, append_eod=False),
            "--append-eod",
        ),
        (replace(options, tokenizer=replace(NUMBERS, vocab_size=61_000)), "another tokenizer"),
        (replace(options, restart=True), ""),
    ):
        killed_after(3, options)
        last = Recorder()
        preprocess(other, last)
        assert reason in "".join(last.notes) and "resuming" not in "".join(last.notes)
        preprocess(replace(other, output_prefix=str(tmp_path / "clean")))
        assert files(tmp_path, "out") == files(tmp_path, "clean")
    killed_after(3, options)
    write(tmp_path / "in.jsonl", 41, seed=1)
    last = Recorder()
    assert preprocess(options, last).num_documents == 41
    assert "another input" in last.notes[0]
    killed_after(3, options)
    (tmp_path / "out_text_document.lengths.partial").unlink()
    last = Recorder()
    assert preprocess(options, last).num_documents == 41
    assert "resuming" not in "".join(last.notes) and len(last.notes) == 1


def test_runs_of_other_keys_keep_their_journals_and_skipped_lists(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", 60)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('{"id": "1"}\n{"text": "1"}\n')
    options = options_for(tmp_path, journal_interval=0.0, skip_bad=True)
    of_id = replace(options, source=replace(SMALL, keys=("id",)))
    preprocess(replace(of_id, output_prefix=str(tmp_path / "clean")))
    killed_after(3, of_id)
    listed = preprocess(options).skipped_list
    assert listed == f"{tmp_path}/out_skipped.txt"
    last = Recorder()
    report = preprocess(of_id, last)
    assert "resuming" in last.notes[0]
    assert files(tmp_path, "out", "id") == files(tmp_path, "clean", "id")
    assert report.skipped_list not in (None, listed)
    places = [Path(path).read_text().partition(":")[0] for path in (listed, report.skipped_list)]
    assert places == [f"{tmp_path}/in.jsonl, line 61", f"{tmp_path}/in.jsonl, line 62"]


def test_a_run_is_not_resumed_after_another_wrote_one_of_its_datasets(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", 60)
    both, one = (
        options_for(tmp_path, journal_interval=0.0, source=replace(SMALL, keys=keys))
        for keys in (("text", "id"), ("id",))
    )
    killed_after(3, both)
    killed_after(4, replace(one, append_eod=False))
    last = Recorder()
    preprocess(both, last)
    assert "resuming" not in "".join(last.notes)
    preprocess(replace(both, output_prefix=str(tmp_path / "clean")))
    assert files(tmp_path, "out", "text", "id") == files(tmp_path, "clean", "text", "id")


def test_a_run_of_an_older_version_is_resumed_from_its_journal(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", 60)
    content = (tmp_path / "in.jsonl").read_text()
    (tmp_path / "in.jsonl").write_text("{}\n" + content)
    options = options_for(tmp_path, journal_interval=0.0, source=replace(SMALL, keys=("id",)), skip_bad=True)
    killed_after(5, options)
    for name in ("{}.unfinished", "{}_skipped.txt"):  # where older versions kept those of all keys
        (tmp_path / name.format("out_id_document")).rename(tmp_path / name.format("out"))
    last = Recorder()
    report = preprocess(options, last)
    assert "resuming" in last.notes[0]
    assert (report.num_documents, report.num_skipped) == (60, 1)
    assert report.skipped_list is not None and len(Path(report.skipped_list).read_text().splitlines()) == 1
    assert not [*tmp_path.glob("*.unfinished"), *tmp_path.glob("out_skipped.txt")]


def test_a_run_is_resumed_under_another_spelling_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in.jsonl", 60)
    monkeypatch.chdir(tmp_path)
    options = options_for(tmp_path, journal_interval=0.0)
    preprocess(replace(options, output_prefix="clean"))
    spellings = ("out", "./out", f"../{tmp_path.name}/out", f"{tmp_path}/out")
    for spelling in spellings:
        killed_after(3, replace(options, output_prefix=spelling))
    last = Recorder()
    preprocess(replace(options, output_prefix="out"), last)
    assert "resuming" in last.notes[0]
    assert files(tmp_path, "out") == files(tmp_path, "clean")


@pytest.mark.parametrize("kind", ["in.jsonl", "in.jsonl.gz"])
@pytest.mark.parametrize("count", [2, 5])
def test_shares_merged_are_the_whole(kind: str, count: int, tmp_path: Path) -> None:
    write(tmp_path / kind, 90)
    write(tmp_path / "more.jsonl", 30, seed=1)
    inputs = (str(tmp_path / kind), str(tmp_path / "more.jsonl"))
    source = replace(SMALL, keys=("text", "id"))
    options = options_for(tmp_path, inputs=inputs, source=source)
    preprocess(replace(options, output_prefix=str(tmp_path / "clean")))
    for number in reversed(range(count)):
        environ = {"RANK": str(number), "WORLD_SIZE": str(count)}
        preprocess(replace(options, share=read_share(None, environ), workers=number + 1))
        if number:
            with pytest.raises(ConfigError, match=f"{count} .*{number} "):
                find_shares(f"{tmp_path}/out")
    assert main(["data", "merge", "--shares", "--remove", "--output-prefix", f"{tmp_path}/out"]) == 0
    assert files(tmp_path, "out", "text", "id") == files(tmp_path, "clean", "text", "id")
    assert not list(tmp_path.glob("*share*"))


def test_shares_of_different_runs_are_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merging = ["data", "merge", "--shares", "--output-prefix", f"{tmp_path}/out"]
    write(tmp_path / "in.jsonl", 40)
    source = replace(SMALL, keys=("text", "id"))
    first, second = (options_for(tmp_path, share=Share(number, 2), source=source) for number in range(2))
    preprocess(first)
    preprocess(second)
    assert main(merging) == 0
    merged = files(tmp_path, "out")
    write(tmp_path / "in.jsonl", 41, seed=1)
    preprocess(first)
    capsys.readouterr()
    assert main(merging) == ConfigError.exit_code
    shown = capsys.readouterr().err
    assert "input" in shown and "--share" in shown and "--append-eod" not in shown
    assert f"{tmp_path}/out_text_document" in shown and f"{tmp_path}/out_id_document" in shown
    assert files(tmp_path, "out") == merged
    preprocess(replace(second, append_eod=False))
    assert main(merging) == ConfigError.exit_code
    assert "--append-eod" in capsys.readouterr().err
    preprocess(replace(second, workers=2))
    assert main(merging) == 0
    preprocess(options_for(tmp_path, "clean", source=source))
    assert files(tmp_path, "out", "text", "id") == files(tmp_path, "clean", "text", "id")
    cards = [json.loads((tmp_path / f"{name}_text_document.card").read_text()) for name in ("out", "clean")]
    assert cards[0] == cards[1]


def test_shares_of_an_older_version_are_merged(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", 40)
    for number in range(2):
        preprocess(options_for(tmp_path, share=Share(number, 2)))
    for path in tmp_path.glob("*share*.card"):
        card = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in card.items() if name != "run"}))
    assert main(["data", "merge", "--shares", "--output-prefix", f"{tmp_path}/out"]) == 0


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        (None, {}, (0, 1)),
        (None, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, (0, 1)),
        (None, {"RANK": "2", "WORLD_SIZE": "8"}, (2, 8)),
        (None, {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4"}, (3, 4)),
        (
            None,
            {
                "SLURM_ARRAY_TASK_ID": "14",
                "SLURM_ARRAY_TASK_COUNT": "3",
                "SLURM_ARRAY_TASK_MIN": "10",
                "SLURM_ARRAY_TASK_STEP": "2",
            },
            (2, 3),
        ),
        ("2/3", {"RANK": "2", "WORLD_SIZE": "8"}, (1, 3)),
        ("1/1", {"RANK": "2", "WORLD_SIZE": "8"}, (0, 1)),
    ],
)
def test_shares_are_read(text: str | None, environ: dict[str, str], expected: tuple[int, int]) -> None:
    share = read_share(text, environ)
    assert (share.number, share.count) == expected


def test_shares_that_contradict_are_refused() -> None:
    both = {"RANK": "0", "WORLD_SIZE": "2", "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "2"}
    with pytest.raises(ConfigError, match="WORLD_SIZE.*SLURM.*--share"):
        read_share(None, both)
    for text in ("0/3", "4/3", "x"):
        with pytest.raises(ConfigError, match="give K/N"):
            read_share(text, {})
    for rank in ("abc", "2"):
        with pytest.raises(ConfigError, match=f"RANK={rank}"):
            read_share(None, {"RANK": rank, "WORLD_SIZE": "2"})


def test_an_empty_share_is_no_error(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", 1)
    for number in range(3):
        preprocess(options_for(tmp_path, share=Share(number, 3)))
    assert main(["data", "merge", "--shares", "--output-prefix", f"{tmp_path}/out"]) == 0
    preprocess(options_for(tmp_path, "clean"))
    assert files(tmp_path, "out") == files(tmp_path, "clean")


BAD = [
    (b"{", "JSON"),
    (b"\xff\xfe", "valid UTF-8"),
    (b'{"text": null}', "not text but null"),
    (b'{"id": "1"}', 'no key "text"'),
    (b'{"text": "70000"}', "token 70000 "),
    (b'{"text": "1", "text2": "' + b"x" * 7000 + b'"}', "more than 6000 (--max-document-bytes)"),
    (b'{"text": "a\\ud800"}', "NullTokenizer takes whole numbers"),
    (b'{"text": "1"}\x00', "JSON"),
]
GOOD = [
    b'{"text": "1 2"}',
    b"",
    b'{"text": "3", "x": NaN}\r',
    b'{"text": "4", "n": ' + b"9" * 5000 + b"}",
    b'{"text": ["5"]}',
]


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_documents_are_left_out_counted_and_located(workers: int, tmp_path: Path) -> None:
    """F23: what a line can have wrong; CRLF, blank lines, NaN and long numbers are not wrong."""
    content = [*GOOD, *(line for line, _ in BAD), *GOOD] * 2
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(content))
    limits = Limits(chunk_bytes=50, max_document_bytes=6000)
    said = Recorder()
    options = options_for(
        tmp_path, source=SourceOptions(limits=limits), append_eod=False, skip_bad=True, workers=workers
    )
    report = preprocess(options, said)
    assert report.workers == workers
    assert (report.num_documents, report.num_skipped) == (16, 2 * len(BAD))
    assert IndexedDataset(f"{tmp_path}/out_text_document")[:4][3].tolist() == [5]
    places = [number for number, line in enumerate(content, start=1) if line in [bad for bad, _ in BAD]]
    assert report.skipped_list == f"{tmp_path}/out_skipped.txt"
    listed = Path(report.skipped_list).read_text().splitlines()
    assert len(listed) == len(said.places) == len(places)
    for line, place, (_, reason) in zip(listed, places, BAD * 2, strict=True):
        assert line.startswith(f"{tmp_path}/in.jsonl, line {place}: ")
        assert reason in line
    with pytest.raises(DataError, match=f"line {places[0]}"):
        preprocess(replace(options, skip_bad=False))


def test_a_line_of_many_blocks_is_passed_over_in_little_memory(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "1"}\n' + b"x" * 1_000_000 + b'\n{"text": "2"}\n')
    with gzip.open(tmp_path / "in.jsonl.gz", "wb") as file:
        file.write((tmp_path / "in.jsonl").read_bytes())
    for name in ("in.jsonl", "in.jsonl.gz"):
        said = Recorder()
        source = SourceOptions(limits=Limits(chunk_bytes=1000, max_document_bytes=5000))
        report = preprocess(options_for(tmp_path, inputs=(str(tmp_path / name),), source=source, skip_bad=True), said)
        assert (report.num_documents, report.num_skipped) == (2, 1)
        assert f"{name}, line 2" in said.places[0] and all(number in said.places[0] for number in ("14", "5000"))


def test_a_dataset_without_a_token_is_pointed_out(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": []}\n' * 3)
    said = Recorder()
    preprocess(options_for(tmp_path), said)
    assert "3 documents" in said.notes[0]
    assert IndexedDataset(f"{tmp_path}/out_text_document").num_documents == 3
    (tmp_path / "in.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"in\.jsonl.*1"):
        preprocess(options_for(tmp_path, skip_bad=True))


def test_flags_of_the_tokenizer_that_training_knows_have_the_same_answers_here() -> None:
    words = ["--input", "in.jsonl", "--output-prefix", "out", "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    harmless = ["--trust-remote-code", "--use-gigatoken", "--padded-vocab-size", "16", "--no-pad-vocab-size"]
    with pytest.raises(ConfigError) as caught:
        parse([*words, *harmless, "--tokenizer-metadata", "M", "--tokenizer-hf-no-use-fast", "--performance-dir", "D"])
    said = [problem for problem in caught.value.violations if "in.jsonl" not in problem]
    assert [problem.split(":")[0] for problem in said] == [
        "--performance-dir",
        "--tokenizer-metadata",
        "--tokenizer-hf-no-use-fast",
    ]
