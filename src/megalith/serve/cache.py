"""Paged KV cache: keys and values of all sequences in blocks of one buffer per layer, and attention over them.

Shapes: T new tokens of all chunks of a batch, H query heads, G key-value heads, K head size, R rows (tokens) of the
buffer.

On a CPU attention runs chunk by chunk, so that other sequences in the batch change neither its cost nor its result. The
scheduler mostly gives a sequence consecutive blocks: its keys are then a view of the buffer, otherwise they are
gathered. Heads come before rows, so that the keys of a head are contiguous.

On an accelerator, where starting a kernel costs more than gathering, the sequences of a batch that get one new token
share one call (`DecodingGroup`); under a sliding window of the keys in it. A chunk of a prompt takes a kernel that
aligns causality with the last key, where there is one, instead of a mask. On a CPU gathering took 1 to 4 times as long
as the calls that it saves for sequences of 64 positions, and 2 to 10 times from 256 on.

In an encoder-decoder model the first blocks of a sequence hold the keys and values of cross attention, one per token
of the encoder input; those of the answer follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from megalith.config import ModelConfig
from megalith.device import capability_of, is_host
from megalith.kernels.cpu.process import use_small_pages
from megalith.kernels.partial_attention import attend_last, has_varlen
from megalith.kernels.transfer import to_device
from megalith.nn.attend import PLAIN, AttentionRule, Mask, attend_fused, by_queries, sdpa
from megalith.nn.cross_attention import CrossAttention
from megalith.nn.precision import product_dtype
from megalith.serve.runner import Batch, Chunk
from megalith.serve.scheduler import padded_to_blocks


class PagedKVCache:
    """The buffers: keys and values [G, num_blocks * block_size, K] for each layer."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        groups: int,
        head_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, device
        self.groups_decoding = not is_host(device)
        shape = (num_layers, groups, num_blocks * block_size, head_size)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        if is_host(device):  # the first token is written to each layer and group, 2 MiB apart or more
            for buffer in (self.keys, self.values):
                use_small_pages(buffer.data_ptr(), buffer.nbytes)
        self.layer_keys, self.layer_values = self.keys.unbind(0), self.values.unbind(0)

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to), in order."""
        size = self.block_size
        for source, target in copies:
            for buffer in (self.keys, self.values):
                buffer[:, :, target * size : (target + 1) * size] = buffer[:, :, source * size : (source + 1) * size]

    def begin(self, batch: Batch) -> CacheView:
        """Copy the blocks that the batch copies, and return the view for its new tokens."""
        self.copy(batch.copies)
        return CacheView(self, batch.chunks)


def block_bytes(config: ModelConfig, num_layers: int, groups: int, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over the layers and key-value heads of this rank."""
    return 2 * num_layers * groups * block_size * config.kernel_head_size * dtype.itemsize


