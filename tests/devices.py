"""What devices can do that tests compute on or decide for; none of them need be here."""

from __future__ import annotations

import torch

from megalith.device import Capability, nvidia

CPU = Capability("cpu", "cpu", half=())
CPU_WITH_BF16 = Capability("cpu", "cpu", half=(torch.bfloat16,))
P40 = nvidia("Tesla P40", (6, 1), 24 * 2**30)
V100 = nvidia("Tesla V100S-PCIE-32GB", (7, 0), 32 * 2**30)
T4 = nvidia("Tesla T4", (7, 5), 16 * 2**30)
RTX_4090 = nvidia("NVIDIA GeForce RTX 4090", (8, 9), 24 * 2**30)
H100 = nvidia("NVIDIA H100 80GB HBM3", (9, 0), 80 * 2**30)
MI300 = Capability("cuda", "AMD Instinct MI300X", (torch.bfloat16, torch.float16), ("flash", "efficient"))
ASCEND = Capability("npu", "Ascend910B", (torch.bfloat16, torch.float16))
