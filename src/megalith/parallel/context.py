"""Context parallelism: attention over sequences that are divided among the ranks of an axis.

Of 2n equal chunks of a sequence rank r of n holds chunk r and chunk 2n - 1 - r (`layout.balanced_positions`). Under a
causal mask every rank then has the same work. With n = 2 (. masked, \\ the triangle of a chunk, # all unmasked):

                 keys of rank 0    keys of rank 1
                   0       3         1       2
    rank 0   0     \\       .         .       .        one product of 2 x 2 chunks under a causal mask, then
             3     #       \\         #       #        late queries with all keys of a later rank
    rank 1   1     #       .         \\       .        or all queries with the early keys of an earlier rank:
             2     #       .         #       \\        2 chunk products at every step on every rank

- `RingAttention` passes keys and values around the ring of ranks and merges block contexts by online softmax; each
  rank keeps its own chunks only, so that memory is 1/n. Liu et al. 2023, arXiv:2310.01889; the balance: Brandon et al.
  2023, arXiv:2311.09431. Volume sent by a rank, of one attention with T = S / n * B tokens per rank, groups G, head
  size K: 2 (n - 1) T G K elements forward, twice that backward.
- `UlyssesAttention` exchanges shards of the sequence for shards of the heads (all-to-all), attends with the ordinary
  kernel and exchanges back. Jacobs et al. 2023, arXiv:2309.14509. Volume: (n - 1) / n T (2 H + 2 G) K elements forward,
  the same backward.

Neither supports a KV cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalith.distributed import comm
from megalith.distributed.context import Axis
from megalith.errors import LayoutError
from megalith.kernels.dropout import Dropout
from megalith.kernels.partial_attention import (
    HiddenRows,
    add_sink,
    attend_part,
    attend_part_backward,
    merge_parts,
    sink_gradient,
)
from megalith.layout import balanced_positions
from megalith.nn.attend import AttentionKernel, AttentionRule, expand_groups
from megalith.nn.attention import ContextParallelAttention
from megalith.nn.cache import LayerCache
from megalith.nn.precision import at_least_fp32, product_dtype


def positions_of(length: int, parts: int, index: int, device: torch.device | None = None) -> Tensor:
    """Return a rank's positions of a sequence of `length` tokens, ascending. [length / parts], int64."""
    chunks = balanced_positions(length, parts, index)
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


class _BalancedPositions(ContextParallelAttention):
    """Balanced division of sequences over the ranks, for ring and Ulysses attention."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self.parts = axis, axis.size

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        return positions_of(length, self.axis.size, self.axis.index, device)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        chunks = balanced_positions(x.shape[dim], self.axis.size, self.axis.index)
        return torch.cat([x.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)

    def attend_cached(self, cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        raise LayoutError(
            f"generation needs a KV cache of whole sequences, which --context-parallel-size {self.parts} divides; "
            f"generate with --context-parallel-size 1"
        )


@dataclass(frozen=True)
class Block:
    """Queries of this rank and keys of rank `source` that one step of the ring multiplies."""

    source: int
    queries: slice
    keys: slice
    causal: bool


def ring_blocks(parts: int, index: int, length: int) -> list[Block]:
    """Return the ring steps of a rank with `length` positions, each with length^2 / 2 products of queries and keys.

    The keys of the previous rank arrive after the first step, then those of the rank before that.
    """
    everything, half = slice(0, length), length // 2
    blocks = [Block(index, everything, everything, causal=True)]
    for step in range(1, parts):
        source = (index - step) % parts
        if source < index:  # of its keys the early chunk precedes all queries here, the late one follows them
            blocks.append(Block(source, everything, slice(0, half), causal=False))
        else:  # all its keys lie between the two chunks of queries here
            blocks.append(Block(source, slice(half, length), everything, causal=False))
    return blocks


def _heads_first(x_SBHK: Tensor) -> Tensor:
    return x_SBHK.permute(1, 2, 0, 3)


def _sequence_first(x_BHSK: Tensor) -> Tensor:
    return x_BHSK.permute(2, 0, 1, 3)


def _block_mask(rule: AttentionRule, block: Block, axis: Axis, q: Tensor) -> HiddenRows | None:
    """Return the mask of a block; None if `block.causal` suffices. Its rows are [Q, S], with documents [B, 1, Q, S]."""
    length, device = q.shape[0] * axis.size, q.device
    if not rule.limits(length) and rule.documents is None:
        return None
    queries = positions_of(length, axis.size, axis.index, device)[block.queries]
    keys = positions_of(length, axis.size, block.source, device)[block.keys]

    def hidden(rows: slice) -> Tensor:
        distance = queries[rows, None] - keys
        mask = distance < 0
        if rule.window is not None:
            mask |= distance > rule.window
        if rule.documents is None:
            return mask
        ids_BS = rule.documents.ids_BS
        return mask | (ids_BS[:, None, queries[rows], None] != ids_BS[:, None, None, keys])

    return hidden


class _RingAttentionFunction(torch.autograd.Function):
    """Saves q, k, v, the context and its log-sum-exp for the backward pass; both passes send keys and values around."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        axis: Axis,
        dropout: Dropout | None,
        rule: AttentionRule,
    ) -> Tensor:
        blocks = ring_blocks(axis.size, axis.index, q.shape[0])
        q_BHSK, wide = _heads_first(q.to(product_dtype(q))), at_least_fp32(q.dtype)
        context = torch.zeros_like(q_BHSK, dtype=wide)
        lse = torch.full(q_BHSK.shape[:3], -math.inf, dtype=wide, device=q.device)
        kv = torch.stack((k, v))
        for step, block in enumerate(blocks):
            next_kv = comm.start_ring_shift(kv, axis) if step < axis.size - 1 else None
            block_context, block_lse = attend_part(
                q_BHSK[:, :, block.queries],
                *map(_heads_first, kv[:, block.keys].to(q_BHSK.dtype)),
                causal=block.causal,
                hidden=_block_mask(rule, block, axis, q),
                scale=rule.scale,
                dropout=_block_dropout(dropout, axis, step),
            )
            merge_parts(context[:, :, block.queries], lse[:, :, block.queries], block_context, block_lse)
            kv = kv if next_kv is None else next_kv.wait()
        if sink is not None:
            add_sink(context, lse, sink)
        narrow = context.to(q.dtype)
        ctx.save_for_backward(q, k, v, narrow, lse, sink)
        ctx.axis, ctx.dropout, ctx.blocks, ctx.rule = axis, dropout, blocks, rule
        return _sequence_first(narrow)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, context, lse, sink = ctx.saved_tensors
        axis, dtype = ctx.axis, product_dtype(q)
        grad, q_BHSK, context = _heads_first(grads[0].to(dtype)), _heads_first(q.to(dtype)), context.to(dtype)
        dq, dkv = torch.zeros_like(q_BHSK, dtype=lse.dtype), torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)
        kv, shifted = torch.stack((k, v)), None
        for step, block in enumerate(ctx.blocks):
            next_kv = comm.start_ring_shift(kv, axis) if step < axis.size - 1 else None
            block_dq, *block_dkv = attend_part_backward(
                *(x[:, :, block.queries] for x in (grad, q_BHSK)),
                *map(_heads_first, kv[:, block.keys].to(dtype)),
                *(x[:, :, block.queries] for x in (context, lse)),
                causal=block.causal,
                hidden=_block_mask(ctx.rule, block, axis, q),
                scale=ctx.rule.scale,
                dropout=_block_dropout(ctx.dropout, axis, step),
            )
            dq[:, :, block.queries] += block_dq
            # The gradient of keys and values follows them around the ring, and is back at its rank after the last step.
            sums = dkv if step == 0 else torch.zeros_like(kv) if shifted is None else shifted.wait()
            for grad_sum, block_grad in zip(sums, block_dkv, strict=True):
                grad_sum[block.keys] += _sequence_first(block_grad)
            if step > 0:
                shifted = comm.start_ring_shift(sums, axis)
            kv = kv if next_kv is None else next_kv.wait()
        if shifted is not None:
            dkv += shifted.wait()
        dk, dv = dkv.to(k.dtype)
        return _sequence_first(dq).to(q.dtype), dk, dv, sink_gradient(sink, lse, context, grad), None, None, None


