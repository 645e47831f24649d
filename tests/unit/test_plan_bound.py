"""What `megalith train` refuses for memory before it starts, and what it warns of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalith.cli.main import main
from megalith.config import RunConfig, load
from megalith.config.rules.rule import Draft
from megalith.plan import bound
from megalith.plan.bound import DeviceMemory, check_memory, checkpoint_bytes, disk_warning, find_room, least_bytes
from megalith.plan.devices import DEVICES, GIB
from megalith.plan.plan import device_here, plan_run, warning_of

DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 50256 --train-iters 1 --lr 1e-4"
GPT_175B = (
    f"{DATA} --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --fp16 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1536 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16"
)
GPT_3B = (
    f"{DATA} --num-layers 32 --hidden-size 2560 --num-attention-heads 32 --seq-length 1024 --bf16 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8"
)
SMALL = (
    f"{DATA} --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 16"
)


def _run(words: str, world: int) -> RunConfig:
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return load(words.split(), environ, files=False)


def _refusal(words: str, world: int, gib: float, ranks: int = 1) -> str:
    room = DeviceMemory(int(gib * GIB), ranks, "the device")
    return check_memory(Draft(_run(words, world), frozenset()), lambda run: room)


def test_the_175b_script_on_two_processes_is_refused_for_layout_and_memory_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bound, "find_room", lambda run: DeviceMemory(32 * GIB, 1, "Tesla V100S-PCIE-32GB"))
    assert main(["train", "--nproc", "2", *GPT_175B.split()]) == 2
    said = capsys.readouterr().err
    assert "--tensor-model-parallel-size 8" in said and "--pipeline-model-parallel-size 2" in said
    total = 16 * (96 * 12 * 12288**2 + 50304 * 12288)  # fp16 gradients, and 12 bytes of states
    assert f"{total / 2 / GIB:.1f}" in said and "V100S" in said and f"{-(-total // (32 * GIB))} such devices" in said


@pytest.mark.parametrize(
    ("flags", "world"),
    [
        ("", 2),
        ("--fp16 --tensor-model-parallel-size 2 --use-distributed-optimizer", 4),
        ("--bf16 --pipeline-model-parallel-size 2 --optimizer sgd --untie-embeddings-and-output-weights", 4),
        ("--bf16 --num-experts 4 --expert-model-parallel-size 2 --swiglu", 4),
        ("--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --use-distributed-optimizer", 2),
    ],
)
def test_the_bound_is_below_the_plan_and_near_it(
    flags: str, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = f"{SMALL} {flags} --hidden-size 512"
    planned = plan_run(words.split(), DEVICES["CPU"], world_size=world).ranks
    held = max(sum(rank.allocated[name] for name in ("weights", "gradients", "optimizer")) for rank in planned)
    least = least_bytes(_run(words, world), 50304)
    scratch = 2**25
    assert least <= held < 1.05 * least + scratch


def test_full_sharding_divides_everything() -> None:
    whole, sharded = (least_bytes(_run(f"{GPT_3B} {flags}", 4)) for flags in ("", "--use-torch-fsdp2"))
    assert sharded == pytest.approx(whole / 4, rel=1e-6)


def test_what_would_fit_is_named() -> None:
    said = _refusal(GPT_3B, 4, 32)
    assert "--use-distributed-optimizer" in said and "--num-layers" not in said
    alone = _refusal(GPT_3B, 1, 32)
    assert "2 such devices" in alone and "--num-layers" in alone and "--use-distributed-optimizer" not in alone
    layers = int(alone.partition("--num-layers ")[2].split()[0])
    fitting = GPT_3B.replace("--num-layers 32", f"--num-layers {layers}")
    assert not _refusal(fitting, 1, 32) and _refusal(fitting.replace(f" {layers} ", f" {layers + 1} "), 1, 32)


def test_only_what_cannot_be_is_refused() -> None:
    assert not _refusal(GPT_3B, 4, 60) and not _refusal(SMALL, 2, 0.5)
    assert not _refusal(f"{GPT_3B} --plan off", 4, 32)
    assert not _refusal(f"{GPT_3B} --optimizer-cpu-offload", 4, 32)
    assert _refusal(GPT_3B, 4, 100, ranks=4), "four processes share the memory of a machine"
    assert not check_memory(Draft(_run(GPT_3B, 4), frozenset()), lambda run: None)


def test_memory_is_that_of_the_devices_that_the_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def room(flags: str, gpu: Any) -> DeviceMemory | None:
        monkeypatch.setattr(bound, "_largest_gpu", lambda: gpu)
        return find_room(_run(f"{SMALL} {flags}", 2))

    assert room("", (GIB, "GPU")) == DeviceMemory(GIB, 1, "GPU")
    assert room("--device cuda", None) is None
    host = room("--device cpu", (GIB, "GPU"))
    assert host is None or (host.ranks == 2 and host.size > GIB)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert room("", (GIB, "GPU")) is None


def test_the_driver_is_asked_for_the_largest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        known = True

        def nvmlInit_v2(self) -> int:
            return 0

        def nvmlDeviceGetCount_v2(self, count: Any) -> int:
            count._obj.value = 2
            return 0

        def nvmlDeviceGetHandleByIndex_v2(self, number: int, gpu: Any) -> int:
            gpu._obj.value = number + 1
            return 0

        def nvmlDeviceGetMemoryInfo(self, gpu: Any, memory: Any) -> int:
            memory._obj.total = gpu.value * GIB
            return 0 if self.known else 3

        def nvmlDeviceGetName(self, gpu: Any, name: Any, size: int) -> int:
            name.value = f"GPU {gpu.value}".encode()
            return 0

    monkeypatch.setattr(bound.ctypes, "CDLL", lambda name: Driver())
    assert bound._largest_gpu() == (2 * GIB, "GPU 2")
    monkeypatch.setattr(Driver, "known", False)
    assert bound._largest_gpu() is None, "such as a GPU that shares the memory of the host"


def test_a_training_warns_by_what_was_planned_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run, card = _run(f"{GPT_3B} --num-layers 16 --micro-batch-size 8", 1), DEVICES["RTX4090"]
    described = card.name, card.compute
    assert not warning_of(run, 50304, device_here(*described, 24 * GIB)), "nothing was planned"
    words = f"{GPT_3B} --num-layers 16 --micro-batch-size 8 --padded-vocab-size 50304"
    assert plan_run(words.split(), card, world_size=1).fits is False
    assert "GeForce" in warning_of(run, 50304, device_here(*described, 24 * GIB))
    assert not warning_of(run, 50304, device_here(*described, 96 * GIB))


@pytest.mark.parametrize(
    ("more", "gib", "named"),
    [
        ("--save-interval 50", 200, ()),
        ("--save-interval 50", 39, ("2 checkpoints", "39 GiB")),
        ("--save-interval 1", 200, ("100 checkpoints", "--keep-last")),
        ("--save-interval 1 --keep-last 2", 200, ()),
        ("--save-interval 1 --keep-last 2", 100, ("3 checkpoints",)),
        ("--save-interval 1 --save-retain-interval 100", 100, ()),
        ("--save-interval 50 --no-save-optim", 39, ()),
        ("--save-interval 1 --lora-rank 8 --load c", 0, ()),
    ],
)
def test_a_disk_that_will_not_do_is_named_at_the_start(
    tmp_path: Path, more: str, gib: int, named: tuple[str, ...]
) -> None:
    run = _run(f"{GPT_3B} --train-iters 100 --save {tmp_path / 'not/yet'} {more}", 1)
    note = disk_warning(run, 50304, {tmp_path: gib * GIB}.__getitem__, resumed=False)
    assert bool(note) == bool(named) and all(word in note for word in (*named, "--save") * bool(named))
    if more == "--save-interval 1":
        assert not disk_warning(run, 50304, {tmp_path: gib * GIB}.__getitem__, resumed=True)


def test_a_checkpoint_has_all_experts_and_the_states_of_all_ranks() -> None:
    dense, mixture, split = (
        checkpoint_bytes(_run(f"{GPT_3B} {more}", world), 50304)
        for more, world in (("", 1), ("--num-experts 8", 1), ("--tensor-model-parallel-size 4", 4))
    )
    assert dense == split and dense is not None and mixture is not None and mixture > 5 * dense


def test_frozen_weights_have_neither_gradients_nor_states() -> None:
    whole, lora = (least_bytes(_run(f"{GPT_3B} {more}", 1)) for more in ("", "--lora-rank 8 --load c"))
    assert whole == 18 * lora // 2
