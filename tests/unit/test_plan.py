"""`megalith plan`: memory of recipes and small models, what is remembered, and what the command prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.cli.main import main
from megalith.distributed.comm import start_all_reduce
from megalith.distributed.context import Axis
from megalith.errors import ConfigError
from megalith.plan import experts
from megalith.plan.chinese import CHINESE
from megalith.plan.devices import DEVICES, GIB, read_devices
from megalith.plan.memory import RankMemory
from megalith.plan.plan import Plan, plan_run, search_run
from megalith.plan.record import Mark, Tensors, replay

from ..live_memory import live_bytes
from .config.test_recipes import RECIPES, VOCABULARIES, gpus

BY_SIZE = {16: "T4", 24: "RTX4090", 32: "V100S", 40: "A100-40GB", 80: "H100"}
COUNTED = [path for path in RECIPES if gpus(path)]
SMALL = (
    "--num-layers {} --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --global-batch-size {} --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255 --hidden-dropout 0 --attention-dropout 0 {}"
)

MASKED = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --lr 1e-3 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 1 --data-path x --vocab-file x --padded-vocab-size 512"
)
DENOISED = f"{MASKED} --model-family t5 --vocab-extra-ids 20 --decoder-seq-length 64"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "megalith" / "plan"


def _plan(layers: int, batch: int = 2, flags: str = "", world_size: int = 1, device: str = "RTX4090") -> Plan:
    return plan_run(SMALL.format(layers, batch, flags).split(), DEVICES[device], world_size=world_size)


def _ranks(*args: Any) -> list[RankMemory]:
    return list(_plan(*args).ranks)


def _recipe(path: Path, *words: str) -> Plan:
    head = dict(line[2:].split(": ", 1) for line in path.read_text(encoding="utf-8").splitlines() if ": " in line)
    vocabulary = VOCABULARIES.get(path.name.partition("-")[0], 50_304)
    given = ["--config", str(path), "--padded-vocab-size", str(vocabulary), *words]
    return plan_run(given, DEVICES[BY_SIZE[int(head["GiB of a GPU"])]], world_size=gpus(path))


def _recipe_named(name: str) -> Path:
    return next(path for path in RECIPES if path.stem == name)


@pytest.mark.parametrize("path", COUNTED, ids=lambda path: path.stem)
def test_a_recipe_fits_its_gpus(path: Path) -> None:
    plan = _recipe(path)
    assert plan.fits and plan.fullest.peak_bytes > GIB


def test_four_gpus_of_24_gib_have_recipes() -> None:
    heads = {path.stem: path.read_text(encoding="utf-8").split("\n\n")[0] for path in COUNTED if gpus(path) == 4}
    assert [name for name, head in heads.items() if "# GiB of a GPU: 24" in head and "RTX 4090" in head]


def test_a_larger_micro_batch_does_not_fit() -> None:
    assert _recipe(_recipe_named("gpt3-1.3b-4gpu"), "--micro-batch-size", "4").fits is False


@pytest.mark.parametrize(
    ("flags", "device", "flag"),
    [
        ("--bf16", "V100S", "--fp16"),
        ("--bf16", "T4", "--fp16"),
        ("--bf16", "A10", ""),
        ("--bf16", "CPU", ""),
        ("--fp16", "V100S", ""),
        ("--device cpu", "H100", "--device cpu"),
        ("--device cpu", "CPU", ""),
    ],
)
def test_flags_that_do_not_suit_the_device_are_noted(flags: str, device: str, flag: str) -> None:
    notes = [note for note in _plan(2, 2, flags, 1, device).notes if "rates" not in note]
    assert [flag in note for note in notes] == [True] * bool(flag)


def test_what_cannot_be_planned_is_said() -> None:
    some = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    with pytest.raises(ConfigError, match="--recompute-method block"):
        plan_run(f"{DENOISED} {some}".split(), DEVICES["H100"], world_size=1)
    with pytest.raises(ConfigError, match="--hidden-size 4000000000"):
        _plan(2, 2, "--hidden-size 4000000000")
    with pytest.raises(ConfigError, match="--search"):
        search_run(f"{MASKED} --model-family bert".split(), DEVICES["H100"], world_size=2)


@pytest.mark.parametrize(
    ("kind", "tokens"), [("BertWordPieceLowerCase", 30522 + 2 + 20), ("BertWordPieceCase", 28996 + 2 + 20)]
)
def test_a_published_vocabulary_is_planned_without_its_files(kind: str, tokens: int) -> None:
    flags = f"{DENOISED} --tokenizer-type {kind}"
    absent = plan_run(flags.replace("--padded-vocab-size 512", "").split(), DEVICES["H100"], world_size=1)
    given = plan_run(f"{flags} --padded-vocab-size {-(-tokens // 128) * 128}".split(), DEVICES["H100"], world_size=1)
    assert absent.ranks == given.ranks
    assert str(tokens) in (set(absent.notes) - set(given.notes)).pop()


def test_a_vocabulary_that_no_file_is_published_with_must_be_given() -> None:
    flags = SMALL.format(2, 2, "--tokenizer-type CharacterTokenizer --vocab-file x").replace("--vocab-size 255", "")
    with pytest.raises(ConfigError, match="--padded-vocab-size"):
        plan_run(flags.split(), DEVICES["H100"], world_size=1)


def test_weights_gradients_and_states_are_counted_to_the_byte_of_a_block() -> None:
    """bf16 weights, fp32 gradients, and 12 bytes of master weights and moments, which ZeRO-1 divides."""
    alone, divided = (_ranks(2, 8, flags, 4)[0].allocated for flags in ("--bf16", "--bf16 --use-distributed-optimizer"))
    parameters = 2 * (12 * 64 * 64 + 13 * 64) + (256 + 128) * 64 + 2 * 64
    blocks, scratch = 512 * 100, 2 * 2**24  # each tensor takes whole blocks
    assert 0 <= alone["weights"] - 2 * parameters <= blocks
    assert 0 <= alone["gradients"] - 4 * parameters - scratch <= blocks
    assert 0 <= alone["optimizer"] - 12 * parameters <= 3 * blocks
    assert 0 <= divided["optimizer"] - 3 * parameters <= 3 * blocks


def test_bert_predicts_hidden_words_alone() -> None:
    """Of 128 words 20 are hidden (--mask-prob 0.15): their logits, and not those of all words, are computed."""
    few, all_ = (
        plan_run(f"{MASKED} --model-family bert {more}".split(), DEVICES["H100"], world_size=2).ranks[0]
        for more in ("", "--tensor-model-parallel-size 2 --sequence-parallel --padded-vocab-size 1024")
    )
    logits = [rank.work["F"] for rank in (few, all_)]
    rows, every = ({op.flops for op in work.ops if op.kind.startswith("product")} for work in logits)
    assert 2 * 2 * 20 * 64 * 512 in rows and 2 * 2 * 128 * 64 * 512 in every and 2 * 2 * 128 * 64 * 512 not in rows


def test_stacks_of_t5_are_added_up_layer_by_layer() -> None:
    """Layers between the ends of a stack add as much each; those of the decoder have weights of two attentions."""

    def ranks_of(encoder: int, decoder: int, more: str = "") -> RankMemory:
        words = f"{DENOISED} --num-layers {encoder} --decoder-num-layers {decoder} {more}".split()
        return plan_run(words, DEVICES["H100"], world_size=1).ranks[0]

    few, long, deep, both = (ranks_of(*sizes) for sizes in ((4, 4), (6, 4), (4, 7), (6, 7)))
    assert both.layers == 13
    assert both.peak_bytes == pytest.approx(long.peak_bytes + deep.peak_bytes - few.peak_bytes, abs=2**16)
    feed_forward, attention, cross = 8 * 64**2, 4 * 64**2, 4 * 64**2
    for rank, own in ((long, 2 * (feed_forward + attention)), (deep, 3 * (feed_forward + attention + cross))):
        assert rank.allocated["optimizer"] - few.allocated["optimizer"] == pytest.approx(8 * own, rel=0.05)
    again = ranks_of(6, 7, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2")
    assert again.peak["activations"] < both.peak["activations"] / 2


@pytest.mark.parametrize("flags", ["--bf16", "--bf16 --use-distributed-optimizer", ""])
def test_offloaded_states_are_not_on_the_device(flags: str) -> None:
    """Weights and gradients stay; of the states the first parameters of a fraction of all elements go."""
    offload = "--optimizer-cpu-offload --optimizer-offload-fraction {}"
    none, half, all_ = (
        _ranks(4, 8, f"{flags} {offload.format(part)}" if part else flags, 2)[0].allocated for part in (0, 0.5, 1.0)
    )
    assert all_["optimizer"] == 0 and {none[name] - all_[name] for name in ("weights", "gradients")} == {0}
    largest = 12 * 256 * 64  # of a parameter, in bytes of states
    assert 0 <= half["optimizer"] - none["optimizer"] / 2 <= largest + 512 * 3
    whole, offloaded = (_plan(4, 8, f"{flags} {more}", 2).time for more in ("", offload.format(1.0)))
    assert offloaded.parts["optimizer"] > whole.parts["optimizer"], "over the bus, and on the host"
    assert _plan(4, 8, f"{flags} {offload.format(1.0)}", 2, "CPU").ranks == _plan(4, 8, flags, 2, "CPU").ranks


def test_frozen_weights_have_neither_gradients_nor_states() -> None:
    whole, lora = (_plan(4, 8, flags, 2) for flags in ("--bf16", "--bf16 --lora-rank 4 --pretrained-checkpoint base"))
    one, other = whole.ranks[0].allocated, lora.ranks[0].allocated
    adapters = (
        4 * 4 * (3 * 64 + 3 * 64 + 2 * 64 + 2 * (64 + 256))
    )  # A and B of q, k, v; of the output; of the MLP's two
    assert 0 <= other["weights"] - one["weights"] - 2 * adapters <= 512 * 4 * 8
    assert 0 <= other["optimizer"] - 12 * adapters <= 3 * 512 * 4 * 8
    assert 0 <= other["gradients"] - 4 * adapters <= 2 * 2**24 + 512, "and scratch"
    assert lora.time.parts["dp"] < whole.time.parts["dp"] and lora.fullest.peak_bytes < whole.fullest.peak_bytes


def test_layers_are_added_up_as_if_each_had_been_run() -> None:
    """A plan looks at two layers of a kind; a third and a fourth add what the second does, in peak and rest."""
    two, three, four = (_ranks(layers)[0] for layers in (2, 3, 4))
    assert abs(four.peak_bytes - 2 * three.peak_bytes + two.peak_bytes) <= 512, "the gradients' one block is rounded"
    kept = three.peak["activations"] - two.peak["activations"]
    # 16 T D numbers of a layer without dropout, and the log-sum-exp of its heads (benchmarks/memory.py)
    assert kept == pytest.approx(4 * 2 * 128 * (16 * 64 + 4), rel=0.05)


def test_logits_are_kept_from_step_to_step_on_a_cpu_alone() -> None:
    card, host = (_plan(2, device=device).ranks[0].allocated.get("logits", 0) for device in ("RTX4090", "CPU"))
    assert card == 0 and host == 2 * 128 * 256 * 4


def test_gradients_of_zero1_are_reduced_without_a_copy() -> None:
    few = "--hidden-size 512 --seq-length 32 --micro-batch-size 1 --use-distributed-optimizer"  # activations
    for plan in (_plan(2, 8, few, 4, on) for on in ("CPU", "H100")):
        assert not plan.fullest.peak["communication"]
        assert plan.fullest.peak_bytes - plan.fullest.allocated_bytes < plan.fullest.allocated["gradients"] / 2


def test_recomputation_and_pipelines_are_counted() -> None:
    again = "--recompute-granularity full --recompute-method {} --recompute-num-layers {}"
    whole = _ranks(6)[0].peak_bytes
    ways = (("block", 2), ("block", 4), ("uniform", 1))
    some, most, uniform = (_ranks(6, 2, again.format(*way))[0].peak_bytes for way in ways)
    assert whole > some > most > uniform
    first, last = _ranks(4, 16, "--pipeline-model-parallel-size 2", 2)
    assert (first.stages, last.stages) == ((0,), (1,))
    assert first.peak["activations"] > 1.9 * _ranks(2, 16)[0].peak["activations"] - first.peak["communication"]
    assert "under way" in first.moment and "logits" not in first.peak and last.peak["logits"] > 0


@pytest.mark.parametrize("exchange", ["allgather", "alltoall"])
def test_experts_are_counted_by_the_tokens_that_they_get(
    exchange: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row keeps at least its input, the result of the first projection, and what the second one multiplies."""
    flags = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type"
    peaks = []
    for rows in (1, 2):
        monkeypatch.setattr(experts, "ROWS", rows)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(rows)))  # what is remembered there is of these rows
        peaks.append(_ranks(2, 4, f"{flags} {exchange} --position-embedding-type rope", 2)[0].peak["activations"])
    rows, numbers = 2 * 128 * 2, 64 + 2 * 256  # a balanced router's, in each of two layers
    assert peaks[1] - peaks[0] >= 2 * 4 * rows * numbers


