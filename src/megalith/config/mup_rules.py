"""Rules of muP: which models it is for, and what its numbers must be."""

from __future__ import annotations

from dataclasses import fields

from megalith.config.groups.mup import MupSettings
from megalith.config.idle import idle_without
from megalith.config.rule import Draft, Rule, rule, show


@rule("use_mup", "model_family", "multi_latent_attention")
def mup_is_for_gpt(draft: Draft) -> str:
    model = draft.run.model
    if not model.use_mup or (model.model_family == "gpt" and not model.multi_latent_attention):
        return ""
    name = "multi_latent_attention" if model.multi_latent_attention else "model_family"
    return f"--use-mup with {show(draft, name)}: its factors are built for GPT with usual attention; leave it out"


@rule("use_mup", "mup_width_mult", "mup_base_hidden_size", "hidden_size")
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


@rule("use_mup", "ckpt_format", "save")
def per_rank_files_have_one_rate(draft: Draft) -> str:
    checkpoint = draft.run.checkpoint
    if not draft.run.model.use_mup or checkpoint.ckpt_format != "torch" or checkpoint.save is None:
        return ""
    return "--ckpt-format torch is written for groups of one rate, not with --use-mup; use torch_dist"


@rule("use_mup", "mup_base_hidden_size")
def mup_without_a_base(draft: Draft) -> str:
    model = draft.run.model
    if not model.use_mup or model.mup_base_hidden_size is not None:
        return ""
    return (
        "--use-mup scales no rate and no initial weight by itself; give the width of the tuned model by "
        "--mup-base-hidden-size"
    )


@rule("use_mup", "init_method_xavier_uniform")
def uniform_weights_know_their_width(draft: Draft) -> str:
    model = draft.run.model
    if not model.use_mup or not model.init_method_xavier_uniform:
        return ""
    return "--use-mup leaves the initial weights of --init-method-xavier-uniform as they are, which know their width"


@rule("use_mup", "optimizer", "muon_scale_mode")
def muon_has_its_scale(draft: Draft) -> str:
    config = draft.run.optimizer
    if not draft.run.model.use_mup or not config.orthogonalises or config.muon_scale_mode != "spectral":
        return ""
    return (
        f"--use-mup with {show(draft, 'muon_scale_mode')}: the updates of Muon's matrices grow with the width; "
        "--muon-scale-mode unit_rms_norm keeps them"
    )


MUP_RULES: tuple[Rule, ...] = (mup_is_for_gpt, width_multiplier_follows, per_rank_files_have_one_rate)
MUP_NOTICES: tuple[Rule, ...] = (
    mup_without_a_base,
    uniform_weights_know_their_width,
    muon_has_its_scale,
    *(
        idle_without(field.name, "use_mup", "--use-mup is not given")
        for field in fields(MupSettings)
        if field.name != "use_mup"
    ),
)
