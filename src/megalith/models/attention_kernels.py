"""Which attention kernel a configuration and a device get."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from megalith.config import ModelConfig
from megalith.kernels.blocked_attention import blocked_causal_attention
from megalith.nn.attention import AttentionKernel, attend_fused, attend_unfused
from megalith.nn.precision import product_dtype


def attend_by_device(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """The fastest exact kernel: blocked products on a CPU where a whole sequence is read, else torch SDPA."""
    whole = q.shape[0] == k.shape[0] > 1
    if q.device.type == "cpu" and whole and dropout == 0.0 and product_dtype(q) == q.dtype:
        return blocked_causal_attention(q, k, v)
    return attend_fused(q, k, v, dropout)


def attention_kernel(config: ModelConfig) -> AttentionKernel:
    """The kernel that --attention-backend and --transformer-impl mean."""
    if config.fused_attention:
        return attend_by_device
    return partial(attend_unfused, softmax_in_fp32=config.attention_softmax_in_fp32)
