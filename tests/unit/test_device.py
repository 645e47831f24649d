"""What a device can do decides by itself what is done on it, and no other module asks for the kind of a device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.devices import ASCEND, CPU, CPU_WITH_BF16, H100, MI300, P40, RTX_4090, T4, V100

from megalith.assemble.trained import _dtype_for
from megalith.device import DESCRIBED, Capability, capability_of, nvidia
from megalith.kernels.partial_attention import has_flash, has_varlen
from megalith.nn.moe.grouped import _one_kernel
from megalith.nn.precision import product_dtype_on

SOURCE = Path(__file__).resolve().parents[2] / "src" / "megalith"
HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("able", "half", "fastest", "attention", "grouped", "compiles"),
    [
        (CPU, (), torch.float32, (), False, True),
        (CPU_WITH_BF16, (torch.bfloat16,), torch.bfloat16, (), False, True),
        (P40, (), torch.float32, ("efficient",), False, False),
        (V100, (torch.float16,), torch.float16, ("efficient",), False, True),
        (T4, (torch.float16,), torch.float16, ("efficient",), False, True),
        (RTX_4090, HALF, torch.bfloat16, ("flash", "cudnn", "efficient"), True, True),
        (H100, HALF, torch.bfloat16, ("flash", "cudnn", "efficient"), True, True),
        (MI300, HALF, torch.bfloat16, ("flash", "efficient"), True, True),
        (ASCEND, HALF, torch.bfloat16, (), False, True),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_decisions(
    able: Capability,
    half: tuple[torch.dtype, ...],
    fastest: torch.dtype,
    attention: tuple[str, ...],
    grouped: bool,
    compiles: bool,
) -> None:
    assert (able.half, able.fastest, able.attention) == (half, fastest, attention)
    assert (able.has_grouped_products, able.compiles) == (grouped, compiles)


@pytest.mark.parametrize(
    ("able", "fp16", "bf16"), [(V100, 130.0, None), (T4, 65.0, None), (RTX_4090, 165.2, 165.2), (H100, 989.4, 989.4)]
)
def test_the_peak_is_that_of_the_datasheet(able: Capability, fp16: float, bf16: float | None) -> None:
    assert able.datasheet is not None and CPU.datasheet is None and MI300.datasheet is None
    assert (able.datasheet.teraflops["fp16"], able.datasheet.teraflops.get("bf16")) == (fp16, bf16)


def test_each_gpu_of_the_datasheets_has_a_peak_in_what_it_trains_in() -> None:
    names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    for able in (V100, T4, RTX_4090, H100):
        assert able.datasheet is not None and set(able.datasheet.teraflops) >= {names[dtype] for dtype in able.half}


def test_a_device_of_this_machine_is_described_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.cuda describes it, with ROCm too, and without flash attention in a build that has none."""

    class Properties:
        name, major, minor, total_memory = H100.name, 9, 0, H100.memory

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    found = []
    for number, (flash, hip) in enumerate([(True, None), (False, None), (True, "6.4")]):
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda flash=flash: flash)
        monkeypatch.setattr(torch.version, "hip", hip)
        found.append(capability_of(torch.device("cuda", 90 + number)))
    assert found[0] == H100 and found[0].title == f"{H100.name} (sm_90)"
    assert found[1].attention == ("cudnn", "efficient")
    assert found[2].compute is None and found[2].title == H100.name and found[2].attention == MI300.attention
    assert capability_of(torch.device("cpu")).kind == "cpu"


def test_products_are_widened_on_cpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for able in (V100, H100, ASCEND):
        monkeypatch.setitem(DESCRIBED, torch.device("cuda", 0), able)
        for dtype in (*HALF, torch.float32, torch.float64):
            assert product_dtype_on(torch.device("cuda", 0), dtype) == dtype


