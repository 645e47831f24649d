"""Where bf16 is multiplied in fp32 is decided by the processor's features."""

from __future__ import annotations

import pytest
import torch
from tests.devices import CPU, CPU_WITH_BF16

from megalith.device import features_of, has_fast_bf16
from megalith.nn.precision import product_dtype

HASWELL = "processor\t: 0\nflags\t\t: fpu sse4_2 avx f16c rdrand fma bmi1 avx2 bmi2\nbugs\t\t: spectre_v1\n"
CASCADE_LAKE = "flags\t\t: fma avx2 avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni\n"
SAPPHIRE_RAPIDS = "flags\t\t: fma avx2 avx512f avx512bw avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8\n"
ZEN_4 = "flags\t\t: fma avx2 avx512f avx512bw avx512_bf16 avx512_vnni\n"
ARROW_LAKE = "flags\t\t: fma avx2 avx_vnni avx_vnni_int8 avx_ne_convert\n"
GRAVITON_2 = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd fphp asimdhp asimddp\n"
GRAVITON_3 = "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd sve i8mm bf16 dgh rng\n"


@pytest.mark.parametrize(
    ("cpu_info", "environ", "fast"),
    [
        (HASWELL, {}, False),
        (CASCADE_LAKE, {}, False),
        (SAPPHIRE_RAPIDS, {}, True),
        (ZEN_4, {}, True),
        (ARROW_LAKE, {}, True),
        (GRAVITON_2, {}, False),
        (GRAVITON_3, {}, True),
        ("", {}, False),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, False),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "avx512_core_vnni"}, False),
        (SAPPHIRE_RAPIDS, {"DNNL_MAX_CPU_ISA": "AVX2"}, False),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI_2"}, False),
        (ARROW_LAKE, {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI_2"}, True),
        (SAPPHIRE_RAPIDS, {"ONEDNN_MAX_CPU_ISA": ""}, True),
    ],
)
def test_features_and_the_environment_decide(
    monkeypatch: pytest.MonkeyPatch, cpu_info: str, environ: dict[str, str], fast: bool
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert has_fast_bf16(features_of(cpu_info), environ) is fast


def test_without_onednn_bf16_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not has_fast_bf16(features_of(SAPPHIRE_RAPIDS), {})


def test_only_bf16_depends_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, bf16 in ((CPU, torch.float32), (CPU_WITH_BF16, torch.bfloat16)):
        monkeypatch.setattr("megalith.device.HOST", host)
        computed = {torch.float64: torch.float64, torch.float32: torch.float32, torch.float16: torch.float32}
        for dtype, wanted in {**computed, torch.bfloat16: bf16}.items():
            assert product_dtype(torch.empty(0, dtype=dtype)) == wanted