def test_a_layout_of_stages_is_planned() -> None:
    """Stages without layers need no more than what they pass on; larger groups keep more micro-batches."""
    even = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    given, apart = (
        f"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout {text}"
        for text in ("Et|t|t|tL", "Ett||tt|L")
    )
    first, same, other = (_ranks(4, 16, flags, 2) for flags in (even, given, apart))
    assert first == same
    assert other[0].allocated["weights"] > first[0].allocated["weights"] > other[1].allocated["weights"]
    grouped = _ranks(4, 16, f"{even} --microbatch-group-size-per-virtual-pipeline-stage 8", 2)
    assert grouped[0].peak["activations"] > 1.5 * first[0].peak["activations"]


@pytest.mark.parametrize("exchange", ["p2p", "a2a"])
def test_context_parallelism_halves_what_a_rank_keeps(exchange: str) -> None:
    flags = f"--bf16 --context-parallel-size 2 --cp-comm-type {exchange}"
    (many, few), (many_2, few_2) = (
        [_ranks(layers, 2, words, size)[0].peak["activations"] for layers in (6, 4)]
        for words, size in (("--bf16", 1), (flags, 2))
    )
    assert many_2 - few_2 == pytest.approx((many - few) / 2, rel=0.15)


def test_a_plan_equals_what_a_process_counts() -> None:
    """One configuration; benchmarks/plan_memory.py has many, with several ranks (tests/distributed/test_plan.py)."""
    words = SMALL.format(3, 4, "--device cpu --recompute-granularity selective").split()
    planned = plan_run(words, DEVICES["CPU"], world_size=1).fullest
    allocated, peak = live_bytes(words)
    assert planned.allocated_bytes == pytest.approx(allocated, rel=0.02)
    assert planned.peak_bytes == pytest.approx(peak, rel=0.02)


