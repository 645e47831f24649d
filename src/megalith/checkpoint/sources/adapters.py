"""Sources that present another source differently: weights alone, in another dtype, with another vocabulary.

Each changes one thing of what a writer or a comparison sees, and reads through to the source under it, so that a
conversion is a stack of these over a folder. None keeps a tensor.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.content import CheckpointContent, Chunk
from megalith.checkpoint.formats.megatron_names import HEAD_OF_T5, parse_name
from megalith.checkpoint.formats.megatron_optimizer import decays, with_rates
from megalith.checkpoint.formats.torch_dist import (
    OPTIMIZER_PREFIX,
    WORD_EMBEDDINGS,
    is_always_fp32,
    is_of_experts,
    is_rng_object,
    optimizer_common,
    read_optimizer_common,
    weight_of,
    with_expert_groups,
)
from megalith.checkpoint.global_parameters import OUTPUT_LAYER
from megalith.checkpoint.sources.source import (
    HALF_PRECISION,
    MAIN_PREFIX,
    Contents,
    Source,
    StoredTensor,
    fitted,
    keys_of,
    short,
)
from megalith.config import ModelConfig
from megalith.errors import CheckpointError
from megalith.models.initialise import generator_for

_OF_OPTIMIZER = ("optimizer", "opt_param_scheduler")


def args_of(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's arguments in the common state; empty where there are none."""
    args = common.get("args")
    return dict(vars(args)) if isinstance(args, Namespace) else {}


class Adapter:
    """Source that presents `source` unchanged; subclasses override what differs."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @property
    def format(self) -> str:
        return self.source.format

    @cached_property
    def held(self) -> Contents:
        return self.source.contents()

    def contents(self) -> Contents:
        return self.held

    def common(self) -> dict[str, Any]:
        return self.source.common()

    def read(self, content: CheckpointContent) -> dict[str, Any]:
        return self.source.read(content)

    def problems(self) -> list[str]:
        return self.source.problems()

    def changed(self, part: int = 0, parts: int = 1) -> list[str]:
        return self.source.changed(part, parts)


class WeightsOnly(Adapter):
    """Source without the optimizer, the scheduler that belongs to it, and the random states."""

    def contents(self) -> Contents:
        held = self.held
        tensors = {key: stored for key, stored in held.tensors.items() if not key.startswith(OPTIMIZER_PREFIX)}
        return Contents(tensors, frozenset(key for key in held.objects if not is_rng_object(key)))

    def common(self) -> dict[str, Any]:
        return {key: value for key, value in self.source.common().items() if key not in _OF_OPTIMIZER}


class InPrecision(Adapter):
    """Source with weights in `dtype` (None: each in its own) and the optimizer state of a run in that dtype.

    A run in half precision has fp32 master weights, a run in fp32 has none: they are added or dropped here. Weights
    converted to fp32 are the master weights where the source has them, not the half-precision weights.
    """

    def __init__(self, source: Source, dtype: torch.dtype | None = None) -> None:
        super().__init__(source)
        self._dtype = dtype

    def contents(self) -> Contents:
        held = self.held
        weights = {
            key: stored if is_always_fp32(key) else replace(stored, dtype=self._dtype or stored.dtype)
            for key, stored in held.tensors.items()
            if not key.startswith(OPTIMIZER_PREFIX)
        }
        states = {
            key: stored
            for key, stored in held.tensors.items()
            if key.startswith(OPTIMIZER_PREFIX) and not key.startswith(MAIN_PREFIX)
        }
        with_states = {key.removeprefix(OPTIMIZER_PREFIX).partition(".")[2] for key in states}
        mains = {
            MAIN_PREFIX + key: replace(stored, dtype=torch.float32)
            for key, stored in weights.items()
            if stored.dtype in HALF_PRECISION and key in with_states
        }
        return Contents({**weights, **states, **mains}, held.objects)

    def common(self) -> dict[str, Any]:
        common = self.source.common()
        args = args_of(common)
        if self._dtype is not None:
            named = isinstance(args.get("params_dtype"), str)
            args |= {"params_dtype": short(self._dtype) if named else self._dtype}
            args |= {"fp16": self._dtype == torch.float16, "bf16": self._dtype == torch.bfloat16}
            common["args"] = Namespace(**args)
        if common.get("optimizer"):
            precision = short(self._dtype) if self._dtype else _precision(args)
            scalars = read_optimizer_common(common["optimizer"])
            scaler = scalars.scaler if precision == "float16" else None
            # Expert-parallel experts have groups of the same settings, which are added again when written.
            groups = [group for group in scalars.param_groups if not group.get("is_expert_parallel")]
            groups = with_rates(groups, common.get("opt_param_scheduler"), args)
            common["optimizer"] = optimizer_common(groups, scalars.step, scaler, precision)
        return common

    def read(self, content: CheckpointContent) -> dict[str, Any]:
        return self.source.read(fitted("the checkpoint", self.held, content, keys_of(content)))


def _precision(args: Mapping[str, Any]) -> str:
    """Return the name of the dtype of the run's parameters."""
    if "params_dtype" in args:
        return str(args["params_dtype"]).removeprefix("torch.")
    return "float16" if args.get("fp16") else "bfloat16" if args.get("bf16") else "float32"


