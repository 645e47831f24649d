"""Rules of what is printed, recorded and measured."""

from __future__ import annotations

from megalith.config.idle import idle_without
from megalith.config.rule import Draft, Rule, multiples, rule, show


@rule("log_memory_interval", "log_interval")
def memory_is_printed_with_a_line(draft: Draft) -> str:
    log = draft.run.log
    if log.log_memory_interval is None or log.log_memory_interval % log.log_interval == 0:
        return ""
    return (
        f"{show(draft, 'log_memory_interval')} is no multiple of {show(draft, 'log_interval')}; "
        f"nearest: {multiples(log.log_memory_interval, log.log_interval)}"
    )


@rule("profile", "profile_step_start", "profile_step_end")
def the_profile_ends_behind_its_start(draft: Draft) -> str:
    log = draft.run.log
    if not log.profile or log.profile_step_start < log.profile_step_end:
        return ""
    return (
        f"{show(draft, 'profile_step_end')} is not above {show(draft, 'profile_step_start')}; "
        f"use at least {log.profile_step_start + 1}"
    )


@rule("profile_ranks", "world_size")
def profiled_ranks_exist(draft: Draft) -> str:
    world = draft.run.launch.world_size
    if draft.run.launch.nproc is not None or all(rank < world for rank in draft.run.log.profile_ranks):
        return ""
    return f"{show(draft, 'profile_ranks')}: ranks are 0 to {world - 1}"


@rule("wandb_project", "wandb_exp_name")
def a_project_of_wandb_has_a_run_name(draft: Draft) -> str:
    log = draft.run.log
    if not log.wandb_project or log.wandb_exp_name:
        return ""
    return f"{show(draft, 'wandb_project')} requires --wandb-exp-name NAME, the name of the run"


@rule("tensorboard_dir", "wandb_project")
def records_without_a_place(draft: Draft) -> str:
    names = (
        "log_timers_to_tensorboard",
        "log_validation_ppl_to_tensorboard",
        "log_memory_to_tensorboard",
        "log_world_size_to_tensorboard",
        "tensorboard_log_interval",
    )
    shown = [show(draft, name) for name in names if name in draft.given and getattr(draft.run.log, name)]
    if draft.run.log.tensorboard_dir or draft.run.log.wandb_project or not shown:
        return ""
    return f"{', '.join(shown)}: no effect without --tensorboard-dir or --wandb-project (metrics.jsonl has it all)"


LOG_RULES: tuple[Rule, ...] = (
    memory_is_printed_with_a_line,
    the_profile_ends_behind_its_start,
    profiled_ranks_exist,
    a_project_of_wandb_has_a_run_name,
)
LOG_NOTICES: tuple[Rule, ...] = (
    records_without_a_place,
    idle_without("tensorboard_queue_size", "tensorboard_dir", "--tensorboard-dir is not given"),
    idle_without("log_progress", "save", "progress.txt is written in the folder of --save"),
    idle_without("memory_snapshot_path", "record_memory_history", "--record-memory-history is not given"),
    *(
        idle_without(name, "wandb_project", "--wandb-project is not given")
        for name in ("wandb_exp_name", "wandb_save_dir", "wandb_entity")
    ),
    *(
        idle_without(name, "profile", "--profile is not given")
        for name in (
            *("profile_step_start", "profile_step_end", "profile_ranks", "use_pytorch_profiler"),
            *("pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack"),
        )
    ),
)
