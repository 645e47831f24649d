"""How fast a run is, and how fast it could be: model FLOPs against the measured rate of a matrix product."""

from __future__ import annotations

import time

import torch

from megalith.config import ModelConfig

_PEAK_SIZES = {"cpu": (1024, 2048), "cuda": (2048, 4096, 8192)}


def step_flops(
    model: ModelConfig, vocab_size: int, seq_length: int, global_batch_size: int, decoder_length: int | None = None
) -> float:
    """Model FLOPs of one step, forward and backward, recomputation not counted.

    Counts the matrix products only, of attention to itself the half of the square that a causal mask leaves (also of
    BERT), as Megatron 0.16 does for its `throughput per GPU`, so that the two can be compared. Of T5, of which Megatron
    counts the encoder and logits at the encoder's length, the decoder counts with all that it sees of the encoder.

    Args:
        model: the architecture.
        vocab_size: padded.
        seq_length: tokens of a sample; of T5 those of the encoder.
        global_batch_size: samples of the step.
        decoder_length: tokens that the decoder of T5 reads.

    Source: spec/training-behaviour.md section 5; `num_floating_point_operations_so_far` of the goldens.
    """
    hidden, gate = model.hidden_size, 1.5 if model.gated else 1.0
    attention = _attention(model, seq_length)
    layers = (*model.experts, *model.experts[-1:] * model.predictions)  # those of prediction are like the last one
    feed_forward = [2 * feed_forward_weights(model, model.moe_router_topk if experts else 0) for experts in layers]
    products = seq_length * sum(2 * attention + layer for layer in feed_forward)
    predicted = seq_length
    if model.model_family == "t5":
        predicted = decoder_length or 0
        itself, heads = _attention(model, predicted), model.head_size * model.num_attention_heads
        queries = 2 * hidden * heads + 2 * heads * seq_length  # with the output projection, and scores with values
        layer = 2 * itself + queries + 2 * hidden * model.ffn_size * gate
        keys = 2 * hidden * heads * seq_length  # keys and values of what the encoder gives
        products += model.num_decoder_layers * (predicted * layer + keys)
    products += predicted * hidden * vocab_size * (1 + model.predictions)
    products += predicted * hidden * (2 * hidden + 3) * model.predictions  # embeddings joined to states, and the norms
    return 6 * global_batch_size * products


def _attention(model: ModelConfig, seq_length: int) -> float:
    """Of the attention of a token, half the multiplications and additions of a forward pass."""
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
    """Half the weights of a feed-forward layer with so many experts, 0 where it is dense; with the experts of a token,
    half the multiplications of its forward pass.
    """
    hidden, gate = model.hidden_size, 1.5 if model.gated else 1.0
    if not experts:
        return hidden * model.ffn_size * gate
    routed, shared = experts * model.expert_size, model.moe_shared_expert_intermediate_size or 0
    if model.moe_latent_size is None:
        return hidden * (routed + shared) * gate
    return (model.moe_latent_size * routed + hidden * shared) * gate + hidden * model.moe_latent_size


def measure_peak(device: torch.device, dtype: torch.dtype, budget_seconds: float = 0.25) -> float:
    """FLOP/s of the best square matrix product on this device, measured now within about the budget.

    On a CPU fp16 is multiplied in fp32 (its native product is hundreds of times slower), so fp32 is what counts there.
    """
    if device.type == "cpu" and dtype == torch.float16:
        dtype = torch.float32
    best, sizes = 0.0, _PEAK_SIZES[device.type]
    deadline = time.perf_counter() + budget_seconds
    for index, size in enumerate(sizes, start=1):
        a = torch.full((size, size), 0.5, dtype=dtype, device=device)
        out = torch.empty_like(a)
        seconds = _time_product(a, out)  # the first also wakes threads and opens the library
        share = time.perf_counter() + (deadline - time.perf_counter()) / (len(sizes) - index + 1)
        while True:
            best = max(best, 2 * size**3 / seconds)
            if time.perf_counter() + seconds > share:
                break
            seconds = _time_product(a, out)
        if time.perf_counter() + 8 * seconds > deadline:  # a size twice as large does eight times the work
            break
    return best


def _time_product(a: torch.Tensor, out: torch.Tensor) -> float:
    _wait(a.device)
    started = time.perf_counter()
    torch.mm(a, a, out=out)
    _wait(a.device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
