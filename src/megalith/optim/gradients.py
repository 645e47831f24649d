"""Preallocated gradient memory: the sink that the layers write their weight gradients to.

One flat buffer holds the gradient of every parameter; the first write of a step overwrites and later ones add, so
there is neither a clearing pass nor an allocation in a step. Gradients that autograd returns (biases, norms, and
everything when no sink is attached) are moved in by a hook as soon as they are complete.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from megalith.nn.precision import product_dtype

SCRATCH_ELEMENTS = 1 << 22  # of a product that is rounded before it is added: 8 MiB of bf16, within the cache of a CPU


class GradientBuffers:
    """Gradients of named parameters in one flat buffer.

    Args:
        named: Parameters with their names, in module order.
        dtype: Of the buffer: fp32 where gradients accumulate in fp32, else that of the parameters.

    Attributes:
        flat: The buffer, 1-D.
        grads: Views of it by parameter name, in the shapes of the parameters.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], dtype: torch.dtype) -> None:
        sizes = [parameter.numel() for _, parameter in named]
        device = named[0][1].device
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        parts = self.flat.split(sizes)
        self.grads = {name: part.view_as(p) for (name, p), part in zip(named, parts, strict=True)}
        self._grad_of = {p: self.grads[name] for name, p in named}
        self._written: set[Parameter] = set()
        self._scratch = torch.empty(0, device=device)
        for _, parameter in named:
            parameter.register_post_accumulate_grad_hook(self._move_in)

    def begin(self) -> None:
        """Start a step: whatever the buffer holds is stale."""
        self._written.clear()

    def finish(self) -> None:
        """End the backward passes of a step: a parameter that received nothing has a zero gradient."""
        for parameter, grad in self._grad_of.items():
            if parameter not in self._written:
                grad.zero_()

    def _is_first(self, parameter: Parameter) -> bool:
        first = parameter not in self._written
        self._written.add(parameter)
        return first

    def matmul(self, parameter: Parameter, grad_TO: Tensor, x_TI: Tensor) -> None:
        """Add grad^T @ x [O, I], rounded to the dtype of the factors as autograd rounds it."""
        total, first = self._grad_of[parameter], self._is_first(parameter)
        if total.dtype == grad_TO.dtype == product_dtype(grad_TO):
            if first:
                torch.mm(grad_TO.t(), x_TI, out=total)
            else:
                total.addmm_(grad_TO.t(), x_TI)
            return
        dtype = product_dtype(grad_TO)
        x = x_TI.to(dtype)
        rows = max(1, SCRATCH_ELEMENTS // x.shape[1])
        for start in range(0, total.shape[0], rows):
            part = total[start : start + rows]
            product = torch.mm(grad_TO[:, start : start + rows].to(dtype).t(), x, out=self._scratch_like(part, dtype))
            rounded = product.to(grad_TO.dtype)
            if first:
                part.copy_(rounded)
            else:
                part.add_(rounded)

    def _scratch_like(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        if self._scratch.dtype != dtype or self._scratch.numel() < part.numel():
            self._scratch = torch.empty(max(part.numel(), SCRATCH_ELEMENTS), dtype=dtype, device=part.device)
        return self._scratch[: part.numel()].view_as(part)

    def rows(self, parameter: Parameter, ids_T: Tensor, grad_TD: Tensor) -> None:
        """Add the rows of `grad_TD` to the rows of the gradient that `ids_T` names."""
        total = self._grad_of[parameter]
        if self._is_first(parameter):
            total.zero_()
        rows = grad_TD.to(total.dtype)
        if total.device.type == "cuda":  # sorts the ids, so that the sum does not depend on timing as index_add_'s does
            total.index_put_((ids_T,), rows, accumulate=True)
        else:
            total.index_add_(0, ids_T, rows)

    def _move_in(self, parameter: Tensor) -> None:
        assert isinstance(parameter, Parameter)
        if parameter.grad is None:  # its gradient went to the sink
            return
        total = self._grad_of[parameter]
        if self._is_first(parameter):
            total.copy_(parameter.grad)
        else:
            total.add_(parameter.grad)
        parameter.grad = None