class WithExpertOptimizer(Adapter):
    """Source with the groups of Megatron's second optimizer, for expert-parallel experts."""

    def common(self) -> dict[str, Any]:
        common = self.source.common()
        if common.get("optimizer"):
            args, scalars = args_of(common), read_optimizer_common(common["optimizer"])
            groups = with_expert_groups(scalars.param_groups, self._decayed)
            common["optimizer"] = optimizer_common(groups, scalars.step, scalars.scaler, _precision(args))
        return common

    @property
    def _decayed(self) -> set[bool]:
        """Values of weight decay (on, off) among the parameters of experts."""
        shapes = {
            key: stored.shape for key, stored in self.held.tensors.items() if not key.startswith(OPTIMIZER_PREFIX)
        }
        return {
            decays(key, shape[parse_name(key).stacked_axes :]) for key, shape in shapes.items() if is_of_experts(key)
        }


_OVER_VOCABULARY = (
    *(WORD_EMBEDDINGS, OUTPUT_LAYER, "output_layer.bias"),  # BERT and T5 have a bias for each token
    *(f"{HEAD_OF_T5}weight", f"{HEAD_OF_T5}bias"),
)


class Repadded(Adapter):
    """Source with another number of rows in the vocabulary, in the optimizer state too; excess rows are left out.

    Rows that are missing are zeros, or with `repeat_last` copies of the last row, as Megatron's converters make them.
    """

    def __init__(self, source: Source, rows: int, *, repeat_last: bool = False) -> None:
        super().__init__(source)
        self._rows, self._repeat_last = rows, repeat_last

    def contents(self) -> Contents:
        held = self.held
        tensors = {
            key: replace(stored, shape=(self._rows, *stored.shape[1:])) if has_vocabulary_rows(key) else stored
            for key, stored in held.tensors.items()
        }
        return Contents(tensors, held.objects)

    def common(self) -> dict[str, Any]:
        common = self.source.common()
        return {**common, "args": Namespace(**{**args_of(common), "padded_vocab_size": self._rows})}

    def read(self, content: CheckpointContent) -> dict[str, Any]:
        held = self.held.tensors
        chunks: list[Chunk] = []
        added: list[tuple[Tensor, Tensor]] = []
        for chunk in content.chunks:
            if not has_vocabulary_rows(chunk.key):
                chunks.append(chunk)
                continue
            shape = held[chunk.key].shape
            rows = max(0, min(chunk.tensor.shape[0], shape[0] - chunk.offset[0]))
            if rows:
                chunks.append(Chunk(chunk.key, chunk.tensor[:rows], chunk.offset, shape))
            missing = chunk.tensor[rows:]
            if self._repeat_last and len(missing):
                last = torch.empty_like(missing[:1])
                chunks.append(Chunk(chunk.key, last, (shape[0] - 1, *chunk.offset[1:]), shape))
                added.append((missing, last))
            else:
                missing.zero_()
        read = self.source.read(replace(content, chunks=chunks))
        for missing, last in added:
            missing.copy_(last.expand_as(missing))
        return read


def has_vocabulary_rows(key: str) -> bool:
    """Return whether the rows of a tensor, a weight or an optimizer's state of one, are those of the vocabulary."""
    return weight_of(key) in _OVER_VOCABULARY