@pytest.mark.parametrize(("able", "flash"), [(V100, False), (T4, False), (RTX_4090, True), (H100, True), (MI300, True)])
def test_kernels_of_attention_and_experts(able: Capability, flash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DESCRIBED, torch.device("cuda", 0), able)
    with torch._subclasses.FakeTensorMode():

        def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda:0")

        found = [has_flash(of(dtype, 1, 2, 8, 64)) for dtype in (*HALF, torch.float32)]
        assert found == [flash, flash, False]
        assert not any(has_flash(of(torch.float16, 1, 2, 8, size)) for size in (60, 320))
        assert has_varlen(of(torch.float16, 1, 2, 8, 64)) == flash
        factors = [(of(dtype, 8, 64), [of(dtype, 32, 64)]) for dtype in (*HALF, torch.float32)]
        assert [_one_kernel(*pair) for pair in factors] == [flash, False, False]


@pytest.mark.parametrize(("able", "fast"), [(V100, False), (T4, False), (RTX_4090, True), (H100, True), (ASCEND, True)])
def test_weights_in_bf16_are_not_served_in_slow_bf16(
    able: Capability, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DESCRIBED, torch.device("cuda", 0), able)
    dtype, notes = _dtype_for(torch.device("cuda", 0), torch.bfloat16)
    assert dtype == (torch.bfloat16 if fast else torch.float32)
    assert len(notes) == (0 if fast else 1) and all("--dtype float16" in note for note in notes)
    for saved in (torch.float16, torch.float32):
        assert _dtype_for(torch.device("cuda", 0), saved) == (saved, ())
    assert _dtype_for(torch.device("cpu"), torch.bfloat16) == (torch.bfloat16, ())


def test_the_capability_of_a_gpu_follows_from_its_architecture_alone() -> None:
    assert nvidia("unheard of", (7, 0)).half == V100.half and nvidia("unheard of", (12, 0)).half == H100.half


ALLOWED = {
    "assemble/nvidia.py": "finds out why torch cannot use an NVIDIA GPU",
    "assemble/model.py": "`choose_device`: the one of --device",
    "config/values.py": "the values of --device",
    "device.py": "the room",
    "kernels/torch_private.py": "torch.cuda.memory's history, which has no public name",
    "parallel/fsdp.py": "passes the type to a DeviceMesh",
    "models/initialise.py": "passes the type to fork_rng",
    "plan/rates.py": "measures the first NVIDIA GPU, as --device cuda",
    "prove/megatron_core.py": "lets the real Megatron run without CUDA",
}
"""Modules that name a kind of device, or read that of one, and what for."""


def _names_of_kinds(tree: ast.AST) -> Iterator[str]:
    """Yield what asks for a kind of device: "cuda", "cuda:0", `torch.cuda`, `x.is_cuda`, `device.type`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] == "cuda":
            yield repr(node.value)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            kind = node.attr == "type" and owner.split(".")[-1].lower().endswith("device")
            if kind or node.attr == "is_cuda" or (node.attr == "cuda" and owner in ("torch", "torch.backends")):
                yield ast.unparse(node)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('torch.device("cuda", 0)', True),
        ('f(device="cuda:1")', True),
        ("torch.cuda.synchronize()", True),
        ("torch.backends.cuda.enable_flash_sdp(True)", True),
        ("x.is_cuda", True),
        ("x.device.type == 'cpu'", True),
        ("self._device.type", True),
        ("torch.accelerator.synchronize()", False),
        ("torch.version.cuda", False),
        ("is_cuda(device)", False),
        ("option.type", False),
        ('state["cuda_rng_state"]', False),
    ],
)
def test_the_rule_itself(line: str, found: bool) -> None:
    assert any(_names_of_kinds(ast.parse(line))) is found


def test_no_other_module_asks_for_the_kind_of_a_device() -> None:
    found = {
        file.relative_to(SOURCE).as_posix(): names
        for file in sorted(SOURCE.rglob("*.py"))
        if (names := sorted(set(_names_of_kinds(ast.parse(file.read_text(encoding="utf-8"))))))
    }
    assert set(found) == set(ALLOWED), found
