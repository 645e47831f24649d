"""Rules of the architecture."""

from __future__ import annotations

from megalith.config.idle import idle_without
from megalith.config.rule import Draft, Rule, divisors, multiples, rule, show


@rule("hidden_size", "num_attention_heads", "kv_channels")
def hidden_size_divides_into_heads(draft: Draft) -> str:
    model = draft.run.model
    if model.kv_channels is not None or model.hidden_size % model.num_attention_heads == 0:
        return ""
    quotient, rest = divmod(model.hidden_size, model.num_attention_heads)
    return (
        f"{show(draft, 'hidden_size')} is not divisible by {show(draft, 'num_attention_heads')} "
        f"({model.hidden_size} = {quotient}*{model.num_attention_heads} + {rest}); "
        f"nearest: {multiples(model.hidden_size, model.num_attention_heads)}, "
        f"or use {divisors(model.hidden_size, model.num_attention_heads, 1)} heads"
    )


@rule("num_attention_heads", "num_query_groups", "group_query_attention")
def heads_divide_into_query_groups(draft: Draft) -> str:
    model = draft.run.model
    if not model.group_query_attention or model.num_attention_heads % model.num_query_groups == 0:
        return ""
    return (
        f"{show(draft, 'num_attention_heads')} is not divisible by {show(draft, 'num_query_groups')}; "
        f"use {divisors(model.num_attention_heads, model.num_query_groups)} groups"
    )


@rule("seq_length", "max_position_embeddings")
def positions_cover_the_sequence(draft: Draft) -> str:
    run = draft.run
    if run.data.seq_length <= run.model.max_position_embeddings:
        return ""
    return (
        f"{show(draft, 'seq_length')} is longer than {show(draft, 'max_position_embeddings')}; "
        f"use --max-position-embeddings {run.data.seq_length}, or a sequence of at most "
        f"{run.model.max_position_embeddings}"
    )


@rule("hidden_size", "ffn_hidden_size", "swiglu")
def gated_layers_have_a_width(draft: Draft) -> str:
    model = draft.run.model
    if model.ffn_size > 0:
        return ""
    return (
        f"--swiglu with {show(draft, 'hidden_size')} gives feed-forward layers of width 0 by Megatron's rule "
        f"int(8/3 x hidden / 64) x 64; give --ffn-hidden-size, for example {4 * model.hidden_size}"
    )


@rule("position_embedding_type", "rotary_percent", "kv_channels", "hidden_size", "num_attention_heads")
def rotary_positions_turn_pairs(draft: Draft) -> str:
    model = draft.run.model
    whole_heads = model.kv_channels is not None or model.hidden_size % model.num_attention_heads == 0
    if model.position_embedding_type != "rope" or not whole_heads:
        return ""
    size, head = model.rotary_size, model.head_size
    if size >= 2 and size % 2 == 0:
        return ""
    if head < 2 or model.rotary_percent == 1.0:
        return (
            f"rotary positions turn pairs of channels, and heads of {head} are odd; use an even head size by "
            f"--kv-channels {head + 1} or another --num-attention-heads"
        )
    even = max(2, size - size % 2)
    return (
        f"{show(draft, 'rotary_percent')} of heads of {head} is {size} channels, and rotary positions turn pairs; "
        f"use --rotary-percent {even / head:.6g} ({even} channels) or {min(even + 2, head - head % 2) / head:.6g}"
    )


@rule("position_embedding_type", "add_position_embedding")
def leaving_out_the_table_needs_rotary_positions(draft: Draft) -> str:
    model = draft.run.model
    if model.add_position_embedding or model.position_embedding_type == "rope":
        return ""
    return f"--no-position-embedding with {show(draft, 'position_embedding_type')}: use --position-embedding-type rope"


@rule("use_rope_scaling", "position_embedding_type")
def rope_scaling_without_rotary_positions(draft: Draft) -> str:
    model = draft.run.model
    if not model.use_rope_scaling or model.position_embedding_type == "rope":
        return ""
    return f"{show(draft, 'use_rope_scaling')} has no effect with {show(draft, 'position_embedding_type')}"


MODEL_RULES: tuple[Rule, ...] = (
    hidden_size_divides_into_heads,
    heads_divide_into_query_groups,
    positions_cover_the_sequence,
    gated_layers_have_a_width,
    rotary_positions_turn_pairs,
    leaving_out_the_table_needs_rotary_positions,
)

MODEL_NOTICES: tuple[Rule, ...] = (
    rope_scaling_without_rotary_positions,
    idle_without("num_query_groups", "group_query_attention", "--group-query-attention is not given"),
    idle_without("rope_scaling_factor", "use_rope_scaling", "--use-rope-scaling is not given"),
)
