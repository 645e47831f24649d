"""Layers through torch.compile: what becomes one graph, and what stays as it is between graphs.

Layers that are alike share a compilation. In a graph weight gradients go to the sink, and tensor-parallel ranks
communicate, by the operators of nn.operators. Between graphs are mixtures of experts, and attention

- inside documents, whose lengths are others in each micro-batch;
- over context-parallel ranks, which communicate;
- with dropout on tensor-parallel ranks, each of which draws from a random stream of its own;
- with windows or sinks on an accelerator, by kernels that no compiler was tried with;

and whatever breaks the graph of a layer with registered modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megalith.device import is_host
from megalith.errors import ConfigError
from megalith.kernels.torch_private import forbid_eager_fallback, is_compile_error
from megalith.models.transformer import Block
from megalith.nn.attention import Attention
from megalith.nn.moe.layer import MoE
from megalith.nn.region import Region

_VECTOR_BITS = {"AVX2": 256, "AVX512": 512}
_LONGEST = 600  # characters of an error of torch.compile, which may hold a whole graph


def compile_block(block: nn.Module, name: str, region: Region, device: torch.device, *, documents: bool) -> None:
    """Compile the forward pass of a layer, when it is first called; the layer raises ConfigError if that fails.

    Args:
        documents: attention stays inside of documents.
    """
    from megalith.nn.operators import number_layers  # it loads the compiler, which takes a second

    forbid_eager_fallback()
    number_layers(block, region)
    whole = isinstance(block, Block) and all(map(_is_known, block.modules()))
    for module in block.modules():
        if isinstance(module, MoE):  # its experts have other numbers of rows in each step
            module.forward, whole = torch.compiler.disable(module.forward), False  # type: ignore[method-assign]
        elif isinstance(module, Attention) and (documents or _attends_outside(module, device)):
            module.context, whole = torch.compiler.disable(module.context), False  # type: ignore[method-assign]
    for module in block.modules():
        if isinstance(module, Attention | Block):
            module.is_one_graph = whole
    compiled: Callable[..., Tensor] = torch.compile(block.forward, fullgraph=whole, options=_options(device))

    def forward(*args: Any, **options: Any) -> Tensor:
        with compile_errors_named(name):
            return compiled(*args, **options)

    block.forward = forward


def _is_known(module: nn.Module) -> bool:
    """Return whether a module is of Megalith or torch; a registered one may break the graph."""
    return type(module).__module__.partition(".")[0] in ("megalith", "torch")


def _attends_outside(attention: Attention, device: torch.device) -> bool:
    """Return whether attention stays outside of graphs for its options, as the head of this module lists them."""
    drops_apart = attention.attention_dropout > 0.0 and attention.region.size > 1
    special = attention.rule.window is not None or attention.has_sinks
    return attention.mixer.parts > 1 or drops_apart or (special and not is_host(device))


@contextmanager
def compile_errors_named(place: str = "the backward pass of a layer") -> Iterator[None]:
    """Raise ConfigError in place of an error of torch.compile."""
    try:
        yield
    except Exception as error:
        if not is_compile_error(error):
            raise
        text = " ".join(str(error).partition("\nSet TORCHDYNAMO_VERBOSE")[0].split())
        cause = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
        raise ConfigError(
            f"--compile: torch.compile failed on {place}: {type(error).__name__}: {cause}. The run does not continue "
            "uncompiled, which would round otherwise; mend the cause, or leave --compile out"
        ) from error


def _options(device: torch.device) -> dict[str, str | int | bool | Callable[..., object]] | None:
    """Return options of torch.compile with the vector width: its cache on disk does not tell processors apart.

    With torch 2.13 a graph that was compiled for AVX-512 gives NaN or corrupts the heap where the same cache is used
    with AVX2, as on a file system that nodes share. Options are part of the cache's key.
    """
    width = _VECTOR_BITS.get(torch.backends.cpu.get_cpu_capability()) if is_host(device) else None
    return None if width is None else {"cpp.simdlen": width}
