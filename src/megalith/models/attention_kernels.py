"""Which attention kernel a configuration and a device get."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.device import is_host
from megalith.kernels.cpu.attention import blocked_causal_attention, whole_attention
from megalith.kernels.partial_attention import attend_varlen, has_varlen
from megalith.kernels.torch_private import sdpa_kernel_for
from megalith.nn.attend import (
    PLAIN,
    AttentionKernel,
    AttentionRule,
    attend_fused,
    attend_unfused,
    by_document,
    expand_groups,
)
from megalith.nn.precision import product_dtype

SMALL = 2**16
"""Scores of a head, up to which torch's flash kernel for CPUs takes longer than products of whole matrices: both
passes with 128 queries 14 ms against 8 at 512 keys and 3.2 against 2.2 at 128, 33 against 30 with 512 and 512."""


def attend_by_device(q: Tensor, k: Tensor, v: Tensor, dropout: float, rule: AttentionRule = PLAIN) -> Tensor:
    """Attend by the fastest exact kernel: on a CPU blocked or whole products where SDPA is not fused, else SDPA.

    Blocks are for causal attention in bf16, with dropout or with a window; whole matrices for what sees later keys or
    has a mask, with dropout, with a bias that learns, or with few scores.

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
    if is_host(q.device) and whole and faster and rule.sink_H is None:
        context = blocked_causal_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), dropout, scale=rule.scale, window=rule.window
        )
        return context.to(q.dtype)
    if is_host(q.device) and _whole(q, k, dropout, rule):
        bias, hides = rule.bias(), rule.causal or rule.limits(k.shape[0]) or rule.hides
        context = whole_attention(
            q.to(dtype),
            *(expand_groups(x.to(dtype), q.shape[2]) for x in (k, v)),
            bias=None if bias is None else bias.to(dtype),
            hidden=rule.hidden(q.shape[0], k.shape[0], q.device) if hides else None,
            dropout=dropout,
            scale=rule.scale_of(q.shape[-1]),
        )
        return context.to(q.dtype)
    return attend_fused(q, k, v, dropout, rule)


def _whole(q: Tensor, k: Tensor, dropout: float, rule: AttentionRule) -> bool:
    """Return whether whole products train faster than SDPA, which on a CPU does not fuse dropout or a learned bias."""
    if rule.plain or rule.sink_H is not None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    bias = rule.bias()
    return dropout > 0.0 or (bias is not None and bias.requires_grad) or q.shape[0] * k.shape[0] <= SMALL


def attention_kernel(config: ModelConfig) -> AttentionKernel:
    """Return the kernel of --attention-backend and --transformer-impl."""
    if config.fused_attention:
        return attend_by_device
    return partial(attend_unfused, softmax_in_fp32=config.softmax_in_fp32)


def describe_attention(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Return the kernel that an accelerator takes in training, and another one for masked calls if there are such."""
    if not config.fused_attention:
        return "unfused"
    shape = (1, config.num_attention_heads, 128, config.kernel_head_size)
    q, k, v = (torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    masks = [None, torch.ones(128, 128, dtype=torch.bool, device=device)]
    plain, masked = (sdpa_kernel_for(q, k, v, mask, config.attention_dropout) for mask in masks)
    return plain if plain == masked else f"{plain}, with a mask {masked}"
