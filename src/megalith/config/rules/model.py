"""Rules of the architecture, and of what not every model has: latent attention, muP, multi-token prediction."""

from __future__ import annotations

from dataclasses import fields

from megalith.config.groups.model import LatentSettings, MupSettings
from megalith.config.rules.rule import (
    Draft,
    Rule,
    divisors,
    excluded,
    exclusive,
    forbid,
    idle,
    idle_without,
    multiples,
    note,
    notice,
    rule,
    show,
    value_of,
)
from megalith.config.values import read_pattern, read_window
from megalith.registry import Registered

ROTARY = ("rope", "yarn", "own")


@rule
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


own_attention_is_for_gpt = forbid(
    lambda run: run.model.attention and (run.model.family.objective != "causal" or run.model.multi_latent_attention),
    "{attention} is for GPT without --multi-latent-attention; leave one of them out",
)
own_mlp_is_for_gpt = forbid(
    lambda run: run.model.mlp and (run.model.family.objective != "causal" or run.model.mixture),
    "{mlp} is for GPT without --num-experts; leave one of them out",
)
own_loss_is_for_gpt = forbid(
    lambda run: run.model.loss and (run.model.family.objective != "causal" or run.model.label_smoothing),
    "{loss} is for GPT, and without --label-smoothing, which is of its own cross-entropy; leave one of them out",
)
own_positions_are_for_usual_attention = forbid(
    lambda run: run.model.multi_latent_attention and isinstance(run.model.position_embedding_type, Registered),
    "{position_embedding_type} is for models without --multi-latent-attention; leave one of them out",
)
_REGISTERED = ("model", "attention", "mlp", "moe_router", "normalization", "position_embedding_type")


@rule
def per_rank_files_hold_known_models(draft: Draft) -> str:
    parts = [name for name in _REGISTERED if isinstance(value_of(draft, name), Registered)]
    if draft.run.checkpoint.ckpt_format != "torch" or not parts:
        return ""
    return (
        f"{show(draft, 'ckpt_format')} with {show(draft, parts[0])}: files of this format hold Megatron's models only; "
        "use --ckpt-format torch_dist"
    )


heads_divide_into_query_groups = forbid(
    lambda run: run.model.group_query_attention and run.model.num_attention_heads % run.model.num_query_groups != 0,
    "{num_attention_heads} is not divisible by {num_query_groups}; use {fitting} groups",
    fitting=lambda run: divisors(run.model.num_attention_heads, run.model.num_query_groups),
)
positions_cover_the_sequence = forbid(
    lambda run: run.data.seq_length > run.model.max_position_embeddings,
    "{seq_length} is longer than {max_position_embeddings}; use --max-position-embeddings {run.data.seq_length}, or a "
    "sequence of at most {run.model.max_position_embeddings}",
)
gated_layers_have_a_width = forbid(
    lambda run: run.model.ffn_size <= 0,
    "--swiglu with {hidden_size} gives feed-forward layers of width 0 by Megatron's rule int(8/3 x hidden / 64) x 64; "
    "give --ffn-hidden-size, for example {width}",
    width=lambda run: 4 * run.model.hidden_size,
)


@rule
def rotary_positions_turn_pairs(draft: Draft) -> str:
    model = draft.run.model
    whole_heads = model.kv_channels is not None or model.hidden_size % model.num_attention_heads == 0
    if model.multi_latent_attention or not model.rotary_kind or not whole_heads:
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


leaving_out_the_table_needs_rotary_positions = forbid(
    lambda run: not run.model.add_position_embedding and run.model.position_embedding_type not in ROTARY,
    "--no-position-embedding with {position_embedding_type}: use --position-embedding-type rope",
)
rope_scaling_without_rotary_positions = note(
    lambda run: run.model.use_rope_scaling and run.model.position_embedding_type != "rope",
    "{use_rope_scaling} has no effect with {position_embedding_type}",
)


_ACTIVATIONS = ("swiglu", "geglu", "quick_geglu", "squared_relu", "relu", "openai_gelu")


@rule
def one_activation(draft: Draft) -> str:
    model = draft.run.model
    given = [name for name in _ACTIVATIONS if getattr(model, name)]
    given += ["onnx_safe"] if model.onnx_safe in ("True", "true", "1") else []
    if len(given) < 2 or given == ["geglu", "openai_gelu"]:
        return ""
    return f"{' and '.join(show(draft, name) for name in given)} name different activations; leave all but one out"


one_norm_of_heads = exclusive("qk_layernorm", "qk_l2_norm", "are two norms of the same heads; leave one of them out")


def _pattern_of_layers(name: str, marks: str) -> Rule:
    """Return a rule for a setting that selects layers by a frequency or a list."""

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

    return Rule(f"{name}_is_a_pattern_of_layers", check)


