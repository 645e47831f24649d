"""Rules of LoRA: what it trains beside, and what has no meaning while the model is frozen."""

from __future__ import annotations

from megalith.config.groups.lora import LORA_TARGETS, PROJECTIONS
from megalith.config.rules.rule import Draft, excluded, forbid, idle_without, rule, show
from megalith.config.run import RunConfig
from megalith.config.values import closest

_NEITHER = "leave --lora-rank out, as this version has no adapters for such a model"


def _is_lora(run: RunConfig) -> bool:
    return run.model.lora_rank is not None


@rule
def lora_targets_are_known(draft: Draft) -> str:
    words = [word.strip() for word in draft.run.model.lora_targets.split(",")]
    unknown = next((word for word in words if word not in LORA_TARGETS), None)
    if unknown is None:
        return ""
    guess = closest(unknown, LORA_TARGETS, cutoff=0.6)
    hint = f"did you mean {guess}?" if guess else f"targets are {', '.join(LORA_TARGETS)}"
    return f"{show(draft, 'lora_targets')}: {unknown or 'an empty word'} is no target; {hint}"


@rule
def adapters_have_their_projection(draft: Draft) -> str:
    model = draft.run.model
    words = {word.strip() for word in model.lora_targets.split(",")}
    if not _is_lora(draft.run) or model.gated or "gate_proj" not in words:
        return ""
    return f"{show(draft, 'lora_targets')}: gate_proj is of a gated MLP (--swiglu); this one has up_proj and down_proj"


lora_has_a_base = forbid(
    lambda run: _is_lora(run) and not (run.checkpoint.load or run.checkpoint.pretrained_checkpoint),
    "{lora_rank} trains beside a model that exists; give its checkpoint or Hugging Face folder by "
    "--pretrained-checkpoint, or adapters to continue by --load",
)
experts_have_no_adapters = forbid(
    lambda run: (
        run.model.mixture and any(PROJECTIONS[name][0].startswith("mlp.") for name in run.model.lora_projections)
    ),
    "{lora_targets} with {num_experts}: adapters of experts are not implemented; {remedy}",
    remedy=lambda run: _NEITHER if run.model.multi_latent_attention else "use --lora-targets attention",
)
latent_attention_has_no_adapters = forbid(
    lambda run: (
        run.model.multi_latent_attention
        and any(PROJECTIONS[name][0].startswith("self_attention.") for name in run.model.lora_projections)
    ),
    "{lora_targets} with --multi-latent-attention: adapters of its projections are not implemented; {remedy}",
    remedy=lambda run: _NEITHER if run.model.mixture else "use --lora-targets mlp",
)
frozen_routers_stay = forbid(
    lambda run: (
        _is_lora(run)
        and (
            run.model.chooses_by == "quantile_balancing"
            or (run.model.moe_router_enable_expert_bias and run.model.moe_router_bias_update_rate != 0)
        )
    ),
    "{lora_rank} freezes the model, and its routers are moved after each step; use --moe-router-bias-update-rate 0 "
    "with --moe-router-enable-expert-bias, and no quantile_balancing",
)
lora_is_updated_by_element = forbid(
    lambda run: _is_lora(run) and run.optimizer.updates_matrices,
    "{lora_rank} with {optimizer}: that updates the matrices of whole layers; use --optimizer adam, sgd or lion",
)
lora_is_saved_as_torch_dist = forbid(
    lambda run: _is_lora(run) and run.checkpoint.ckpt_format != "torch_dist",
    "{lora_rank} with {ckpt_format}: adapters are saved in torch_dist; leave --ckpt-format out",
)
lora_is_not_fully_sharded = forbid(
    lambda run: _is_lora(run) and run.parallel.fully_shards,
    "{lora_rank}: FSDP would shard frozen weights with trained ones, which is not implemented; use "
    "--use-distributed-optimizer",
)
lora_is_for_gpt = forbid(
    lambda run: _is_lora(run) and run.model.family.objective != "causal",
    "{lora_rank} with {model_family}: adapters are for GPT; leave --lora-rank out",
)
lora_is_beside_known_layers = forbid(
    lambda run: _is_lora(run) and (run.model.model or run.model.attention or run.model.mlp),
    "{lora_rank}: adapters are beside built-in layers; leave it out, or --model, --attention and --mlp",
)
lora_is_without = excluded(
    "lora",
    _is_lora,
    {
        "mtp_num_layers": "its adapters are beside the layers of GPT alone; leave one of them out",
        "use_mup": "its factors are those of a model that is trained as a whole; leave one of them out",
        "use_cpu_initialization": "Megatron draws no adapters; leave it out",
        "decoupled_lr": "the embeddings that it is the rate of are frozen; leave it out",
        "compile": "adapters are not compiled yet; leave it out",
    },
    switch="lora_rank",
)
lora_settings_need_a_rank = idle_without("lora_rank", "lora_alpha", "lora_targets", "lora_dropout", "lora_use_rslora")
