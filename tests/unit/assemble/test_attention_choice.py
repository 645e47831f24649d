"""`--attention-backend` on GPUs: the kernel that torch SDPA may take, and a refusal where a GPU has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.devices import ASCEND, H100, MI300, RTX_4090, T4, V100

from megalith.assemble.model import choose_attention
from megalith.cli import train_start
from megalith.config import load
from megalith.device import DESCRIBED, Capability
from megalith.errors import ConfigError
from megalith.models import attention_kernels
from megalith.models.attention_kernels import describe_attention

BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 30"
)
GPU = torch.device("cuda", 0)


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Which kernels of SDPA were switched on or off."""
    found: dict[str, bool] = {}
    for kernel in ("flash", "cudnn", "mem_efficient", "math"):
        monkeypatch.setattr(
            torch.backends.cuda, f"enable_{kernel}_sdp", lambda on, kernel=kernel: found.update({kernel: on})
        )
    return found


@pytest.mark.parametrize("able", [H100, RTX_4090], ids=lambda able: able.name)
@pytest.mark.parametrize(
    ("flag", "flash", "cudnn"), [("auto", True, True), ("flash", True, False), ("fused", False, True)]
)
def test_the_backend_chooses_the_kernel(
    able: Capability, flag: str, flash: bool, cudnn: bool, enabled: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DESCRIBED, torch.device("cuda", 0), able)
    choose_attention(load(f"{BASE} --attention-backend {flag}".split(), {}, files=False), GPU)
    assert enabled == {"flash": flash, "cudnn": cudnn}, "the memory-efficient kernel stays for masks"


@pytest.mark.parametrize(
    ("able", "flag"),
    [(V100, "flash"), (V100, "fused"), (T4, "flash"), (T4, "fused"), (MI300, "fused"), (ASCEND, "flash")],
    ids=str,
)
def test_a_kernel_that_the_device_lacks_is_refused(
    able: Capability, flag: str, enabled: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DESCRIBED, torch.device("cuda", 0), able)
    with pytest.raises(ConfigError) as caught:
        choose_attention(load(f"{BASE} --attention-backend {flag}".split(), {}, files=False), GPU)
    assert all(part in str(caught.value) for part in (f"--attention-backend {flag}", able.title, "sm_80", "use auto"))
    assert enabled == {}


@pytest.mark.parametrize("flag", ["auto", "unfused", "local"])
def test_an_old_gpu_needs_no_flag(flag: str, enabled: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DESCRIBED, torch.device("cuda", 0), V100)
    choose_attention(load(f"{BASE} --attention-backend {flag}".split(), {}, files=False), GPU)
    assert enabled == {"flash": True, "cudnn": True}, "torch itself takes neither there"


@pytest.mark.parametrize("flag", ["auto", "flash", "fused", "unfused"])
def test_a_cpu_takes_every_backend_as_before(flag: str, enabled: dict[str, bool]) -> None:
    choose_attention(load(f"{BASE} --attention-backend {flag}".split(), {}, files=False), torch.device("cpu"))
    assert enabled == {}


def test_torch_is_asked_which_kernel_it_takes() -> None:
    """On this CPU, whose SDPA has a flash kernel, also for masks, and none with dropout."""
    cpu, model = torch.device("cpu"), load(f"{BASE} --attention-dropout 0".split(), {}, files=False).model
    assert describe_attention(model, torch.float32, cpu) == "FLASH_ATTENTION"
    model = load(BASE.split(), {}, files=False).model
    assert describe_attention(model, torch.float32, cpu) == "MATH"
    model = load(f"{BASE} --attention-backend unfused".split(), {}, files=False).model
    assert describe_attention(model, torch.float32, cpu) == "unfused"


@pytest.mark.parametrize("flags", ["--window-size 5,0", "--softmax-type learnable"])
@pytest.mark.parametrize("in_one_call", [True, False])
def test_the_kernel_of_windows_and_sinks_is_said(
    flags: str, in_one_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(f"{BASE} --attention-dropout 0 {flags}".split(), {}, files=False).model
    wanted = {"window": "window" in flags, "sink": "softmax" in flags}

    def has_varlen(q: torch.Tensor, **asked: bool) -> bool:
        assert asked == wanted
        return in_one_call

    monkeypatch.setattr(attention_kernels, "has_varlen", has_varlen)
    plain, _, special = describe_attention(model, torch.float32, torch.device("cpu")).partition(", ")
    assert plain == "FLASH_ATTENTION"  # of the CPU here
    assert ("blocks of queries" in special) != in_one_call


def _start(monkeypatch: pytest.MonkeyPatch, able: Capability, flags: str, *, peers: bool = True) -> list[str]:
    """Return what the start of a run prints on a device."""
    monkeypatch.setitem(DESCRIBED, torch.device("cuda", 0), able)
    monkeypatch.setattr(train_start, "describe_attention", lambda *_: "KERNEL")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: peers)
    lines: list[str] = []
    console = cast(Any, SimpleNamespace(print=lines.append, log=lambda line: None, warn=lines.append))
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    train_start._print_configuration(load(f"{BASE} {flags}".split(), environ, files=False), console, GPU)
    return lines


def test_the_kernel_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _start(monkeypatch, H100, "--bf16")
    assert sum("KERNEL" in line for line in lines) == 1
    assert any(H100.name in line for line in lines) and not any("WARNING" in line for line in lines)


@pytest.mark.parametrize("peers", [True, False])
def test_cards_without_peer_access_are_said_once(peers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _start(monkeypatch, RTX_4090, "--bf16", peers=peers)
    assert sum("NCCL" in line for line in lines) == (0 if peers else 1)


@pytest.mark.parametrize(("flag", "warns"), [("--bf16", True), ("--fp16", False), ("", False)])
def test_slow_bf16_is_warned_of(flag: str, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for able in (V100, T4):
        warnings = [line for line in _start(monkeypatch, able, flag) if "WARNING" in line]
        assert bool(warnings) == warns and all("--fp16" in line for line in warnings)
