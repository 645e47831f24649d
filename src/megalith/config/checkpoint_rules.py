"""Rules of saving: in the background, how many checkpoints stay, and those for a restart only."""

from __future__ import annotations

from megalith.config.idle import idle_without
from megalith.config.rule import Draft, Rule, multiples, rule, show


@rule("async_save", "ckpt_format")
def saving_beside_the_training_is_for_torch_dist(draft: Draft) -> str:
    checkpoint = draft.run.checkpoint
    if not checkpoint.async_save or checkpoint.ckpt_format == "torch_dist":
        return ""
    return (
        f"--async-save with {show(draft, 'ckpt_format')}: only torch_dist is written beside the training; use "
        "--ckpt-format torch_dist, or leave --async-save out"
    )


@rule("save_retain_interval", "save_interval")
def retained_checkpoints_are_saved_ones(draft: Draft) -> str:
    retained, interval = draft.run.checkpoint.save_retain_interval, draft.run.checkpoint.save_interval
    if retained is None or interval is None or retained % interval == 0:
        return ""
    return (
        f"{show(draft, 'save_retain_interval')} is no multiple of {show(draft, 'save_interval')}, so that the "
        f"iterations to keep are not all saved; nearest: {multiples(retained, interval)}"
    )


@rule("non_persistent_save_interval", "non_persistent_ckpt_type")
def non_persistent_saves_have_a_type(draft: Draft) -> str:
    checkpoint = draft.run.checkpoint
    if checkpoint.non_persistent_save_interval is None or checkpoint.non_persistent_ckpt_type is not None:
        return ""
    return f"{show(draft, 'non_persistent_save_interval')} requires --non-persistent-ckpt-type global or local"


@rule("non_persistent_ckpt_type", "non_persistent_local_ckpt_dir")
def non_persistent_saves_outlive_the_processes(draft: Draft) -> str:
    kind, launch = draft.run.checkpoint.non_persistent_ckpt_type, draft.run.launch
    reason = ""
    if kind == "in_memory":
        reason = "checkpoints in memory are gone with the process"
    elif kind == "local" and (not launch.one_host or launch.local_world_size not in (None, launch.world_size)):
        reason = f"of the {launch.world_size} processes {launch.local_world_size or 'some'} are on this machine, and "
        reason += "what lies on the disk of one machine cannot be read by another"
    elif kind == "local" and draft.run.checkpoint.non_persistent_local_ckpt_dir is None:
        return f"{show(draft, 'non_persistent_ckpt_type')} requires --non-persistent-local-ckpt-dir DIR"
    if not reason:
        return ""
    return (
        f"{show(draft, 'non_persistent_ckpt_type')} is not supported ({reason}); use --non-persistent-ckpt-type global "
        "with --async-save, under which the training hardly waits for the shared file system"
    )


@rule("ckpt_convert_format", "ckpt_convert_save", "load")
def a_conversion_has_a_source_and_a_place(draft: Draft) -> str:
    checkpoint = draft.run.checkpoint
    if checkpoint.ckpt_convert_format is None:
        if checkpoint.ckpt_convert_save is None:
            return ""
        return f"{show(draft, 'ckpt_convert_save')} requires --ckpt-convert-format torch or torch_dist"
    needed = {"--load": checkpoint.load, "--ckpt-convert-save": checkpoint.ckpt_convert_save}
    lacking = [flag for flag, folder in needed.items() if folder is None]
    return f"{show(draft, 'ckpt_convert_format')} requires {' and '.join(lacking)} DIR" if lacking else ""


@rule("save", "save_interval")
def saving_has_an_interval(draft: Draft) -> str:
    checkpoint = draft.run.checkpoint
    if checkpoint.save is None or checkpoint.save_interval is not None:
        return ""
    return f"{show(draft, 'save')} requires --save-interval N, the iterations between checkpoints"


def _folder_of(kind: str) -> Rule:
    """A notice for the folder of a kind of checkpoints that are not saved."""
    name = f"non_persistent_{kind}_ckpt_dir"

    def check(draft: Draft) -> str:
        checkpoint = draft.run.checkpoint
        if getattr(checkpoint, name) is None or checkpoint.non_persistent_ckpt_type == kind:
            return ""
        return f"{show(draft, name)} has no effect: --non-persistent-ckpt-type {kind} is not given"

    return Rule(f"{name}_needs_its_type", (name, "non_persistent_ckpt_type"), check)


@rule("use_tokenizer_model_from_checkpoint_args", "use_checkpoint_args", "use_mp_args_from_checkpoint_args")
def only_what_is_taken_can_be_left_out(draft: Draft) -> str:
    checkpoint = draft.run.checkpoint
    if (
        checkpoint.use_tokenizer_model_from_checkpoint_args
        or checkpoint.use_checkpoint_args
        or checkpoint.use_mp_args_from_checkpoint_args
    ):
        return ""
    return (
        "--no-use-tokenizer-model-from-checkpoint-args has no effect: --use-checkpoint-args is not given, the "
        "tokenizer is the one that the flags name"
    )


CHECKPOINT_RULES: tuple[Rule, ...] = (
    saving_has_an_interval,
    saving_beside_the_training_is_for_torch_dist,
    retained_checkpoints_are_saved_ones,
    non_persistent_saves_have_a_type,
    non_persistent_saves_outlive_the_processes,
    a_conversion_has_a_source_and_a_place,
)
CHECKPOINT_NOTICES: tuple[Rule, ...] = (
    *(
        idle_without(name, "save", "nothing is saved without --save")
        for name in (
            *("save_interval", "no_save_optim", "no_save_rng", "async_save", "save_retain_interval", "keep_last"),
            "non_persistent_save_interval",
        )
    ),
    _folder_of("global"),
    _folder_of("local"),
    only_what_is_taken_can_be_left_out,
    *(
        idle_without(name, "load", "nothing is loaded without --load")
        for name in ("ckpt_step", "no_load_optim", "no_load_rng", "finetune", "exit_on_missing_checkpoint")
    ),
)