@rule
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


@rule
def the_window_is_two_numbers(draft: Draft) -> str:
    text = draft.run.model.window_size
    if text is None:
        return ""
    try:
        read_window(text)
    except ValueError as error:
        return f"{show(draft, 'window_size')}: {error}"
    return ""


@notice
def the_window_looks_back(draft: Draft) -> str:
    text = draft.run.model.window_size
    if text is None or read_window(text)[1] in (0, -1):
        return ""
    left, right = read_window(text)
    return f"{show(draft, 'window_size')}: attention is causal, so that the {right} to the right count as {left},0"


yarn_knows_the_length_before = forbid(
    lambda run: run.model.position_embedding_type == "yarn" and run.model.yarn_original_max_position_embeddings is None,
    "--position-embedding-type yarn needs --yarn-original-max-position-embeddings, the longest sequence that the "
    "model was trained on before; it is at most --max-position-embeddings {run.model.max_position_embeddings}",
)
yarn_rotates_halves = forbid(
    lambda run: run.model.position_embedding_type == "yarn" and run.model.rotary_interleaved,
    "--position-embedding-type yarn rotates halves of heads, not --rotary-interleaved pairs; leave that out",
)
yarn_leaves_fast_turns_alone = forbid(
    lambda run: (run.model.yarn_beta_fast or 32.0) <= (run.model.yarn_beta_slow or 1.0),
    "--yarn-beta-fast {fast:g} must be above --yarn-beta-slow {slow:g}",
    fast=lambda run: run.model.yarn_beta_fast or 32.0,
    slow=lambda run: run.model.yarn_beta_slow or 1.0,
)
wide_residuals_need_half_precision = forbid(
    lambda run: run.model.fp32_residual_connection and not run.precision.fp16 and not run.precision.bf16,
    "--fp32-residual-connection needs --fp16 or --bf16: without them all hidden states are in fp32",
)
fused_attention_needs_no_layer_scaling = note(
    lambda run: run.model.apply_query_key_layer_scaling and run.model.fused_attention,
    "--apply-query-key-layer-scaling has no effect with fused attention, which never rounds scores; "
    "--attention-backend unfused repeats the numbers of Megatron's own kernel",
)


gates_are_given = idle(
    ("glu_linear_offset", "activation_func_clamp_value"),
    lambda run: run.model.gated,
    lambda draft: ": the feed-forward layers are not gated",
)


patterns_are_of_layers = (
    _pattern_of_layers("moe_layer_freq", "1 for a layer with experts"),
    _pattern_of_layers("no_rope_freq", "1 for a layer without rotary positions"),
    _pattern_of_layers("window_attn_skip_freq", "1 for a layer with the window"),
)


def _read_by(kinds: tuple[str, ...], *names: str) -> list[Rule]:
    """Make notices for settings that only some kinds of rotary positions read."""
    return idle(
        names,
        lambda run: run.model.rotary_kind in kinds,
        lambda draft: (
            f" with --multi-latent-attention and --rope-type {draft.run.model.rotary_kind}"
            if draft.run.model.multi_latent_attention
            else f" with {show(draft, 'position_embedding_type')}"
        ),
    )


def _fields(group: type) -> tuple[str, ...]:
    """Return the names of a group of settings without the first one, which switches them on."""
    return tuple(field.name for field in fields(group))[1:]


