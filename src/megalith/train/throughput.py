"""How fast a run is, and how fast it could be: model FLOPs against the rate of a matrix product, by datasheet and as
measured."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megalith.checkpoint.formats.megatron_names import parse_name
from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.device import capability_of, is_host
from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.models.families import MODELS
from megalith.models.language_model import LanguageModel, named_placements
from megalith.nn.placement import global_shape
from megalith.nn.precision import product_dtype
from megalith.registry import Registered

_PEAK_SIZES, _PEAK_SIZES_ON_DEVICE = (512, 1024, 2048), (2048, 4096, 8192)
_WARM_UPS, _FEWEST_SAMPLES = 2, 3


def registered_flops(
    chunks: Sequence[LanguageModel], context: ParallelContext, tokens: int, of_built_in: float
) -> float:
    """Return the model FLOPs of a step of a model with registered layers; all ranks call this.

    They are those of the built-in layers, `of_built_in`, and 6 for each token and parameter that the model has beyond
    these (Kaplan et al. 2020, arXiv:2001.08361); of a model of another kind 6 for all its parameters.

    Args:
        chunks: The parts of the model on this rank.
        tokens: Of a step.
    """
    config = chunks[0].config
    first = context.tp.is_first and context.cp.is_first and context.dp.is_first
    here = sum(
        math.prod(global_shape(parameter.shape, placement, context.tp.size))
        for chunk in chunks
        for name, parameter, placement in named_placements(chunk)
        if first and name != chunk.copied_weight and parse_name(name).expert is None
    )
    own = comm.all_reduce(torch.tensor([float(here)], dtype=torch.float64, device=context.device), context.world)
    if not isinstance(chunks[0], MODELS[config.model_family]):
        return 6.0 * tokens * own.item()
    built_in: dict[str, Any] = {"model": None, "attention": None, "mlp": None}
    if isinstance(config.normalization, Registered):
        built_in["normalization"] = "RMSNorm"
    if isinstance(config.position_embedding_type, Registered):
        built_in["position_embedding_type"] = "rope" if config.rotary_kind else "none"
    params = GlobalParameters.from_config(replace(config, **built_in), chunks[0].vocab_size)
    usual = sum(math.prod(shape) for name, shape in params.shapes.items() if parse_name(name).expert is None)
    return of_built_in + 6.0 * tokens * (own.item() - usual)


def datasheet_peak(device: torch.device, dtype: torch.dtype) -> tuple[str, float] | None:
    """Return the name of a device and its datasheet FLOP/s in a dtype; None if it is not known."""
    known = capability_of(device).datasheet
    if known is None:
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    name = {torch.float32: "tf32" if tf32 else "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    rate = known.teraflops.get(name)
    return None if rate is None else (f"{known.name}, {name}", rate * 1e12)


def measure_peak(device: torch.device, dtype: torch.dtype, budget_seconds: float = 0.25) -> float:
    """Return the FLOP/s of the best square matrix product on this device, of several samples within about the budget.

    The first products of each size start threads, open libraries and choose kernels: they do not count. Operands are
    random, because constant ones let a GPU clock higher. If products of a dtype are computed in another one
    (`nn.precision.product_dtype`), that is measured.
    """
    dtype = product_dtype(torch.empty(0, dtype=dtype, device=device))
    best, last, deadline = 0.0, 0.0, time.perf_counter() + budget_seconds
    products: list[_Product] = []
    for size in _PEAK_SIZES if is_host(device) else _PEAK_SIZES_ON_DEVICE:
        cost = 8 * last * (_WARM_UPS + _FEWEST_SAMPLES)  # a size twice as large does eight times the work
        if products and time.perf_counter() + cost > deadline:
            break
        products.append(_Product(size, dtype, device))
        for _ in range(_WARM_UPS):
            products[-1].seconds()
        last = min(products[-1].seconds() for _ in range(_FEWEST_SAMPLES))
        best = max(best, products[-1].flops / last)
    for product in itertools.cycle(products):
        if time.perf_counter() >= deadline:
            return best
        best = max(best, product.flops / product.seconds())
    raise AssertionError("there is always a size")


class _Product:
    """A square matrix product."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flops = 2.0 * size**3
        generator = torch.Generator(device).manual_seed(0)  # the global one belongs to the run, which saves its state
        self._a, self._b = (
            torch.rand(size, size, generator=generator, device=device).sub_(0.5).to(dtype) for _ in range(2)
        )
        self._out = torch.empty_like(self._a)

    def seconds(self) -> float:
        """Multiply once, and wait for the result."""
        _wait(self._a.device)
        started = time.perf_counter()
        torch.mm(self._a, self._b, out=self._out)
        _wait(self._a.device)
        return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if not is_host(device):
        torch.accelerator.synchronize(device)
