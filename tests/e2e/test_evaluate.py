"""A checkpoint is measured by Megatron's command lines and by ours; results that cannot be are called out."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megalith.cli.main import main
from megalith.tokenizers import train_byte_level_bpe

from .warm import WarmProcess, free_port

ARCHITECTURE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64"
SAMPLES = 13  # batches of 8 do not divide them


class Work:
    """A folder with a trained checkpoint C, the files of tasks/main.py, and the flags FILES of the tokenizer."""

    def __init__(self, folder: Path, files: list[str], train: list[str]) -> None:
        self.folder, self.files, self.train = folder, files, train
        self.checkpoint, self.lambada = folder / "C", folder / "lambada_test.jsonl"
        self.wiki = folder / "wiki.test.tokens"


@pytest.fixture(scope="module")
def work(warm: WarmProcess, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Work:
    data = shared / "data"
    folder = tmp_path_factory.mktemp("evaluate")
    text = (data / "tinyshakespeare/input.txt").read_text()[:20_000]
    (folder / "text.txt").write_text(text)
    files = ["--vocab-file", str(data / "gpt2/gpt2-vocab.json"), "--merge-file", str(data / "gpt2/gpt2-merges.txt")]
    words = ["--input", folder / "text.txt", "--output-prefix", folder / "data", "--append-eod", "--workers", 1]
    words += ["--tokenizer-type", "GPT2BPETokenizer", *files]
    prepared = warm.run(words, folder, command="preprocess")
    assert prepared.code == 0, prepared.text
    train = shlex.split(
        f"{ARCHITECTURE} --seq-length 64 --micro-batch-size 4 --lr 0.01 --eval-iters 0 --num-workers 0 "
        f"--hidden-dropout 0 --attention-dropout 0 --data-path {folder / 'data_text_document'}"
    )
    made = Work(folder, files, [*train, *files])
    done = warm.run([*made.train, "--train-iters", 40, "--save", made.checkpoint, "--save-interval", 40], folder)
    assert done.code == 0, done.text
    paragraphs = [part.strip() for part in text.split("\n\n") if len(part.split()) > 12]
    lines = [json.dumps({"text": part.replace("\n", " ").rstrip(".?!,;:'")}) for part in paragraphs[:SAMPLES]]
    made.lambada.write_text("\n".join(lines) + "\n")
    made.wiki.write_text((data / "wikitext-2/test.txt").read_text()[:9_000])
    return made


def _run(command: list[object], **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in variables.items()}}
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)


def _tasks_main(repository: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, repository / "tasks/main.py", *words])


def _script_on_two_ranks(repository: Path, work: Work, *words: object) -> subprocess.CompletedProcess[str]:
    """The script of the examples, with its paths and sizes from the environment."""
    return _run(
        ["bash", repository / "examples/eval_gpt2_lambada.sh", *words],
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        MASTER_PORT=free_port(),
        PROCESSES=2,
        TENSOR=2,
        TASK="WIKITEXT103",
        CHECKPOINTS=work.checkpoint,
        DATA=work.wiki,
        VOCAB=work.files[1],
        MERGES=work.files[3],
    )


def _w10(work: Work, task: str) -> list[object]:
    """The users' command line."""
    data = work.lambada if task == "LAMBADA" else work.wiki
    more = "--strict-lambada" if task == "LAMBADA" else "--overlapping-eval 32"
    flags = f"--task {task} {more} {ARCHITECTURE} --seq-length 64 --micro-batch-size 8 --log-interval 1"
    tail = ["--tokenizer-type", "GPT2BPETokenizer", "--no-load-optim", "--no-load-rng"]
    return [*shlex.split(flags), "--valid-data", data, "--load", work.checkpoint, *work.files, *tail]


