"""The experts of an MoE layer on this rank: feed-forward layers that are computed together."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from megalith.nn.feed_forward import Activation, FeedForward
from megalith.nn.moe.grouped import add_biases, grouped
from megalith.nn.placement import Replicated
from megalith.nn.precision import FactoryKwargs
from megalith.nn.recompute import RecomputedOutputs
from megalith.nn.region import Region


class Experts(nn.Module):
    """The experts of this rank, [N, D] -> [N, D], with rows sorted by expert; each is a feed-forward layer.

    Parameters are named `local_experts.K`, K counted from 0 on each rank, as in Megatron. `nn.moe.layer` calls the
    operators of the region around them: results are partial sums over its ranks.

    Args:
        here: the numbers of these experts among all of the layer.
        total: number of experts of the layer on all ranks.
        weigh_inputs: multiply the input rows by their weights, instead of the activations between the projections.
        inner_again: recompute the activations between the projections in the backward pass.

    Attributes:
        first: the number of expert `local_experts.0` among all.
        total: how many experts the layer has on all ranks.
    """

    def __init__(
        self,
        here: range,
        total: int,
        hidden_size: int,
        ffn_size: int,
        activation: Activation,
        region: Region,
        *,
        bias: bool,
        inner_again: bool = False,
        weigh_inputs: bool = False,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.first, self.total = here.start, total
        self.region, self.activation, self.inner_again = region, activation, inner_again
        self.weigh_inputs = weigh_inputs
        layers = [FeedForward(hidden_size, ffn_size, activation, region, bias=bias, **factory) for _ in here]
        for layer in layers:
            layer.linear_fc2.bias_placement = Replicated(partial=True)  # the first rank of the region adds it
        self.local_experts = nn.ModuleList(layers)
        self._ups = [layer.linear_fc1 for layer in layers]
        self._downs = [layer.linear_fc2 for layer in layers]

    def forward(self, x_ND: Tensor, counts: list[int], weights_N: Tensor) -> Tensor:
        """Compute expert k on its `counts[k]` rows and weigh each row.

        As in Megatron the weight multiplies the activations between the projections, and the bias of the second one.
        """
        if self.weigh_inputs:
            x_ND = (x_ND * weights_N.unsqueeze(-1)).to(x_ND.dtype)
            weights_N = torch.ones_like(weights_N)
        up_NF = add_biases(grouped(x_ND, counts, self._ups), counts, self._ups)
        if self.inner_again and self.training and torch.is_grad_enabled():
            inner = RecomputedOutputs(self._inner, up_NF, weights_N)
            (inner_NF,) = inner.outputs
            with inner.not_kept():
                y_ND = grouped(inner_NF, counts, self._downs)
        else:
            (inner_NF,) = self._inner(up_NF, weights_N)
            y_ND = grouped(inner_NF, counts, self._downs)
        return add_biases(y_ND, counts, self._downs, weights_N) if self.region.index == 0 else y_ND

    def _inner(self, up_NF: Tensor, weights_N: Tensor) -> tuple[Tensor]:
        inner_NF = self.activation(up_NF)
        return ((inner_NF * weights_N.unsqueeze(-1)).to(inner_NF.dtype),)


def experts_within(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Yield the experts of each layer of a model, with the prefix of the names of their parameters."""
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            yield f"{name}.", module


def _experts_around(name: str, model: nn.Module) -> tuple[str, Experts] | None:
    """Return the experts that a parameter is of, with the prefix of its name; None for other parameters."""
    owners = name.split(".")[:-1]
    for depth in range(1, len(owners) + 1):
        module = model.get_submodule(".".join(owners[:depth]))
        if isinstance(module, Experts):
            return f"{'.'.join(owners[:depth])}.", module
    return None


def region_of(name: str, model: nn.Module) -> Region:
    """Return the tensor-parallel region of a parameter: that of experts may differ from that of the layers."""
    found = _experts_around(name, model)
    region: Region = model.region if found is None else found[1].region  # type: ignore[assignment]
    return region


def name_among_all(name: str, model: nn.Module) -> str:
    """Return the name of a parameter, for an expert's with its number among all experts of the layer."""
    found = _experts_around(name, model)
    if found is None:
        return name
    prefix, experts = found
    kind, number, rest = name.removeprefix(prefix).split(".", 2)
    return f"{prefix}{kind}.{experts.first + int(number)}.{rest}"
