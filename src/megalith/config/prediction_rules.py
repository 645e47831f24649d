"""Rules of multi-token prediction: which models and layouts have it."""

from __future__ import annotations

from megalith.config.idle import idle_without
from megalith.config.rule import Draft, Rule, rule, show


@rule("mtp_num_layers", "model_family")
def prediction_is_for_gpt(draft: Draft) -> str:
    model = draft.run.model
    if not model.predictions or model.model_family == "gpt":
        return ""
    return f"{show(draft, 'mtp_num_layers')} is for GPT, and {show(draft, 'model_family')}; leave it out"


@rule("mtp_num_layers", "seq_length")
def there_are_tokens_to_predict(draft: Draft) -> str:
    run = draft.run
    if run.model.predictions < run.data.seq_length:
        return ""
    return (
        f"{show(draft, 'mtp_num_layers')} looks beyond the {run.data.seq_length} tokens of a sample; give fewer layers "
        "or a longer --seq-length"
    )


@rule("mtp_num_layers", "position_embedding_type", "pipeline_model_parallel_size")
def learned_positions_stay_on_one_stage(draft: Draft) -> str:
    model = draft.run.model
    pipeline = draft.run.parallel.pipeline_model_parallel_size > 1
    if not model.predictions or not pipeline or model.position_embedding_type != "learned_absolute":
        return ""
    return (
        f"{show(draft, 'mtp_num_layers')} with --position-embedding-type learned_absolute and "
        f"{show(draft, 'pipeline_model_parallel_size')}: the last stage would need a second table of positions, which "
        "Megatron lets go its own way; use --position-embedding-type rope, or no pipeline"
    )


@rule("mtp_num_layers", "use_mup")
def prediction_has_no_width_rules(draft: Draft) -> str:
    model = draft.run.model
    if not model.predictions or not model.use_mup:
        return ""
    return f"{show(draft, 'mtp_num_layers')} with --use-mup: no factor of logits is known for its layers; leave one out"


def _not_by_layer(name: str) -> Rule:
    @rule("mtp_num_layers", name)
    def check(draft: Draft) -> str:
        model = draft.run.model
        if not model.predictions or getattr(model, name) is None:
            return ""
        return (
            f"{show(draft, 'mtp_num_layers')} with {show(draft, name)}: that says something of each of the "
            "--num-layers, and nothing of those behind them; leave one of them out"
        )

    return Rule(f"prediction_without_{name}", check.needs, check.check)


PREDICTION_RULES: tuple[Rule, ...] = (
    prediction_is_for_gpt,
    there_are_tokens_to_predict,
    learned_positions_stay_on_one_stage,
    prediction_has_no_width_rules,
    *map(_not_by_layer, ("window_attn_skip_freq", "no_rope_freq")),
)
PREDICTION_NOTICES: tuple[Rule, ...] = (
    idle_without("mtp_loss_scaling_factor", "mtp_num_layers", "--mtp-num-layers is not given"),
)
