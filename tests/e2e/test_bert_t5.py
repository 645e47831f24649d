"""BERT and T5 as their users run them: from Chinese text to a trained, resumed, measured and exported model."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megalith.api import load
from megalith.cli.main import main
from megalith.errors import ConfigError
from megalith.tokenizers.word_piece import WordPieceTokenizer

from ..chinese import SIZE, documents, write_text, write_vocabulary
from .test_serve import started
from .warm import WarmProcess, free_port

MODEL = "--hidden-size 16 --num-attention-heads 4 --max-position-embeddings 32 --hidden-dropout 0 --attention-dropout 0"
RUN = (
    "--micro-batch-size 4 --global-batch-size 4 --lr 0.01 --lr-decay-style constant --split 80,10,10 --eval-iters 1 "
    "--log-interval 2 --num-workers 0 --save-interval 6 --train-iters 12"
)
BERT = f"--num-layers 2 {MODEL} --seq-length 32 {RUN}"
T5 = (
    f"--encoder-num-layers 2 --decoder-num-layers 1 {MODEL} --encoder-seq-length 32 --decoder-seq-length 24 {RUN} "
    "--vocab-extra-ids 20"
)
PUBLISHED = (
    "--position-embedding-type relative --normalization RMSNorm --disable-bias-linear --softmax-scale 1.0 --relu "
    "--no-t5-logits-bias --t5-scaled-logits --relative-attention-num-buckets 8 --relative-attention-max-distance 20"
)


@pytest.fixture(scope="module")
def work(warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.jsonl, vocab.txt and the dataset that the tool makes of them."""
    folder = tmp_path_factory.mktemp("chinese")
    write_text(folder / "text.jsonl", 80)
    write_vocabulary(folder / "vocab.txt")
    words = "--input text.jsonl --output-prefix my-bert --split-sentences --tokenizer-type BertWordPieceLowerCase"
    tool = [*words.split(), "--vocab-file", "vocab.txt"]
    told = warm.run(tool, folder, command="preprocess")
    if told.code:  # where nltk's data are not: the message says what does without
        assert "--sentence-splitter marks" in told.text
    done = warm.run([*tool, "--sentence-splitter", "marks"], folder, command="preprocess")
    assert done.code == 0, done.text
    assert "80 documents" in done.text
    return folder


def _flags(work: Path, flags: str, save: str, *more: object) -> list[str]:
    data = ["--data-path", work / "my-bert_text_sentence", "--vocab-file", work / "vocab.txt"]
    return list(map(str, [*shlex.split(flags), *data, "--save", work / save, "--load", work / save, *more]))


def _losses(text: str) -> dict[int, str]:
    """Iteration -> all that is printed of its losses."""
    found = re.finditer(r"iteration +(\d+)/.*?(lm loss.*?)\| loss scale", text)
    return {int(match[1]): match[2] for match in found}


def _train_resumed(work: Path, warm: WarmProcess, family: str, flags: str, save: str) -> dict[int, str]:
    """Train as the root script does; a second run that was stopped half-way has to end alike."""
    whole = warm.run(["--model-family", family, *_flags(work, flags, save)], work)
    assert whole.code == 0, whole.text
    for half in (("--exit-interval", 6), ()):
        part = warm.run(["--model-family", family, *_flags(work, flags, f"{save}-halves", *half)], work)
        assert part.code == 0, part.text
    losses = _losses(whole.text)
    assert sorted(losses) == [2, 4, 6, 8, 10, 12]
    assert _losses(part.text)[12] == losses[12], "the same numbers from step 8 on"
    assert "successfully saved checkpoint" in whole.text and "validation loss at" in whole.text
    return losses


def _evaluated(work: Path, *words: object) -> dict[str, Any]:
    assert main(["evaluate", *map(str, words), "--json", str(work / "result.json")]) == 0
    found: dict[str, Any] = json.loads((work / "result.json").read_text())
    return found


@pytest.fixture(scope="module")
def bert(work: Path, warm: WarmProcess) -> Path:
    """A checkpoint of a BERT in the form of the one published."""
    flags = f"{BERT} --apply-residual-connection-post-layernorm --no-bias-gelu-fusion"
    losses = _train_resumed(work, warm, "bert", flags, "B")
    assert all("sop loss" in line for line in losses.values())
    return work / "B"


@pytest.fixture(scope="module")
def t5(work: Path, warm: WarmProcess) -> Path:
    """A checkpoint of a T5 in Megatron's form."""
    _train_resumed(work, warm, "t5", T5, "T")
    return work / "T"


