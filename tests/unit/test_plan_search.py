"""The search for layouts: exact against trying everything, only what trains, and what the command prints."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megalith.cli.main import main
from megalith.cli.plan import run as plan
from megalith.config import RunConfig, load
from megalith.config.command_line import read_command_line, words_of
from megalith.config.reading import read_recipe
from megalith.config.render import given_recipe
from megalith.errors import ConfigError
from megalith.plan.bound import least_bytes
from megalith.plan.budget import MOST_HOURS
from megalith.plan.devices import DEVICES
from megalith.plan.memory import RankMemory
from megalith.plan.plan import machines
from megalith.plan.presets import PRESETS, preset_words
from megalith.plan.search import Search, Values
from megalith.plan.time import step_time

GPT = (
    "--num-layers 12 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 32 --train-iters 1 --lr 1e-4 --mock-data --bf16 --hidden-dropout 0 "
    "--attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 31999 "
)
RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.toml"))
EXPERTS = "--num-experts 4 --moe-token-dispatcher-type alltoall"


def _memory(run: RunConfig, vocab_size: int) -> Sequence[RankMemory]:
    """Stand for plans: states, and activations by a rule of thumb."""
    tp, pp = run.layout.tp, run.layout.pp
    each = 80 if run.train.recompute_granularity is None else 2
    shards = run.layout.cp * (tp if run.parallel.sequence_parallel_here else tp**0.5)
    tokens = run.train.micro_batch_size * run.data.seq_length * min(pp, run.num_micro_batches)
    kept = int(each * tokens * run.model.hidden_size * run.model.num_layers / pp / shards)
    held = {"weights": least_bytes(run, vocab_size), "activations": kept}
    return [RankMemory((0,), 1, held, held, "", ())]


def _search(flags: str, world: int, device: str) -> Search:
    base = load((GPT + flags).split(), {}, files=False)
    return Search(base, DEVICES[device], world_size=world, nodes=1, tokens=32_000, memory=_memory)


def _all(search: Search) -> Iterator[tuple[float, Values]]:
    """Yield the time of everything that trains and fits, without the search's bounds and order."""
    for layout in search.layouts():
        for variant, again in product(search.variants(layout), ("none", "full")):
            full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
            values = {**variant, **(full if again == "full" else {})}
            run, vocab_size = search.run_of(values)
            (rank,) = _memory(run, vocab_size)
            if search.allowed(values) and rank.peak_bytes <= search.device.room:
                yield step_time(run, vocab_size, search.device).step_seconds, values


@pytest.mark.parametrize(("flags", "world", "device"), [("", 4, "A100-40GB"), (EXPERTS, 4, "H100")])
def test_nothing_faster_is_missed(flags: str, world: int, device: str) -> None:
    fastest: dict[Any, float] = {}
    search = _search(flags, world, device)
    for seconds, values in _all(search):
        layout = tuple(values[name] for name in list(values)[:9])
        fastest[layout] = min(seconds, fastest.get(layout, seconds))
    found = _search(flags, world, device).best(5)
    assert [one.time.step_seconds for one in found.best] == pytest.approx(sorted(fastest.values())[:5], rel=1e-9)
    assert found.planned < len(fastest) * 4, "most are not looked at"


def test_what_is_proposed_trains_and_reasons_name_neighbours() -> None:
    search = _search("", 8, "RTX4090")
    found = search.best(5)
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    for one in found.best:
        words = [*GPT.replace("--micro-batch-size 1 ", "").split(), *one.flags()]
        assert load(words, environ, files=False).layout == one.run.layout
        assert one.peak_bytes <= DEVICES["RTX4090"].room
    reasons = list(search.losers(found.best[0]))
    assert any("slower" in why or "fit" in why for _, why in reasons)
    assert all(change.startswith(("--", "without --")) for change, _ in reasons)


