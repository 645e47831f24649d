"""Cloze tasks: what is asked, what counts as right, on crafted files and models."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import math
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from megalith.errors import DataError
from megalith.evaluate.score import Sample, Scorer
from megalith.evaluate.text import (
    Cloze,
    accuracy,
    bundled_path,
    context_and_target,
    make_cloze,
    read_documents,
    read_texts,
)

from .models import CONTEXT, VOCABULARY, Letters, small_model

TOKENIZER = Letters()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def test_the_last_token_or_the_last_word() -> None:
    text = "the cat and the  dog"
    assert context_and_target(text, TOKENIZER, strict=False) == (ids(text)[:-1], ids("g"))
    assert context_and_target(text, TOKENIZER, strict=True) == (ids("the cat and the"), ids(" dog"))


def test_the_last_word_may_occur_before() -> None:
    assert context_and_target("dog or dog", TOKENIZER, strict=True) == (ids("dog or"), ids(" dog"))


def test_blanks_around_a_text_do_not_count_in_strict() -> None:
    assert context_and_target(" a dog \n", TOKENIZER, strict=True) == (ids("a"), ids(" dog"))


@pytest.mark.parametrize(("text", "strict"), [("", False), ("x", False), ("", True), ("   ", True), ("word", True)])
def test_texts_that_ask_nothing_are_skipped(text: str, strict: bool) -> None:
    cloze = make_cloze([text, "a good one"], TOKENIZER, strict=strict, context_length=CONTEXT)
    assert (len(cloze.samples), cloze.skipped) == (1, 1)


def test_long_texts_lose_their_beginning() -> None:
    text = "abcdefghij klmnopqrst uvw"
    cloze = make_cloze([text], TOKENIZER, strict=True, context_length=CONTEXT)
    (sample,) = cloze.samples
    assert cloze.shortened == 1
    assert list(sample.ids) == ids(text)[-CONTEXT - 1 :]
    assert sample.num_targets == 4


def test_a_target_longer_than_the_context_is_skipped() -> None:
    cloze = make_cloze(["a " + "b" * 40], TOKENIZER, strict=True, context_length=CONTEXT)
    assert (cloze.samples, cloze.skipped) == ((), 1)


def test_right_means_every_token_of_the_word() -> None:
    """Continue contexts by what the model itself finds most likely: those are right, one other letter is wrong."""
    model = small_model()
    scorer = Scorer(model, batch_size=2)
    samples, wanted = [], []
    for start in range(4):
        context = [start, start + 7, start + 20]
        for _ in range(2):
            context.append(int(model(torch.tensor([context]))[0, -1].argmax()))
        spoilt = [*context[:-2], (context[-2] + 1) % VOCABULARY, context[-1]]
        samples += [context, spoilt]
        wanted += [True, False]
    cloze = Cloze(tuple(Sample(each, 2) for each in samples), skipped=0, shortened=0)
    result = accuracy(cloze, scorer(cloze.samples), VOCABULARY)
    assert [bool(score.greedy.all()) for score in scorer(cloze.samples)] == wanted
    assert (result.correct, result.total, result.share) == (4, 8, 0.5)
    assert result.by_chance == pytest.approx(8 / VOCABULARY**2)


def test_nothing_asked_is_not_a_number() -> None:
    cloze = make_cloze([""], TOKENIZER, strict=False, context_length=CONTEXT)
    result = accuracy(cloze, [], VOCABULARY)
    assert (result.total, result.skipped) == (0, 1)
    assert math.isnan(result.share) and math.isnan(result.loss)


def test_the_bundled_task() -> None:
    texts = read_texts(bundled_path())
    assert len(texts) == 60 and len(set(texts)) == 60
    assert all(len(text.split()) > 8 and text[-1].isalpha() for text in texts)
    assert all(text.isascii() for text in texts)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a b"}\nnot json\n', "file.jsonl:2 is not valid JSON"),
        ('{"text": "a b"}\n{"txt": "a b"}\n', 'file.jsonl:2 has no text under the key "text"; it has the keys txt'),
        ('["a"]\n', "it has a list"),
        ("\n\n", "is empty"),
        ('{"text": 5}\n', "it has the keys text"),
        ('{"text": "a b"}\n{"text": "a\\ud800b"}\n', "file.jsonl:2"),
    ],
)
def test_bad_files(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "file.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match=said.replace("(", r"\(")):
        read_texts(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl"):
        read_texts(tmp_path / "absent.jsonl")
    (tmp_path / "latin").write_bytes(json.dumps({"text": "x"}).encode() + b'\n{"text": "\xe9"}')
    with pytest.raises(DataError, match="is not UTF-8"):
        read_texts(tmp_path / "latin")


@pytest.mark.parametrize("name", ["texts.jsonl", "the texts.jsonl.packed"])
@pytest.mark.parametrize("program", ["gzip", "xz", "bzip2", "zstd"])
def test_the_command_that_decompresses_a_file(program: str, name: str, tmp_path: Path) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program}")
    content = b'{"text": "a b"}\n'
    ending = {"gzip": ".gz", "xz": ".xz", "bzip2": ".bz2", "zstd": ".zst"}[program] if name == "texts.jsonl" else ""
    file = tmp_path / f"{name}{ending}"
    packed = {"gzip": gzip.compress, "xz": lzma.compress, "bzip2": bz2.compress}.get(program)
    file.write_bytes(
        packed(content)
        if packed
        else subprocess.run(["zstd", "-c"], input=content, capture_output=True, check=True).stdout
    )
    with pytest.raises(DataError) as error:
        read_texts(file)
    said = str(error.value)
    assert str(file) in said and "iconv" not in said
    before = set(tmp_path.iterdir())
    subprocess.run(said[said.index(f"{program} -") :], shell=True, check=True)
    (plain,) = set(tmp_path.iterdir()) - before
    assert read_texts(plain) == ["a b"]


def test_a_text_may_begin_as_bzip2_does(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("BZhang wrote")
    assert read_documents(tmp_path / "text.txt") == ["BZhang wrote"]


def test_an_archive_is_no_text(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "texts.jsonl", "w") as archive:
        archive.writestr("a.jsonl", '{"text": "a b"}')
    with pytest.raises(DataError, match=r"texts\.jsonl is a zip"):
        read_texts(tmp_path / "texts.jsonl")
