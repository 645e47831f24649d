"""Benchmarks' files in the forms in which they are distributed; what is missing or damaged is named with its remedy."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megalith.cli.main import main
from megalith.errors import DataError
from megalith.evaluate.local_data import BENCHMARKS, LocalDataset

MMLU = [
    {"question": f"Which is {n}?", "subject": "anatomy", "choices": list("abcd"), "answer": n % 4} for n in range(6)
]
CEVAL = [
    {"id": n, "question": f"\u95ee\u9898 {n}", "A": "w", "B": "x", "C": "y", "D": "z", "answer": "ABCD"[n % 4]}
    for n in range(4)
]
GSM8K = [{"question": f"{n} and {n}?", "answer": f"{n} + {n}\n#### {2 * n}"} for n in range(5)]


def parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the data extra is not installed")
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(arrow.Table.from_pylist(list(rows)), path)


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def jsonl(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _zip(path: Path, members: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)


FORMS: dict[str, tuple[str, str | None, str, list[dict[str, Any]]]] = {
    "shards of the hub": ("mmlu", "anatomy", "test", MMLU),
    "csv by split": ("ceval", "law", "val", CEVAL),
    "a zip archive": ("ceval", "law", "val", CEVAL),
    "another spelling": ("ceval", "law", "val", CEVAL),
    "a configuration": ("gsm8k", "main", "test", GSM8K),
    "jsonl of the authors": ("gsm8k", "main", "test", GSM8K),
}


def write_form(form: str, folder: Path) -> None:
    if form == "shards of the hub":
        for number in range(2):
            parquet(folder / f"anatomy/test-0000{number}-of-00002.parquet", MMLU[3 * number : 3 * number + 3])
    elif form == "csv by split":
        _write(folder / "val/law_val.csv", "\ufeff" + as_csv(CEVAL))
    elif form == "a zip archive":
        _zip(folder / "ceval-exam.zip", {"val/law_val.csv": as_csv(CEVAL), "val/logic_val.csv": "x"})
    elif form == "another spelling":
        parquet(folder / "law/validation.parquet", CEVAL)
    elif form == "a configuration":
        parquet(folder / "main/test-00000-of-00001.parquet", GSM8K)
        parquet(folder / "socratic/test-00000-of-00001.parquet", GSM8K[:1])
    else:
        _write(folder / "test.jsonl", jsonl(GSM8K))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_rows(tmp_path: Path, form: str) -> None:
    task, part, split, rows = FORMS[form]
    write_form(form, tmp_path)
    found = LocalDataset(tmp_path, BENCHMARKS[task]).rows(part, split)
    assert [{key: str(value) for key, value in row.items()} for row in found] == [
        {key: str(value) for key, value in row.items()} for row in rows
    ]


def test_what_is_missing_is_named_with_the_command_that_gets_it(tmp_path: Path) -> None:
    def refused(task: str, part: str | None, split: str) -> str:
        with pytest.raises(DataError) as error:
            LocalDataset(tmp_path, BENCHMARKS[task]).rows(part, split)
        return str(error.value)

    assert "hf download cais/mmlu --repo-type dataset" in refused("mmlu", "anatomy", "dev")
    assert "anatomy" in refused("mmlu", "anatomy", "dev") and str(tmp_path) in refused("mmlu", "anatomy", "dev")
    parquet(tmp_path / "anatomy/test-00000-of-00002.parquet", MMLU)
    assert "2 files" in refused("mmlu", "anatomy", "test")
    _write(tmp_path / "law/val.csv", as_csv([{"question": 1, "A": 2}]))
    assert "law/val.csv" in (said := refused("ceval", "law", "val")) and "answer" in said
    _write(tmp_path / "test.jsonl", jsonl(GSM8K) + "{\n")
    assert "test.jsonl, line 6" in refused("gsm8k", "main", "test")
    _write(tmp_path / "law/dev.parquet", "no parquet")
    assert "law/dev.parquet" in refused("ceval", "law", "dev")
    _write(tmp_path / "a.zip", "no archive")
    assert "a.zip" in refused("cmmlu", "law", "dev")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "mmlu"], "--data"),
        (["--task", "mmlu", "--data", "nowhere"], "hf download cais/mmlu"),
        (["--task", "cloze", "--num-fewshot", "2"], "--num-fewshot 2"),
        (["--task", "gsm8k", "--data", ".", "--num-fewshot", "-1"], "--num-fewshot -1"),
        (["--task", "gsm8k", "--data", ".", "--chat-template", "x"], "--apply-chat-template"),
        (["--task", "text", "--data", __file__, "--others", "x"], "--others"),
    ],
)
def test_flags_that_do_not_fit_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "nowhere", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_lm_eval_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    assert main(["evaluate", "nowhere", "--task", "gsm8k", "--data", str(tmp_path)]) == 2
    assert "eval" in capsys.readouterr().err.partition("lm-eval")[2]