settings_are_read = (
    *idle_without("group_query_attention", "num_query_groups"),
    *idle_without("use_rope_scaling", "rope_scaling_factor"),
    *idle_without("window_size", "window_attn_skip_freq"),
    *_read_by(ROTARY, "no_rope_freq"),
    *_read_by(("rope",), "rotary_seq_len_interpolation_factor"),
    *_read_by(("rope", "own"), "rotary_percent"),
    *_read_by(
        ("yarn",),
        *("rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
        *("yarn_correction_range_round_to_int", "mscale", "mscale_all_dim"),
    ),
    *idle_without("multi_latent_attention", *_fields(LatentSettings)),
    *idle_without("use_mup", *_fields(MupSettings)),
    *idle_without("mtp_num_layers", "mtp_loss_scaling_factor"),
)


latent_attention_is_without = excluded(
    "latent_attention",
    lambda run: run.model.multi_latent_attention,
    {
        "group_query_attention": "all heads come from one latent vector already; leave it out",
        "attention_output_gate": "its heads have no gates; leave it out",
        "add_qkv_bias": "its projections have no biases; leave it out",
        "qk_l2_norm": "its norms are those of the latent vectors, by --qk-layernorm; leave it out",
        "softmax_type": "it has no sinks; leave it out",
        "no_rope_freq": "the turned channels are part of every layer; leave it out",
        "rotary_interleaved": "it always turns neighbouring channels; leave it out",
        "use_rope_scaling": "its positions are stretched by --rope-type yarn and --rotary-scaling-factor; leave it out",
        "rotary_seq_len_interpolation_factor": "its positions are stretched by --rope-type yarn; leave it out",
    },
    switch="multi_latent_attention",
)


other_families_are_without = excluded(
    "another_family",
    lambda run: run.model.family.objective != "causal",
    {
        "multi_latent_attention": "multi-latent attention is for GPT; leave it out",
        "mtp_num_layers": "multi-token prediction is for GPT; leave it out",
        "use_mup": "its factors are built for GPT; leave it out",
    },
    switch="model_family",
)
latent_positions_turn_pairs = forbid(
    lambda run: run.model.multi_latent_attention and (run.model.rotary_size < 2 or run.model.rotary_size % 2 != 0),
    "{qk_pos_emb_head_dim} with {rotary_percent} are {run.model.rotary_size} channels, and positions turn pairs; use "
    "--qk-pos-emb-head-dim {nearest} and all of them",
    nearest=lambda run: multiples(run.model.qk_pos_emb_head_dim, 2),
)
rope_type_is_of_latent_attention = forbid(
    lambda run: not run.model.multi_latent_attention and run.model.rope_type not in (None, "rope"),
    "{rope_type} is of --multi-latent-attention; else use --position-embedding-type yarn",
)
latent_positions_have_their_own_type = note(
    lambda run: (
        run.model.multi_latent_attention
        and run.model.position_embedding_type in ("none", "yarn")
        and run.model.position_embedding_type != run.model.rotary_kind
    ),
    "{position_embedding_type} does not change the rotary positions of --multi-latent-attention, which --rope-type "
    "decides; it is {run.model.rotary_kind}",
)
latent_heads_have_their_own_sizes = note(
    lambda run: run.model.multi_latent_attention,
    "{kv_channels} has no effect: the heads of --multi-latent-attention have --qk-head-dim, --qk-pos-emb-head-dim and "
    "--v-head-dim",
    given="kv_channels",
)


mup_is_without = excluded(
    "mup",
    lambda run: run.model.use_mup,
    {"multi_latent_attention": "its factors are built for usual attention; leave it out"},
    switch="use_mup",
)


@rule
def width_multiplier_follows(draft: Draft) -> str:
    model = draft.run.model
    given = model.mup_width_mult
    # 1 is Megatron's default, which it replaces.
    if not model.use_mup or given in (None, 1.0) or given == model.width_multiplier:
        return ""
    return (
        f"{show(draft, 'mup_width_mult')} is not {show(draft, 'hidden_size')} / {show(draft, 'mup_base_hidden_size')}, "
        f"which it follows from; leave it out, or use --mup-width-mult {model.width_multiplier:g}"
    )


mup_without_a_base = note(
    lambda run: run.model.use_mup and run.model.mup_base_hidden_size is None,
    "--use-mup scales no rate and no initial weight by itself; give the width of the tuned model by "
    "--mup-base-hidden-size",
)
uniform_weights_know_their_width = note(
    lambda run: run.model.use_mup and run.model.init_method_xavier_uniform,
    "--use-mup leaves the initial weights of --init-method-xavier-uniform as they are, which know their width",
)
muon_has_its_scale = note(
    lambda run: run.model.use_mup and run.optimizer.uses_muon and run.optimizer.muon_scale_mode == "spectral",
    "--use-mup with {muon_scale_mode}: the updates of Muon's matrices grow with the width; --muon-scale-mode "
    "unit_rms_norm keeps them",
)
there_are_tokens_to_predict = forbid(
    lambda run: run.model.predictions >= run.data.seq_length,
    "{mtp_num_layers} looks beyond the {run.data.seq_length} tokens of a sample; give fewer layers or a longer "
    "--seq-length",
)
learned_positions_stay_on_one_stage = forbid(
    lambda run: (
        run.model.predictions and run.parallel.pipeline_model_parallel_size > 1 and run.model.adds_position_embeddings
    ),
    "{mtp_num_layers} with {position_embedding_type} and {pipeline_model_parallel_size}: the last "
    "stage would need a second position embedding, which Megatron does not keep in sync; use --position-embedding-type "
    "rope, or no pipeline",
)


prediction_is_without = excluded(
    "prediction",
    lambda run: run.model.predictions,
    {
        **dict.fromkeys(
            ("window_attn_skip_freq", "no_rope_freq"),
            "that describes the --num-layers, and not the prediction layers after them; leave one of them out",
        ),
        "use_mup": "no factor of logits is known for its layers; leave one out",
    },
    switch="mtp_num_layers",
)