class CacheView:
    """The cache as one batch sees it: rows of its new tokens and visible keys of each chunk; a model's `KVCache`.

    Positions and lengths count from the first decoder token.
    """

    def __init__(self, cache: PagedKVCache, chunks: Sequence[Chunk]) -> None:
        size, device = cache.block_size, cache.device
        self.spans: list[_Span] = []
        positions: list[int] = []
        new_rows: list[int] = []
        begin = 0
        for chunk in chunks:
            padded, stop = padded_to_blocks(chunk.encoder_length, size), chunk.start + len(chunk.tokens)
            start = max(chunk.start, padded)
            positions += range(start - padded, stop - padded)
            new_rows += [chunk.blocks[p // size] * size + p % size for p in range(start, stop)]
            rows = _rows_of(chunk.blocks[padded // size : -(-stop // size)], size, stop - padded)
            encoder_rows = _rows_of(chunk.blocks[: padded // size], size, chunk.encoder_length) if padded else None
            end = begin + stop - start
            self.spans.append(_Span(begin, end, stop - padded, rows, _placed(encoder_rows, device), device))
            begin = end
        self.positions_S = to_device(torch.tensor(positions), device)
        self.length = max(span.length for span in self.spans)
        # One stretch of rows is written through a view, any other set of rows by index.
        together = new_rows[-1] - new_rows[0] == len(new_rows) - 1 and len(self.spans) == 1
        stretch = slice(new_rows[0], new_rows[-1] + 1)
        self.rows: slice | Tensor = stretch if together else to_device(torch.tensor(new_rows), device)
        self.masks: dict[tuple[int, int], Tensor] = {}
        self.groups_decoding = cache.groups_decoding and len(self.spans) > 1
        self._decoding: dict[int, list[DecodingGroup]] = {}
        self.layers = [
            LayerCacheView(self, *buffers) for buffers in zip(cache.layer_keys, cache.layer_values, strict=True)
        ]
        if len(new_rows) == 1:
            self._prepare_single_token(cache, new_rows[0])
        elif len(new_rows) == len(self.spans) and not cache.groups_decoding:
            self._prepare_decoding(cache)

    def _prepare_single_token(self, cache: PagedKVCache, row: int) -> None:
        """Make the views of all layers at once, for one new token of a sequence in consecutive blocks."""
        rows = self.spans[0].rows
        if isinstance(rows, slice) and product_dtype(cache.keys) == cache.keys.dtype:
            buffers = (cache.keys, cache.values)
            new = [buffer[:, None, None, :, row].unbind(0) for buffer in buffers]
            held = [buffer[:, None, :, rows].unbind(0) for buffer in buffers]
            for layer, *views in zip(self.layers, *new, *held, strict=True):
                layer.single_token_views = tuple(views)

    def _prepare_decoding(self, cache: PagedKVCache) -> None:
        """Make the views of all layers at once, for one new token of each sequence, all in consecutive blocks."""
        rows = [span.rows for span in self.spans if isinstance(span.rows, slice)]
        if len(rows) == len(self.spans) and product_dtype(cache.keys) == cache.keys.dtype:
            buffers = (cache.keys, cache.values)
            held = [zip(*(buffer[:, None, :, own].unbind(0) for buffer in buffers), strict=True) for own in rows]
            for layer, *views in zip(self.layers, *held, strict=True):
                layer.decoding_views = views

    def decoding(self, reach: int) -> list[DecodingGroup]:
        """Return the groups of sequences with one new token, which sees `reach` keys at most; cached over layers."""
        if reach not in self._decoding:
            self._decoding[reach] = decoding_groups(self.spans, self.positions_S.device, reach)
        return self._decoding[reach]

    def mask(self, new: int, length: int) -> Tensor:
        """Return the causal mask [new, length] of the last `new` positions, True where visible; cached over layers.

        What CUDA's memory-efficient kernel takes instead of a mask has no memory.
        """
        device = self.positions_S.device
        if (new, length) not in self.masks:
            if "efficient" in capability_of(device).attention:
                self.masks[new, length] = causal_lower_right(new, length)
            else:
                ones = torch.ones(new, length, dtype=torch.bool, device=device)
                self.masks[new, length] = ones.tril(length - new)
        return self.masks[new, length]


@dataclass(eq=False, slots=True)
class _Span:
    """The new tokens [begin, end) of a batch that belong to one sequence, and the rows of its keys and values."""

    begin: int
    end: int
    length: int  # of the sequence, new tokens included
    rows: slice | Tensor  # on the host
    encoder_rows: slice | Tensor | None  # of its encoder input, on the device
    device: torch.device
    placed: slice | Tensor | None = None  # `rows` on the device, once they were asked for

    def last_rows(self, number: int) -> slice | Tensor:
        """Return the rows of the last keys, on the device."""
        if self.placed is None:
            self.placed = _placed(self.rows, self.device)
        assert self.placed is not None
        return self.placed if number == self.length else _last(self.placed, number)


def _placed(rows: slice | Tensor | None, device: torch.device) -> slice | Tensor | None:
    return to_device(rows, device) if isinstance(rows, Tensor) else rows


def _last(rows: slice | Tensor, number: int) -> slice | Tensor:
    return slice(rows.stop - number, rows.stop) if isinstance(rows, slice) else rows[len(rows) - number :]


_ROWS_AT_ONCE = 1 << 17
"""Rows of the cache that one group gathers at most; those of 8 heads of 128 in bf16 take 512 MiB, values included."""


class DecodingGroup:
    """Sequences of a batch that get one new token each: N of them, of whose last keys it sees L at most.

    Attributes:
        tokens_N: the new token of each, as an index of the batch's tokens.
        rows: of these keys of all, [N * L]. Padding repeats the first row of its sequence, whose values are finite.
        mask_N11L: True where a key is of the sequence.
    """

    def __init__(self, spans: Sequence[_Span], device: torch.device, reach: int) -> None:
        lengths = torch.tensor([min(span.length, reach) for span in spans])
        longest = int(lengths.max())
        rows_NL = torch.empty(len(spans), longest, dtype=torch.int64)
        for rows, span, length in zip(rows_NL, spans, lengths.tolist(), strict=True):
            own = _last(span.rows, length)
            held = torch.arange(own.start, own.stop) if isinstance(own, slice) else own
            rows[:length], rows[length:] = held, held[0]
        mask_NL = torch.arange(longest) < lengths[:, None]
        self.tokens_N = to_device(torch.tensor([span.begin for span in spans]), device)
        self.rows, self.mask_N11L = to_device(rows_NL.flatten(), device), to_device(mask_NL[:, None, None], device)
        self._added: Tensor | None = None

    def attend(self, q_THK: Tensor, keys_GRK: Tensor, values_GRK: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention of the new tokens to the keys of their sequences, [N, H, K]."""
        q_NHK, groups, dtype = q_THK[self.tokens_N], keys_GRK.shape[0], product_dtype(q_THK)
        (number, heads, size), longest = q_NHK.shape, self.mask_N11L.shape[-1]
        k_NGLK, v_NGLK = (
            x.index_select(1, self.rows).view(groups, number, longest, size).transpose(0, 1).to(dtype)
            for x in (keys_GRK, values_GRK)
        )
        q_NGQK = q_NHK.to(dtype).view(number, groups, heads // groups, size)  # a group's queries see the same keys
        mask, scale = self.mask_N11L, rule.scale_of(size)
        if rule.sink_H is not None:  # one more key, with a score of its own for each head, and no value
            k_NGLK, v_NGLK = (nn.functional.pad(x, (0, 0, 0, 1)) for x in (k_NGLK, v_NGLK))
            sink_NGQ1 = rule.sink_H.to(dtype).view(1, groups, -1, 1).expand(number, -1, -1, -1)
            mask = torch.cat((self._scores(dtype).expand(-1, *q_NGQK.shape[1:3], -1), sink_NGQ1), dim=-1)
        found = scaled_dot_product_attention(q_NGQK, k_NGLK, v_NGLK, attn_mask=mask, scale=scale)
        return found.reshape(number, heads, size).to(q_THK.dtype)

    def _scores(self, dtype: torch.dtype) -> Tensor:
        """Return the mask [N, 1, 1, L] as what is added to scores; the same tensor for all layers."""
        if self._added is None:
            zeros = torch.zeros_like(self.mask_N11L, dtype=dtype)
            self._added = zeros.masked_fill_(~self.mask_N11L, -torch.inf)
        return self._added


def decoding_groups(spans: Sequence[_Span], device: torch.device, reach: int) -> list[DecodingGroup]:
    """Return the groups of all sequences with one new token, neighbours by length together; none for a single one.

    The new token sees `reach` keys at most.
    """
    single = sorted((span for span in spans if span.end - span.begin == 1), key=lambda span: span.length)
    groups, begin = list[DecodingGroup](), 0
    for end in range(1, len(single) + 1) if len(single) > 1 else ():
        if end == len(single) or (end + 1 - begin) * min(single[end].length, reach) > _ROWS_AT_ONCE:
            groups.append(DecodingGroup(single[begin:end], device, reach))
            begin = end
    return groups


def _rows_of(blocks: Sequence[int], size: int, length: int) -> slice | Tensor:
    """Return the first `length` rows of these blocks: a slice where the blocks are consecutive, else their indices."""
    first = blocks[0]
    if blocks[-1] - first == len(blocks) - 1 and all(block == first + i for i, block in enumerate(blocks)):
        return slice(first * size, first * size + length)
    return (torch.tensor(blocks)[:, None] * size + torch.arange(size)).flatten()[:length]


class LayerCacheView:
    """The keys and values of one layer as one batch sees them; an `nn.cache.LayerCache`."""

    def __init__(self, view: CacheView, keys_GRK: Tensor, values_GRK: Tensor) -> None:
        self.view, self.keys, self.values = view, keys_GRK, values_GRK
        self.single_token_views: tuple[Tensor, Tensor, Tensor, Tensor] | None = (
            None  # `CacheView._prepare_single_token`
        )
        self.decoding_views: list[tuple[Tensor, Tensor]] = []  # `CacheView._prepare_decoding`: of each span

    def attend(self, q_SBHK: Tensor, k_SBGK: Tensor, v_SBGK: Tensor, rule: AttentionRule = PLAIN) -> Tensor:
        """Attend (`nn.cache.LayerCache.attend`); B is 1."""
        view = self.view
        if self.single_token_views is not None and rule.sees_all(view.length):
            return self._attend_one(q_SBHK, k_SBGK, v_SBGK, rule.scale_of(q_SBHK.shape[3]))
        q_THK = q_SBHK.squeeze(1)
        for buffer, new in ((self.keys, k_SBGK), (self.values, v_SBGK)):
            buffer[:, view.rows] = new.squeeze(1).transpose(0, 1)
        if self.decoding_views and rule.sees_all(view.length):
            return self._attend_each(q_SBHK, rule.scale_of(q_SBHK.shape[3]))
        if len(view.spans) == 1:
            return self._attend(q_THK, view.spans[0], rule).unsqueeze(1)
        reach = rule.reach(1, view.length)
        if view.groups_decoding and rule.plain and (groups := view.decoding(reach)):
            return self._attend_together(q_THK, groups, rule).unsqueeze(1)
        found = [self._attend(q_THK[span.begin : span.end], span, rule) for span in view.spans]
        return torch.cat(found).unsqueeze(1)

    def _attend_together(self, q_THK: Tensor, groups: Sequence[DecodingGroup], rule: AttentionRule) -> Tensor:
        """Attend as `attend` does, with one call for each group of sequences that get one new token."""
        context_THK = torch.empty_like(q_THK)
        for group in groups:
            context_THK[group.tokens_N] = group.attend(q_THK, self.keys, self.values, rule)
        for span in self.view.spans:
            if span.end - span.begin > 1:
                context_THK[span.begin : span.end] = self._attend(q_THK[span.begin : span.end], span, rule)
        return context_THK

    def _attend_one(self, q_11HK: Tensor, k_11GK: Tensor, v_11GK: Tensor, scale: float) -> Tensor:
        """Attend from one token as `attend` does; the queries of a group, which see the same keys, become positions."""
        assert self.single_token_views is not None
        new_k_11GK, new_v_11GK, k_1GSK, v_1GSK = self.single_token_views
        new_k_11GK.copy_(k_11GK)
        new_v_11GK.copy_(v_11GK)
        heads, groups, size = q_11HK.shape[2], k_1GSK.shape[1], q_11HK.shape[3]
        q_1GQK = _queries_of_groups(q_11HK[0], groups)[0]
        return _attend_position(q_1GQK, k_1GSK, v_1GSK, scale, heads // groups).reshape(1, 1, heads, size)

    def _attend_each(self, q_S1HK: Tensor, scale: float) -> Tensor:
        """Attend from one token of each sequence; the queries of a group, as in `_attend_one`, become positions."""
        (number, _, heads, size), groups = q_S1HK.shape, self.keys.shape[0]
        q_S1GQK = _queries_of_groups(q_S1HK.squeeze(1), groups)
        found = [
            _attend_position(q, k, v, scale, heads // groups)
            for q, (k, v) in zip(q_S1GQK.unbind(0), self.decoding_views, strict=True)
        ]
        return torch.cat(found).reshape(number, 1, heads, size)

    def _attend(self, q_QHK: Tensor, span: _Span, rule: AttentionRule) -> Tensor:
        """Attend causally from the last Q positions of a sequence. [Q, H, K] -> [Q, H, K]."""
        new, heads, size = q_QHK.shape
        length = span.length if rule.mask is not None else rule.reach(new, span.length)
        k_GSK, v_GSK = self._keys_and_values(span.last_rows(length))
        if rule.mask is not None and rule.mask.bias_HQS is not None:
            bias_HQS = rule.mask.bias_HQS[:, span.begin : span.end, : span.length]
            rule = replace(rule, mask=Mask(None, bias_HQS))
        if has_varlen(q_QHK, window=True) and rule.plain and not (rule.sees_all(length) and new in (1, length)):
            inputs = (x[None] for x in (q_QHK, k_GSK.transpose(0, 1), v_GSK.transpose(0, 1)))
            window = rule.window if rule.limits(length) else None
            return attend_last(*inputs, scale=rule.scale_of(size), window=window, sink_H=rule.sink_H)[0]
        if not rule.sees_all(length):
            q, k, v = q_QHK[:, None], *(x.transpose(0, 1)[:, None] for x in (k_GSK, v_GSK))
            attend = attend_fused if rule.mask is not None else partial(by_queries, attend_fused)
            return attend(q, k, v, 0.0, rule).squeeze(1)
        scale = rule.scale_of(size)
        groups = k_GSK.shape[0]
        dtype, source = product_dtype(q_QHK), q_QHK.dtype
        q, k, v = (x if dtype == source else x.to(dtype) for x in (q_QHK, k_GSK, v_GSK))
        if new == 1:  # the queries of a group see the same keys: they take the place of positions
            q = _queries_of_groups(q, groups)[0]
            return _attend_position(q, k[None], v[None], scale, heads // groups).reshape(1, heads, size).to(source)
        whole = new == length
        mask = None if whole else self.view.mask(new, length)
        context = sdpa(q.transpose(0, 1)[None], k[None], v[None], mask, 0.0, causal=whole, scale=scale)
        return context[0].transpose(0, 1).to(source)

    def _keys_and_values(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of these rows, [G, rows, K] each."""
        if isinstance(rows, slice):
            return self.keys[:, rows], self.values[:, rows]
        return self.keys.index_select(1, rows), self.values.index_select(1, rows)

    def write_encoder(self, chunk: int, k_EBGK: Tensor, v_EBGK: Tensor) -> None:
        """Write the keys and values of the encoder input of chunk number `chunk` of the batch; B is 1."""
        rows = self.view.spans[chunk].encoder_rows
        assert rows is not None, "the chunk has no encoder input"
        for buffer, new in ((self.keys, k_EBGK), (self.values, v_EBGK)):
            buffer[:, rows] = new.squeeze(1).transpose(0, 1)

    def attend_encoder(self, q_SBHK: Tensor, rule: AttentionRule) -> Tensor:
        """Attend from each new token to the encoder input of its sequence. [S, B, H, K] -> [S, B, H, K]; B is 1."""
        found = []
        for span in self.view.spans:
            assert span.encoder_rows is not None, "the chunk has no encoder input"
            k, v = (x.transpose(0, 1)[:, None] for x in self._keys_and_values(span.encoder_rows))
            found.append(attend_fused(q_SBHK[span.begin : span.end], k, v, 0.0, rule))
        return torch.cat(found)


def _queries_of_groups(q_NHK: Tensor, groups: int) -> Tensor:
    """Return the queries of one position of N sequences, [N, 1, G, Q, K]; the queries of a group see the same keys.

    On a CPU torch's attention of a single row in half precision takes twice as long as that of two rows
    (benchmarks/results/README.md): a single query is there twice, and only the first result counts.
    """
    number, heads, size = q_NHK.shape
    q_N1GQK = q_NHK.view(number, 1, groups, heads // groups, size)
    if heads == groups and q_NHK.dtype in (torch.float16, torch.bfloat16) and is_host(q_NHK.device):
        return torch.cat((q_N1GQK, q_N1GQK), -2)  # repeat takes four times as long
    return q_N1GQK


_MANY_KEYS = 256  # copies of fewer keys and values take longer than they save


def _attend_position(q_1GRK: Tensor, k_1GSK: Tensor, v_1GSK: Tensor, scale: float, queries: int) -> Tensor:
    """Attend from one position to all its keys, [1, G, queries, K]; R is `queries`, or 2 where one is there twice.

    Over many keys fp32 is faster for one query, the copies of keys and values included (benchmarks/results/README.md).
    """
    if q_1GRK.shape[2] == queries or k_1GSK.shape[2] < _MANY_KEYS:
        return scaled_dot_product_attention(q_1GRK, k_1GSK, v_1GSK, scale=scale)[:, :, :queries]
    q, k, v = (x.float() for x in (q_1GRK[:, :, :queries], k_1GSK, v_1GSK))
    return scaled_dot_product_attention(q, k, v, scale=scale).to(q_1GRK.dtype)


class EncoderCacheView:
    """Keys and values of cross attention as one batch sees them; a `nn.cross_attention.EncodedCache`."""

    def __init__(self, view: CacheView, layers: Sequence[CrossAttention]) -> None:
        self._layers = dict(zip(layers, view.layers, strict=True))

    def attend_across(self, layer: CrossAttention, q_SBHK: Tensor) -> Tensor:
        """Attend to the encoder's output (`nn.cross_attention.EncodedCache.attend_across`)."""
        return self._layers[layer].attend_encoder(q_SBHK, layer.rule)

    def write(self, chunk: int, states_EBD: Tensor) -> None:
        """Write the keys and values of every layer for the encoder's output of chunk number `chunk` of the batch."""
        for layer, cache in self._layers.items():
            cache.write_encoder(chunk, *layer.keys_and_values(states_EBD))
