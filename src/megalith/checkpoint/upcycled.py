"""A dense model as a mixture of experts (Komatsuzaki et al. 2022, arXiv:2212.05055; Megatron's `--moe-use-upcycling`).

Every expert of a layer is a copy of its feed-forward layer, and routers are drawn. The weights of the experts that a
token chooses add up to 1, so that the mixture computes what the dense model computes, until training moves the copies
apart.
"""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass, replace
from typing import Any

import torch

from megalith.checkpoint.adapted import Adapter, args_of
from megalith.checkpoint.content import CheckpointContent, Chunk
from megalith.checkpoint.fit import Contents, StoredTensor
from megalith.checkpoint.source import Source
from megalith.config.foreign_args import model_of
from megalith.errors import CheckpointError, ConfigError
from megalith.models.initialise import generator_for

_DENSE = re.compile(r"decoder\.layers\.mlp\.(linear_fc[12]\.(?:weight|bias))")
_EXPERTS = "decoder.layers.mlp.experts.experts."
_ROUTER = "decoder.layers.mlp.router."


@dataclass(frozen=True)
class Upcycling:
    """What is to become of each feed-forward layer.

    Attributes:
        experts: copies of it.
        top_k: of them for each token.
        seed: of the routers.
    """

    experts: int
    top_k: int = 2
    seed: int = 1234

    def check(self) -> None:
        """Refuse what is no mixture.

        Raises:
            ConfigError: says what.
        """
        if self.experts < 2:
            raise ConfigError([f"--upcycle {self.experts}: a mixture has 2 experts or more"])
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError(
                [f"--moe-router-topk {self.top_k} with --upcycle {self.experts}: use 1 to {self.experts}"]
            )


class Upcycled(Adapter):
    """With experts; of a source that has weights only.

    Args:
        source: a GPT without experts.
        wanted: how many.
        where: names the source in errors.

    Raises:
        CheckpointError: it is another model.
    """

    def __init__(self, source: Source, wanted: Upcycling, where: str) -> None:
        super().__init__(source)
        model = model_of(args_of(source.common()))
        if model.mixture or model.model_family != "gpt" or model.predictions:
            what = "is a mixture of experts already" if model.mixture else f"is a {model.model_family.upper()}"
            what = "has layers of multi-token prediction" if model.predictions else what
            raise CheckpointError(f"{where} {what}; --upcycle makes a mixture of a dense GPT")
        self._wanted, self._model = wanted, model

    def contents(self) -> Contents:
        held = self.held
        tensors: dict[str, StoredTensor] = {}
        for key, stored in held.tensors.items():
            match = _DENSE.fullmatch(key)
            layers, *rest = stored.shape if match else (0,)
            shape = (layers, self._wanted.experts, *rest)
            tensors[f"{_EXPERTS}{match[1]}" if match else key] = replace(stored, shape=shape) if match else stored
            if match and match[1].startswith("linear_fc1."):
                router = (layers, self._wanted.experts, *stored.shape[2:])
                tensors[f"{_ROUTER}{match[1].removeprefix('linear_fc1.')}"] = StoredTensor(router, stored.dtype, 1)
        return Contents(tensors, frozenset())

    def common(self) -> dict[str, Any]:
        common = self.source.common()
        made = {"num_experts": self._wanted.experts, "moe_router_topk": self._wanted.top_k, "moe_layer_freq": 1}
        return {**common, "args": Namespace(**{**args_of(common), **made})}

    def read(self, content: CheckpointContent) -> dict[str, Any]:
        others = [chunk for chunk in content.chunks if not chunk.key.startswith((_ROUTER, _EXPERTS))]
        for chunk in content.chunks:
            if chunk.key.startswith(_ROUTER):
                self._draw(chunk)
            elif chunk.key.startswith(_EXPERTS):
                self._copy(chunk)
        return self.source.read(replace(content, chunks=others))

    def _copy(self, chunk: Chunk) -> None:
        """The same of the dense layer into each expert of a chunk [layers, experts, ...]."""
        dense = torch.empty_like(chunk.tensor[:, 0])
        key = f"decoder.layers.mlp.{chunk.key.removeprefix(_EXPERTS)}"
        offset, shape = ((values[0], *values[2:]) for values in (chunk.offset, chunk.global_shape))
        self.source.read(CheckpointContent([Chunk(key, dense, offset, shape)]))
        chunk.tensor.copy_(dense.unsqueeze(1).expand_as(chunk.tensor))

    def _draw(self, chunk: Chunk) -> None:
        """Routers N(0, std), each from the seed and its own name: the same in every layout."""
        (first, *start), (_, *whole), kind = chunk.offset, chunk.global_shape, chunk.key.removeprefix(_ROUTER)
        for index, part in enumerate(chunk.tensor):
            generator = generator_for(self._wanted.seed, f"decoder.layers.{first + index}.mlp.router.{kind}")
            router = torch.empty(whole).normal_(0.0, self._model.init_method_std, generator=generator)
            part.copy_(router[tuple(slice(a, a + size) for a, size in zip(start, part.shape, strict=True))])
