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
from megalith.config import ModelConfig
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


def step_flops(
    model: ModelConfig, vocab_size: int, seq_length: int, global_batch_size: int, decoder_length: int | None = None
) -> float:
    """Return the model FLOPs of one step, forward and backward, recomputation not counted.

    Counts the matrix products only, of attention to itself the half of the square that a causal mask leaves (also of
    BERT), as Megatron 0.16 does for its `throughput per GPU`, so that the two can be compared. Of T5, of which Megatron
    counts the encoder and logits at the encoder's length, the decoder counts with all that it sees of the encoder.

    Args:
        seq_length: tokens of a sample; of T5 those of the encoder.
        decoder_length: tokens that the decoder of T5 reads.

    Source: docs/reference/training.md#flops; `num_floating_point_operations_so_far` of golden `pretrain`.
    """
    hidden, gate = model.hidden_size, 1.5 if model.gated else 1.0
    attention = attention_products(model, seq_length)
    layers = (*model.experts, *model.experts[-1:] * model.predictions)  # those of prediction are like the last one
    feed_forward = [2 * feed_forward_weights(model, model.moe_router_topk if experts else 0) for experts in layers]
    products = seq_length * sum(2 * attention + layer for layer in feed_forward)
    predicted = seq_length
    if model.family.encoder_decoder:
        predicted = decoder_length or 0
        itself, heads = attention_products(model, predicted), model.head_size * model.num_attention_heads
        queries = 2 * hidden * heads + 2 * heads * seq_length  # with the output projection, and scores with values
        layer = 2 * itself + queries + 2 * hidden * model.ffn_size * gate
        keys = 2 * hidden * heads * seq_length  # keys and values of what the encoder gives
        products += model.num_decoder_layers * (predicted * layer + keys)
    products += predicted * hidden * vocab_size * (1 + model.predictions)
    products += predicted * hidden * (2 * hidden + 3) * model.predictions  # embeddings joined to states, and the norms
    return 6 * global_batch_size * products


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


def attention_products(model: ModelConfig, seq_length: int) -> float:
    """Return half the multiplications and additions of the attention of a token in a forward pass.

    At length 0 it is half of those of its weights.
    """
    hidden, heads = model.hidden_size, model.num_attention_heads
    if not model.multi_latent_attention:
        groups = model.query_groups / heads
        return (1 + groups + seq_length / (2 * hidden)) * model.head_size * heads * hidden
    size, rank = model.latent_query_size, model.q_lora_rank
    queries = hidden * heads * size if rank is None else rank * (hidden + heads * size)
    others = model.kv_lora_rank * (hidden + heads * (model.qk_head_dim + model.v_head_dim))
    others += hidden * (model.qk_pos_emb_head_dim + heads * model.v_head_dim)
    return (queries + others + seq_length / 2 * heads * (size + model.v_head_dim)) / 2


def feed_forward_weights(model: ModelConfig, experts: int) -> float:
    """Return half the weights of a feed-forward layer: with `experts` experts, dense for 0."""
    hidden, gate = model.hidden_size, 1.5 if model.gated else 1.0
    if not experts:
        return hidden * model.ffn_size * gate
    routed, shared = experts * model.expert_size, model.moe_shared_expert_intermediate_size or 0
    if model.moe_latent_size is None:
        return hidden * (routed + shared) * gate
    return (model.moe_latent_size * routed + hidden * shared) * gate + hidden * model.moe_latent_size


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
