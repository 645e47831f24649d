"""What attention is: which keys a query sees and how their scores become weights, and two kernels that compute it.

Shapes: Q queries, S keys, B batch, H query heads, G key-value heads (H is a multiple of G), K head size.

The kernels mean the same: `attend_fused` (torch SDPA, which stores no scores) and `attend_unfused`, the arithmetic of
Megatron's local implementation step by step, which repeats its half-precision runs to the last digit.

What differs between layers is an `AttentionRule`: the scale of the scores, a window, a sink, whether it is causal; and
between micro-batches the documents that attention stays inside of, or a `Mask`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from megalith.device import is_host
from megalith.kernels.dropout import dropout as drop
from megalith.kernels.partial_attention import attend_groups, has_flash
from megalith.nn.documents import Documents
from megalith.nn.precision import at_least_fp32, matmul, product_dtype

MASKED_SCORE = -10000.0  # Megatron's fill value; exp of it is 0 in every dtype


@dataclass(frozen=True, eq=False)
class Mask:
    """What a micro-batch or its positions change of the scores, each None where it changes nothing.

    Attributes:
        hidden_BQS: True where a query may not look, besides what the rule hides, [B, 1 or Q, S]; every query must see
            some key, or what it gets is undefined.
        bias_HQS: added to the scaled scores of the heads that are here, [H, Q, S] or [B, H, Q, S].
    """

    hidden_BQS: Tensor | None = None
    bias_HQS: Tensor | None = None


@dataclass(frozen=True)
class AttentionRule:
    """Which keys a query sees, and how its scores become weights.

    Attributes:
        scale: of the products of queries and keys; 1 / sqrt(K) if None.
        window: how many positions before its own a query sees; all of them if None.
        sink_H: score of one more key of each head, which every query sees and which has no value; none if None.
        documents: of the sequences, and no query sees a key of another one; None where each is one document.
        layer_scaling: the products are divided by this before they are rounded to the dtype of the queries, and the
            scores multiplied by it afterwards (Megatron's query-key layer scaling); it changes the rounding only.
        causal: no query sees a later key; else all see all keys, of which there may be another number.
        mask: of the micro-batch; not with documents.
    """

    scale: float | None = None
    window: int | None = None
    sink_H: Tensor | None = None
    layer_scaling: int = 1
    documents: Documents | None = None
    causal: bool = True
    mask: Mask | None = None

    @property
    def plain(self) -> bool:
        """True if the keys of a query follow from its position alone, as in a decoder."""
        return self.causal and self.mask is None

    def scale_of(self, size: int) -> float:
        """Return the scale of the scores of heads of `size` elements."""
        return float(size**-0.5) if self.scale is None else self.scale

    @property
    def hides(self) -> bool:
        """True if the mask masks any key."""
        return self.mask is not None and self.mask.hidden_BQS is not None

    def limits(self, num_keys: int) -> bool:
        """Return whether the window may mask earlier keys."""
        return self.window is not None and self.window < num_keys - 1

    def reach(self, num_queries: int, num_keys: int) -> int:
        """Return how many of the last keys the last `num_queries` positions attend to, without a mask."""
        return num_keys if self.window is None else min(num_keys, num_queries + self.window)

    def sees_all(self, num_keys: int) -> bool:
        """Return whether the last of `num_keys` positions attends to all of them, without sink or mask."""
        return self.sink_H is None and self.mask is None and (self.window is None or not self.limits(num_keys))

    def hidden(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """Return the mask, True where a key is masked: [Q, S], or with a `mask` [B, 1, 1 or Q, S].

        The last query's own key is the last one. With a window of 2:        # hidden      . seen

            . # # # #
            . . # # #
            . . . # #
            # . . . #
            # # . . .
        """
        ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
        offset = num_keys - num_queries
        hidden = ones.triu(offset + 1) if self.causal else ~ones
        if self.window is not None and self.limits(num_keys):
            hidden = hidden | ones.tril(offset - self.window - 1)
        if self.mask is None or self.mask.hidden_BQS is None:
            return hidden
        return hidden | self.mask.hidden_BQS[:, None]

    def bias(self) -> Tensor | None:
        """Return the tensor that is added to the scaled scores, [H, Q, S] or [B, H, Q, S], or None."""
        return None if self.mask is None else self.mask.bias_HQS


PLAIN = AttentionRule()
"""Every earlier key, and nothing else."""

AttentionKernel = Callable[[Tensor, Tensor, Tensor, float, AttentionRule], Tensor]
"""(q [Q, B, H, K], k [S, B, G, K], v [S, B, G, K], dropout, rule) -> context [Q, B, H, K].

The last query's own key is the last one.
"""


def expand_groups(x_SBGK: Tensor, num_heads: int) -> Tensor:
    """Repeat each key-value head for the query heads of its group. [S, B, G, K] -> [S, B, H, K]."""
    groups = x_SBGK.shape[2]
    return x_SBGK if groups == num_heads else x_SBGK.repeat_interleave(num_heads // groups, dim=2)


def sdpa(
    q_BHQK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None, dropout: float, *, causal: bool, scale: float
) -> Tensor:
    """Apply torch SDPA, without copies of key-value heads where its kernel needs none. -> [B, H, Q, K].

    CUDA's memory-efficient kernel takes no groups before torch 2.14, and SDPA would compute all scores without a word;
    it is the one for masks and for what flash attention does not support, so heads are repeated there. On a CPU the
    backward pass of SDPA would use a thread for each group alone.
    """
    inputs, heads = (q_BHQK, k_BGSK, v_BGSK), q_BHQK.shape[1]
    if k_BGSK.shape[1] != heads:
        takes_groups = by_flash = mask is None and has_flash(q_BHQK)
        if is_host(q_BHQK.device):
            takes_groups = not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))
            if by_flash and dropout == 0.0 and not takes_groups and not torch.compiler.is_compiling():
                return attend_groups(*inputs, causal=causal, scale=scale)
        if not takes_groups:
            k_BGSK, v_BGSK = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k_BGSK, v_BGSK))
    grouped = k_BGSK.shape[1] != heads
    return nn.functional.scaled_dot_product_attention(
        q_BHQK, k_BGSK, v_BGSK, mask, dropout, causal, scale=scale, enable_gqa=grouped
    )


def by_document(
    attend: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, dropout: float, rule: AttentionRule
) -> Tensor:
    """Apply a kernel to each document of `rule.documents` separately, with as many queries as keys."""
    assert rule.documents is not None, "there are no documents"
    assert rule.mask is None, "a mask says itself what documents hide"
    alone = replace(rule, documents=None)
    separated = zip(*map(rule.documents.separated, (q, k, v)), strict=True)
    return rule.documents.joined([attend(q, k, v, dropout, alone) for q, k, v in separated])


QUERIES = 512
"""Queries that `by_queries` gives to one call. With a window of w keys a call multiplies w + 512 for each of them."""


def by_queries(attend: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, dropout: float, rule: AttentionRule) -> Tensor:
    """Apply a kernel to blocks of queries and the keys that they see, so that no mask is of all queries and keys.

    With a window of 3 and blocks of 2, of the key of the last query:       # hidden      . seen

            . #                            block 0
            . .
            . . . #                        block 1
            . . . .
              # . . . #                    block 2: its first query does not see key 0
              # # . . .
    """
    assert rule.plain and rule.documents is None, "the keys of a query follow from its position alone"
    found, earlier = [], k.shape[0] - q.shape[0]
    for start in range(0, q.shape[0], QUERIES):
        stop = min(start + QUERIES, q.shape[0])
        keys = slice(earlier + stop - rule.reach(stop - start, earlier + stop), earlier + stop)
        found.append(attend(q[start:stop], k[keys], v[keys], dropout, rule))
    return found[0] if len(found) == 1 else torch.cat(found)


def _with_sink(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sink_H: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Append the sink as one more key: a channel in which queries are 1 and that key is sink / scale.

    Shapes: [B, H, Q, K], 2 x [B, H, S, K], [.., Q, S] -> [B, H, Q, K + 8], 2 x [B, H, S + 1, K + 8], [.., Q, S + 1];
    the kernels of GPUs want head sizes that are multiples of 8. `seen` is True, or 0 added, where a query looks.
    """
    batch, heads, num_queries, _ = q.shape
    one = q.new_ones(batch, heads, num_queries, 1)
    q = torch.cat((q, one, one.new_zeros(batch, heads, num_queries, 7)), dim=-1)
    key = (sink_H.to(q.dtype) / scale).view(1, heads, 1, 1).expand(batch, heads, 1, 1)
    key = nn.functional.pad(key, (k.shape[-1], 7))
    k = torch.cat((nn.functional.pad(k, (0, 8)), key), dim=2)
    v = nn.functional.pad(v, (0, 8, 0, 1))
    return q, k, v, nn.functional.pad(seen, (0, 1), value=True if seen.dtype == torch.bool else 0.0)


def _sdpa_mask(rule: AttentionRule, num_queries: int, num_keys: int, q: Tensor) -> Tensor | None:
    """Return the `attn_mask` of torch SDPA for a rule, apart from `is_causal`: True where unmasked, or added scores."""
    square, special = num_queries == num_keys, rule.limits(num_keys) or rule.sink_H is not None
    if rule.plain:
        needed = special or (not square and num_queries > 1)
        return ~rule.hidden(num_queries, num_keys, q.device) if needed else None
    if not special and not rule.causal and rule.mask is None:
        return None
    bias = rule.bias()
    if bias is not None and not special and not rule.causal and not rule.hides:
        return bias.to(q.dtype)
    hidden = rule.hidden(num_queries, num_keys, q.device)
    return ~hidden if bias is None else bias.to(q.dtype).masked_fill(hidden, -torch.inf)


def attend_fused(q: Tensor, k: Tensor, v: Tensor, dropout: float, rule: AttentionRule = PLAIN) -> Tensor:
    """Compute softmax(scale q k^T) v by torch SDPA. [Q, B, H, K], 2 x [S, B, G, K] -> [Q, B, H, K]."""
    if rule.documents is not None:
        return by_document(attend_fused, q, k, v, dropout, rule)
    dtype, source, size = product_dtype(q), q.dtype, q.shape[-1]
    if rule.sink_H is not None:  # each head has a key of its own
        k, v = expand_groups(k, q.shape[2]), expand_groups(v, q.shape[2])
    q_BHQK, k_BGSK, v_BGSK = (x.to(dtype).permute(1, 2, 0, 3) for x in (q, k, v))
    scale, mask = rule.scale_of(size), _sdpa_mask(rule, q.shape[0], k.shape[0], q_BHQK)
    causal = rule.causal and q.shape[0] == k.shape[0]
    if mask is not None and rule.sink_H is not None:
        q_BHQK, k_BGSK, v_BGSK, mask = _with_sink(q_BHQK, k_BGSK, v_BGSK, mask, rule.sink_H, scale)
    context = sdpa(q_BHQK, k_BGSK, v_BGSK, mask, dropout, causal=causal and mask is None, scale=scale)
    return context[..., :size].permute(2, 0, 1, 3).to(source)


def attend_unfused(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, rule: AttentionRule = PLAIN, *, softmax_in_fp32: bool
) -> Tensor:
    """Compute softmax(scale q k^T) v, rounding every intermediate as Megatron's local implementation does
    (docs/reference/training.md#loss).

    Shapes: [Q, B, H, K], 2 x [S, B, G, K] -> [Q, B, H, K].
    """
    k, v = expand_groups(k, q.shape[2]), expand_groups(v, q.shape[2])
    if rule.documents is not None:
        return by_document(partial(attend_unfused, softmax_in_fp32=softmax_in_fp32), q, k, v, dropout, rule)
    num_queries, batch, heads, size = q.shape
    q_NQK, k_NSK, v_NSK = (x.reshape(x.shape[0], batch * heads, size).transpose(0, 1) for x in (q, k, v))
    dtype, alpha = product_dtype(q), rule.scale_of(size) / rule.layer_scaling
    empty = torch.zeros(1, dtype=dtype, device=q.device)
    scores = torch.baddbmm(empty, q_NQK.to(dtype), k_NSK.to(dtype).transpose(1, 2), beta=0.0, alpha=alpha)
    scores = scores.to(q.dtype)
    if softmax_in_fp32:
        scores = scores.to(at_least_fp32(q.dtype))
    if rule.layer_scaling != 1:
        scores = scores * rule.layer_scaling
    by_head = scores.view(batch, heads, num_queries, k.shape[0])
    if (bias := rule.bias()) is not None:
        by_head = by_head + bias.to(scores.dtype)
    hidden = rule.hidden(num_queries, k.shape[0], q.device)
    scores = by_head.masked_fill(hidden, MASKED_SCORE).view_as(scores)
    if rule.sink_H is not None:
        sink_NQ1 = rule.sink_H.repeat(batch)[:, None, None].expand(-1, num_queries, 1)
        scores = torch.cat((scores, sink_NQ1.to(scores.dtype)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[0]]
    probabilities = drop(weights.to(q.dtype), dropout)
    context_NQK = matmul(probabilities, v_NSK)
    return context_NQK.transpose(0, 1).reshape(num_queries, batch, heads, size)
