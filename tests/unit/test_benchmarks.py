"""The benchmarks' own code: goals, tables, turns and a part that fails. The pages show what the result files hold."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"load_before": 0.1, "stolen": 0.0, "date": "2026-11-25", "commit": "abc"}
MACHINE = {"processor": "P", "features": ["avx2"], "cores": 2, "python": "3.11", "versions": {"torch": "2.13"}}


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "peers")


def module(name: str) -> Any:
    return importlib.import_module(name)


def results(row: dict[str, Any], name: str = "step 124M fp32") -> dict[str, Any]:
    return {"m": {"machine": MACHINE, "found": {name: {**QUIET, **row}}}}


def row(ours: list[float], compiled: list[float]) -> dict[str, Any]:
    return {"ours": "megalith train", "seconds": {"megalith train": ours, "compiled": compiled}}


# --- what is committed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["README.md", "README.zh.md"])
def test_the_figures_of_the_readme_are_those_of_the_results(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert text.count("<!-- ") >= 4
    assert module("table").quote(text, module("parts").read_results("commands")) == text, (
        "run benchmarks/commands.py --pages"
    )


def test_the_table_of_the_benchmarks_is_that_of_the_results() -> None:
    written = (ROOT / "docs/results/benchmarks.md").read_text(encoding="utf-8")
    assert module("table").page(module("parts").read_results("commands")) == written, (
        "run benchmarks/commands.py --pages"
    )


def test_the_table_of_what_is_learnt_is_that_of_the_results() -> None:
    written = (ROOT / "docs/results/learning.md").read_text(encoding="utf-8")
    assert module("learn").page(module("parts").read_results("learning")) == written, "run benchmarks/learn.py --pages"


def test_both_readmes_quote_the_same() -> None:
    quotes = [
        [match.groups() for match in module("table")._QUOTE.finditer((ROOT / file).read_text(encoding="utf-8"))]
        for file in ("README.md", "README.zh.md")
    ]
    assert quotes[0] == quotes[1] and len(quotes[0]) == 4


# --- the table ----------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_of_the_rounds_and_stands_beside_its_goal() -> None:
    table = module("table")
    line = next(
        line for line in table.page(results(row([1.0, 2.0, 1.0], [1.3, 1.0, 1.1]))).splitlines() if "124M" in line
    )
    what, against, goal, cell = (part.strip() for part in line.strip("|").split("|"))
    assert (what, against, goal) == ("step 124M fp32", "compiled", ">= 1.2")
    assert cell.startswith("**1.10** (0.50 to 1.30)") and "missed" in cell


@pytest.mark.parametrize(("compiled", "verdict"), [(1.2, "met"), (1.19, "missed")])
def test_a_goal_is_met_at_its_bound(compiled: float, verdict: str) -> None:
    assert verdict in module("table").page(results(row([1.0], [compiled])))


def test_a_goal_that_is_missed_by_little_is_not_printed_as_the_goal() -> None:
    page = module("table").page(results(row([1.0], [1.196])))
    assert "**1.196**" in page and "missed" in page


def test_a_figure_is_bounded_from_above() -> None:
    table, name = module("table"), "ranks 16"
    for mib, verdict in ((250.0, "met"), (251.0, "missed")):
        found = {**row([1.0], [2.0]), "figures": {"largest rank": {"unit": "MiB", "values": [mib]}}}
        line = next(line for line in table.page(results(found, name)).splitlines() if "largest rank" in line)
        assert "<= 250 MiB" in line and verdict in line


@pytest.mark.parametrize("busy", [{"load_before": 0.6}, {"stolen": 0.02}])
def test_what_was_measured_beside_other_work_is_marked(busy: dict[str, float]) -> None:
    table = module("table")
    quiet, loaded = results(row([1.0], [2.0])), results({**row([1.0], [2.0]), **busy})
    head = table.HEAD.count("*loaded*")
    assert table.page(quiet).count("*loaded*") == head and table.page(loaded).count("*loaded*") == head + 1
    cell = "| <!-- step 124M fp32: compiled --> |"
    assert table.quote(cell, quiet) == "| <!-- step 124M fp32: compiled --> 2.00 (m) |"
    assert "loaded" in table.quote(cell, loaded)


def test_a_peer_that_did_not_run_is_named_with_the_reason() -> None:
    found = {**row([1.0], [2.0]), "left_out": {"llama.cpp": "first line\nno such file"}}
    assert "llama.cpp did not run (no such file)" in module("table").page(results(found))


def test_a_quote_of_what_is_not_measured_is_a_dash() -> None:
    assert (
        module("table").quote("| <!-- start 124M: import torch --> 3 |", {})
        == "| <!-- start 124M: import torch --> - |"
    )


# --- turns --------------------------------------------------------------------------------------------------------

STEPS = "import time\nfor n in range(1000): print('step', n, flush=True); time.sleep(0.005)"


def test_contenders_take_as_many_turns_as_there_are_rounds() -> None:
    found = module("contender").in_turns(
        dict.fromkeys("ab", [sys.executable, "-c", STEPS]), r"^step", 0.0, rounds=(3, 9)
    )
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 3, "b": 3}
    assert all(second > 0 for seconds in found.values() for second in seconds)


def test_a_peer_that_does_not_start_is_left_out_and_ours_must_start() -> None:
    contender, left_out = module("contender"), dict[str, str]()
    steps, fails = [sys.executable, "-c", STEPS], [sys.executable, "-c", "raise SystemExit('no compiler')"]
    found = contender.in_turns({"a": steps, "b": fails}, r"^step", 0.0, rounds=(1, 1), left_out=left_out)
    assert list(found) == ["a"] and "no compiler" in left_out["b"]
    with pytest.raises(RuntimeError, match="no compiler"):
        contender.in_turns({"b": fails, "a": steps}, r"^step", 0.0, rounds=(1, 1), left_out=left_out)


def test_the_order_of_turns_changes_and_the_least_rounds_are_taken() -> None:
    order = list[str]()

    def turn(name: str) -> float:
        order.append(name)
        return float(len(order))

    turns = {name: lambda name=name: turn(name) for name in "ab"}
    assert module("contender").alternate(turns, 0.0, (2, 5)) == {"a": [1.0, 4.0], "b": [2.0, 3.0]}
    assert order == ["a", "b", "b", "a"]


def test_the_memory_of_a_contender_is_that_of_its_largest_process() -> None:
    child = "data = bytearray(64 << 20); print('step', flush=True); import time; time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    contender = module("contender").Contender([sys.executable, "-c", parent], "^step")
    try:
        contender.wait(1)
        assert 64 < contender.largest_mib() < 128
        assert 64 < contender.peak_mib() < 128
    finally:
        contender.close()


def test_a_command_has_its_own_memory_and_one_that_fails_is_reported_with_its_output() -> None:
    contender = module("contender")
    filled = "import time; held = bytearray(b'1') * (64 << 20); time.sleep(0.5)"
    assert 64 < contender.run([sys.executable, "-c", filled]).peak_mib < 100  # this process has more
    with pytest.raises(RuntimeError, match=r"ended with 3(.|\n)*the reason"):
        contender.run([sys.executable, "-c", "import sys; print('the reason'); sys.exit(3)"])


# --- parts --------------------------------------------------------------------------------------------------------


def test_a_part_that_fails_keeps_what_was_found_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    parts, kept = module("parts"), dict[str, Any]()

    def broken(options: argparse.Namespace, folder: Path, clock: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "first", {"seconds": 0.123456}
        raise RuntimeError("the disk is full")

    def sound(options: argparse.Namespace, folder: Path, clock: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "second", {"left_out": {"peer": "is missing"}}

    options = argparse.Namespace(minutes=1.0, rounds=None, folder=None)
    chosen = {"a": parts.Part(broken, 1), "b": parts.Part(sound, 1)}
    failed = parts.measure(chosen, options, kept.__setitem__, lambda name, result: name)
    assert failed == ["a", "second: peer"] and list(kept) == ["first", "second"]
    assert kept["first"]["seconds"] == 0.1235 and {"load_before", "stolen", "date", "commit"} <= set(kept["first"])
    said = capsys.readouterr().out
    assert "the disk is full" in said and "is missing" in said


def test_the_time_that_a_part_leaves_goes_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, now = module("parts"), [100.0]
    monkeypatch.setattr(parts.time, "perf_counter", lambda: now[0])
    clock = parts.Clock(100.0, {"a": 1, "b": 3})
    clock.begin("a")
    assert clock.until() == 125.0 and clock.until(0.2) == 105.0
    now[0] = 110.0
    clock.begin("b")
    assert clock.until() == 200.0
    now[0] = 210.0
    assert clock.until() == 210.0  # no time is left


def test_a_machine_is_named_by_its_maker_and_its_last_feature() -> None:
    name_of = module("machine").name_of
    assert name_of({"processor": "AMD EPYC", "features": ["avx2", "avx512f", "avx512_bf16"]}) == "amd-avx512"
    assert name_of({"processor": "Intel(R) Xeon(R)", "features": ["avx2", "amx_tile", "amx_bf16"]}) == "intel-amx"
    assert name_of({"processor": "AMD EPYC", "features": ["avx2"]}) == "amd-avx2"


def test_stolen_time_is_a_share_of_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, now, stat = module("machine"), [0.0], ["cpu  1 2 3 4 5 6 7 100 0 0\n"]
    monkeypatch.setattr(machine, "_read", lambda path: stat[0])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
    disturbance = machine.Disturbance(0.2)
    now[0], stat[0] = 10.0, "cpu  1 2 3 4 5 6 7 200 0 0\n"
    assert disturbance.record() == {"load_before": 0.2, "stolen": 0.05}


def test_bf16_is_measured_where_the_processor_multiplies_it() -> None:
    chosen, unset = argparse.Namespace(precisions=["bf16"]), argparse.Namespace(precisions=None)
    precisions_of = module("commands").precisions_of
    assert precisions_of(unset, ["avx2"]) == ["fp32"]
    assert precisions_of(unset, ["avx2", "avx512f", "avx512_bf16"]) == ["bf16", "fp32"]
    assert precisions_of(chosen, ["avx2"]) == ["bf16"]


# --- contenders' work ---------------------------------------------------------------------------------------------


def test_the_jsonl_has_its_size_and_ends_with_a_whole_line(tmp_path: Path) -> None:
    module("commands").write_jsonl(tmp_path / "t.jsonl", ["a" * 5000, "b" * 3000], 1)
    data = (tmp_path / "t.jsonl").read_bytes()
    assert 2**20 <= len(data) < 2**20 + 6000
    assert {len(json.loads(line)["text"]) for line in data.splitlines()} == {5000, 3000}


def test_uniform_requests_share_no_prefix() -> None:
    asked = module("generate").requests(8, 3, uniform=True)
    assert {(len(prompt), count) for prompt, count in asked} == {(64, 64)}
    assert len({tuple(prompt[:2]) for prompt, _ in asked}) == 8
    assert asked[0][0][:2] != module("generate").requests(8, 4, uniform=True)[0][0][:2]


# --- what is learnt -----------------------------------------------------------------------------------------------


def test_means_of_seeds_are_compared_in_standard_errors() -> None:
    learn = module("learn")
    losses = {learn.OURS: [1.0, 2.0, 3.0], learn.PEER: [3.0, 4.0, 5.0]}
    found = {
        f"{who} {seed}": {"who": who, "seed": seed, "loss": loss}
        for who, values in losses.items()
        for seed, loss in enumerate(values)
    }
    assert learn.mean_and_error(learn.losses_of(found, learn.PEER)) == (4.0, pytest.approx(3**-0.5))
    text = learn.verdict(found)
    assert "-2.0000" in text and f"{2 / (2 / 3) ** 0.5:.1f} standard errors" in text
    assert "too few" in learn.verdict({name: result for name, result in found.items() if result["seed"] == 0})


def test_the_loop_beside_the_recipe_continues_where_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from megalith.config import load

    peer, ids = module("characters"), torch.arange(400) % 7
    small = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "2", "--train-iters", "6"]
    intervals = ["--eval-interval", "3", "--save-interval", "3", "--lr-warmup-iters", "2"]
    recipe = str(ROOT / "recipes" / "shakespeare-char-cpu.toml")
    run = load(["--config", recipe, *small, *intervals], {}, files=False)
    rate = peer.learning_rate

    def rate_until_killed(run: Any, iteration: int) -> float:
        if iteration == 5:
            raise KeyboardInterrupt
        return float(rate(run, iteration))

    torch.manual_seed(1)
    whole = peer.train(run, ids, ids[:200], 7, tmp_path / "whole.pt")
    torch.manual_seed(1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(peer, "learning_rate", rate_until_killed)
        peer.train(run, ids, ids[:200], 7, tmp_path / "parts.pt")
    assert peer.train(run, ids, ids[:200], 7, tmp_path / "parts.pt") == whole
    assert [*whole] == ["3", "6"] and whole["6"] < whole["3"] < 2.1


# --- the speedrun -------------------------------------------------------------------------------------------------


def run_folder(folder: Path, losses: dict[int, float], seed: int = 1, flags: str = "--optimizer muon") -> Path:
    """A run of 40 steps of 100 tokens, of 1 TFLOP and 2 seconds each."""
    from megalith.config import load

    small = (
        "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --kv-channels 4 --ffn-hidden-size 32 --seq-length 10"
    )
    others = "--max-position-embeddings 10 --micro-batch-size 10 --train-iters 40 --lr 1e-3 --mock-data"
    words = f"{small} {others} --tokenizer-type NullTokenizer --vocab-size 15 --seed {seed} {flags}"
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "config.json").write_text(json.dumps(load(words.split(), {}, files=False).to_dict()))
    events: list[dict[str, Any]] = [{"event": "start", "iteration": 0}]
    for iteration in range(1, 41):
        events.append({"event": "step", "iteration": iteration, "loss": 2.0, "num_tokens": 100, "seconds": 2.0})
        if iteration in losses:
            events.append(
                {"event": "evaluation", "iteration": iteration, "split": "validation", "loss": losses[iteration]}
            )
    events.append({"event": "throughput", "iteration": 40, "tokens_per_second": 50.0, "teraflops": 0.5})
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_a_speedrun_counts_until_its_first_evaluation_at_the_target(tmp_path: Path) -> None:
    speedrun = module("speedrun")
    record = speedrun.record_of(run_folder(tmp_path / "a", {10: 1.6, 20: 1.47, 30: 1.4, 40: 1.45}), "it")
    assert (record["reached"], record["iteration"], record["loss"]) == (True, 20, 1.47)
    assert (record["tokens"], record["flops"], record["seconds"]) == (2000, 20e12, 40)
    square = 4 * 8**3 + 2 * 8**3
    wide = 4 * 8 * 8 * 32 + 2 * 8**3
    assert record["muon_flops"] == pytest.approx(20 * 5 * 2 * (4 * square + 2 * wide), rel=1e-3)
    missed = speedrun.record_of(run_folder(tmp_path / "b", {10: 1.6, 20: 1.5, 40: 1.7}, flags=""), "it")
    assert (missed["reached"], missed["iteration"], missed["loss"], missed["muon_flops"]) == (False, 20, 1.5, 0)
    with pytest.raises(ValueError, match="evaluation"):
        speedrun.record_of(run_folder(tmp_path / "c", {}), "it")


def test_a_speedrun_of_longer_windows_is_measured_in_those_of_the_reference(tmp_path: Path) -> None:
    speedrun = module("speedrun")
    flags = "--seq-length 512 --max-position-embeddings 512"
    folder = run_folder(tmp_path / "a", {10: 1.6, 20: 1.47, 30: 1.4, 40: 1.45}, flags=flags)
    for loss in (1.48, 1.46):
        record = speedrun.record_of(folder, "it", lambda _, iteration, loss=loss: {30: loss}[iteration])
        assert (record["reached"], record["loss"], record["loss_of_run"]) == (loss < 1.47, loss, 1.4)


def test_seeds_of_a_speedrun_share_a_row_and_failures_stay(tmp_path: Path) -> None:
    speedrun, runs = module("speedrun"), list[dict[str, Any]]()
    for change, seed, losses in (("one", 1, 1.46), ("two", 1, 1.6), ("one", 2, 1.42), ("two", 1, 1.5)):
        folder = run_folder(tmp_path / f"{change}-{seed}-{losses}", {40: losses}, seed)
        runs = speedrun.add(runs, speedrun.record_of(folder, change))
    assert [(run["change"], run["seed"], run["loss"]) for run in runs] == [
        ("one", 1, 1.46),
        ("one", 2, 1.42),
        ("two", 1, 1.5),
    ]
    one, two = speedrun.table(runs)[2:4]
    assert "1.4400 ± 0.0283 | 2 |" in one and "not reached" not in one
    assert "1.5000, not reached | 1 |" in two
    whole = {**runs[0], "change": speedrun.REFERENCE, "flops": 400e12}
    assert "| 1/10.0 |" in speedrun.table([*runs, whole])[2]


def test_the_table_of_the_speedrun_is_that_of_its_runs() -> None:
    speedrun = module("speedrun")
    written = (ROOT / "docs/results/learning.md").read_text(encoding="utf-8")
    assert speedrun.page(written, speedrun.read_runs()) == written, "run benchmarks/speedrun.py --pages"
