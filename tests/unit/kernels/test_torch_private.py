"""Canaries: each undocumented operator of torch that the package calls still does what it is called for."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megalith.kernels import torch_private as private

SCALE = 0.5


def _heads(*shape: int) -> list[Tensor]:
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.mark.skipif(not private.has_cpu_flash(), reason="this torch has no flash kernel for CPUs")
def test_flash_kernel_for_cpus() -> None:
    q, k, v = _heads(2, 3, 5, 4)
    scores = (SCALE * q @ k.mT).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    wanted = scores.softmax(-1) @ v
    context, lse = private.flash_forward(q, k, v, True, SCALE)
    torch.testing.assert_close(context, wanted, msg="aten._scaled_dot_product_flash_attention_for_cpu: context")
    torch.testing.assert_close(lse, scores.logsumexp(-1), msg="aten._scaled_dot_product_flash_attention_for_cpu: lse")
    grad = torch.randn_like(wanted)
    own = private.flash_backward(grad, *(x.detach() for x in (q, k, v, context, lse)), True, SCALE)
    for found, right in zip(own, torch.autograd.grad(wanted, (q, k, v), grad), strict=True):
        torch.testing.assert_close(found, right, msg="aten._scaled_dot_product_flash_attention_for_cpu_backward")


@pytest.mark.skipif(not private.has_cpu_flash(), reason="this torch has no flash kernel for CPUs")
def test_flash_kernel_for_cpus_takes_groups() -> None:
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    grad, copies = torch.randn_like(q), [x.repeat_interleave(3, dim=1) for x in (k, v)]
    context, lse = private.flash_forward(q, k, v, True, SCALE)
    wanted = private.flash_forward(q, *copies, True, SCALE)
    torch.testing.assert_close((context, lse), wanted, msg="aten._scaled_dot_product_flash_attention_for_cpu: groups")
    dq, dk, dv = private.flash_backward(grad, q, k, v, context, lse, True, SCALE)
    right_dq, *sums = private.flash_backward(grad, q, *copies, context, lse, True, SCALE)
    right_dk, right_dv = (x.unflatten(1, (2, 3)).sum(2) for x in sums)
    torch.testing.assert_close(
        (dq, dk, dv),
        (right_dq, right_dk, right_dv),
        msg="aten._scaled_dot_product_flash_attention_for_cpu_backward: groups",
    )


def test_gradient_of_a_softmax() -> None:
    scores, grad = torch.randn(3, 7, requires_grad=True), torch.randn(3, 7)
    probabilities = scores.softmax(-1)
    (wanted,) = torch.autograd.grad(probabilities, scores, grad)
    kept = probabilities.detach()
    torch.testing.assert_close(private.softmax_backward(grad, kept), wanted, msg="torch._softmax_backward_data")
    private.softmax_backward(grad, kept, out=grad)
    torch.testing.assert_close(grad, wanted, msg="aten._softmax_backward_data.out over its own input")


def test_gradient_of_silu() -> None:
    x, grad = torch.randn(3, 7, requires_grad=True), torch.randn(3, 7)
    (wanted,) = torch.autograd.grad(torch.nn.functional.silu(x), x, grad)
    private.silu_backward(grad, x.detach(), out=grad)
    torch.testing.assert_close(grad, wanted, msg="aten.silu_backward.grad_input over its own input")


def test_gradient_of_a_sigmoid() -> None:
    x, grad, found = torch.randn(3, 7, requires_grad=True), torch.randn(3, 7), torch.empty(3, 7)
    h = x.sigmoid()
    (wanted,) = torch.autograd.grad(h, x, grad)
    private.sigmoid_backward(grad, h.detach(), out=found)
    torch.testing.assert_close(found, wanted, msg="aten.sigmoid_backward.grad_input")


@pytest.mark.skipif(not private.has_onednn_linear(), reason="this torch has no oneDNN operator for linear layers")
def test_linear_by_onednn() -> None:
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(6, 8), torch.randn(6)
    for added in (None, bias):
        wanted = torch.nn.functional.linear(x, weight, added)
        torch.testing.assert_close(private.onednn_linear(x, weight, added), wanted, msg="mkldnn._linear_pointwise")
        packed = private.onednn_linear(x, private.onednn_pack(weight, 16), added)
        torch.testing.assert_close(packed, wanted, msg="mkldnn._reorder_linear_weight")


@pytest.mark.skipif(not private.has_fp16_linear(), reason="this torch or processor has no fp16 products")
def test_linear_by_fbgemm() -> None:
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(6, 8).half().float(), torch.randn(6)
    for added in (None, bias):
        wanted = torch.nn.functional.linear(x, weight, added)
        found = private.fp16_linear(x, private.fp16_pack(weight, added))
        torch.testing.assert_close(found, wanted, msg="quantized.linear_prepack_fp16, linear_dynamic_fp16")


def test_operators_on_lists() -> None:
    def both() -> tuple[list[Tensor], list[Tensor]]:
        return [torch.tensor([1.0, -2.0])], [torch.tensor([3.0, 4.0])]

    (x,), (y,) = both()
    assert torch.equal(private.foreach_lerp([x], [y], 0.5)[0], x.lerp(y, 0.5)), "torch._foreach_lerp"
    assert private.foreach_norm([y])[0] == 5.0, "torch._foreach_norm"
    for change, wanted in (
        (lambda x, y: private.foreach_add_(x, y, alpha=-2.0), [-5.0, -10.0]),
        (lambda x, y: private.foreach_copy_(x, y), [3.0, 4.0]),
        (lambda x, y: private.foreach_lerp_(x, y, 0.5), [2.0, 1.0]),
        (lambda x, y: private.foreach_mul_(x, 3.0), [3.0, -6.0]),
        (lambda x, y: private.foreach_sign_(x), [1.0, -1.0]),
    ):
        first, second = both()
        change(first, second)
        assert first[0].tolist() == wanted, f"an operator torch._foreach_*_ does not work in place: {wanted}"


def test_check_and_unscaling_of_a_loss_scaler() -> None:
    for value, expected in ((8.0, 0.0), (torch.inf, 1.0)):
        grads, found = [torch.tensor([4.0, value])], torch.zeros(1)
        private.unscale_and_check_(grads, found, torch.tensor([0.25]))
        assert found.item() == expected, "torch._amp_foreach_non_finite_check_and_unscale_: found_inf"
        assert grads[0][0] == 1.0, "torch._amp_foreach_non_finite_check_and_unscale_: the gradient"


def test_what_autograd_says_of_a_tensor() -> None:
    x = torch.zeros(2)
    assert private.is_view(x[:1]) and not private.is_view(x), "Tensor._is_view"
    before = private.version_of(x)
    x.add_(1.0)
    assert private.version_of(x) == before + 1, "Tensor._version"


def test_operators_for_gpus_are_there() -> None:
    """What they compute is tested where there is a GPU (tests/gpu)."""
    for name in ("_scaled_dot_product_flash_attention", "_flash_attention_forward"):
        assert hasattr(torch.ops.aten, name) and hasattr(torch.ops.aten, name.replace("_forward", "") + "_backward")
    assert callable(torch.cuda.memory._record_memory_history) and callable(torch.cuda.memory._dump_snapshot)


def test_which_kernel_attention_takes() -> None:
    """Flash attention on a CPU, which has none with dropout; names of other kernels are those of `SDPBackend`."""
    q, mask = torch.zeros(1, 2, 8, 16), torch.ones(8, 8, dtype=torch.bool)
    assert [private.sdpa_kernel_for(q, q, q, None, dropout) for dropout in (0.0, 0.1)] == ["FLASH_ATTENTION", "MATH"]
    assert private.sdpa_kernel_for(q, q, q, mask, 0.1) == "MATH"
    assert {"EFFICIENT_ATTENTION", "CUDNN_ATTENTION"} < set(SDPBackend.__members__)


def test_errors_of_the_compiler_are_known() -> None:
    import torch._dynamo
    import torch._inductor.config

    config = torch._dynamo.config
    broken = torch.compile(lambda x: torch._dynamo.graph_break(), fullgraph=True, backend="eager")
    with config.patch(suppress_errors=True, fail_on_recompile_limit_hit=False, recompile_limit=8):
        private.forbid_eager_fallback()
        assert (config.suppress_errors, config.fail_on_recompile_limit_hit) == (False, True)
        with pytest.raises(Exception, match="graph_break") as found:
            broken(torch.ones(1))
    assert private.is_compile_error(found.value) and not private.is_compile_error(RuntimeError("another"))
    assert private.cpp_compiler(os.environ) in torch._inductor.config.cpp.cxx


def test_memory_is_told_apart_without_addresses() -> None:
    x = torch.empty(4, 6, device="meta")
    assert private.memory_of(x[1:]) == private.memory_of(x) != private.memory_of(torch.empty_like(x))
