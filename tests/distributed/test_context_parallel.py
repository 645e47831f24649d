"""Attention over divided sequences equals attention over whole ones: values, gradients, volume, dropout."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.distributed import comm
from megalith.distributed.context import Axis, ParallelContext
from megalith.errors import LayoutError
from megalith.layout import Layout, balanced_positions
from megalith.nn.attend import PLAIN, AttentionRule, attend_fused
from megalith.nn.attention import AttentionShape, ContextParallelAttention, LocalAttention, SelfAttention
from megalith.nn.region import Solo
from megalith.nn.rope import rotation
from megalith.parallel import context as context_parallel
from megalith.parallel.context import RingAttention, UlyssesAttention, ring_blocks
from megalith.serve.cache import PagedKVCache
from megalith.serve.runner import Batch, Chunk

BATCH, HEADS, SIZE = 2, 8, 4
KINDS = {"p2p": RingAttention, "a2a": UlyssesAttention}


def _axis() -> Axis:
    return ParallelContext.create(Layout(cp=dist.get_world_size()), torch.device("cpu")).cp


def _whole(length: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and an upstream gradient of whole sequences, the same on every rank."""
    generator = torch.Generator().manual_seed(length + groups)
    shapes = [(length, BATCH, heads, SIZE) for heads in (HEADS, groups, groups, HEADS)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def _gathered(x: Tensor, axis: Axis, length: int) -> Tensor:
    """The parts of all ranks put where their positions say."""
    whole = torch.empty(length, *x.shape[1:], dtype=x.dtype)
    mixer = RingAttention(axis)
    whole[comm.all_gather(mixer.positions(length), axis)] = comm.all_gather(x.detach(), axis)
    return whole


def _both_passes(kind: str, length: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    """Context, dq, dk, dv of whole sequences."""
    axis = _axis()
    mixer = KINDS[kind](axis)
    *inputs, grad = (mixer.shard(x, 0).clone() for x in _whole(length, groups, dtype))
    q, k, v = (x.requires_grad_() for x in inputs)
    context = mixer.attend(q, k, v, 0.0, attend_fused, PLAIN)
    gradients = torch.autograd.grad(context, (q, k, v), grad)
    return [_gathered(x, axis, length) for x in (context, *gradients)]


def _wanted(length: int, groups: int) -> list[Tensor]:
    *inputs, grad = _whole(length, groups, torch.float64)
    q, k, v = (x.requires_grad_() for x in inputs)
    context = LocalAttention().attend(q, k, v, 0.0, attend_fused, PLAIN)
    return [context.detach(), *torch.autograd.grad(context, (q, k, v), grad)]


@pytest.mark.parametrize(("length", "groups"), [(16, 8), (40, 2), (8, 1)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_values_and_gradients_are_those_of_whole_sequences(
    ranks: Any, world_size: int, kind: str, length: int, groups: int
) -> None:
    wanted = _wanted(length, groups)
    for results in ranks.run(world_size, _both_passes, kind, length, groups, torch.float64):
        for mine, reference in zip(results, wanted, strict=True):
            assert (mine - reference).abs().max() <= 1e-10 * reference.abs().max()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2**-20), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_as_exact_as_their_dtype(ranks: Any, kind: str, dtype: torch.dtype, tolerance: float) -> None:
    for results in ranks.run(2, _both_passes, kind, 24, 2, dtype):
        for mine, reference in zip(results, _wanted(24, 2), strict=True):
            assert mine.dtype == dtype
            assert (mine.double() - reference).abs().max() <= tolerance * reference.abs().max()


def _uneven_groups() -> float:
    """Six query heads in three groups over two ranks: groups are repeated until they divide."""
    axis = _axis()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(8, 1, heads, SIZE, dtype=torch.float64, generator=generator) for heads in (6, 3, 3))
    mixer = UlyssesAttention(axis)
    mixed = mixer.attend(*(mixer.shard(x, 0) for x in (q, k, v)), 0.0, attend_fused, PLAIN)
    return float((_gathered(mixed, axis, 8) - LocalAttention().attend(q, k, v, 0.0, attend_fused, PLAIN)).abs().max())


def test_groups_that_do_not_divide_are_repeated(ranks: Any) -> None:
    assert max(ranks.run(2, _uneven_groups)) <= 1e-12


# --- the placement ---


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_every_position_is_on_one_rank(parts: int) -> None:
    held = [position for rank in range(parts) for chunk in balanced_positions(48, parts, rank) for position in chunk]
    assert sorted(held) == list(range(48))


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_each_step_of_the_ring_is_the_same_work_on_all_ranks_and_nothing_is_left_out(parts: int) -> None:
    length, local = 16 * parts, 16
    positions = [[p for chunk in balanced_positions(length, parts, rank) for p in chunk] for rank in range(parts)]
    seen = set()
    for rank in range(parts):
        blocks = [block for (block,) in ring_blocks(parts, rank, local)]
        assert [block.source for block in blocks] == [(rank - step) % parts for step in range(parts)]
        for block in blocks:
            queries, keys = positions[rank][block.queries], positions[block.source][block.keys]
            pairs = [(q, k) for i, q in enumerate(queries) for j, k in enumerate(keys) if not block.causal or j <= i]
            assert len(pairs) == (local * (local + 1) if block.causal else local * local) // 2
            assert not seen.intersection(pairs)
            seen.update(pairs)
    assert seen == {(q, k) for q in range(length) for k in range(q + 1)}


@pytest.mark.parametrize("window", [0, 1, 5, 8, 20, 60, 200])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_what_lies_outside_of_a_window_is_not_computed(parts: int, window: int) -> None:
    """Each pair of a query and a key in the window is in one block; distant chunks are in none."""
    length, local, half = 16 * parts, 16, 8
    positions = [[p for chunk in balanced_positions(length, parts, rank) for p in chunk] for rank in range(parts)]
    seen = []
    for rank in range(parts):
        steps = ring_blocks(parts, rank, local, window)
        assert len(steps) == parts
        whole = [block for (block,) in ring_blocks(parts, rank, local)]
        for step, blocks in enumerate(steps):
            products = sum(len(positions[0][block.queries]) * len(positions[0][block.keys]) for block in blocks)
            assert products <= len(positions[0][whole[step].queries]) * len(positions[0][whole[step].keys])
            for block in blocks:
                assert block.source == (rank - step) % parts
                queries, keys = positions[rank][block.queries], positions[block.source][block.keys]
                seen += [(q, k) for q in queries for k in keys if 0 <= q - k <= window]
                assert all(any(0 <= q - k <= window for k in keys) for q in queries)
        if window <= half and parts > 2:  # the two chunks of this rank, and the one before each
            assert sum(map(len, steps)) <= 4 and sum(not blocks for blocks in steps) >= parts - 3
    assert len(seen) == len(set(seen))
    assert set(seen) == {(q, k) for q in range(length) for k in range(max(0, q - window), q + 1)}


def _in_a_window(window: int) -> tuple[list[Tensor], list[int]]:
    """Context, dq, dk, dv and the gradient of the sinks with a window; the calls of attention in each pass."""
    axis, length, calls = _axis(), 64, list[str]()
    mixer = RingAttention(axis)
    q, k, v, grad = (mixer.shard(x, 0) for x in _whole(length, 2, torch.float64))
    leaves = [x.clone().requires_grad_() for x in (q, k, v, _SINKS)]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("attend_part", "attend_part_backward"):
            original = getattr(context_parallel, name)
            patch.setattr(
                context_parallel, name, lambda *a, _do=original, _name=name, **k: (calls.append(_name), _do(*a, **k))[1]
            )
        context = mixer.attend(*leaves[:3], 0.0, attend_fused, AttentionRule(window=window, sink_H=leaves[3]))
        *gradients, sinks = torch.autograd.grad(context, leaves, grad)
    found = [_gathered(x, axis, length) for x in (context, *gradients)]
    return [*found, comm.all_reduce(sinks, axis)], [calls.count(name) for name in sorted(set(calls))]


_SINKS = torch.linspace(-1, 1, HEADS, dtype=torch.float64)


@pytest.mark.parametrize(("window", "calls"), [(3, 13), (8, 13), (30, None), (100, 16)])
def test_a_window_of_the_ring_is_that_of_whole_sequences(ranks: Any, window: int, calls: int | None) -> None:
    """Four ranks with a block in each step would be 16 calls; those of the first and last rank see fewer others."""
    q, k, v, grad = _whole(64, 2, torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, _SINKS)]
    context = attend_fused(*leaves[:3], 0.0, AttentionRule(window=window, sink_H=leaves[3]))
    wanted = [context.detach(), *torch.autograd.grad(context, leaves, grad)]
    results = ranks.run(4, _in_a_window, window)
    for ours, _ in results:
        for mine, reference in zip(ours, wanted, strict=True):
            assert (mine - reference).abs().max() <= 1e-10 * reference.abs().max()
    for counts in zip(*(counts for _, counts in results), strict=True):
        assert calls is None or sum(counts) == calls


def test_a_length_that_does_not_divide_names_its_neighbours() -> None:
    mixer = RingAttention(Axis("cp", (0, 1, 2, 3), 1))
    with pytest.raises(LayoutError, match=r"--seq-length 20 .*--context-parallel-size 4"):
        mixer.positions(20)
    with pytest.raises(LayoutError, match="16 or 24"):
        mixer.shard(torch.zeros(1, 20), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_is_refused(kind: str) -> None:
    layer = _new_layer(KINDS[kind](Axis("cp", (0, 1), 0)))
    cache = PagedKVCache(1, 4, 2, 2, 6, dtype=torch.float64, device=torch.device("cpu"))
    (layer_cache,) = cache.begin(Batch([Chunk([0] * 4, 0, [0, 1])])).layers
    with pytest.raises(LayoutError, match="generate with --context-parallel-size 1"):
        layer(torch.zeros(4, 1, 24, dtype=torch.float64), None, layer_cache)


def test_heads_that_do_not_divide_are_refused_with_their_number() -> None:
    q = torch.zeros(4, 1, 3, 4)
    with pytest.raises(LayoutError, match=r"\b3\b.*--context-parallel-size 2"):
        UlyssesAttention(Axis("cp", (0, 1), 0)).attend(q, q, q, 0.0, attend_fused, PLAIN)


def test_one_rank_holds_whole_sequences() -> None:
    q, k, v, _ = _whole(7, 2, torch.float64)
    wanted = LocalAttention().attend(q, k, v, 0.0, attend_fused, PLAIN)
    for mixer in (RingAttention(Axis("cp")), UlyssesAttention(Axis("cp"))):
        assert mixer.positions(7).tolist() == list(range(7))
        torch.testing.assert_close(mixer.attend(q, k, v, 0.0, attend_fused, PLAIN), wanted)


def test_a_batch_is_divided_with_its_positions() -> None:
    mixer = RingAttention(Axis("cp", (0, 1), 1))
    tokens = torch.arange(16).view(2, 8)
    assert mixer.positions(8).tolist() == [2, 3, 4, 5]
    assert mixer.shard(tokens, 1).tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]


# --- the volume ---


@dataclass
class _Volume:
    """Elements that leave this rank."""

    elements: list[float] = field(default_factory=list)

    def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
        assert tensor is not None
        stay = {"ring_shift": 0.0, "all_to_all": 1 / axis.size}[operation]
        self.elements.append(tensor.numel() * (1 - stay))

    def after(self, operation: str, axis: Axis) -> None:
        pass

    def waiting(self, peer: int | None = None) -> None: ...

    def waited(self) -> None: ...


def _volume(kind: str, length: int, groups: int) -> tuple[float, float, int]:
    """Elements sent in the forward and in the backward pass, and bytes that are kept between them."""
    volume = _Volume()
    mixer = KINDS[kind](replace(_axis(), observer=volume))
    q, k, v, grad = (mixer.shard(x, 0).requires_grad_() for x in _whole(length, groups, torch.float64))
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        context = mixer.attend(q, k, v, 0.0, attend_fused, PLAIN)
    forward, volume.elements = sum(volume.elements), []
    context.backward(grad.detach())
    return forward, sum(volume.elements), sum(kept.values())


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_ring_sends_each_key_value_and_gradient_once_around_and_keeps_its_own_part(
    ranks: Any, world_size: int
) -> None:
    length, groups = 16, 2
    here = length // world_size * BATCH * groups * SIZE
    forward = 2 * (world_size - 1) * here
    queries = length // world_size * BATCH * HEADS * SIZE
    kept = 8 * (2 * queries + 2 * here + queries // SIZE)  # q, context, k, v, lse
    assert ranks.run(world_size, _volume, "p2p", length, groups) == [(forward, 2 * forward, kept)] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_exchange_sends_each_head_once_each_way(ranks: Any, world_size: int) -> None:
    length, groups = 16, 4
    here = length // world_size * BATCH * SIZE
    expected = (world_size - 1) / world_size * here * (2 * HEADS + 2 * groups)
    for forward, backward, _ in ranks.run(world_size, _volume, "a2a", length, groups):
        assert (forward, backward) == (expected, expected)


def _order() -> tuple[list[str], list[str]]:
    """Starts of exchanges and computations of parts, in both passes."""
    events: list[str] = []

    class Watch(_Volume):
        def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
            events.append(operation)

    mixer = RingAttention(replace(_axis(), observer=Watch()))
    *inputs, grad = (mixer.shard(x, 0) for x in _whole(48, 2, torch.float64))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("attend_part", "attend_part_backward"):
            original = getattr(context_parallel, name)
            patch.setattr(
                context_parallel, name, lambda *a, _do=original, **k: (events.append("compute"), _do(*a, **k))[1]
            )
        context = mixer.attend(*(x.requires_grad_() for x in inputs), 0.0, attend_fused, PLAIN)
        forward = events[:]
        context.backward(grad)
    return forward, events[len(forward) :]


def test_each_exchange_starts_before_the_computation_beside_it(ranks: Any) -> None:
    for forward, backward in ranks.run(3, _order):
        assert forward == ["ring_shift", "compute", "ring_shift", "compute", "compute"]
        # The gradients of a part leave while the next part is computed.
        steps = [["ring_shift", "compute"], ["ring_shift", "compute", "ring_shift"], ["compute", "ring_shift"]]
        assert backward == [event for step in steps for event in step]


# --- dropout ---


def _dropped(kind: str, seeds: range) -> tuple[Tensor, Tensor, bool]:
    """The mean context over seeds and the exact one, of whole sequences; whether a seed repeats its result."""
    axis, length = _axis(), 8
    mixer = KINDS[kind](axis)
    q, k, v, _ = (mixer.shard(x, 0) for x in _whole(length, 2, torch.float64))

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return mixer.attend(q, k, v, 0.3, attend_fused, PLAIN)

    mean = torch.stack([draw(seed) for seed in seeds]).mean(0)
    repeats = torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    return (
        _gathered(mean, axis, length),
        _gathered(mixer.attend(q, k, v, 0.0, attend_fused, PLAIN), axis, length),
        repeats,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_keeps_the_mean_and_follows_the_seed(ranks: Any, kind: str) -> None:
    for mean, exact, repeats in ranks.run(2, _dropped, kind, range(500)):
        assert (mean - exact).abs().max() < 0.25
        assert (mean - exact).abs().mean() < 0.03
        assert repeats


def _dropped_slopes(kind: str) -> list[tuple[float, float]]:
    """Directional derivatives of q, k and v with dropout: by backward and by differences, over all ranks."""
    axis = _axis()
    mixer = KINDS[kind](axis)
    q, k, v, grad = (mixer.shard(x, 0) for x in _whole(16, 2, torch.float64))

    def total(inputs: list[Tensor]) -> Tensor:
        torch.manual_seed(3)
        return (mixer.attend(inputs[0], inputs[1], inputs[2], 0.3, attend_fused, PLAIN) * grad).sum()

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(total(leaves), leaves)
    found = []
    for index, gradient in enumerate(gradients):
        direction = torch.randn(gradient.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(axis.index))
        moved, back = (
            total([x + step * direction if i == index else x for i, x in enumerate((q, k, v))])
            for step in (1e-6, -1e-6)
        )
        both = torch.stack([(gradient * direction).sum(), (moved - back) / 2e-6])
        found.append(tuple(comm.all_reduce(both, axis).tolist()))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_the_same_in_the_backward_pass(ranks: Any, kind: str) -> None:
    for slopes in ranks.run(2, _dropped_slopes, kind):
        for backward, numeric in slopes:
            assert backward == pytest.approx(numeric, rel=1e-6)
            assert abs(numeric) > 1e-3


def _masks(length: int) -> Tensor:
    """Which probabilities [query, key] are kept: equal scores, and values that tell the keys apart."""
    axis = _axis()
    mixer = RingAttention(axis)
    zeros = torch.zeros(length // axis.size, 1, 1, length, dtype=torch.float64)
    values = mixer.shard(torch.eye(length, dtype=torch.float64), 0)[:, None, None]
    torch.manual_seed(0)  # the same stream on all ranks
    return _gathered(mixer.attend(zeros, zeros, values, 0.25, attend_fused, PLAIN), axis, length)[:, 0, 0]


def test_the_ring_masks_each_block_independently(ranks: Any) -> None:
    length = 64
    context, _ = ranks.run(2, _masks, length)
    kept = context > 0
    rows = torch.arange(1, length + 1, dtype=torch.float64)[:, None]
    torch.testing.assert_close(context, kept / rows / 0.75)
    assert not kept.triu(1).any()
    assert 0.7 < kept.sum() / (length * (length + 1) / 2) < 0.8
    here = [torch.cat([torch.arange(64)[c.start : c.stop] for c in balanced_positions(64, 2, r)]) for r in (0, 1)]
    first, second = (kept[positions][:, positions] for positions in here)
    later = kept[here[0][16:]][:, here[1]]  # the second step of rank 0
    triangle = torch.ones(16, 16, dtype=torch.bool).tril()
    assert not torch.equal(first, second)
    assert not torch.equal(first[:16, :16][triangle], later[:, :16][triangle])


# --- inside the layer ---

SHAPE = AttentionShape(hidden_size=24, num_heads=4, num_groups=2, head_size=6)


def _new_layer(mixer: ContextParallelAttention) -> SelfAttention:
    torch.manual_seed(0)
    layer = SelfAttention(
        SHAPE, Solo(), mixer=mixer, qkv_bias=True, bias=True, dtype=torch.float64, device=torch.device("cpu")
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def _layer(mixer: ContextParallelAttention, compiled: bool = False) -> tuple[list[Tensor], Tensor]:
    """The gradients of a layer's weights and its output, over the positions of the mixer."""
    layer = _new_layer(mixer)
    if compiled:
        layer.compile(backend="aot_eager")
    x, grad = torch.randn(2, 16, BATCH, 24, dtype=torch.float64)
    rope = rotation(mixer.positions(16), 6, 10000, interleaved=False, dtype=torch.float64)
    output = layer(mixer.shard(x, 0), rope)
    output.backward(mixer.shard(grad, 0))
    gradients = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
    return gradients, output.detach()


def _layer_on_ranks(kind: str, compiled: bool) -> tuple[list[Tensor], Tensor]:
    axis = _axis()
    gradients, output = _layer(KINDS[kind](axis), compiled)
    return [comm.all_reduce(gradient, axis) for gradient in gradients], _gathered(output, axis, 16)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_weight_gradients_of_a_layer_sum_to_those_of_one_process(ranks: Any, kind: str, compiled: bool) -> None:
    wanted_gradients, wanted_output = _layer(LocalAttention())
    assert len(wanted_gradients) == 4
    for gradients, output in ranks.run(2, _layer_on_ranks, kind, compiled):
        for mine, reference in zip([output, *gradients], [wanted_output, *wanted_gradients], strict=True):
            assert (mine - reference).abs().max() <= 1e-10 * reference.abs().max()
