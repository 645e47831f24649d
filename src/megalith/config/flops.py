"""Model FLOPs of a training step, from the configuration alone."""

from __future__ import annotations

from megalith.config.groups import ModelConfig


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