def test_fsdp2_keeps_its_part_of_gradients_and_gathers_and_reduces_in_each_pass() -> None:
    parameters = 4 * (12 * 64 * 64 + 13 * 64) + (256 + 128) * 64 + 2 * 64
    flags = "--use-torch-fsdp2"
    one, several = (_plan(4, size, flags, 2, "CPU") for size in (4, 24))
    assert one.fullest.allocated == several.fullest.allocated
    assert one.fullest.allocated["weights"] == 2 * parameters, "half of four bytes"
    assert several.fullest.peak["gradients"] == 2 * parameters > one.fullest.peak["gradients"]
    zero2 = _plan(4, 24, f"{flags} --torch-fsdp2-no-reshard-after-forward", 2, "CPU")
    assert zero2.fullest.peak["weights"] == 6 * parameters, "its own half and the whole"
    # In each of six micro-batches a reduction, by gloo twice as long as a gather; a gather in the step, or two in each:
    once = zero2.time.parts["dp"]
    assert 22 / 13 * once < several.time.parts["dp"] < 24 / 13 * once


def test_megatron_fsdp_is_planned_as_fsdp2() -> None:
    strategy = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    whole, other = (_plan(2, 4, flags, 2) for flags in ("--use-torch-fsdp2", strategy))
    assert whole.ranks == other.ranks and whole.time == other.time


