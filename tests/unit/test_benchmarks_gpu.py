"""`make gpu` without a GPU: what it measures and keeps, and the pages, which show the result files and nothing else."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAMP = {"code": "abc", "torch": "2.13", "card": "NVIDIA H100 80GB HBM3"}
STEP = {
    **STAMP,
    "date": "2026-12-01",
    "commit": "12345678",
    "parameters": 1_300_000_000,
    "precision": "bf16",
    "length": 2048,
    "micro_batch": 4,
    "micro_batches": 2,
    "seconds": [0.5, 0.3, 0.4],
    "warm_up_seconds": 3.0,
    "tokens_per_second": 40960,
    "teraflops": 400.0,
    "mfu": 0.431,
    "losses": [10.9, 10.8],
    "memory_mib": {"state": 23000, "peak_allocated": 40960, "peak_reserved": 50000},
    "counted_state_mib": 22300,
    "host_waits": {"megalith/train/step.py:200": 1},
    "trace": {"kinds": {"attention": 0.2, "matrix products": 0.6}, "busy": 0.97, "launches": 900, "longest": []},
}
TESTS = {**STAMP, "passed": 20, "skipped": {"needs two CUDA devices": 9}, "left_out": {"test_x": "E\nit is 3"}}
PEAK = {**STAMP, "teraflops": [790.0, 800.0], "datasheet": {"device": "H100 SXM, bf16", "teraflops": 989.4}}
SERVE = {**STAMP, "streams": {"16": {"seconds": [1.0], "tokens": 9, "tokens_per_second": 9.0}}}
RECORD = {
    "machine": {
        "gpu": "NVIDIA H100 80GB HBM3",
        "gpus": 1,
        "driver": "580.1",
        "by": "someone",
        "processor": "P",
        "cores": 16,
        "python": "3.12",
    },
    "found": {
        "peak bf16": PEAK,
        "tests test_steps.py": TESTS,
        "step llama 1.3B eager": STEP,
        "step llama 1.3B compiled": {**STEP, "mfu": 0.502},
        "step gpt2 124M eager": {**STEP, "parameters": 124_000_000, "mfu": None, "host_waits": None},
        "step gpt2 345M eager": {**STAMP, "left_out": {"case": "it died"}},
        "serve 124M http": {**STAMP, "without": "fastapi not installed"},
        "serve 124M engine": SERVE,
    },
}


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def module(name: str) -> Any:
    return importlib.import_module(name)


# --- pages ------------------------------------------------------------------------------------------------------------


def test_the_pages_are_those_of_the_results() -> None:
    pages = module("gpu_pages")
    found = pages.pages(module("parts").read_results("gpu"))
    assert {path.name for path in found} == {"gpu.md", "README.md", "README.zh.md"}
    for path, parts in found.items():
        text = path.read_text(encoding="utf-8")
        assert pages.fill(text, parts) == text, "run benchmarks/gpu.py --pages"


def test_each_result_file_has_its_report() -> None:
    for name, record in module("parts").read_results("gpu").items():
        written = ROOT / f"benchmarks/results/gpu-{name}.md"
        assert written.read_text(encoding="utf-8") == module("gpu_pages").report(name, record)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_without_a_result_nothing_is_claimed_and_with_one_the_card_is_named(language: str) -> None:
    pages = module("gpu_pages")
    assert "|" not in pages.overview({}, language) and "**" in pages.status({}, language)
    results = {"h100": RECORD}
    assert "H100" in pages.status(results, language) and "**" not in pages.status(results, language)
    row = pages.overview(results, language).splitlines()[-1]
    for shown in ("H100", "20", "1.3B", "43.1 %", "50.2 %", "someone", "2026-12-01"):
        assert shown in row
    assert "124M" not in row


def test_the_page_of_details_has_a_line_for_each_file_and_step() -> None:
    lines = module("gpu_pages").details({"a": RECORD, "b": RECORD}).splitlines()
    assert sum("gpu-a.md" in line or "gpu-b.md" in line for line in lines) == 2
    eager = next(line for line in lines if "llama 1.3B eager" in line)
    predicted = json.loads((ROOT / "benchmarks/results/gpu_predicted.json").read_text(encoding="utf-8"))["mfu"]["H100"]
    low, high = (f"{100 * value:.0f}" for value in predicted["llama 1.3B eager"])
    shown = ("0.4 ", "43.1 %", f"{low} to {high} %", "40.0 GiB", "bf16, 2 x 4 x 2048")
    assert all(words in eager for words in shown)
    assert sum("124M" in line or "1.3B" in line for line in lines) == 6


def test_a_report_names_what_failed_and_what_was_skipped_with_the_reason() -> None:
    text = module("gpu_pages").report("h100", RECORD)
    for shown in ("it is 3", "needs two CUDA devices", "it died", "fastapi not installed", "790", "989", "step.py:200"):
        assert shown in text
    assert module("gpu_pages").tests(RECORD) == (20, 1, 9)


def test_a_page_without_its_part_is_an_error() -> None:
    with pytest.raises(ValueError, match="results"):
        module("gpu_pages").fill("a page", {"results": "x"})


# --- what is measured, and kept ---------------------------------------------------------------------------------------


def options(**values: Any) -> argparse.Namespace:
    given = {"device": "cuda", "precision": "bf16", "compiles": True, "gib": 79.0, "rounds": None, "flags": ""}
    given |= {"sizes": None, "styles": None, "length": None, "micro_batch": None, "parts": [], "known": {}}
    return argparse.Namespace(**{**given, "stamp": STAMP, **values})


@pytest.mark.parametrize(
    ("gib", "sizes"), [(12.0, {"124M", "345M"}), (8.0, {"124M"}), (31.7, {"124M", "345M", "1.3B"}), (0.5, {"124M"})]
)
def test_sizes_are_those_that_fit_the_card(gib: float, sizes: set[str]) -> None:
    cases = module("gpu").step_cases(options(gib=gib))
    assert {name.split()[2] for name in cases} == sizes
    assert {name.split()[1] for name in cases} == {"gpt2", "llama", "experts"}
    assert next(iter(cases)).split()[2] == max(sizes, key=("124M", "345M", "1.3B").index)


def test_without_a_compiler_for_the_card_steps_are_eager() -> None:
    cases = module("gpu").step_cases(options(compiles=False))
    assert cases and not any("--compile" in words for words in cases.values())


def test_every_case_is_one_that_its_program_takes() -> None:
    parse = module("gpu_cases").parser().parse_args
    for device in ("cuda", "cpu"):
        for words in module("gpu").step_cases(options(device=device, flags="--clip-grad 1")).values():
            assert parse([str(word) for word in words]).flags == "--clip-grad 1"


def test_a_complete_result_of_the_same_code_is_kept_unless_its_part_is_named() -> None:
    gpu, row = module("gpu"), {**STAMP, "date": "2026-12-01"}
    known = {"peak bf16": row, "peak fp16": {**row, "torch": "2.12"}, "step a": {**row, "left_out": {"case": "died"}}}
    found = {name: gpu.is_known(options(known=known), name) for name in (*known, "tests x")}
    assert found == {"peak bf16": True, "peak fp16": False, "step a": False, "tests x": False}
    assert not gpu.is_known(options(known=known, parts=["peak"]), "peak bf16")


def test_the_digest_is_that_of_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = module("gpu")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    file = tmp_path / "src" / "megalith" / "a.py"
    file.parent.mkdir(parents=True)
    file.write_text("a = 1\n")
    before = gpu.digest_of_sources()
    (tmp_path / "README.md").write_text("no source")
    assert gpu.digest_of_sources() == before
    file.write_text("a = 2\n")
    assert gpu.digest_of_sources() != before


def test_cases_stop_when_the_time_is_over_and_what_is_known_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, clock = module("gpu"), module("parts").Clock(100.0, {"peak": 1})
    monkeypatch.setattr(gpu, "run_case", lambda words: {"teraflops": words})
    clock.begin("peak")
    known = {"peak a": {**STAMP, "date": "2026-12-01"}}
    cases = {"peak a": [1], "peak b": [2], "peak c": [3]}
    found = gpu.rows(options(known=known), clock, cases)
    assert next(found) == ("peak b", {**STAMP, "teraflops": [2]})
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: clock.began + 1000.0)
    assert list(found) == []


def test_a_micro_batch_is_halved_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, tried = module("gpu"), list[int]()

    def run(words: list[Any]) -> dict[str, Any]:
        tried.append(words[words.index("--micro-batch") + 1])
        if tried[-1] > most:
            raise gpu.OutOfMemory("CUDA out of memory")
        return {"seconds": [1.0]}

    monkeypatch.setattr(gpu, "run_case", run)
    most = 2
    assert gpu.result_of(["step", "--micro-batch", 8, "--compile"]) == {"seconds": [1.0]} and tried == [8, 4, 2]
    most = 0
    assert "CUDA out of memory" in gpu.result_of(["step", "--micro-batch", 2])["without"]


def test_a_case_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    gpu, pid = module("gpu"), tmp_path / "pid"
    with pytest.raises(gpu.CaseError, match="here"):
        gpu.run_limited(["sh", "-c", f"sleep 600 & echo $! > {pid}; echo here; wait"], 1.0)
    number = int(pid.read_text())
    for _ in range(100):
        if not Path(f"/proc/{number}").exists() or " Z " in Path(f"/proc/{number}/stat").read_text():
            break
        time.sleep(0.05)
    else:
        os.kill(number, 9)
        pytest.fail("its child goes on")


def test_a_case_reports_its_exit_code_and_output() -> None:
    gpu = module("gpu")
    assert gpu.run_limited([sys.executable, "-c", "import sys; print('out'); sys.exit(3)"], 60.0) == (3, "out\n")


def test_results_of_pytest_are_counted_by_their_outcome(tmp_path: Path) -> None:
    (tmp_path / "found.xml").write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><skipped message="no card"/></testcase>'
        '<testcase name="c"><failure message="m">the trace</failure></testcase>'
        '<testcase name="d"><error message="fixture"/></testcase></testsuite></testsuites>'
    )
    assert module("gpu").read_junit(tmp_path / "found.xml") == {
        "passed": 1,
        "skipped": {"no card": 1},
        "left_out": {"c": "the trace", "d": "fixture"},
    }


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ([], "cpu"),
        (["NVIDIA H100 80GB HBM3"], "h100-80gb-hbm3"),
        (["Tesla V100S-PCIE-32GB"] * 2, "v100s-pcie-32gb-x2"),
        (["NVIDIA GeForce RTX 4090"] * 4, "rtx-4090-x4"),
    ],
)
def test_files_are_named_after_the_card(names: list[str], wanted: str) -> None:
    assert module("gpu").name_of_card([{"name": name} for name in names]) == wanted


def test_places_where_the_host_waits_are_counted() -> None:
    texts = ("called a synchronizing CUDA operation", "called a synchronizing CUDA operation", "something else")
    place = "/home/x/src/megalith/train/step.py"
    caught = [warnings.WarningMessage(UserWarning(text), UserWarning, place, 7) for text in texts]
    assert module("gpu_cases").wait_places(caught) == {"megalith/train/step.py:7": 2}


# --- a trial ----------------------------------------------------------------------------------------------------------


def test_a_trial_on_the_cpu_measures_keeps_and_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cases run in this process instead of one each."""
    gpu, cases = module("gpu"), module("gpu_cases")

    def run_case(words: list[Any]) -> dict[str, Any]:
        chosen = cases.parser().parse_args([str(word) for word in words])
        found: dict[str, Any] = json.loads(json.dumps(cases.CASES[chosen.case](chosen)))
        return found

    monkeypatch.setattr(gpu, "run_case", run_case)
    words = ["environment", "attention", "step", "--styles", "gpt2", "experts", "--rounds", "2", "--results", tmp_path]
    words += ["--by", "me", "--device", "cpu", "--precision", "fp32", "--no-compile"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, words)])
    monkeypatch.setattr(gpu, "SIZES", {**gpu.SIZES, "tiny": (0.0, 32, 2)})
    assert gpu.main() == 0, capsys.readouterr().out
    record = json.loads((tmp_path / "gpu-cpu.json").read_text())
    assert record["machine"]["by"] == "me" and record["machine"]["gpus"] == 0
    assert list(record["found"]) == [
        "environment",
        "attention 1x2x64x16 fp32",
        "step gpt2 tiny eager",
        "step experts tiny eager",
    ]
    row = record["found"]["step gpt2 tiny eager"]
    assert len(row["seconds"]) == 2 and row["micro_batch"] == 2 and row["losses"][1] < row["losses"][0]
    assert sum(row["trace"]["kinds"].values()) == pytest.approx(1, abs=0.01) and row["trace"]["launches"] > 100
    assert row["parameters"] == 2 * (12 * 64**2 + 13 * 64) + 128 * 64 + 32 * 64 + 2 * 64
    assert record["found"]["attention 1x2x64x16 fp32"]["milliseconds"]["math"] > 0
    assert "tiny" in (tmp_path / "gpu-cpu.md").read_text()