def test_bert(work: Path, bert: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    checkpoint = bert
    result = _evaluated(work, checkpoint, "--task", "masked", "--data", work / "my-bert_text_sentence", "--samples", 40)
    assert result["result"]["samples"] == 40
    tokens, orders = result["result"]["tokens"], result["result"]["orders"]
    assert tokens["total"] > 100 and tokens["mean"] < 9.9 and orders["total"] == 40, "guessing has 9.96"
    again = _evaluated(work, checkpoint, "--task", "masked", "--data", work / "text.jsonl", "--samples", 40)
    assert again["result"] == result["result"], "the text gives the samples of its dataset"
    shown = capsys.readouterr().out
    assert shown.count(" validation results on MASKED | number correct: ") == 2 and "| order accuracy: " in shown
    (work / "empty.txt").write_text("\n")
    assert main(["evaluate", str(checkpoint), "--task", "masked", "--data", str(work / "empty.txt")]) == 3
    assert "empty.txt" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(checkpoint), str(tmp_path / "HF")]) == 0
    compared = "logits equal those of transformers" if find_spec("transformers") else "logits not compared"
    assert compared in capsys.readouterr().out
    assert json.loads((tmp_path / "HF/config.json").read_text())["vocab_size"] == SIZE + 2, "with [BOS] and [EOS]"


