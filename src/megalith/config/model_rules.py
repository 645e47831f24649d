"""Rules of the architecture."""

from __future__ import annotations

from megalith.config.idle import idle_without
from megalith.config.patterns import read_pattern, read_window
from megalith.config.rule import Draft, Rule, divisors, multiples, rule, show

ROTARY = ("rope", "yarn")


@rule("hidden_size", "num_attention_heads", "kv_channels", "multi_latent_attention")
def hidden_size_divides_into_heads(draft: Draft) -> str:
    model = draft.run.model
    if (
        model.kv_channels is not None
        or model.multi_latent_attention
        or model.hidden_size % model.num_attention_heads == 0
    ):
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


@rule(
    "position_embedding_type",
    "rotary_percent",
    "kv_channels",
    "hidden_size",
    "num_attention_heads",
    "multi_latent_attention",
)
def rotary_positions_turn_pairs(draft: Draft) -> str:
    model = draft.run.model
    whole_heads = model.kv_channels is not None or model.hidden_size % model.num_attention_heads == 0
    if model.multi_latent_attention or model.position_embedding_type not in ROTARY or not whole_heads:
        return ""
    size, head = model.rotary_size, model.head_size
    if size >= 2 and size % 2 == 0:
        return ""
    if head < 2 or model.rotary_percent == 1.0 or model.position_embedding_type == "yarn":
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
    if model.add_position_embedding or model.position_embedding_type in ROTARY:
        return ""
    return f"--no-position-embedding with {show(draft, 'position_embedding_type')}: use --position-embedding-type rope"


@rule("use_rope_scaling", "position_embedding_type")
def rope_scaling_without_rotary_positions(draft: Draft) -> str:
    model = draft.run.model
    if not model.use_rope_scaling or model.position_embedding_type == "rope":
        return ""
    return f"{show(draft, 'use_rope_scaling')} has no effect with {show(draft, 'position_embedding_type')}"


_ACTIVATIONS = ("swiglu", "geglu", "quick_geglu", "squared_relu", "relu", "openai_gelu")


@rule(*_ACTIVATIONS, "onnx_safe")
def one_activation(draft: Draft) -> str:
    model = draft.run.model
    given = [name for name in _ACTIVATIONS if getattr(model, name)]
    given += ["onnx_safe"] if model.onnx_safe in ("True", "true", "1") else []
    if len(given) < 2 or given == ["geglu", "openai_gelu"]:
        return ""
    return f"{' and '.join(show(draft, name) for name in given)} name different activations; leave all but one out"


@rule("qk_layernorm", "qk_l2_norm")
def one_norm_of_heads(draft: Draft) -> str:
    model = draft.run.model
    if not (model.qk_layernorm and model.qk_l2_norm):
        return ""
    return "--qk-layernorm and --qk-l2-norm are two norms of the same heads; leave one of them out"


def _pattern_of_layers(name: str, marks: str) -> Rule:
    """A rule for a setting that names layers by a frequency or a list."""

    @rule(name, "num_layers")
    def check(draft: Draft) -> str:
        text, layers = getattr(draft.run.model, name), draft.run.model.num_layers
        if text is None:
            return ""
        try:
            pattern = read_pattern(text)
        except ValueError as error:
            return f"{show(draft, name)}: {error} ({marks})"
        if isinstance(pattern, int) or len(pattern) == layers:
            return ""
        return (
            f"{show(draft, name)} is a list for {len(pattern)} layers, and there are {show(draft, 'num_layers')}; give "
            f"{layers} entries"
        )

    return Rule(f"{name}_is_a_pattern_of_layers", check.needs, check.check)


@rule("no_rope_freq", "num_layers")
def layers_without_rotation_recur(draft: Draft) -> str:
    model = draft.run.model
    if model.no_rope_freq is None or not model.no_rope_freq.strip().isdecimal():
        return ""
    every = int(model.no_rope_freq)
    if every < 1 or model.num_layers % every == 0:
        return ""
    return (
        f"{show(draft, 'num_layers')} is not divisible by {show(draft, 'no_rope_freq')}; use "
        f"{divisors(model.num_layers, every)}, or a list of {model.num_layers} entries"
    )


@rule("window_size")
def the_window_is_two_numbers(draft: Draft) -> str:
    text = draft.run.model.window_size
    if text is None:
        return ""
    try:
        read_window(text)
    except ValueError as error:
        return f"{show(draft, 'window_size')}: {error}"
    return ""


@rule("window_size")
def the_window_looks_back(draft: Draft) -> str:
    text = draft.run.model.window_size
    if text is None or read_window(text)[1] in (0, -1):
        return ""
    left, right = read_window(text)
    return f"{show(draft, 'window_size')}: attention is causal, so that the {right} to the right count as {left},0"


