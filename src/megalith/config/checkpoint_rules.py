"""Rules of saving: in the background, how many checkpoints stay, and those for a restart only."""

from __future__ import annotations

from megalith.config.idle import idle_without
from megalith.config.rule import Draft, Rule, multiples, rule, show

_NODE_LOCAL = {
    "local": "checkpoints on the disks of the nodes can be loaded only by the same nodes",
    "in_memory": "checkpoints in memory are gone with the process",
}


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
    return f"{show(draft, 'non_persistent_save_interval')} requires --non-persistent-ckpt-type global"


@rule("non_persistent_ckpt_type")
def non_persistent_saves_are_global(draft: Draft) -> str:
    reason = _NODE_LOCAL.get(draft.run.checkpoint.non_persistent_ckpt_type or "")
    if reason is None:
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


CHECKPOINT_RULES: tuple[Rule, ...] = (
    saving_has_an_interval,
    saving_beside_the_training_is_for_torch_dist,
    retained_checkpoints_are_saved_ones,
    non_persistent_saves_have_a_type,
    non_persistent_saves_are_global,
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
    idle_without(
        "non_persistent_global_ckpt_dir", "non_persistent_ckpt_type", "--non-persistent-ckpt-type global is not given"
    ),
    *(
        idle_without(name, "load", "nothing is loaded without --load")
        for name in ("ckpt_step", "no_load_optim", "no_load_rng", "finetune", "exit_on_missing_checkpoint")
    ),
)
