"""Which attention kernel a configuration and a device get."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.kernels.blocked_attention import blocked_causal_attention
from megalith.kernels.varlen_attention import attend_varlen, has_varlen
from megalith.nn.attend import PLAIN, AttentionKernel, AttentionRule, attend_fused, attend_unfused, by_document
from megalith.nn.precision import product_dtype


def attend_by_device(q: Tensor, k: Tensor, v: Tensor, dropout: float, rule: AttentionRule = PLAIN) -> Tensor:
    """The fastest exact kernel: blocked products on a CPU in bf16, with dropout or with a window, else torch SDPA.

    The blocks are causal; what sees later keys or has a mask is SDPA's.

    Documents are one call of the flash kernel on a GPU, and elsewhere one call each.

    A compiled graph cannot draw from a generator of its own, so dropout is SDPA's there.
    """
    dtype = product_dtype(q)
    documents = rule.documents
    if documents is not None and has_varlen(q.to(dtype)) and rule.sink_H is None and not rule.limits(documents.longest):
        q_THK, k_THK, v_THK = (documents.laid_out(x.to(dtype)) for x in (q, k, v))
        context = attend_varlen(
            q_THK,
            k_THK,
            v_THK,
            documents.offsets,
            documents.longest,
            dropout=dropout,
            scale=rule.scale_of(q.shape[-1]),
        )
        return documents.in_sequences(context).to(q.dtype)
    if documents is not None:
        return by_document(attend_by_device, q, k, v, dropout, rule)
    whole = q.shape[0] == k.shape[0] > 1 and rule.plain
    blocked = dropout > 0.0 or rule.limits(k.shape[0])
    faster = not torch.compiler.is_compiling() if blocked else dtype == torch.bfloat16
    if q.device.type == "cpu" and whole and faster and rule.sink_H is None:
        context = blocked_causal_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), dropout, scale=rule.scale, window=rule.window
        )
        return context.to(q.dtype)
    return attend_fused(q, k, v, dropout, rule)


def attention_kernel(config: ModelConfig) -> AttentionKernel:
    """The kernel that --attention-backend and --transformer-impl mean."""
    if config.fused_attention:
        return attend_by_device
    return partial(attend_unfused, softmax_in_fp32=config.softmax_in_fp32)