@rule("position_embedding_type", "yarn_original_max_position_embeddings")
def yarn_knows_the_length_before(draft: Draft) -> str:
    model = draft.run.model
    if model.position_embedding_type != "yarn" or model.yarn_original_max_position_embeddings is not None:
        return ""
    return (
        "--position-embedding-type yarn needs --yarn-original-max-position-embeddings, the longest sequence that the "
        f"model was trained on before; it is at most --max-position-embeddings {model.max_position_embeddings}"
    )


@rule("position_embedding_type", "rotary_interleaved")
def yarn_rotates_halves(draft: Draft) -> str:
    model = draft.run.model
    if model.position_embedding_type != "yarn" or not model.rotary_interleaved:
        return ""
    return "--position-embedding-type yarn rotates halves of heads, not --rotary-interleaved pairs; leave that out"


@rule("yarn_beta_fast", "yarn_beta_slow")
def yarn_leaves_fast_turns_alone(draft: Draft) -> str:
    model = draft.run.model
    fast, slow = model.yarn_beta_fast or 32.0, model.yarn_beta_slow or 1.0
    if fast > slow:
        return ""
    return f"{show(draft, 'yarn_beta_fast')} must be above {show(draft, 'yarn_beta_slow')}"


@rule("fp32_residual_connection", "fp16", "bf16")
def wide_residuals_need_half_precision(draft: Draft) -> str:
    precision = draft.run.precision
    if not draft.run.model.fp32_residual_connection or precision.fp16 or precision.bf16:
        return ""
    return "--fp32-residual-connection needs --fp16 or --bf16: without them all hidden states are in fp32"


@rule("apply_query_key_layer_scaling", "attention_backend", "transformer_impl")
def fused_attention_needs_no_layer_scaling(draft: Draft) -> str:
    model = draft.run.model
    if not model.apply_query_key_layer_scaling or not model.fused_attention:
        return ""
    return (
        "--apply-query-key-layer-scaling has no effect with fused attention, which never rounds scores; "
        "--attention-backend unfused repeats the numbers of Megatron's own kernel"
    )


def _only_with(name: str, types: tuple[str, ...], default: object) -> Rule:
    """A notice for a setting that only some kinds of positions read."""

    @rule(name, "position_embedding_type", "multi_latent_attention", "rope_type")
    def check(draft: Draft) -> str:
        model = draft.run.model
        idle = model.rotary_kind not in types and getattr(model, name) != default
        return f"{show(draft, name)} has no effect with {show(draft, 'position_embedding_type')}" if idle else ""

    return Rule(f"{name}_needs_{types[0]}", check.needs, check.check)


@rule("glu_linear_offset", "activation_func_clamp_value", "swiglu", "geglu", "quick_geglu")
def gates_are_given(draft: Draft) -> str:
    model = draft.run.model
    names = [name for name in ("glu_linear_offset", "activation_func_clamp_value") if getattr(model, name)]
    if not names or model.gated:
        return ""
    shown = " and ".join(show(draft, name) for name in names)
    return f"{shown} {'have' if len(names) > 1 else 'has'} no effect: the feed-forward layers are not gated"


MODEL_RULES: tuple[Rule, ...] = (
    hidden_size_divides_into_heads,
    heads_divide_into_query_groups,
    positions_cover_the_sequence,
    gated_layers_have_a_width,
    rotary_positions_turn_pairs,
    leaving_out_the_table_needs_rotary_positions,
    one_activation,
    one_norm_of_heads,
    _pattern_of_layers("moe_layer_freq", "1 for a layer with experts"),
    _pattern_of_layers("no_rope_freq", "1 for a layer without rotary positions"),
    _pattern_of_layers("window_attn_skip_freq", "1 for a layer with the window"),
    layers_without_rotation_recur,
    the_window_is_two_numbers,
    yarn_knows_the_length_before,
    yarn_rotates_halves,
    yarn_leaves_fast_turns_alone,
    wide_residuals_need_half_precision,
)

MODEL_NOTICES: tuple[Rule, ...] = (
    rope_scaling_without_rotary_positions,
    idle_without("num_query_groups", "group_query_attention", "--group-query-attention is not given"),
    idle_without("rope_scaling_factor", "use_rope_scaling", "--use-rope-scaling is not given"),
    idle_without("window_attn_skip_freq", "window_size", "--window-size is not given"),
    the_window_looks_back,
    fused_attention_needs_no_layer_scaling,
    gates_are_given,
    _only_with("no_rope_freq", ROTARY, None),
    _only_with("rotary_seq_len_interpolation_factor", ("rope",), None),
    _only_with("rotary_scaling_factor", ("yarn",), 1.0),
    _only_with("yarn_original_max_position_embeddings", ("yarn",), None),
    _only_with("yarn_beta_fast", ("yarn",), None),
    _only_with("yarn_beta_slow", ("yarn",), None),
    _only_with("yarn_correction_range_round_to_int", ("yarn",), True),
    _only_with("mscale", ("yarn",), 1.0),
    _only_with("mscale_all_dim", ("yarn",), 0.0),
    _only_with("rotary_percent", ("rope",), 1.0),
)