@pytest.mark.full
def test_sixteen_thousand_gpus_are_searched() -> None:
    words = preset_words("llama3-405b", DEVICES["H100"])
    base = load([*words, "--micro-batch-size", "1"], {}, files=False)
    search = Search(base, DEVICES["H100"], world_size=16_384, nodes=2048, tokens=128_256, memory=_memory)
    found = search.best(1)
    assert found.best[0].run.layout.world_size == 16_384 and found.best[0].run.layout.pp > 1
    assert found.tried < 8000 and found.planned < 200


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_models(name: str) -> None:
    run = load([*preset_words(name, DEVICES["A100"]), "--micro-batch-size", "1"], {}, files=False)
    billions = float(name.rpartition("-")[2].removesuffix("m").removesuffix("b").rpartition("x")[2])
    billions = billions / 1000 if name.endswith("m") else 46.7 if name.startswith("mixtral") else billions
    bytes_of_each = 18
    counted = least_bytes(run, run.tokenizer.vocab_size or 0) / bytes_of_each / 1e9
    assert counted == pytest.approx(billions, rel=0.07)


def test_the_command_proposes_layouts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = GPT.replace("4096", "64").replace("--num-layers 12", "--num-layers 2").replace("heads 32", "heads 2")
    assert main(["plan", *small.replace("--micro-batch-size 1 ", "").split(), "--gpus", "2xRTX4090", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["layouts"][0]
    assert found["fits"] and found["step_seconds"] == first["step_seconds"] <= found["layouts"][-1]["step_seconds"]
    assert found["memory"]["peak_bytes"] == first["peak_bytes"] and "--nproc 2" in first["command"]
    words = small.replace("--micro-batch-size 1 ", "").split()
    assert main(["plan", *words, "--gpus", "2xRTX4090", "--nodes", "2"]) == 0
    (command,) = re.findall("^  (torchrun .*)$", capsys.readouterr().out, re.MULTILINE)
    assert {"--nnodes", "--node-rank", "--master-addr"} <= set(command.partition(" -m ")[0].split())


def test_what_fits_nowhere_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no layout") as error:
        plan(["--gpus", "4xT4", "--preset", "llama3-405b"])
    needed = re.search(r"less than ([\d.]+) GiB", str(error.value))
    assert needed and 15.9 < float(needed[1]) * 2**30 / (406e9 / 4) <= 18  # bytes of each parameter
    assert not _search("", 1, "T4").best(1).best


def test_hours_pay_for_the_size_with_the_lowest_loss(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.plan.plan._memory", lambda device, run, vocab_size: _memory(run, vocab_size))

    def bought(hours: str, data: str) -> list[dict[str, Any]]:
        assert main(["plan", "--gpus", "4xRTX4090", "--hours", hours, "--data", data, "--json"]) == 0
        rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["sizes"]
        assert [row["loss"] for row in rows] == sorted(row["loss"] for row in rows)
        return rows

    day = bought("24", "2B")
    assert day[0]["train_iters"] * day[0]["step_seconds"] == pytest.approx(86_400, rel=0.01)
    assert f"--train-iters {day[0]['train_iters']}" in day[0]["command"] and "--nproc 4" in day[0]["command"]
    assert bought("1", "2B")[0]["parameters"] < day[0]["parameters"]
    with pytest.raises(ConfigError, match="--data"):
        plan(["--gpus", "4xRTX4090", "--hours", "1"])


@pytest.fixture
def bought(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    monkeypatch.setattr("megalith.plan.plan._memory", lambda device, run, vocab_size: _memory(run, vocab_size))

    def plan_of(words: str) -> dict[str, Any]:
        assert main(["plan", *words.split(), "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return plan_of


@pytest.mark.parametrize("form", ["--search --preset gpt3-345m", "--hours 24 --data 2B"])
def test_flags_that_a_search_replaces_are_named(form: str, bought: Callable[[str], dict[str, Any]]) -> None:
    given = "--tensor-model-parallel-size 4 --sequence-parallel --micro-batch-size 2"
    notes = " ".join(bought(f"--gpus 8xH100 {form} {given}")["notes"])
    assert all(
        flag in notes for flag in ("--tensor-model-parallel-size 4", "--sequence-parallel", "--micro-batch-size 2")
    )
    assert "--tensor" not in " ".join(bought(f"--gpus 8xH100 {form}")["notes"])


def test_the_command_of_a_search_undoes_the_layout_of_a_recipe(
    bought: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    """Also settings that no flag undoes, such as recomputation."""
    recipe = tmp_path / "run.toml"
    kept = read_command_line(preset_words("gpt3-345m", DEVICES["H100"])).values
    layout = {"micro_batch_size": 1, "tensor_model_parallel_size": 8, "sequence_parallel": True}
    layout |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    recipe.write_text(given_recipe({**kept, **layout}))
    found = bought(f"--gpus 8xH100 --search --config {recipe}")
    assert all(flag in found["notes"][0] for flag in ("--tensor-model-parallel-size 8", "--recompute-num-layers 2"))
    for one in found["layouts"]:
        words = shlex.split(one["command"])[2:]
        run = load(words, {}, files=False)
        assert str(run.layout) == one["layout"]
        again = "full" if "--recompute-granularity" in one["flags"] else None
        assert run.train.recompute_granularity == again
        assert run.parallel.sequence_parallel == ("--sequence-parallel" in one["flags"])
        assert run.model.num_layers == kept["num_layers"] and run.train.train_iters == kept["train_iters"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_flags_say_what_a_recipe_says(recipe: Path) -> None:
    values = read_recipe(recipe).values
    reading = read_command_line(words_of(values))
    assert reading.values == values and not reading.problems


@pytest.mark.parametrize(("gpus", "named"), [("12xH100", True), ("16xH100", False), ("6xH100", False)])
def test_machines_that_are_not_full_are_named(gpus: str, named: bool, bought: Callable[[str], dict[str, Any]]) -> None:
    notes = " ".join(bought(f"--gpus {gpus} --preset gpt3-345m --global-batch-size 96")["notes"])
    assert ("--nodes" in notes) == named


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--hours 1 --data 2B --learning-rate 3", ["--learning-rate"]),
        ("--hours 1 --data 2B --num-layers x --lr y", ["--num-layers", "--lr y"]),
        ("--hours 1 --data 2B --num-layers 2 --kv-channels 3", ["--num-layers 2", "--kv-channels 3"]),
        ("--hours 1 --data 2B --train-samples 1000 --train-iters=5", ["--train-samples 1000", "--train-iters 5"]),
        ("--hours 1 --data 2B --config recipes/gpt3-1.3b-4gpu.toml", ["--hidden-size 2048", "gpt3-1.3b-4gpu.toml"]),
        ("--hours 1 --data 2B --search --html a.html", ["--search", "--html a.html"]),
        ("--hours 1 --data 2B --preset gpt3-1.3b", ["--preset gpt3-1.3b"]),
        ("--hours nan --data 2X", ["--hours nan", "--data 2X"]),
        ("--hours inf --data 2B", ["--hours inf", str(MOST_HOURS)]),
        ("--hours 1e9 --data 0B", ["--hours 1e+09", "--data 0B"]),
        ("--hours 0 --data " + "9" * 400, ["--hours 0", "--data 9"]),
        ("--hours 1", ["--data"]),
        ("--data 2B", ["--data 2B", "--hours"]),
        ("--preset gpt3-1.3b --html=", ["--html"]),
        ("--preset gpt3-1.3b --data 2B --html /missing/a.html", ["--data 2B", "--html /missing/a.html"]),
        ("--preset=", ["--preset"]),
    ],
)
def test_flags_that_hours_do_not_go_with_are_named(
    words: str, named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--gpus", "1xH100", *words.split()]) == 2
    said = capsys.readouterr().err
    assert all(flag in said for flag in named)


def test_an_unknown_preset_is_named_beside_missing_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "llama9"]) == 2
    said = capsys.readouterr().err
    assert "--preset llama9" in said and "llama3-8b" in said and "--gpus" in said


def test_tokens_are_those_of_the_planned_batch_and_length(bought: Callable[[str], dict[str, Any]]) -> None:
    for words, of_a_step in (
        ("", 64 * 2048),
        ("--global-batch-size 512", 512 * 2048),
        ("--seq-length 4096", 64 * 4096),
    ):
        first = bought(f"--gpus 1xH100 --hours 1 --data 2B {words}")["sizes"][0]
        assert first["tokens"] == first["train_iters"] * of_a_step
        assert words in first["command"] and first["command"].count("--seq-length") == 1
    more = bought("--gpus 1xH100 --hours 0.01 --data 2B --vocab-size 127999")["sizes"][0]
    fewer = bought("--gpus 1xH100 --hours 0.01 --data 2B")["sizes"][0]
    assert more["parameters"] - fewer["parameters"] == 2 * (128_000 - 32_000) * 384


def test_own_flags_replace_those_that_exclude_them(bought: Callable[[str], dict[str, Any]]) -> None:
    command = bought("--gpus 1xH100 --hours 1 --data 2B --fp16 --data-path text")["sizes"][0]["command"]
    assert "--fp16" in command and "--bf16" not in command and "--mock-data" not in command


def test_more_hours_than_the_largest_size_that_fits_needs(bought: Callable[[str], dict[str, Any]]) -> None:
    few, many = (
        bought(f"--gpus 1xV100-16GB --hours {words}")["sizes"] for words in ("2160 --data 300B", "8760 --data 1T")
    )
    assert [one["parameters"] for one in few] == [one["parameters"] for one in many] and len(many) > 2
    assert many[0]["parameters"] == max(one["parameters"] for one in many)


def test_neighbours_on_both_sides_are_shown(bought: Callable[[str], dict[str, Any]]) -> None:
    for gpus, hours in (("1xH100", 1), ("4xRTX4090", 24), ("12xH100", 24)):
        sizes = [one["parameters"] for one in bought(f"--gpus {gpus} --hours {hours} --data 2B")["sizes"]]
        assert min(sizes) < sizes[0] < max(sizes)


def test_hours_of_less_than_a_step(bought: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "1xH100", "--hours", "1e-6", "--data", "2B"]) == 2
    least = re.search(r"--hours 1e-06 .* ([\de.-]+) hours", capsys.readouterr().err)
    assert least and bought(f"--gpus 1xH100 --hours {least[1]} --data 2B")["sizes"][0]["train_iters"] == 1


def test_a_batch_that_no_layout_divides_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "7xH100", "--hours", "0.1", "--data", "2B", "--global-batch-size", "5"]) == 2
    assert "--global-batch-size" in capsys.readouterr().err


def test_hours_in_chinese(bought: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--gpus", "1xH100", "--hours", "1", "--data", "2B", "--lang"]
    assert bought(" ".join(words[1:-1])) and main([*words, "en"]) == 0
    english = capsys.readouterr().out
    assert main([*words, "zh"]) == 0
    chinese = capsys.readouterr().out
    assert english.isascii() and len(english.splitlines()) == len(chinese.splitlines())
    named = [line for line in chinese.splitlines() if line and not line.startswith("  megalith")]
    assert not any(line.isascii() for line in named)


@pytest.mark.parametrize(
    ("gpus", "nodes"), [("8xH100", 1), ("12xH100", 2), ("16xH100", 2), ("20xH100", 4), ("3xH100", 1), ("11xH100", 11)]
)
def test_as_few_machines_as_hold_the_devices(gpus: str, nodes: int) -> None:
    assert machines(gpus)[2] == nodes
    assert machines("144xGB200")[2] == 3 and machines("12xH100", 4)[2] == 4
