"""Rules of activation recomputation, which are Megatron's."""

from __future__ import annotations

from megalith.config.idle import idle_without
from megalith.config.rule import Draft, Rule, rule, show

_DETAILS = ("recompute_method", "recompute_num_layers")


def _given(draft: Draft) -> list[str]:
    return [name for name in _DETAILS if getattr(draft.run.train, name) is not None]


@rule("recompute_granularity", *_DETAILS)
def whole_layers_are_recomputed_by_a_method(draft: Draft) -> str:
    given = _given(draft)
    if draft.run.train.recompute_granularity != "full" or len(given) == len(_DETAILS):
        return ""
    missing = {
        "recompute_method": "--recompute-method uniform (all layers, in groups) or block (the first of each stage)",
        "recompute_num_layers": "--recompute-num-layers N (layers of a group, or from the first on; 1 was the default "
        "of older Megatron versions)",
    }
    lacking = " and ".join(text for name, text in missing.items() if name not in given)
    return f"--recompute-granularity full requires {lacking}"


@rule("recompute_granularity", *_DETAILS)
def selective_recomputation_has_no_method(draft: Draft) -> str:
    given = _given(draft)
    if draft.run.train.recompute_granularity != "selective" or not given:
        return ""
    return (
        f"{' and '.join(show(draft, name) for name in given)} with --recompute-granularity selective: whole layers are "
        "recomputed by --recompute-granularity full"
    )


@rule("recompute_granularity", "moe_layer_recompute")
def experts_are_recomputed_once(draft: Draft) -> str:
    train = draft.run.train
    if not train.moe_layer_recompute or train.recompute_granularity != "full":
        return ""
    return "--moe-layer-recompute with --recompute-granularity full, which recomputes experts too; leave it out"


@rule("recompute_granularity", "recompute_modules", "attention_backend", "transformer_impl", "model_family")
def fused_attention_keeps_no_scores(draft: Draft) -> str:
    train, model = draft.run.train, draft.run.model
    named = ("core_attn",) if train.recompute_modules is None else train.recompute_modules
    if train.recompute_granularity != "selective" or "core_attn" not in named:
        return ""
    if model.keeps_weights_of_attention:
        return ""
    return (
        "selective recomputation of core_attn needs nothing here: fused attention stores no scores, which is what it "
        "would save; the numbers are the same"
    )


@rule("recompute_modules", "moe_layer_recompute", "num_experts")
def experts_are_there_to_be_recomputed(draft: Draft) -> str:
    run = draft.run
    if run.model.mixture or run.train.recomputed_parts.isdisjoint({"moe", "moe_act", "shared_experts"}):
        return ""
    name = "moe_layer_recompute" if run.train.moe_layer_recompute else "recompute_modules"
    return f"{show(draft, name)}: there are no experts to recompute without --num-experts"


@rule("recompute_modules", "moe_shared_expert_intermediate_size")
def shared_experts_are_there_to_be_recomputed(draft: Draft) -> str:
    model = draft.run.model
    lacking = model.mixture and model.moe_shared_expert_intermediate_size is None
    if not lacking or "shared_experts" not in draft.run.train.recomputed_parts:
        return ""
    return (
        f"{show(draft, 'recompute_modules')}: there are no shared experts without --moe-shared-expert-intermediate-size"
    )


@rule("recompute_modules", "multi_latent_attention")
def latent_heads_are_there_to_be_recomputed(draft: Draft) -> str:
    run = draft.run
    if run.model.multi_latent_attention or "mla_up_proj" not in run.train.recomputed_parts:
        return ""
    return f"{show(draft, 'recompute_modules')}: mla_up_proj is a part of --multi-latent-attention alone"


@rule("recompute_granularity", "recompute_modules", "moe_layer_recompute")
def modules_are_recomputed_selectively(draft: Draft) -> str:
    train = draft.run.train
    if train.recompute_modules is None or train.recompute_granularity == "selective" or train.moe_layer_recompute:
        return ""
    return f"{show(draft, 'recompute_modules')} has no effect without --recompute-granularity selective"


RECOMPUTE_RULES: tuple[Rule, ...] = (
    whole_layers_are_recomputed_by_a_method,
    selective_recomputation_has_no_method,
    experts_are_recomputed_once,
)
RECOMPUTE_NOTICES: tuple[Rule, ...] = (
    fused_attention_keeps_no_scores,
    modules_are_recomputed_selectively,
    experts_are_there_to_be_recomputed,
    shared_experts_are_there_to_be_recomputed,
    latent_heads_are_there_to_be_recomputed,
    *(
        idle_without(name, "recompute_granularity", "--recompute-granularity is not given")
        for name in ("recompute_method", "recompute_num_layers")
    ),
)
