"""Sliding windows and attention sinks without a mask of all queries and keys, against the masked form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.devices import H100, MI300, V100
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalith.device import DESCRIBED, Capability
from megalith.kernels import partial_attention
from megalith.models import attention_kernels
from megalith.models.attention_kernels import attend_by_device
from megalith.nn.attend import QUERIES, AttentionRule, attend_fused, by_queries
from megalith.nn.documents import Documents

META = torch.device("meta")
SINK = torch.tensor([0.5, -1.0, 2.0, 0.0])
RULES = {
    "window": AttentionRule(scale=0.3, window=70),
    "narrow": AttentionRule(window=0),
    "sink": AttentionRule(sink_H=SINK),
    "both": AttentionRule(scale=0.7, window=130, sink_H=SINK),
}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5}
Attend = Callable[[Tensor, Tensor, Tensor, float, AttentionRule], Tensor]


def _qkv(length: int, dtype: torch.dtype, device: torch.device | None = None) -> list[Tensor]:
    """q, k, v: two queries a key-value head."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(length, 2, heads, 8) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def _both_passes(attend: Attend, inputs: list[Tensor], rule: AttentionRule) -> list[Tensor]:
    """Return the context and the gradients of q, k, v and the sinks."""
    sink = None if rule.sink_H is None else rule.sink_H.to(inputs[0]).requires_grad_()
    leaves = [*inputs, *([] if sink is None else [sink])]
    found = attend(*inputs, 0.0, replace(rule, sink_H=sink))
    upstream = torch.linspace(-1, 1, found.numel(), dtype=found.dtype, device=found.device).view_as(found)
    return [found, *torch.autograd.grad(found, leaves, upstream)]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, window: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores [.., H, Q, S] masked by causality, window and documents, keys and values with copies of heads."""
    heads = q.shape[-2]
    k, v = (x.repeat_interleave(heads // x.shape[-2], dim=-2).transpose(-3, -2) for x in (k, v))
    scores = scale * q.transpose(-3, -2) @ k.transpose(-2, -1)
    at = torch.arange(q.shape[-3])
    distance = at[:, None] - at
    hidden = distance < 0 if window is None else (distance < 0) | (distance > window)
    if offsets is not None:
        document = torch.bucketize(at, offsets[1:], right=True)
        hidden = hidden | (document[:, None] != document)
    return scores.masked_fill(hidden, -torch.inf), k, v


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *places: Any, scale: float, window: int | None
) -> tuple[Tensor, ...]:
    """Compute `torch_private.varlen_forward` on a CPU."""
    assert places[0] is places[1]
    assert (q.dim(), k.dim()) == ((4, 4) if places[0] is None else (3, 3))
    scores, k, v = _flash(q, k, v, places[0], window, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v).transpose(-3, -2).contiguous(), lse, lse, lse


def _flash_backward(grad: Tensor, *kept: Any, scale: float, window: int | None) -> tuple[Tensor, ...]:
    """Compute `torch_private.varlen_backward` on a CPU: as the kernel does, by the context and lse that it is given."""
    q, k, v, context, lse, offsets = kept[:6]
    scores, wide_k, wide_v = _flash(q, k, v, offsets, window, scale)
    weights = (scores - lse[..., None]).exp()
    grad_HQK, delta = grad.transpose(-3, -2), (grad * context).sum(-1).transpose(-2, -1)[..., None]
    d_scores = weights * (grad_HQK @ wide_v.transpose(-2, -1) - delta) * scale
    dq = d_scores @ wide_k
    dk, dv = d_scores.transpose(-2, -1) @ q.transpose(-3, -2), weights.transpose(-2, -1) @ grad_HQK
    dk, dv = (d.unflatten(-3, (k.shape[-2], -1)).sum(-3) for d in (dk, dv))
    return tuple(d.transpose(-3, -2) for d in (dq, dk, dv))


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Put the flash kernel for GPUs, written out, on this CPU; return the windows that it was called with."""
    windows: list[int | None] = []

    def forward(*given: Any, **options: Any) -> tuple[Tensor, ...]:
        windows.append(options["window"])
        return _flash_forward(*given, **options)

    monkeypatch.setattr(attention_kernels, "has_varlen", lambda q, **_: True)
    monkeypatch.setattr(partial_attention, "varlen_forward", forward)
    monkeypatch.setattr(partial_attention, "varlen_backward", _flash_backward)
    return windows


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("length", [130, QUERIES + 77, 2 * QUERIES])
@pytest.mark.parametrize("name", RULES)
def test_without_a_mask_as_with_it(name: str, length: int, dtype: torch.dtype) -> None:
    """By the kernels of a CPU, and by blocks of queries, as on a GPU without flash attention."""
    inputs, rule = _qkv(length, dtype), RULES[name]
    wanted = _both_passes(attend_fused, [x.detach().double().requires_grad_() for x in inputs], rule)
    for attend in (attend_by_device, partial(by_queries, attend_fused)):
        for mine, reference in zip(_both_passes(attend, inputs, rule), wanted, strict=True):
            assert mine.dtype == dtype
            limit = TOLERANCES[dtype] * max(
                1.0, float(reference.detach().abs().max())
            )  # with the own key alone dq is 0
            assert (mine.double() - reference).abs().max() <= limit


