"""Which attention kernel a configuration and a device get."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.device import is_host
from megalith.kernels.cpu.attention import blocked_causal_attention, whole_attention
from megalith.kernels.dropout import Dropout
from megalith.kernels.partial_attention import attend_groups, attend_varlen, has_varlen
from megalith.kernels.torch_private import sdpa_kernel_for
from megalith.nn.attend import (
    PLAIN,
    AttentionKernel,
    AttentionRule,
    attend_fused,
    attend_unfused,
    by_document,
    by_queries,
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

    Documents, windows and sinks are one call of the flash kernel on a GPU that has it. Elsewhere documents are one call
    each, and windows and sinks one for each block of queries; but a sink on a CPU needs no mask.

    A compiled graph cannot draw from a generator of its own, so dropout is SDPA's there.
    """
    dtype = product_dtype(q)
    documents, scale = rule.documents, rule.scale_of(q.shape[-1])
    whole = q.shape[0] == k.shape[0] > 1 and rule.plain
    window, has_sink = rule.window if rule.limits(k.shape[0]) else None, rule.sink_H is not None
    special = window is not None or has_sink
    by_flash = whole and has_varlen(q.to(dtype), window=window is not None, sink=has_sink)
    if by_flash and (documents is not None or special):
        return _attend_varlen(q.to(dtype), k.to(dtype), v.to(dtype), dropout, rule).to(q.dtype)
    if documents is not None:
        return by_document(attend_by_device, q, k, v, dropout, rule)
    blocked = dropout > 0.0 or window is not None
    faster = not torch.compiler.is_compiling() if blocked else dtype == torch.bfloat16
    if is_host(q.device) and whole and faster and not has_sink:
        context = blocked_causal_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), dropout, scale=rule.scale, window=rule.window
        )
        return context.to(q.dtype)
    if is_host(q.device) and whole and has_sink and not torch.compiler.is_compiling():
        heads_first = (x.to(dtype).permute(1, 2, 0, 3) for x in (q, k, v))
        drawn = Dropout.draw(dropout)
        context = attend_groups(
            *heads_first, causal=True, scale=scale, window=window, sink_H=rule.sink_H, dropout=drawn
        )
        return context.permute(2, 0, 1, 3).to(q.dtype)
    if whole and special:
        return by_queries(attend_fused, q, k, v, dropout, rule)
    if is_host(q.device) and _whole(q, k, dropout, rule):
        bias, hides = rule.bias(), rule.causal or rule.limits(k.shape[0]) or rule.hides
        context = whole_attention(
            q.to(dtype),
            *(expand_groups(x.to(dtype), q.shape[2]) for x in (k, v)),
            bias=None if bias is None else bias.to(dtype),
            hidden=rule.hidden(q.shape[0], k.shape[0], q.device) if hides else None,
            dropout=dropout,
            scale=scale,
        )
        return context.to(q.dtype)
    return attend_fused(q, k, v, dropout, rule)


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, dropout: float, rule: AttentionRule) -> Tensor:
    """Apply `attend_varlen`. [S, B, H, K], 2 x [S, B, G, K] -> [S, B, H, K]."""
    documents = rule.documents
    longest, offsets = (len(q), None) if documents is None else (documents.longest, documents.offsets)

    def laid_out(x: Tensor) -> Tensor:
        return x.transpose(0, 1) if documents is None else documents.laid_out(x)

    context = attend_varlen(
        laid_out(q),
        laid_out(k),
        laid_out(v),
        offsets,
        longest,
        dropout=dropout,
        scale=rule.scale_of(q.shape[-1]),
        window=rule.window if rule.limits(longest) else None,
        sink_H=rule.sink_H,
    )
    return context.transpose(0, 1) if documents is None else documents.in_sequences(context)


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
    has_window, has_sink = any(window is not None for window in config.windows), config.softmax_type != "vanilla"
    if has_window or has_sink:
        flash = has_varlen(q, window=has_window, sink=has_sink)
        return f"{plain}, in windows and with sinks {'FLASH_ATTENTION' if flash else f'{masked} by blocks of queries'}"
    return plain if plain == masked else f"{plain}, with a mask {masked}"