class WithCommon(Adapter):
    """Source with another common state: a function of the original one and of Megatron's args in it."""

    def __init__(self, source: Source, changed: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__(source)
        self._changed = changed

    def common(self) -> dict[str, Any]:
        common = self.source.common()
        return self._changed(common, args_of(common))


class Watched(Adapter):
    """Source that calls `on_read` with each chunk before it is filled."""

    def __init__(self, source: Source, on_read: Callable[[Chunk], None]) -> None:
        super().__init__(source)
        self._on_read = on_read

    def read(self, content: CheckpointContent) -> dict[str, Any]:
        for chunk in content.chunks:
            self._on_read(chunk)
        return self.source.read(content)


_DENSE = "decoder.layers.mlp."
_EXPERT_OF = {
    f"{_DENSE}{linear}.{kind}": f"{_DENSE}experts.experts.{linear}.{kind}"
    for linear in ("linear_fc1", "linear_fc2")
    for kind in ("weight", "bias")
}
"""Key of a dense layer -> that of the experts that are copies of it."""
_DENSE_OF = {expert: dense for dense, expert in _EXPERT_OF.items()}
_ROUTER_OF = {f"{_DENSE}linear_fc1.{kind}": f"{_DENSE}router.{kind}" for kind in ("weight", "bias")}
"""Key of a dense layer -> that of the router that chooses among the copies."""
_ROUTERS = frozenset(_ROUTER_OF.values())


@dataclass(frozen=True)
class Upcycling:
    """Number and choice of the experts that each feed-forward layer becomes."""

    experts: int  # copies of it
    top_k: int = 2  # of them for each token
    seed: int = 1234  # of the routers

    def violations(self) -> list[str]:
        """Return why this is not a valid MoE layer; empty if it is."""
        if self.experts < 2:
            return [f"--upcycle {self.experts}: an MoE layer has at least 2 experts"]
        if not 1 <= self.top_k <= self.experts:
            return [f"--moe-router-topk {self.top_k} with --upcycle {self.experts}: use 1 to {self.experts}"]
        return []


class Upcycled(Adapter):
    """Source of a dense model, weights only, with experts in place of its feed-forward layers.

    Every expert of a layer is a copy of its feed-forward layer, and routers are drawn. The weights of the experts that
    a token chooses sum to 1, so that the MoE model computes what the dense model computes, until training makes the
    copies differ (Komatsuzaki et al. 2022, arXiv:2212.05055; Megatron's `--moe-use-upcycling`).
    """

    def __init__(self, source: Source, wanted: Upcycling, model: ModelConfig, where: str) -> None:
        super().__init__(source)
        if model.mixture or model.family.objective != "causal" or model.predictions:
            what = "is a mixture of experts already" if model.mixture else f"is a {model.family.title}"
            what = "has layers of multi-token prediction" if model.predictions else what
            raise CheckpointError(f"{where} {what}; --upcycle makes a mixture of a dense GPT")
        self._wanted, self._model = wanted, model

    def contents(self) -> Contents:
        held = self.held
        tensors: dict[str, StoredTensor] = {}
        for key, stored in held.tensors.items():
            if key not in _EXPERT_OF:
                tensors[key] = stored
                continue
            layers, *rest = stored.shape
            tensors[_EXPERT_OF[key]] = replace(stored, shape=(layers, self._wanted.experts, *rest))
            if key in _ROUTER_OF:
                tensors[_ROUTER_OF[key]] = StoredTensor((layers, self._wanted.experts, *rest[1:]), stored.dtype, 1)
        return Contents(tensors, frozenset())

    def common(self) -> dict[str, Any]:
        common = self.source.common()
        made = {"num_experts": self._wanted.experts, "moe_router_topk": self._wanted.top_k, "moe_layer_freq": 1}
        return {**common, "args": Namespace(**{**args_of(common), **made})}

    def read(self, content: CheckpointContent) -> dict[str, Any]:
        others = [chunk for chunk in content.chunks if chunk.key not in _ROUTERS and chunk.key not in _DENSE_OF]
        for chunk in content.chunks:
            if chunk.key in _ROUTERS:
                self._draw(chunk)
            elif chunk.key in _DENSE_OF:
                self._copy(chunk)
        return self.source.read(replace(content, chunks=others))

    def _copy(self, chunk: Chunk) -> None:
        """Copy the dense layer into each expert of a chunk [layers, experts, ...]."""
        dense = torch.empty_like(chunk.tensor[:, 0])
        offset, shape = ((values[0], *values[2:]) for values in (chunk.offset, chunk.global_shape))
        self.source.read(CheckpointContent([Chunk(_DENSE_OF[chunk.key], dense, offset, shape)]))
        chunk.tensor.copy_(dense.unsqueeze(1).expand_as(chunk.tensor))

    def _draw(self, chunk: Chunk) -> None:
        """Draw routers N(0, std), each from the seed and its own name: the same in every layout."""
        (first, *start), (_, *whole), kind = chunk.offset, chunk.global_shape, chunk.key.rpartition(".")[2]
        for index, part in enumerate(chunk.tensor):
            generator = generator_for(self._wanted.seed, f"decoder.layers.{first + index}.mlp.router.{kind}")
            router = torch.empty(whole).normal_(0.0, self._model.init_method_std, generator=generator)
            part.copy_(router[tuple(slice(a, a + size) for a, size in zip(start, part.shape, strict=True))])
