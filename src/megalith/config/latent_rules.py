"""Rules of multi-latent attention: what its sizes must be, and what of other attention it has not."""

from __future__ import annotations

from dataclasses import fields

from megalith.config.groups.latent import LatentSettings
from megalith.config.idle import idle_without
from megalith.config.rule import Draft, Rule, multiples, rule, show

# Setting -> (the value that goes with it, why another does not).
_WITHOUT = {
    "group_query_attention": (False, "all heads come from one latent vector already"),
    "attention_output_gate": (False, "its heads have no gates"),
    "add_qkv_bias": (False, "its projections have no biases"),
    "qk_l2_norm": (False, "its norms are those of the latent vectors, by --qk-layernorm"),
    "softmax_type": ("vanilla", "it has no sinks"),
    "no_rope_freq": (None, "the turned channels are part of every layer"),
    "rotary_interleaved": (False, "it always turns neighbouring channels"),
    "use_rope_scaling": (False, "its positions are stretched by --rope-type yarn and --rotary-scaling-factor"),
    "rotary_seq_len_interpolation_factor": (None, "its positions are stretched by --rope-type yarn"),
}


def _not_with(name: str) -> Rule:
    usual, why = _WITHOUT[name]

    @rule("multi_latent_attention", name)
    def check(draft: Draft) -> str:
        model = draft.run.model
        if not model.multi_latent_attention or getattr(model, name) == usual:
            return ""
        return f"--multi-latent-attention with {show(draft, name)}: {why}; leave it out"

    return Rule(f"latent_attention_without_{name}", check.needs, check.check)


@rule("multi_latent_attention", "model_family")
def latent_attention_is_for_gpt(draft: Draft) -> str:
    model = draft.run.model
    if not model.multi_latent_attention or model.model_family == "gpt":
        return ""
    return f"--multi-latent-attention is for GPT, and {show(draft, 'model_family')}; leave it out"


@rule("multi_latent_attention", "qk_pos_emb_head_dim", "rotary_percent", "rope_type")
def latent_positions_turn_pairs(draft: Draft) -> str:
    model = draft.run.model
    if not model.multi_latent_attention or (model.rotary_size >= 2 and model.rotary_size % 2 == 0):
        return ""
    return (
        f"{show(draft, 'qk_pos_emb_head_dim')} with {show(draft, 'rotary_percent')} are {model.rotary_size} channels, "
        f"and positions turn pairs; use --qk-pos-emb-head-dim {multiples(model.qk_pos_emb_head_dim, 2)} and all of them"
    )


@rule("multi_latent_attention", "rope_type")
def rope_type_is_of_latent_attention(draft: Draft) -> str:
    model = draft.run.model
    if model.multi_latent_attention or model.rope_type in (None, "rope"):
        return ""
    return f"{show(draft, 'rope_type')} is of --multi-latent-attention; else use --position-embedding-type yarn"


@rule("multi_latent_attention", "kv_channels")
def latent_heads_have_their_own_sizes(draft: Draft) -> str:
    if not draft.run.model.multi_latent_attention or "kv_channels" not in draft.given:
        return ""
    return (
        f"{show(draft, 'kv_channels')} has no effect: the heads of --multi-latent-attention have --qk-head-dim, "
        "--qk-pos-emb-head-dim and --v-head-dim"
    )


LATENT_RULES: tuple[Rule, ...] = (
    latent_attention_is_for_gpt,
    latent_positions_turn_pairs,
    rope_type_is_of_latent_attention,
    *map(_not_with, _WITHOUT),
)
LATENT_NOTICES: tuple[Rule, ...] = (
    latent_heads_have_their_own_sizes,
    *(
        idle_without(field.name, "multi_latent_attention", "--multi-latent-attention is not given")
        for field in fields(LatentSettings)
        if field.name != "multi_latent_attention"
    ),
)