@pytest.mark.parametrize("name", RULES)
def test_by_the_flash_kernel_of_gpus(name: str, flash: list[int | None]) -> None:
    inputs, rule = _qkv(150, torch.float64), RULES[name]
    found, wanted = _both_passes(attend_by_device, inputs, rule), _both_passes(attend_fused, inputs, rule)
    for mine, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-10)
    assert flash == [rule.window], "one call for all sequences"


@pytest.mark.parametrize("name", RULES)
def test_by_the_flash_kernel_of_gpus_in_documents(name: str, flash: list[int | None]) -> None:
    ids = torch.zeros(2, 150, dtype=torch.int32)
    ids[0, [1, 40]], ids[1, 100] = 1, 1
    inputs, rule = _qkv(150, torch.float64), replace(RULES[name], documents=Documents.of(ids.cumsum(1)))
    found, wanted = _both_passes(attend_by_device, inputs, rule), _both_passes(attend_fused, inputs, rule)
    for mine, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-10)
    assert flash == [rule.window if rule.limits(110) else None], "one call for all documents"


def test_the_sink_of_a_cpu_with_dropout_repeats_and_keeps_the_mean() -> None:
    inputs, rule = [x.detach() for x in _qkv(60, torch.float32)], RULES["sink"]
    torch.manual_seed(0)
    draws = [attend_by_device(*inputs, 0.3, rule) for _ in range(600)]
    assert not torch.equal(draws[0], draws[1])
    torch.manual_seed(0)
    assert torch.equal(attend_by_device(*inputs, 0.3, rule), draws[0])
    torch.testing.assert_close(torch.stack(draws).mean(0), attend_fused(*inputs, 0.0, rule), rtol=0, atol=0.2)


class _Largest(TorchDispatchMode):
    """Records the most elements that a tensor had which an operator returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


LENGTH = 4096


def _largest(attend: Attend, inputs: list[Tensor], rule: AttentionRule) -> int:
    with _Largest() as mode:
        _both_passes(attend, inputs, rule)
    return mode.elements


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("able", [None, V100, H100, MI300], ids=lambda able: getattr(able, "name", "cpu"))
def test_no_mask_of_all_queries_and_keys(able: Capability | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on a CPU, and for GPUs on the meta device, whose SDPA is not fused: there a call's scores count too."""
    if able is not None:
        monkeypatch.setitem(DESCRIBED, META, able)
    device, dtype = (META, torch.float16) if able else (None, torch.float32)
    shape = [(LENGTH, 1, heads, 8) for heads in (2, 1, 1)]
    inputs = [torch.zeros(size, dtype=dtype, device=device, requires_grad=True) for size in shape]
    rule = RULES[name]
    rule = rule if rule.sink_H is None else replace(rule, sink_H=rule.sink_H[:2])
    largest, squares = _largest(attend_by_device, inputs, rule), LENGTH * LENGTH
    assert _largest(attend_fused, inputs, rule) >= squares, "the count sees the mask"
    by_flash = able is H100
    assert largest <= (LENGTH * 2 * 8 if by_flash else squares // 2)


def test_which_gpus_take_windows_and_sinks_in_one_call() -> None:
    assert [able.has_windowed_flash for able in (V100, H100, MI300)] == [False, True, False]


@pytest.mark.parametrize("able", [V100, H100], ids=lambda able: able.name)
def test_compiled_blocks_have_them_in_their_graph(able: Capability, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced in both passes without a break; nothing is compiled, so that no compiler is needed."""
    monkeypatch.setitem(DESCRIBED, META, able)
    torch._dynamo.reset()
    shapes = [(2 * QUERIES, 1, heads, 8) for heads in (4, 2, 2)]
    inputs = [torch.zeros(shape, dtype=torch.float16, device=META, requires_grad=True) for shape in shapes]
    graph = torch.compile(attend_by_device, backend="aot_eager", fullgraph=True)
    context, *gradients = _both_passes(graph, inputs, RULES["both"])
    assert [gradient.shape for gradient in gradients] == [*(x.shape for x in inputs), SINK.shape]
    assert context.shape == inputs[0].shape
    torch._dynamo.reset()
