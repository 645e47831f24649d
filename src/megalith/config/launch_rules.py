"""Rules of the launch: that what starts the processes and what each process is told fit together."""

from __future__ import annotations

from megalith.config.rule import Draft, Rule, rule


@rule("rank", "world_size")
def rank_is_in_the_world(draft: Draft) -> str:
    launch = draft.run.launch
    if launch.rank < launch.world_size:
        return ""
    return (
        f"environment variable RANK={launch.rank} with WORLD_SIZE={launch.world_size}: ranks count from 0 to "
        f"{launch.world_size - 1}"
    )


@rule("nproc", "world_size")
def one_launcher(draft: Draft) -> str:
    launch = draft.run.launch
    if launch.nproc is None or launch.nproc == launch.world_size:
        return ""
    by = "RANK and WORLD_SIZE say that a launcher has" if launch.launcher == "hand" else f"{launch.launcher} has"
    return (
        f"--nproc {launch.nproc} starts {launch.nproc} processes itself, and {by} already "
        f"started {launch.world_size}; leave out one of the two"
    )


@rule("nproc", "max_restarts")
def restarts_need_a_supervisor(draft: Draft) -> str:
    launch = draft.run.launch
    if launch.max_restarts == 0 or launch.nproc is not None:
        return ""
    return (
        f"--max-restarts {launch.max_restarts} needs --nproc N, which starts the processes; that of torchrun stands "
        "before the name of the script"
    )


@rule("max_restarts", "save")
def restarts_without_checkpoints(draft: Draft) -> str:
    if draft.run.launch.max_restarts == 0 or draft.run.checkpoint.save:
        return ""
    return "--max-restarts without --save begins at iteration 0 again: give --save FOLDER --save-interval N to go on"


LAUNCH_RULES: tuple[Rule, ...] = (rank_is_in_the_world, one_launcher, restarts_need_a_supervisor)
LAUNCH_NOTICES: tuple[Rule, ...] = (restarts_without_checkpoints,)
