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
  size K: 2 (n - 1) T G K elements forward, twice that backward. Under a sliding window what lies outside of it is not
  computed, but still sent.
- `UlyssesAttention` exchanges shards of the sequence for shards of the heads (all-to-all), attends with the ordinary
  kernel and exchanges back. Jacobs et al. 2023, arXiv:2309.14509. Volume: (n - 1) / n T (2 H + 2 G) K elements forward,
  the same backward.

Neither supports a KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def ring_blocks(parts: int, index: int, length: int, window: int | None = None) -> list[list[Block]]:
    """Return the blocks of each ring step of a rank with `length` positions.

    The keys of the previous rank arrive after the first step, then those of the rank before that. Without a window each
    step has one block, of length^2 / 2 products of queries and keys; with one, what is farther away is left out, and
    steps may have none.
    """
    everything, half = slice(0, length), length // 2
    blocks = [Block(index, everything, everything, causal=True)]
    for step in range(1, parts):
        source = (index - step) % parts
        if source < index:  # of its keys the early chunk precedes all queries here, the late one follows them
            blocks.append(Block(source, everything, slice(0, half), causal=False))
        else:  # all its keys lie between the two chunks of queries here
            blocks.append(Block(source, slice(half, length), everything, causal=False))
    if window is None:
        return [[block] for block in blocks]
    held = [balanced_positions(length * parts, parts, rank) for rank in range(parts)]
    return [_within(block, held[index], held[block.source], window) for block in blocks]


def _within(block: Block, queries: Sequence[range], keys: Sequence[range], window: int) -> list[Block]:
    """Return a block without the queries and keys that lie too far apart; positions are those of both ranks."""
    if block.causal:
        if len(queries) == 1 or queries[1].start - window < queries[0].stop:
            return [block]
        half = len(queries[0])
        return [replace(block, queries=part, keys=part) for part in (slice(0, half), slice(half, 2 * half))]
    first, last = _position(queries, block.queries.start), _position(keys, block.keys.stop - 1)
    near = slice(block.queries.start, min(block.queries.stop, _number_below(queries, last + window + 1)))
    kept = slice(max(block.keys.start, _number_below(keys, first - window)), block.keys.stop)
    return [replace(block, queries=near, keys=kept)] if near.start < near.stop and kept.start < kept.stop else []


def _position(chunks: Sequence[range], number: int) -> int:
    first = len(chunks[0])
    return chunks[0][number] if number < first else chunks[1][number - first]


def _number_below(chunks: Sequence[range], position: int) -> int:
    """Return how many positions of the chunks are below this one."""
    return sum(min(max(position - chunk.start, 0), len(chunk)) for chunk in chunks)


def _heads_first(x_SBHK: Tensor) -> Tensor:
    return x_SBHK.permute(1, 2, 0, 3)


def _sequence_first(x_BHSK: Tensor) -> Tensor:
    return x_BHSK.permute(2, 0, 1, 3)


