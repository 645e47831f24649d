"""`megalith generate` as a user runs it, on a checkpoint alone."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megalith.api import load
from megalith.checkpoint.files import manifest
from megalith.cli.main import main
from megalith.tokenizers import train_byte_level_bpe

from .test_serve import started
from .warm import WarmProcess

TEXT = "the king said to the queen that the crown of the kingdom is heavy\n\n" * 200


@pytest.fixture(scope="module")
def saved(warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save folder; the files that trained it are gone."""
    folder = tmp_path_factory.mktemp("generate")
    work = folder / "work"
    work.mkdir()
    (work / "text.txt").write_text(TEXT)
    vocab, merges = train_byte_level_bpe([TEXT], 300, work)
    tokenizer = ["--vocab-file", str(vocab), "--merge-file", str(merges)]
    words = ["--input", work / "text.txt", "--output-prefix", work / "data", "--tokenizer-type", "GPT2BPETokenizer"]
    done = warm.run([*words, "--append-eod", "--workers", 1, *tokenizer], work, command="preprocess")
    assert done.code == 0, done.text
    train = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 8 --train-iters 120 --lr 0.005 --eval-iters 0 --save-interval 60 --hidden-dropout 0 "
        "--attention-dropout 0 --num-workers 0 --make-vocab-size-divisible-by 1"
    )
    paths = ["--data-path", str(work / "data_text_document"), "--save", str(folder / "saved"), *tokenizer]
    done = warm.run([*shlex.split(train), *paths], folder)
    assert done.code == 0, done.text
    shutil.rmtree(work)
    return folder / "saved"