def _measured_and_answered(work: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--data", work / "my-bert_text_sentence", "--samples", 30]
    result = _evaluated(work, checkpoint, "--task", "spans", *data)["result"]
    assert result["samples"] == 30 and result["orders"] is None
    assert result["tokens"]["total"] > 60 and result["tokens"]["mean"] < 9.9
    assert " validation results on SPANS | number correct: " in capsys.readouterr().out
    prompt = ["--prompt", "\u4e00\u4e03<extra_id_0>\u4e0e", "--temperature", "5", "--max-new-tokens", "4"]
    assert main(["generate", str(checkpoint), *prompt]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.full
def test_two_processes_answer_as_one(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "generate",
        str(t5),
        "--prompt",
        "\u4e00\u4e03<extra_id_0>\u4e0e",
        "--temperature",
        "5",
        "--max-new-tokens",
        "6",
    ]
    assert main(words) == 0
    alone = capsys.readouterr().out
    assert len(alone.strip()) > 3, "at this temperature the end is as likely as any other token"
    place = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *place, "-m", "megalith", *words, "--tp", "2"]
    together = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (together.returncode, together.stdout) == (0, alone), together.stderr


def test_t5(work: Path, t5: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _measured_and_answered(work, t5, capsys)
    assert main(["checkpoint", "export", str(t5), str(tmp_path / "HF")]) != 0
    said = capsys.readouterr().err
    nearest = re.search(r"^ +t5: .*", said, re.MULTILINE)
    assert nearest and re.search(r"position_embedding_type relative\b.*\blearned_absolute\b", nearest[0])
    assert "model_family" not in nearest[0]


def test_t5_as_published(work: Path, warm: WarmProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    done = warm.run(["--model-family", "t5", *_flags(work, f"{T5} {PUBLISHED}", "P")], work)
    assert done.code == 0, done.text
    assert re.search(r"^try it: megalith generate .*<extra_id_0>", done.text, re.MULTILINE)
    _measured_and_answered(work, work / "P", capsys)
    assert main(["checkpoint", "export", str(work / "P"), str(tmp_path / "HF")]) == 0
    compared = "logits equal those of transformers" if find_spec("transformers") else "logits not compared"
    assert compared in capsys.readouterr().out
    assert main(["checkpoint", "import", str(tmp_path / "HF"), str(tmp_path / "I"), "--no-compare"]) == 0
    prompt = ["--prompt", "\u4e00\u4e03<extra_id_0>\u4e0e", "--temperature", "5", "--max-new-tokens", "6"]
    capsys.readouterr()
    answers = []
    for folder in (work / "P", tmp_path / "HF", tmp_path / "I"):
        assert main(["generate", str(folder), *prompt]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0].strip() and answers == [answers[0]] * 3, "with the tokenizer that the folder brings"
    assert main(["checkpoint", "export", str(tmp_path / "I"), str(tmp_path / "again"), "--no-compare"]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "HF" / name).read_bytes()
    _read_by_transformers(tmp_path / "HF", work / "vocab.txt")


def _read_by_transformers(folder: Path, vocabulary: Path) -> None:
    """The ids of transformers' tokenizer of a folder are ours, and it knows the sentinels."""
    if find_spec("transformers") is None:
        return
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    ours = WordPieceTokenizer(vocabulary, lower_case=True, vocab_extra_ids=20)
    for text in documents(5, seed=3):
        assert theirs(text).input_ids == ours.encode(text)
    mixed = "\u4e00<extra_id_3>\u4e03"
    assert theirs(mixed).input_ids == [*ours.encode("\u4e00"), ours.extra_ids[3], *ours.encode("\u4e03")]
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == tuple(
        ours.special[role] for role in ("pad", "bos", "eos")
    )


def test_masks_are_filled(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(bert), "--prompt", "\u4e00[MASK]\u4e0e[MASK]", "--num-samples", "3"]
    assert main(words) == 0
    filled, *rows = capsys.readouterr().out.splitlines()
    best = [re.findall(r"(\S+) (\d+\.\d)%", row) for row in rows]
    assert [row[:11] for row in rows] == ["  [MASK] 1:", "  [MASK] 2:"] and [len(found) for found in best] == [3, 3]
    assert filled == f"\u4e00{best[0][0][0]}\u4e0e{best[1][0][0]}"
    shares = [float(share) for _, share in best[0]]
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 100
    assert main([*words, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["text"] == filled and [len(mask) for mask in found["masks"]] == [3, 3]
    assert [candidate["text"] for candidate in found["masks"][1]] == [text for text, _ in best[1]]
    with pytest.raises(ConfigError, match="fills in its"):
        load(bert)


def test_lines_without_masks_fail_alone(
    bert: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\u4e00[MASK]\n\u4e00\n[MASK]\n"))
    assert main(["generate", str(bert), "--json"]) == 2
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    assert ["masks" in line for line in lines] == [True, False, True]
    assert lines[1]["prompt"] == "\u4e00" and "[MASK]" in lines[1]["error"]
    assert re.search(r"prompt 2 of standard input.*\[MASK\]", shown.err)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\u4e00[MASK]\n[MASK]\n"))
    assert main(["generate", str(bert), "--json", "--greedy"]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("--greedy") == 1 and not shown.out, "an error of the command line, not of each line"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_server_answers_as_the_command_line(
    warm: WarmProcess, t5: Path, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "\u4e00\u4e03<extra_id_0>\u4e0e"
    words = ["--prompt", prompt, "--temperature", "5", "--top-p", "0", "--max-new-tokens", "6", "--seed", "7"]
    assert main(["generate", str(t5), *words]) == 0
    alone = capsys.readouterr().out
    model = load(t5)
    written = model.generate([prompt, "\u4e03"], temperature=5, top_p=0, max_new_tokens=6, seed=7)
    assert written[0].text + "\n" == alone and len(written) == 2
    with pytest.raises(ConfigError, match="answers one"):
        model.score(prompt)
    with started(warm, [t5, "--port", 0, "--tp", ranks], ranks) as server:
        body = {"prompt": prompt, "temperature": 5, "max_tokens": 6, "seed": 7}
        status, found = server.ask("POST", "/v1/completions", body)
        assert status == 200, found
        assert json.loads(found)["choices"][0]["text"] + "\n" == alone
        status, found = server.ask("PUT", "/api", {"prompts": [prompt, "\u4e03"], "tokens_to_generate": 3, "top_k": 1})
        assert status == 200 and len(json.loads(found)["text"]) == 2
        assert server.ask("GET", "/")[0] == 200
        assert "2 + 1 layers of 16" in server.text


@pytest.mark.parametrize(
    ("family", "command", "said"),
    [
        ("bert", "evaluate {} --task cloze", "--task cloze needs a model that continues text, a GPT, and"),
        ("bert", "evaluate {} --task cloze", "megalith evaluate --task masked measures it"),
        ("bert", "evaluate {} --task spans --data {}/../text.jsonl", "holds a BERT; use --task masked"),
        ("bert", "evaluate {} --task masked --data {}/none", "nor the prefix of a dataset"),
        ("bert", "evaluate {} --task masked --data {}/../text.jsonl --seq-length 33", "longer than the 32 positions"),
        ("bert", "evaluate {} --task masked --data {}/../text.jsonl --seq-length 6", "use at least 8"),
        ("bert", "evaluate {} --task cloze --samples 3", "--samples 3 is for --task masked and spans"),
        ("bert", "serve {}", "a server needs a model that writes text, a GPT or a T5, and"),
        ("bert", "serve {}", "megalith generate --prompt"),
        ("bert", "generate {} --prompt x", "--prompt has no [MASK]"),
        ("bert", "generate {} --prompt x[MASK] --greedy", "--greedy is for text generation"),
        (
            "bert",
            "generate {} --prompt x[MASK] --temperature 0 --seed 7",
            "--temperature, --seed are for text generation",
        ),
        ("bert", "generate {} --prompt x[MASK] --chat", "--chat is for text generation"),
        ("t5", "generate {} --prompt x --chat --chat-template chatml", "--chat needs a decoder"),
        ("bert", "generate {} --prompt x[MASK] --json --stream", "--stream is for text generation"),
        ("bert", "generate {} --tp 2 --prompt x", "--tp 2 is for a T5"),
        ("bert", "generate {} --tp 2 --prompt x", "megalith evaluate --task masked measures it"),
        ("bert", "generate {} --tp 2", "--tp 2 needs --prompt TEXT"),
        ("t5", "serve {} --pp 2", "--pipeline-model-parallel-size 2"),
        ("t5", "evaluate {} --task masked --data {}/../text.jsonl", "holds a T5; use --task spans"),
        ("t5", "evaluate {} --task cloze", "megalith evaluate --task spans measures it"),
    ],
)
def test_what_needs_another_model_says_what_works(
    request: pytest.FixtureRequest, family: str, command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = request.getfixturevalue(family)
    assert main(shlex.split(command.replace("{}", str(checkpoint)))) == 2
    assert said in capsys.readouterr().err
