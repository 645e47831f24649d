"""The port through which weight gradients leave the backward pass.

Autograd returns each weight gradient in freshly allocated memory and adds it to `.grad` afterwards; on a CPU the
first touch of that memory costs more than writing the gradient. A sink owns preallocated buffers instead, and the
layers pass it the two operands of the gradient, so that the product is written straight into the buffer. The same
port later lets a data-parallel bucket start its reduction, or a pipeline schedule delay the product.

Layers without a sink return their weight gradients to autograd as usual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import Module, Parameter


class GradientSink(Protocol):
    """Receives gradients of parameters; the first write of a step overwrites, later ones add.

    Attributes:
        defers: whether it keeps operands for later at this moment.
    """

    @property
    def defers(self) -> bool: ...

    def accumulate_linear(
        self, parameter: Parameter, grad_TO: Tensor, x_TI: Tensor, *, buffer_reused: bool = False
    ) -> None:
        """Add grad^T @ x, of shape [O, I], to the gradient of `parameter`.

        The sink may keep both and defer the product, unless `buffer_reused`: one is overwritten after the call.
        """
        ...

    def accumulate_embedding(self, parameter: Parameter, ids_T: Tensor, grad_TD: Tensor) -> None:
        """Add each row of `grad_TD` to the row of the gradient of the table `parameter` [V, D] that `ids_T` names."""
        ...


@dataclass(frozen=True)
class CopyingSink:
    """Passes copies to a sink that defers products, from memory that is used again, as that of a compiled graph."""

    sink: GradientSink
    defers = False

    def accumulate_linear(
        self, parameter: Parameter, grad_TO: Tensor, x_TI: Tensor, *, buffer_reused: bool = False
    ) -> None:
        self.sink.accumulate_linear(parameter, grad_TO.clone(), x_TI.clone())

    def accumulate_embedding(self, parameter: Parameter, ids_T: Tensor, grad_TD: Tensor) -> None:
        self.sink.accumulate_embedding(parameter, ids_T.clone(), grad_TD.clone())


def attach_sink(module: Module, sink: GradientSink | None) -> None:
    """Set the gradient sink of every layer below `module` that has one; None removes it."""
    for layer in module.modules():
        if hasattr(layer, "sink"):
            setattr(layer, "sink", sink)  # noqa: B010 - a plain attribute, not a submodule