class Generate:
    """Runs the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *words: object, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8", newline="\n"))
        self._capsys.readouterr()
        code = main(["generate", *map(str, words)])
        return subprocess.CompletedProcess(words, code, *self._capsys.readouterr())


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Generate:
    return Generate(capsys, monkeypatch)


def test_the_model_has_learnt_its_sentence(warm: WarmProcess, saved: Path) -> None:
    words = [saved, "--prompt", "the king said", "--greedy", "--max-new-tokens", 20]
    done = warm.run(words, saved.parent, command="generate")
    assert done.code == 0
    assert done.text.startswith("the king said to the queen that the crown of the kingdom is heavy")


def test_an_older_iteration_and_standard_input(generate: Generate, saved: Path) -> None:
    done = generate(saved / "iter_0000060", "--prompt", "-", "--max-new-tokens", 3, stdin="the queen")
    assert done.returncode == 0
    assert done.stdout.startswith("the queen")


def test_a_dialogue_by_a_template(generate: Generate, saved: Path, tmp_path: Path) -> None:
    (template := tmp_path / "chat.jinja").write_text(
        "{% for one in messages %}{{ one.role[0] }}:{{ one.content }}\n{% endfor %}"
    )
    words = (saved, "--chat", "--chat-template", template, "--system", "x", "--greedy", "--max-new-tokens", 3)
    done = generate(*words, "--json", stdin="the king\nsaid\n")
    assert done.returncode == 0
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["prompt"] == "s:x\nu:the king\n"
    assert second["prompt"] == f"{first['prompt']}a:{first['text']}\nu:said\n"
    assert generate(*words, "--prompt", "the king").stdout == first["text"] + "\n", "the answer alone"

    template.write_text(
        "{% for one in messages %}{{ one.content }}{% if one.role == 'assistant' %} to the{% endif %}{% endfor %}"
    )
    done = generate(
        saved,
        "--chat",
        "--chat-template",
        template,
        "--greedy",
        "--max-new-tokens",
        20,
        "--json",
        "--prompt",
        "the king",
    )
    ended = json.loads(done.stdout)
    assert ended["text"].strip() == "said" and ended["finish_reason"] == "stop", (
        "before what ends an answer by the template"
    )

    for prompt in (("--prompt", "the king"), ()):  # without one it fails before it waits for the first
        done = generate(saved, "--chat", *prompt, stdin="")
        assert done.returncode == 2 and "--chat-template" in done.stderr
    done = generate(saved, "--system", "x", "--prompt", "the king")
    assert done.returncode == 2 and "--chat" in done.stderr


def test_everything_wrong_is_said_at_once(generate: Generate, saved: Path) -> None:
    done = generate(saved, "--prompt", "x", "--temperature", -1, "--max-new-tokens", 0, "--top-p", 2)
    assert done.returncode == 2
    assert all(flag in done.stderr for flag in ("--temperature -1", "--max-new-tokens 0", "--top-p 2"))


def test_a_prompt_longer_than_the_context_names_both_lengths(generate: Generate, saved: Path) -> None:
    done = generate(saved, "--prompt", "king " * 50)
    assert done.returncode == 2
    assert re.search(r"\b5\d tokens\b.*\b32\b", done.stderr)


def test_an_answer_that_the_context_ends_says_so(generate: Generate, saved: Path) -> None:
    done = generate(saved, "--prompt", "king " * 28, "--greedy", "--max-new-tokens", 50)
    assert done.returncode == 0
    assert done.stderr.startswith("note: ") and "--max-new-tokens" in done.stderr


def test_a_prompt_that_is_not_utf_8(generate: Generate, tmp_path: Path) -> None:
    bad = b"\xff\xfe".decode("utf-8", "surrogateescape")  # as Python reads such words of a command line
    done = generate(tmp_path, "--chat", "--prompt", bad, "--system", bad, "--top-p", 2)
    assert done.returncode == 2
    assert all(flag in done.stderr for flag in ("--prompt", "--system", "--top-p 2"))


def test_a_folder_without_checkpoints(generate: Generate, tmp_path: Path) -> None:
    done = generate(tmp_path, "--prompt", "x")
    assert done.returncode == 4
    assert str(tmp_path) in done.stderr and "Traceback" not in done.stderr


def test_texts_that_are_typed_are_continued_one_after_the_other(generate: Generate, saved: Path) -> None:
    typed = "the king said\n" + "king " * 50 + "\nthe queen\n"
    done = generate(saved, "--greedy", "--max-new-tokens", 8, "--num-samples", 2, "--stop", " crown", stdin=typed)
    assert done.returncode == 2
    lines = done.stdout.splitlines()
    assert lines[0].startswith("the king said to the queen") and lines[1] == lines[0]
    assert lines[2].startswith("the queen") and "crown" not in done.stdout
    assert re.search(r"prompt 2 of standard input.*\b5\d tokens\b.*\b32\b", done.stderr)
    assert "Traceback" not in done.stderr and "--prompt" not in done.stderr


def test_failed_lines_are_told_by_exit_code_place_and_object(generate: Generate, saved: Path) -> None:
    lines = [b"the king", b"", b"\xff\xfe", b"king " * 50, b"the queen"]
    asked = (saved, "--greedy", "--max-new-tokens", 2)
    done = generate(*asked, "--json", stdin=b"\r\n".join(lines))
    assert done.returncode == 2
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt"] for line in found] == [line.decode("utf-8", "surrogateescape") for line in lines if line]
    assert ["error" in line for line in found] == [False, True, True, False]
    assert all(set(line) == {"prompt", "error"} and line["error"] for line in found[1:3])
    places = re.findall(r"prompt (\d+) of standard input \(line (\d+)\)", done.stderr)
    assert places == [("2", "3"), ("3", "4")] and len(done.stderr.splitlines()) == 2
    assert generate(*asked, "--json", stdin="the king\nthe queen\n").returncode == 0

    done = generate(*asked, "--prompt", "-", stdin=lines[2])
    assert done.returncode == 2 and "--prompt -" in done.stderr


def test_a_failed_line_in_a_terminal_ends_nothing(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("king " * 50 + "\nthe queen\n"))
    assert main(["generate", str(saved), "--greedy", "--max-new-tokens", "2"]) == 0
    shown = capsys.readouterr()
    assert "the queen" in shown.out and re.search(r"\b5\d tokens\b", shown.err)


def test_a_checkpoint_without_its_tokenizer_takes_it_by_flags(generate: Generate, saved: Path, tmp_path: Path) -> None:
    """As Megatron writes them: the args name files of the machine where it was trained."""
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    folder = copy / "iter_0000120"
    body = manifest.read(folder)
    assert body is not None
    files = {"--vocab-file": "vocab.json", "--merge-file": "merges.txt"}
    for name in files.values():
        (folder / name).rename(tmp_path / name)
        del body["files"][name]
    facts = {key: value for key, value in body.items() if key not in ("format", "hash", "files")}
    (folder / manifest.MANIFEST_FILE).write_bytes(manifest.render(manifest.records_of(body), facts))
    asked = [copy, "--prompt", "the king said", "--greedy", "--max-new-tokens", 6]
    alone = generate(*asked)
    assert alone.returncode == 3
    assert "no copy: give --tokenizer-type GPT2BPETokenizer --vocab-file FILE --merge-file FILE" in alone.stderr
    done = generate(*asked, *(word for flag, name in files.items() for word in (flag, tmp_path / name)))
    assert done.stdout.startswith("the king said to the queen"), done.stderr
    wrong = generate(*asked, "--tokenizer-model", "a file", "--vocab-size", "many")
    assert wrong.returncode == 2 and "--vocab-size many" in wrong.stderr


def test_program_command_line_and_server_write_the_same(generate: Generate, warm: WarmProcess, saved: Path) -> None:
    model, prompt = load(saved), "the queen said"
    written = model.generate(prompt, temperature=0, max_new_tokens=9)
    asked = [saved, "--prompt", prompt, "--greedy", "--max-new-tokens", 9]
    assert generate(*asked).stdout == f"{prompt}{written.text}\n"
    (line,) = generate(*asked, "--json").stdout.splitlines()
    assert json.loads(line) == json.loads(json.dumps(vars(written)))
    assert written.finish_reason == "length" and len(written.token_ids) == 9
    with started(warm, [saved, "--port", 0]) as server:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 9}
        status, found = server.ask("POST", "/v1/completions", body)
    assert status == 200 and json.loads(found)["choices"][0]["text"] == written.text
    assert "".join(model.stream(prompt, temperature=0, max_new_tokens=9)) == written.text


def test_samples_as_json_at_the_end_or_as_they_come(generate: Generate, saved: Path) -> None:
    asked = [saved, "--num-samples", 3, "--seed", 7, "--max-new-tokens", 6, "--temperature", 2, "--json"]
    lines = [
        json.loads(line) for line in generate(*asked, stdin="the\n" + "king " * 50 + "\nking\n").stdout.splitlines()
    ]
    assert "error" in lines.pop(3)
    assert [line["prompt"] for line in lines] == ["the"] * 3 + ["king"] * 3
    model = load(saved)
    samples = model.generate(["the"] * 3, seed=7, max_new_tokens=6, temperature=2)
    assert [line["text"] for line in lines[:3]] == [sample.text for sample in samples]
    assert len({sample.text for sample in samples}) > 1
    events = [json.loads(line) for line in generate(*asked, "--stream", "--prompt", "the").stdout.splitlines()]
    for number, sample in enumerate(samples):
        *tokens, end = [event for event in events if event["sample"] == number]
        assert end == {"sample": number, "finish_reason": sample.finish_reason}
        assert "".join(token["text"] for token in tokens) == sample.text
        assert [(token["token_id"], token["logprob"]) for token in tokens] == list(
            zip(sample.token_ids, sample.logprobs, strict=True)
        )
    assert [event["sample"] for event in events[:3]] == [0, 1, 2], "token by token"


def test_scores_of_a_text_are_those_of_evaluate(generate: Generate, saved: Path, tmp_path: Path) -> None:
    text = "the king said to the queen that the crown of the queen is light\n" * 6
    (tmp_path / "text.txt").write_text(text)
    words = ["evaluate", saved, "--task", "text", "--data", tmp_path / "text.txt", "--json", tmp_path / "result.json"]
    assert main(list(map(str, words))) == 0
    result = json.loads((tmp_path / "result.json").read_text())["result"]
    scores = load(saved).score(text)
    assert len(scores) == result["num_tokens"] > 64, "several windows"
    assert -float(scores.sum()) == result["total"]
