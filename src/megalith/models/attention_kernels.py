"""Which attention kernel a configuration and a device get."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.kernels.blocked_attention import blocked_causal_attention
from megalith.nn.attention import AttentionKernel, attend_fused, attend_unfused
from megalith.nn.precision import product_dtype


def attend_by_device(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """The fastest exact kernel: blocked products on a CPU in bf16 or with dropout, else torch SDPA.

    A compiled graph cannot draw from a generator of its own, so dropout is SDPA's there.
    """
    dtype = product_dtype(q)
    whole = q.shape[0] == k.shape[0] > 1
    faster = not torch.compiler.is_compiling() if dropout > 0.0 else dtype == torch.bfloat16
    if q.device.type == "cpu" and whole and faster:
        return blocked_causal_attention(q.to(dtype), k.to(dtype), v.to(dtype), dropout).to(q.dtype)
    return attend_fused(q, k, v, dropout)


def attention_kernel(config: ModelConfig) -> AttentionKernel:
    """The kernel that --attention-backend and --transformer-impl mean."""
    if config.fused_attention:
        return attend_by_device
    return partial(attend_unfused, softmax_in_fp32=config.attention_softmax_in_fp32)
