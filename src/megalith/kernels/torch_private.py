"""Undocumented operators of torch; the package uses them through this module only.

tests/unit/kernels/test_torch_private.py calls each of them, and reports in one line what a new torch has broken.
Tested versions are in pyproject.toml.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.device import is_host

foreach_add_, foreach_copy_ = torch._foreach_add_, torch._foreach_copy_
foreach_lerp, foreach_lerp_ = torch._foreach_lerp, torch._foreach_lerp_
foreach_mul_, foreach_norm, foreach_sign_ = torch._foreach_mul_, torch._foreach_norm, torch._foreach_sign_
unscale_and_check_ = torch._amp_foreach_non_finite_check_and_unscale_
"""As called by `torch.amp.GradScaler`: (gradients, found_inf [1], inverse scale [1])."""


def has_cpu_flash() -> bool:
    """Return whether this torch has a flash kernel for CPUs."""
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return context and lse from SDPA's flash kernel of the device."""
    cpu, aten = is_host(q.device), torch.ops.aten
    kernel = aten._scaled_dot_product_flash_attention_for_cpu if cpu else aten._scaled_dot_product_flash_attention
    context, lse, *_ = kernel(q, k, v, 0.0, causal, scale=scale)
    return context, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for `flash_forward`."""
    arguments = (grad, q, k, v, context, lse.contiguous())
    if is_host(q.device):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = kernel(*arguments, 0.0, causal, scale=scale)
    else:
        nothing = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout state, unused without dropout
        rest = (None, None, q.shape[2], k.shape[2], 0.0, causal, nothing, nothing)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
        dq, dk, dv, *_ = kernel(*arguments, *rest, scale=scale)
    return dq, dk, dv


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, *places: Any, scale: float, window: int | None
) -> tuple[Tensor, ...]:
    """Return context, lse and two tensors of dropout state from the causal flash kernel for GPUs.

    `places` are the offsets of queries and keys, their maximum lengths, and the dropout probability. Without offsets
    q, k and v are whole sequences [B, S, H, K], else packed [T, H, K]; the lse is [B, H, S] or [H, T]. A query sees
    `window` keys before its own; the last query's own key is the last one.
    """
    kernel = torch.ops.aten._flash_attention_forward
    return tuple(kernel(q, k, v, *places, True, False, scale=scale, window_size_left=window)[:4])


def varlen_backward(grad: Tensor, *kept: Any, scale: float, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv for `varlen_forward`; `kept` are q, k, v, context, lse, places and the dropout state."""
    *others, first, second = kept
    kernel = torch.ops.aten._flash_attention_backward
    dq, dk, dv = kernel(grad, *others, True, first, second, scale=scale, window_size_left=window)
    return dq, dk, dv


def silu_backward(grad: Tensor, x: Tensor, *, out: Tensor) -> Tensor:
    """Compute the gradient of x for silu(x); `out` may be `grad`."""
    torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=out)
    return out


def softmax_backward(grad: Tensor, probabilities: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the gradient of a softmax's input (last dimension); written to `out`, which may be `grad`, if given."""
    if out is None:
        return torch._softmax_backward_data(grad, probabilities, -1, grad.dtype)
    torch.ops.aten._softmax_backward_data.out(grad, probabilities, -1, grad.dtype, grad_input=out)
    return out


def sigmoid_backward(grad: Tensor, h: Tensor, *, out: Tensor) -> Tensor:
    """Compute grad h (1 - h), the gradient of a sigmoid's input from its output h."""
    torch.ops.aten.sigmoid_backward.grad_input(grad, h, grad_input=out)
    return out


def has_onednn_linear() -> bool:
    """Return whether this torch has `onednn_linear`, which torch.compile uses."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def has_onednn_bf16() -> bool:
    """Return whether `onednn_linear` multiplies bf16 on this processor.

    The answer fixes oneDNN's instruction set, so that ONEDNN_MAX_CPU_ISA has no effect any more: not to be asked for on
    import.
    """
    return has_onednn_linear() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute y = x W^T + b with oneDNN, in fp32 or bf16 on a CPU. [..., I], [O, I], [O] -> [..., O]."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def onednn_pack(weight: Tensor, rows: int) -> Tensor:
    """Return a weight [O, I] in oneDNN's layout for x with `rows` rows, an opaque tensor for `onednn_linear`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def has_fp16_linear() -> bool:
    """Return whether this torch has `fp16_linear` for this processor: FBGEMM's, which needs AVX2."""
    quantized = torch.ops.quantized
    return (
        torch.backends.quantized.engine in ("x86", "fbgemm")
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        and hasattr(quantized, "linear_prepack_fp16")
        and hasattr(quantized, "linear_dynamic_fp16")
    )


def fp16_pack(weight: Tensor, bias: Tensor | None = None) -> Any:
    """Return a weight [O, I] in fp32, rounded to fp16, and a bias in FBGEMM's layout: an object for `fp16_linear`."""
    return torch.ops.quantized.linear_prepack_fp16(weight, bias)


def fp16_linear(x: Tensor, packed: Any) -> Tensor:
    """Compute y = x W^T + b in fp32 with FBGEMM. [..., I] -> [..., O]."""
    y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return y


def version_of(tensor: Tensor) -> int:
    """Return torch's version counter of a tensor: the number of in-place writes."""
    return tensor._version


def memory_of(tensor: Tensor) -> int:
    """Return a number that tells the memory of live tensors apart, also on torch's meta device, without addresses."""
    return tensor.untyped_storage()._cdata


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd treats a tensor as a view of another."""
    return tensor._is_view()


def record_memory_history() -> None:
    """Start to record allocations of GPU memory."""
    torch.cuda.memory._record_memory_history(stacks="python")


def dump_memory_history(path: str) -> None:
    """Write the record for pytorch.org/memory_viz, and stop recording."""
    torch.cuda.memory._dump_snapshot(path)
    torch.cuda.memory._record_memory_history(enabled=None)


def sdpa_kernel_for(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> str:
    """Return the name of the kernel that torch SDPA takes for a call: MATH, FLASH_ATTENTION, ..."""
    return str(torch._C._SDPBackend(torch._fused_sdp_choice(q, k, v, mask, dropout, mask is None)).name)


COMPILE_DISABLERS = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
"""Environment variables that turn torch.compile off, without a word, where they are 1."""


def cpp_compiler(environ: Mapping[str, str]) -> str:
    """Return the C++ compiler that torch.compile calls on a CPU."""
    return environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def forbid_eager_fallback() -> None:
    """Make torch.compile raise where it would leave a function uncompiled; an environment variable may ask for that.

    Layers of several kinds, in training and evaluation, in sizes known and variable, are more than its limit of 8.
    """
    import torch._dynamo

    config: Any = torch._dynamo.config
    config.suppress_errors, config.fail_on_recompile_limit_hit = False, True
    config.recompile_limit = max(config.recompile_limit, 64)


def is_compile_error(error: Exception) -> bool:
    """Return whether torch.compile raised it, and not the function that it compiles."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return isinstance(error, TorchDynamoException | FailOnRecompileLimitHit)
