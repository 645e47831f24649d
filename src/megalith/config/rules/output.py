"""Rules of what a run writes: checkpoints, logs, profiles."""

from __future__ import annotations

from megalith.config.rules.rule import (
    Draft,
    Rule,
    excluded,
    forbid,
    idle,
    idle_without,
    multiples,
    note,
    rule,
    show,
)

saving_beside_the_training_is_for_torch_dist = forbid(
    lambda run: run.checkpoint.async_save and run.checkpoint.ckpt_format != "torch_dist",
    "--async-save with {ckpt_format}: only torch_dist is written beside the training; use --ckpt-format torch_dist, "
    "or leave --async-save out",
)


_ADAM_ALONE = "it is written for AdamW with its usual groups; use torch_dist"

per_rank_files_are_without = excluded(
    "per_rank_files",
    lambda run: run.checkpoint.ckpt_format == "torch" and run.checkpoint.save is not None,
    {
        **dict.fromkeys(("optimizer", "apply_wd_to_qk_layernorm", "no_weight_decay_cond_type"), _ADAM_ALONE),
        "use_mup": "it is written for groups of one rate; use torch_dist",
    },
    switch="ckpt_format",
)


@rule
def retained_checkpoints_are_saved_ones(draft: Draft) -> str:
    retained, interval = draft.run.checkpoint.save_retain_interval, draft.run.checkpoint.save_interval
    if retained is None or interval is None or retained % interval == 0:
        return ""
    return (
        f"{show(draft, 'save_retain_interval')} is not a multiple of {show(draft, 'save_interval')}, so that the "
        f"iterations to keep are not all saved; nearest: {multiples(retained, interval)}"
    )


@rule
def non_persistent_saves_have_a_type(draft: Draft) -> str:
    checkpoint = draft.run.checkpoint
    if checkpoint.non_persistent_save_interval is None or checkpoint.non_persistent_ckpt_type is not None:
        return ""
    return f"{show(draft, 'non_persistent_save_interval')} requires --non-persistent-ckpt-type global or local"


@rule
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


@rule
def a_conversion_has_a_source_and_a_place(draft: Draft) -> str:
    checkpoint = draft.run.checkpoint
    if checkpoint.ckpt_convert_format is None:
        if checkpoint.ckpt_convert_save is None:
            return ""
        return f"{show(draft, 'ckpt_convert_save')} requires --ckpt-convert-format torch or torch_dist"
    needed = {"--load": checkpoint.load, "--ckpt-convert-save": checkpoint.ckpt_convert_save}
    lacking = [flag for flag, folder in needed.items() if folder is None]
    return f"{show(draft, 'ckpt_convert_format')} requires {' and '.join(lacking)} DIR" if lacking else ""


saving_has_an_interval = forbid(
    lambda run: run.checkpoint.save is not None and run.checkpoint.save_interval is None,
    "{save} requires --save-interval N, the iterations between checkpoints",
)
only_what_is_taken_can_be_left_out = note(
    lambda run: (
        not run.checkpoint.use_tokenizer_model_from_checkpoint_args
        and not run.checkpoint.use_checkpoint_args
        and not run.checkpoint.use_mp_args_from_checkpoint_args
    ),
    "--no-use-tokenizer-model-from-checkpoint-args has no effect: --use-checkpoint-args is not given, the tokenizer "
    "is the one that the flags name",
)


def _folder_of(kind: str) -> list[Rule]:
    """Make the notice for the folder of a kind of checkpoints that are not saved."""
    return idle(
        (f"non_persistent_{kind}_ckpt_dir",),
        lambda run: run.checkpoint.non_persistent_ckpt_type == kind,
        lambda draft: f": --non-persistent-ckpt-type {kind} is not given",
    )


checkpoint_settings_are_read = (
    *idle_without(
        "save",
        *("save_interval", "no_save_optim", "no_save_rng", "async_save", "save_retain_interval", "keep_last"),
        *("keep_best", "rehearse_resume"),
        "non_persistent_save_interval",
        why="nothing is saved without --save",
    ),
    *_folder_of("global"),
    *_folder_of("local"),
    *idle_without(
        "load",
        *("ckpt_step", "no_load_optim", "no_load_rng", "finetune", "exit_on_missing_checkpoint"),
        *("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
        why="nothing is loaded without --load",
    ),
    note(
        lambda run: run.train.skip_train and not (run.checkpoint.load or run.checkpoint.pretrained_checkpoint),
        "--skip-train evaluates the initial weights: nothing is loaded without --load",
    ),
)
memory_is_printed_with_a_line = forbid(
    lambda run: run.log.log_memory_interval is not None and run.log.log_memory_interval % run.log.log_interval != 0,
    "{log_memory_interval} is not a multiple of {log_interval}; nearest: {nearest}",
    nearest=lambda run: multiples(run.log.log_memory_interval or 0, run.log.log_interval),
)
the_profile_ends_behind_its_start = forbid(
    lambda run: run.log.profile and run.log.profile_step_start >= run.log.profile_step_end,
    "{profile_step_end} is not above {profile_step_start}; use at least {least}",
    least=lambda run: run.log.profile_step_start + 1,
)


the_profile_begins_in_the_run = note(
    lambda run: run.log.profile and run.log.profile_step_start >= run.train_iters,
    "--profile has no effect: the run has {run.train_iters} iterations, which {profile_step_start} excludes",
)


@rule
def profiled_ranks_exist(draft: Draft) -> str:
    world = draft.run.launch.world_size
    if draft.run.launch.nproc is not None or all(rank < world for rank in draft.run.log.profile_ranks):
        return ""
    return f"{show(draft, 'profile_ranks')}: ranks are 0 to {world - 1}"


a_project_of_wandb_has_a_run_name = forbid(
    lambda run: run.log.wandb_project and not run.log.wandb_exp_name,
    "{wandb_project} requires --wandb-exp-name NAME, the name of the run",
)


records_without_a_place = idle(
    (
        *("log_timers_to_tensorboard", "log_validation_ppl_to_tensorboard", "log_memory_to_tensorboard"),
        *("log_world_size_to_tensorboard", "tensorboard_log_interval"),
    ),
    lambda run: run.log.tensorboard_dir or run.log.wandb_project or run.log.trackers,
    lambda draft: " without --tracker, --tensorboard-dir or --wandb-project (metrics.jsonl has it all)",
)


log_settings_are_read = (
    *idle(
        ("tensorboard_queue_size",),
        lambda run: run.log.tensorboard_dir or "tensorboard" in run.log.trackers,
        lambda draft: ": --tensorboard-dir is not given",
    ),
    *idle_without("trackers", "tracker_project", "tracker_run"),
    *idle_without("save", "log_progress", why="progress.txt is written in the folder of --save"),
    *idle_without("record_memory_history", "memory_snapshot_path"),
    *idle(
        ("wandb_exp_name", "wandb_save_dir", "wandb_entity"),
        lambda run: run.log.wandb_project or "wandb" in run.log.trackers,
        lambda draft: ": --wandb-project is not given",
    ),
    *idle_without(
        "profile",
        *("profile_step_start", "profile_step_end", "profile_ranks", "use_pytorch_profiler"),
        *("pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack"),
    ),
)