def test_lambada_as_typed(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "tasks/main.py", *map(str, _w10(work, "LAMBADA"))]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    shown = told.out.splitlines()
    lines = [line for line in shown if not line.startswith("note: ")]
    start = lines.index(f"> building lambada dataset from {work.lambada} ...")
    number = r"\d\.\d{4}E[+-]\d\d"
    result = lines[start + 5]
    assert lines[start + 1 : start + 4] == [
        f" > found {SAMPLES} samples.",
        "> working on iteration: 0",
        "> working on iteration: 1",
    ]
    assert re.fullmatch(
        rf" validation results on LAMBADA \| number correct: {number} \| total examples: 1\.3000E\+01 \| "
        rf"avg accuracy: {number}",
        result,
    )
    assert lines[start + 4] == lines[start + 6] == "-" * (len(result) + 1)
    assert lines[start + 7] == "done :-)"
    assert [line for line in shown if re.match("note: .*--no-load-optim, --no-load-rng", line)]
    assert [line for line in shown if re.match("note: --seq-length 64 .*LAMBADA", line)]


@pytest.mark.full
def test_wikitext_as_typed_and_by_the_script_on_two_ranks(work: Work, repository: Path, tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone.json", tmp_path / "shared.json"
    for done in (
        _tasks_main(repository, *_w10(work, "WIKITEXT103"), "--json", alone),
        _script_on_two_ranks(repository, work, "--json", shared, "--overlapping-eval", 32),
    ):
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        (result,) = [line for line in lines if line.startswith(" validation results on WIKITEXT103 | avg loss: ")]
        assert re.fullmatch(r".*ppl: \S+ \| adjusted ppl: \S+ \| token ratio: \d\.\d+ \|", result)
        assert sum(line.startswith(" > number of original tokens: ") for line in lines) == 1
        assert lines.count("done :-)") == 1 and lines.count("-" * (len(result) + 1)) == 2
    one, two = (json.loads(file.read_text()) for file in (alone, shared))
    assert [body["layout"]["tp"] for body in (one, two)] == [1, 2]
    assert two["result"]["mean"] == pytest.approx(one["result"]["mean"], rel=1e-5)
    assert two["result"]["num_tokens"] == one["result"]["num_tokens"] > 2000


def test_our_command_gives_the_same(work: Work, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = []
    for number, words in enumerate(
        (
            ["tasks/main.py", *map(str, _w10(work, "WIKITEXT103"))],
            [str(work.checkpoint), "--task", "wikitext103", "--data", str(work.wiki)],
        )
    ):
        assert main(["evaluate", *words, "--json", str(tmp_path / f"{number}.json")]) == 0
        body = json.loads((tmp_path / f"{number}.json").read_text())
        pairs.append((body["result"], body["alarms"]))
    assert pairs[0] == pairs[1]
    assert "GPT2BPETokenizer" not in capsys.readouterr().err


def test_any_text_and_the_bundled_task(work: Work, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    documents = tmp_path / "documents.jsonl"
    documents.write_text(json.dumps({"text": "to be or not to be"}) + "\n" + json.dumps({"text": ""}) + "\n")
    for task, data in (("text", work.folder / "text.txt"), ("text", documents), ("cloze", None)):
        words = [
            str(work.checkpoint),
            "--task",
            task,
            *(["--data", str(data), "--overlapping-eval", "64"] if data else []),
        ]
        assert main(["evaluate", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" validation results on TEXT | ") == 2 and shown.count("| bits per byte: ") == 2
    assert " validation results on CLOZE | " in shown and " > found 60 samples." in shown


def test_flags_that_contradict_the_checkpoint(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-layers", "12", "--hidden-size", "768", "--seq-length", "1024", "--swiglu"]
    line = ["evaluate", "tasks/main.py", "--task", "WIKITEXT103", "--valid-data", str(work.wiki), *words]
    assert main([*line, "--load", str(work.checkpoint)]) == 2
    said = capsys.readouterr().err
    for given, held in (("--num-layers 12", "2"), ("--hidden-size 768", "32"), ("--swiglu given", "not given")):
        assert re.search(rf"{given} .*checkpoint.*\b{held}\b", said), said
    assert re.search(r"--seq-length 1024 .*\b64 positions", said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--task RACE --load C", "--task RACE is not supported: it fine-tunes a BERT model"),
        ("--task RET-FINETUNE-NQ", "retrieval over an index of Wikipedia"),
        ("--task MSDP", "multi-stage dialogue prompting"),
        ("--task SQUAD", "--task SQUAD is not known; use LAMBADA or WIKITEXT103"),
        ("--task LAMBADA --load C", "needs a file to measure on"),
        ("--task LAMBADA --valid-data a b --load C", "takes one file"),
        ("--task LAMBADA --valid-data absent.jsonl --load C", "docs/evaluation.md tells where to get LAMBADA's"),
        ("--task LAMBADA --valid-data x", "--load is missing"),
        ("--task LAMBADA --load C --num-layer 2", "did you mean --num-layers?"),
        ("--task LAMBADA --load C --faiss-use-gpu", "--faiss-use-gpu: retrieval models"),
        ("--task LAMBADA --load C --context-parallel-size 2", "--context-parallel-size 2"),
        ("--load C", "--task"),
    ],
)
def test_what_cannot_be_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "tasks/main.py", *shlex.split(words)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--task wikitext103", "needs a file to measure on"),
        ("--task cloze --micro-batch-size 0", "--micro-batch-size 0 is below 1"),
        ("--task nothing", "invalid choice"),
    ],
)
def test_our_command_refuses_too(work: Work, words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(work.checkpoint), *shlex.split(words)]) == 2
    assert said in capsys.readouterr().err


def test_an_overlap_longer_than_a_window(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--task", "text", "--data", str(work.wiki), "--seq-length", "16", "--overlapping-eval", "32"]
    assert main(["evaluate", str(work.checkpoint), *words]) == 2
    assert re.search(r"--overlapping-eval 32 .*\b16 tokens", capsys.readouterr().err)


def test_no_checkpoint(work: Work, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tmp_path), "--task", "cloze"]) == 4
    assert str(tmp_path) in capsys.readouterr().err