def _seen(rule: AttentionRule, block: Block, axis: Axis, length: int, device: torch.device) -> dict[str, Any]:
    """Return which keys the queries of a block see, as options of `attend_part`; `length` is of the whole sequence.

    The rows of a mask are [Q, S], with documents [B, 1, Q, S].
    """
    window = rule.window if rule.limits(length) else None
    if rule.documents is None:
        queries, keys = (balanced_positions(length, axis.size, rank) for rank in (axis.index, block.source))
        farthest = _position(queries, block.queries.stop - 1) - _position(keys, block.keys.start)
        if window is None or farthest <= window:
            return {"causal": block.causal}
        if block.causal and farthest == block.queries.stop - block.queries.start - 1:  # without a gap
            return {"causal": True, "window": window}
    queries_S = positions_of(length, axis.size, axis.index, device)[block.queries]
    keys_S = positions_of(length, axis.size, block.source, device)[block.keys]

    def hidden(rows: slice) -> Tensor:
        distance = queries_S[rows, None] - keys_S
        mask = distance < 0
        if window is not None:
            mask |= distance > window
        if rule.documents is None:
            return mask
        ids_BS = rule.documents.ids_BS
        return mask | (ids_BS[:, None, queries_S[rows], None] != ids_BS[:, None, None, keys_S])

    return {"causal": block.causal, "hidden": hidden}


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
        length = q.shape[0] * axis.size
        steps = ring_blocks(axis.size, axis.index, q.shape[0], rule.window if rule.limits(length) else None)
        q_BHSK, wide = _heads_first(q.to(product_dtype(q))), at_least_fp32(q.dtype)
        context = torch.zeros_like(q_BHSK, dtype=wide)
        lse = torch.full(q_BHSK.shape[:3], -math.inf, dtype=wide, device=q.device)
        kv = torch.stack((k, v))
        for step, blocks in enumerate(steps):
            next_kv = comm.start_ring_shift(kv, axis) if step < axis.size - 1 else None
            for number, block in enumerate(blocks):
                block_context, block_lse = attend_part(
                    q_BHSK[:, :, block.queries],
                    *map(_heads_first, kv[:, block.keys].to(q_BHSK.dtype)),
                    **_seen(rule, block, axis, length, q.device),
                    scale=rule.scale,
                    dropout=_block_dropout(dropout, axis, step, number),
                )
                merge_parts(context[:, :, block.queries], lse[:, :, block.queries], block_context, block_lse)
            kv = kv if next_kv is None else next_kv.wait()
        if sink is not None:
            add_sink(context, lse, sink)
        narrow = context.to(q.dtype)
        ctx.save_for_backward(q, k, v, narrow, lse, sink)
        ctx.axis, ctx.dropout, ctx.steps, ctx.rule = axis, dropout, steps, rule
        return _sequence_first(narrow)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, context, lse, sink = ctx.saved_tensors
        axis, dtype = ctx.axis, product_dtype(q)
        grad, q_BHSK, context = _heads_first(grads[0].to(dtype)), _heads_first(q.to(dtype)), context.to(dtype)
        dq, dkv = torch.zeros_like(q_BHSK, dtype=lse.dtype), torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)
        kv, shifted = torch.stack((k, v)), None
        for step, blocks in enumerate(ctx.steps):
            next_kv = comm.start_ring_shift(kv, axis) if step < axis.size - 1 else None
            found = []
            for number, block in enumerate(blocks):
                block_dq, *block_dkv = attend_part_backward(
                    *(x[:, :, block.queries] for x in (grad, q_BHSK)),
                    *map(_heads_first, kv[:, block.keys].to(dtype)),
                    *(x[:, :, block.queries] for x in (context, lse)),
                    **_seen(ctx.rule, block, axis, q.shape[0] * axis.size, q.device),
                    scale=ctx.rule.scale,
                    dropout=_block_dropout(ctx.dropout, axis, step, number),
                )
                dq[:, :, block.queries] += block_dq
                found.append((block.keys, block_dkv))
            # The gradient of keys and values follows them around the ring, and is back at its rank after the last step.
            sums = dkv if step == 0 else torch.zeros_like(kv) if shifted is None else shifted.wait()
            for keys, block_dkv in found:
                for grad_sum, block_grad in zip(sums, block_dkv, strict=True):
                    grad_sum[keys] += _sequence_first(block_grad)
            if step > 0:
                shifted = comm.start_ring_shift(sums, axis)
            kv = kv if next_kv is None else next_kv.wait()
        if shifted is not None:
            dkv += shifted.wait()
        dk, dv = dkv.to(k.dtype)
        return _sequence_first(dq).to(q.dtype), dk, dv, sink_gradient(sink, lse, context, grad), None, None, None


def _block_dropout(dropout: Dropout | None, axis: Axis, step: int, number: int) -> Dropout | None:
    return None if dropout is None else dropout.for_block((number * axis.size + axis.index) * axis.size + step)


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