def test_segments_are_replayed() -> None:
    tensors = [Tensors(5, "weights", "w"), Tensors(3, "activations", "a"), Tensors(4, "logits", "l")]
    events = [0, 1, 2, ~2, ~1]
    marks = [Mark(0, "", ""), Mark(1, "F", "0"), Mark(4, "B", "0")]
    (_, build), (mark, forward), (_, backward) = replay(events, tensors, marks)
    assert build.change == {"weights": 5} and mark.operation == "F"
    assert forward.peak == {"activations": 3, "logits": 4} and sum(forward.change.values()) == 3
    assert [one.what for one in forward.alive] == ["l", "a"] and [one.what for one in forward.kept] == ["a"]
    assert backward.change == {"activations": -3} and sum(backward.peak.values()) == 0
    assert [one.what for one in backward.alive] == ["a"], "the piece's own, from its forward pass"


def test_a_structure_is_measured_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _plan(2, 4, "--bf16", 2)
    monkeypatch.setattr("megalith.plan.measure.measure", lambda *_: pytest.fail("measured again"))
    assert _plan(2, 4, "--bf16", 2).ranks == first.ranks
    deeper = _plan(5, 8, "--bf16 --use-distributed-optimizer", 4)  # other layers, replicas and ZeRO: integers
    assert deeper.fullest.peak_bytes > first.fullest.peak_bytes
    (file,) = cache.iterdir()
    file.write_text("{")  # cut off
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    assert _plan(2, 4, "--bf16", 2).ranks == first.ranks