def _block_dropout(dropout: Dropout | None, axis: Axis, step: int) -> Dropout | None:
    return None if dropout is None else dropout.for_block(axis.index * axis.size + step)


class RingAttention(_BalancedPositions):
    """Ring attention: keys and values are passed around the ranks while each computes. `kernel` is not used.

    Dropout masks of a block derive from a seed of torch's default stream, the rank and the step, so that ranks draw
    different masks even if their streams are equal.
    """

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, kernel: AttentionKernel, rule: AttentionRule
    ) -> Tensor:
        assert rule.plain, "config/rules allows ring attention for plain rules only"
        sink, rule = rule.sink_H, replace(rule, sink_H=None)
        context: Tensor = _RingAttentionFunction.apply(q, k, v, sink, self.axis, Dropout.draw(dropout), rule)
        return context


class UlyssesAttention(_BalancedPositions):
    """Ulysses attention: all-to-all to all positions of some heads on each rank, and back.

    Dropout is the kernel's, from torch's default stream: ranks whose streams are equal draw equal masks for their
    heads.
    """

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, kernel: AttentionKernel, rule: AttentionRule
    ) -> Tensor:
        assert rule.plain, "config/rules allows Ulysses attention for plain rules only"
        parts, heads = self.parts, q.shape[2]
        if heads % parts:
            raise LayoutError(
                f"--cp-comm-type a2a divides heads, and the {heads} of a tensor-parallel rank are not divisible by "
                f"--context-parallel-size {parts}; use --cp-comm-type p2p, or a multiple of {parts} heads on each rank"
            )
        groups = math.lcm(k.shape[2], parts)
        k, v = expand_groups(k, groups), expand_groups(v, groups)
        by_rank = torch.cat([x.unflatten(2, (parts, -1)) for x in (q, k, v)], dim=3).flatten(2, 3)
        whole = self._by_position(comm.exchange(by_rank, self.axis, split_dim=2, concat_dim=0))
        q, k, v = whole.split((heads // parts, groups // parts, groups // parts), dim=2)
        if rule.sink_H is not None:
            rule = replace(rule, sink_H=rule.sink_H.view(parts, -1)[self.axis.index])
        context = kernel(q, k, v, dropout, rule)
        return comm.exchange(self._by_rank(context), self.axis, split_dim=0, concat_dim=2)

    def _by_position(self, x: Tensor) -> Tensor:
        """Reorder chunks along the sequence: rank by rank -> by position."""
        chunks = x.chunk(2 * self.parts)
        return torch.cat(chunks[0::2] + chunks[::-1][0::2])

    def _by_rank(self, x: Tensor) -> Tensor:
        """Reorder chunks along the sequence: by position -> rank by rank."""
        chunks = x.chunk(2 * self.parts)
        pairs = zip(chunks[: self.parts], chunks[self.parts :][::-1], strict=True)
        return torch.cat([chunk for pair in pairs for chunk in pair])