def _alarm_of(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    """The lines between the two of exclamation marks with which an evaluation with alarms ends."""
    assert main(["evaluate", *map(str, words), "--fail-on-alarm"]) == 7
    lines = capsys.readouterr().out.splitlines()
    first, last = (number for number, line in enumerate(lines) if set(line) == {"!"})
    assert lines[first - 1] == "done :-)" and last == len(lines) - 1
    return lines[first + 1 : last]


def test_none_correct_is_called_out(work: Work, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hopeless = tmp_path / "lambada_test.jsonl"
    hopeless.write_text('{"text": "KING: My lord, the zebra ate seventeen xylophones"}\n' * 9)
    what, cause = _alarm_of(capsys, work.checkpoint, "--task", "lambada", "--data", hopeless)
    assert what.startswith("ALARM: 0 of 9 ")
    assert cause.startswith("  likely cause: ")


def test_another_tokenizer_stops_with_both_cards(
    work: Work, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocab, merges = train_byte_level_bpe(["to be or not to be"], 270, tmp_path)
    words = ["--task", "cloze", "--vocab-file", vocab, "--merge-file", merges]
    assert main(["evaluate", *map(str, (work.checkpoint, *words))]) != 0
    assert re.search(r"\n *vocab_size +50257 +2\d\d\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "content"),
    [
        (["lambada", "--strict-lambada"], '{"text": ""}\n{"text": "one"}\n'),
        (["text"], ""),
        (["wikitext103"], "\n"),
    ],
)
def test_nothing_to_measure_is_an_error(
    words: list[str], content: str, work: Work, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / ("lambada.jsonl" if content.startswith("{") else "text.txt")
    empty.write_text(content)
    assert main(["evaluate", str(work.checkpoint), "--task", *words, "--data", str(empty)]) == 3
    assert str(empty) in capsys.readouterr().err


def test_random_weights_are_called_out(
    work: Work, warm: WarmProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*work.train, "--train-iters", 1, "--save", tmp_path / "C", "--save-interval", 1]
    done = warm.run([*words, "--lr", 0, "--weight-decay", 0], tmp_path)
    assert done.code == 0, done.text
    lines = _alarm_of(capsys, tmp_path / "C", "--task", "wikitext103", "--data", work.wiki)
    assert re.search("ALARM: .*weights.* random", "\n".join(lines))


def test_a_sound_result_has_no_alarm(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(work.checkpoint), "--task", "text", "--data", str(work.folder / "text.txt"), "--fail-on-alarm"]
    assert main(["evaluate", *words, "--overlapping-eval", "64"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("done :-)")