def test_the_command_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    words = SMALL.format(2, 8, "--bf16").split()
    assert main(["plan", *words, "--gpus", "4xH100", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["fits"] is True and found["memory"]["peak_bytes"] > found["memory"]["allocated_bytes"] > 0
    assert found["memory"]["ranks"][0]["peak_bytes"] == found["memory"]["peak_bytes"]
    assert {name: found[name] for name in found["reasons"]} == {"layouts": None}
    assert found["step_seconds"] == pytest.approx(sum(found["parts"].values())) and 0 < found["mfu"] < 1


def test_the_command_prints_what_would_need_less(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL.format(4, 8, "--bf16").split(), "--gpus", "4xRTX4090"]) == 0
    out = capsys.readouterr().out
    flags = ("--use-distributed-optimizer", "--micro-batch-size 1", "--recompute-granularity full")
    assert all(flag in out for flag in flags) and "--sequence-parallel" not in out and len(out.splitlines()) < 40


def test_the_text_is_chinese_where_it_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["plan", *SMALL.format(4, 8, "--bf16").split(), "--gpus", "4xRTX4090"]
    out = []
    for language, more in (("zh_CN.UTF-8", []), ("C.UTF-8", ["--lang", "zh"]), ("zh_CN.UTF-8", ["--lang", "en"])):
        monkeypatch.setenv("LC_ALL", language)
        assert main([*words, *more]) == 0
        out.append(capsys.readouterr().out)
    assert out[0] == out[1] and out[0].startswith("\u653e\u5f97\u4e0b") and "{" not in out[0]
    assert out[2].isascii() and len(out[2].splitlines()) == len(out[0].splitlines())
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert main([*words, "--json"]) == 0
    assert capsys.readouterr().out.isascii()


def test_each_chinese_text_has_the_values_of_the_english_one() -> None:
    for english, chinese in CHINESE.items():
        assert sorted(re.findall(r"{\w+", english)) == sorted(re.findall(r"{\w+", chinese)), english


def test_a_launch_script_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun --nproc-per-node 4 pretrain_gpt.py {SMALL.format(2, 8, '--bf16')}\n")
    assert main(["plan", str(script), "--gpus", "A100", "--json"]) == 0
    four = json.loads(capsys.readouterr().out)["memory"]
    assert main(["plan", str(script), "--use-distributed-optimizer", "--gpus", "A100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["allocated_bytes"] < four["allocated_bytes"]


def test_a_recipe_is_planned_as_by_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(_recipe_named("gpt3-1.3b-4gpu"))
    assert main(["plan", recipe, "--gpus", "4xRTX4090", "--json"]) == 0
    named = capsys.readouterr().out
    assert json.loads(named)["layouts"] is None, "the recipe has a layout, which is planned"
    assert main(["plan", "--config", recipe, "--gpus", "4xRTX4090", "--json"]) == 0
    assert named == capsys.readouterr().out


def test_an_axis_without_a_group_is_for_plans_alone() -> None:
    sent = torch.ones(4)
    assert start_all_reduce(sent, Axis("tp", ranks=(0, 1), planned=lambda *_: None)).wait() is sent
    with pytest.raises(RuntimeError, match="all_reduce.*tp"):
        start_all_reduce(sent, Axis("tp", ranks=(0, 1)))


def test_a_bad_configuration_shows_the_violations_of_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    words = SMALL.format(2, 8, "--tensor-model-parallel-size 3 --num-query-groups 5").split()
    assert main(["plan", *words, "--gpus", "3xH100"]) == 2
    planned = capsys.readouterr().err
    assert main(["train", *words, "--nproc", "3"]) == 2
    assert planned.replace("megalith plan", "megalith train") == capsys.readouterr().err


@pytest.mark.parametrize("text", ["0xH100", "8xH101", "H100x8", "8 x", ""])
def test_devices_that_are_not_known(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        read_devices(text)


def test_devices() -> None:
    assert read_devices("16xh100") == (16, DEVICES["H100"]) and read_devices("CPU") == (1, DEVICES["CPU"])
    assert all(device.room < device.gib * GIB for device in DEVICES.values() if device.compute)
