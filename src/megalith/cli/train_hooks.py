"""Files of a training run, and the hooks that write them: console, logs, metrics, curves, profiles."""

from __future__ import annotations

import importlib
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from megalith.assemble.training import BuiltRun
from megalith.checkpoint.rank_group import RankGroup
from megalith.cli.rehearse import Rehearsal
from megalith.compat.megatron.memory import MemoryReport, theoretical_memory, theory_lines
from megalith.compat.megatron.run_console import MegatronConsole, RunConsole
from megalith.config import RunConfig
from megalith.config.saved_args import megatron_args
from megalith.data.sft_dataset import SFTDataset
from megalith.device import is_cuda
from megalith.distributed import comm
from megalith.distributed.context import Axis
from megalith.distributed.machine import try_to_write
from megalith.errors import ConfigError
from megalith.models.language_model import GenerativeModel
from megalith.plan import cache_folder
from megalith.progress import in_terminal
from megalith.tokenizers import build_tokenizer
from megalith.train.metrics import MetricsWriter, memory_in_use
from megalith.train.profiler import MemoryHistory, Profile, build_profiler
from megalith.train.records import ProgressLog, Records
from megalith.train.results import Hook, Hooks
from megalith.train.routing_trace import RoutingTrace
from megalith.train.sample_answers import SampleAnswers, prompt_of
from megalith.train.state import TrainState
from megalith.train.status import StatusLine
from megalith.train.timers import StragglerReport, WaitClock
from megalith.train.trackers import (
    THREADED,
    SwanLab,
    TensorBoard,
    Threaded,
    TrackedRun,
    Tracker,
    WandB,
    require_package,
)
from megalith.train.user_hooks import UserHooks, registered_hooks


def run_folder(config: RunConfig) -> Path:
    """Return the folder for metrics, logs and configuration: inside `--save`, else under ./runs.

    A run without --save did not ask for files, so a read-only working folder does not stop it: a temporary folder is
    used, which the last line of the run names.
    """
    if config.checkpoint.save:
        return Path(config.checkpoint.save) / "run"
    folder = Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
    try:
        try_to_write(folder)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="megalith-run-"))
    return folder


def open_run_folder(config: RunConfig, command: str, folder: Path) -> RunConsole:
    """Check that the folders of the run are writable, and open its log, which starts with the command."""
    for name in config.log.trackers:
        require_package(name, f"--tracker {name}")
    if config.log.wandb_project:
        require_package("wandb", "--wandb-project")
    if config.log.tensorboard_dir:
        require_package("tensorboard", "--tensorboard-dir")
        with _as_config_error("--tensorboard-dir", config.log.tensorboard_dir):
            try_to_write(Path(config.log.tensorboard_dir))
    if (traced := config.log.moe_routing_trace_path) is not None and config.model.mixture:
        with _as_config_error("--moe-routing-trace-path", traced):
            try_to_write(Path(traced))
    save = config.checkpoint.save
    with (
        _as_config_error("--save", save)
        if save
        else _as_config_error("the run folder (there is no --save)", str(folder))
    ):
        try_to_write(folder)
        console = RunConsole(folder / "log.txt")
        console.log(f"\n{command}")
    return console


def open_rank_log(folder: Path, rank: int) -> RunConsole:
    """Open the log of a rank other than the first; without a file if this machine cannot write to the folder."""
    try:
        return RunConsole(folder / f"log-rank{rank:05d}.txt", shows=False)
    except OSError:
        return RunConsole(None, shows=False)


@contextmanager
def _as_config_error(flag: str, folder: str) -> Iterator[None]:
    """Turn an OSError about the folder of a flag into a ConfigError that names the flag."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename and str(error.filename) != folder else ""
        raise ConfigError(f"{flag} {folder}: not writable: {error.strerror}{where}; give a writable folder") from error


def build_hooks(
    config: RunConfig, folder: Path, console: RunConsole, built: BuiltRun, clock: WaitClock | None
) -> list[Hook]:
    """Build the hooks of this rank that record and print the run, followed by those of the user.

    Only the first rank writes shared files. `clock` measures time spent waiting (`--log-straggler`).
    """
    state, context = built.run.state, built.run.state.context
    first = context.rank == 0
    memory = partial(memory_in_use, context.device)
    figures = "" if config.model.registered_layers else theory_lines(theoretical_memory(config, state.model.vocab_size))
    hooks: list[Hook] = [metrics := _metrics(config, folder, built)] if first else []
    hooks.append(_console(config, console))
    if first and config.checkpoint.rehearse_resume:
        hooks.append(Rehearsal(config, console.print, console.warn, metrics.event))
    if first and config.log.plan != "off" and cache_folder().is_dir():
        from megalith.cli.planned import planned  # others need not wait for its import

        found = planned(config, state.model.vocab_size, context.device, memory, console.print, metrics.event)
        hooks += [found] if found else []
    hooks.append(MemoryReport(context, memory, console.print, figures, config.log.log_memory_interval))
    if first:
        hooks += _records(config, folder, console, built)
        hooks += [StatusLine(built.run.loop_config)] if in_terminal() else []
    hooks += _profiles(config, folder, console, built)
    if config.log.moe_routing_trace_path and config.model.mixture:
        hooks.append(_routing_trace(config, built))
    hooks += _sample_answers(config, console, built, Hooks(hooks))
    if clock is not None:
        hooks.append(build_straggler_report(config, context.world, clock, console.print))
    if config.train.hooks:
        hooks.append(UserHooks(registered_hooks(config), config, built.run))
    return hooks


def build_straggler_report(config: RunConfig, world: Axis, clock: WaitClock, say: Callable[[str], None]) -> Hook:
    """Build the report of slow ranks (`--log-straggler`); every rank needs it."""
    return StragglerReport(world, clock, say, config.log.straggler_minmax_count)


def dump_groups(path: str, state: TrainState) -> None:
    """Write the parameter group of each weight (`--dump-param-to-param-group-map`); all ranks call it."""
    own = {
        name: {
            "group": number,
            "wd_mult": group.wd_mult,
            "lr_mult": group.lr_mult,
            "is_decoupled_lr": group.decoupled,
        }
        for number, group in enumerate(state.optimizer.groups)
        for name in group.names
    }
    everywhere = comm.all_gather_objects(own, state.context.world)

    def write() -> None:
        with _as_config_error("--dump-param-to-param-group-map", path):
            Path(path).write_text(json.dumps({k: v for ours in everywhere for k, v in ours.items()}, indent=1) + "\n")

    RankGroup(state.context.world).run_on_first(write)


def _metrics(config: RunConfig, folder: Path, built: BuiltRun) -> MetricsWriter:
    device, resumed = built.run.state.context.device, built.resumed_at
    # Not earlier: a start that is refused leaves the configuration of the run that is here.
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=1) + "\n", encoding="utf-8")
    metrics = MetricsWriter(folder / "metrics.jsonl", partial(memory_in_use, device))
    changes = [change.to_dict() for change in built.changes]
    metrics.event("start" if resumed is None else "resume", iteration=resumed or 0, changes=changes)
    return metrics


def _console(config: RunConfig, console: RunConsole) -> Hook:
    save = config.checkpoint.save
    return MegatronConsole(
        console,
        save,
        config.layout,
        throughput=config.log.log_throughput,
        passing=config.checkpoint.ephemeral_dir(save or ""),
        save_format=config.checkpoint.ckpt_format,
        timing_option=config.log.timing_log_option,
    )


def _sample_answers(config: RunConfig, console: RunConsole, built: BuiltRun, listeners: Hooks) -> list[Hook]:
    """Build the answers to prompts, which all ranks compute; `listeners` receive them."""
    valid, model, texts = built.loaders.valid, built.run.state.model, config.log.sample_prompts
    count = config.data.sft_sample_prompts if config.data.sft else 0
    if not (count or texts):
        return []
    if not isinstance(model, GenerativeModel):
        console.warn("no samples are computed: a registered model does not continue prompts")
        return []
    held_out = getattr(valid.dataset, "datasets", [valid.dataset]) if valid is not None and count else []
    prompts = [prompt for data in held_out if isinstance(data, SFTDataset) for prompt in data.prompts(count)][:count]
    if count and not prompts:
        console.warn("--sft-sample-prompts has no effect: there is no held-out conversation with a prompt")
    if texts and valid is None and built.loaders.test is None:
        console.warn("--sample-prompts has no effect: nothing is evaluated")
    tokenizer, length = build_tokenizer(config.tokenizer), config.data.seq_length
    prompts += [prompt_of(text, tokenizer, length) for text in texts]
    return [SampleAnswers(model, prompts, tokenizer, length, listeners.after_sampling)] if prompts else []


def _records(config: RunConfig, folder: Path, console: RunConsole, built: BuiltRun) -> list[Hook]:
    log, state = config.log, built.run.state
    hooks: list[Hook] = []
    sinks = _trackers(config, folder, console, built)
    if sinks:
        memory, resumed_at = partial(memory_in_use, state.context.device), built.resumed_at
        begin = -1 if resumed_at is None else resumed_at
        hooks.append(Records(sinks, log, state.context.world.size, memory, begin))
    if log.log_progress and config.checkpoint.save:
        world = state.context.world.size
        path = Path(config.checkpoint.save) / "progress.txt"
        spent, job = built.run.loop_config.flops_per_step * world, os.environ.get("SLURM_JOB_ID", "")
        hooks.append(ProgressLog(path, world, state.flops, spent, job))
    return hooks


def _trackers(config: RunConfig, folder: Path, console: RunConsole, built: BuiltRun) -> list[Tracker]:
    """Build the trackers of `--tracker` and of Megatron's flags."""
    log, state, arguments = config.log, built.run.state, megatron_args(config)
    name = log.tracker_run or (Path(config.checkpoint.save).resolve().name if config.checkpoint.save else folder.name)
    sinks: list[Tracker] = []
    if log.tensorboard_dir or "tensorboard" in log.trackers:
        board = TensorBoard(
            log.tensorboard_dir or str(folder / "tensorboard"),
            queue_size=log.tensorboard_queue_size,
            arguments=arguments,
            iteration=state.iteration,
            samples=state.consumed_samples,
            resumes=built.resumed_at is not None,
        )
        sinks.append(board)
    if log.wandb_project or "wandb" in log.trackers:
        project = log.wandb_project or log.tracker_project
        named = replace(log, wandb_project=project, wandb_exp_name=log.wandb_exp_name or name)
        with suppress(Exception):  # ahead of the seconds that it has; its thread imports it again, and reports
            importlib.import_module("wandb")
        # Known before W&B has begun, which a checkpoint may not wait for.
        state.wandb_run_id = os.environ.get("WANDB_RUN_ID") or state.wandb_run_id or secrets.token_hex(4)
        begin = partial(WandB, named, folder, arguments, os.environ, state.wandb_run_id)
        sinks.append(_begin_wandb(Threaded("W&B", begin), console))
    if others := [THREADED[other] for other in log.trackers if other in THREADED]:
        run_id, resumes = _tracker_run_id(folder, resumes=built.resumed_at is not None)
        run = TrackedRun(log.tracker_project, name, folder, arguments, run_id, resumes)
        for make in others:
            here = make is SwanLab  # it sets handlers of signals, which the main thread alone may
            sinks.append(Threaded(make.name, partial(make, run), local=make.is_local(), here=here))
    return sinks


def _begin_wandb(sink: Threaded, console: RunConsole) -> Threaded:
    """Wait some seconds until W&B has begun, and say where it records if it is offline."""
    sink.wait_until_begun()
    if isinstance(curves := sink.tracker, WandB) and curves.mode == "offline":
        why = f" ({curves.why_offline})" if curves.why_offline else ""
        console.print(
            f"W&B is offline and records to {curves.folder}{why}; upload with: wandb sync "
            f"{curves.folder}/wandb/offline-run-*"
        )
    return sink


def _tracker_run_id(folder: Path, *, resumes: bool) -> tuple[str, bool]:
    """Return the id of the run in trackers, and whether it is an earlier one; it is kept in the run folder."""
    file = folder / "tracker-run-id"
    if resumes and file.is_file():
        return file.read_text(encoding="ascii").strip(), True
    file.write_text((made := secrets.token_hex(6)) + "\n", encoding="ascii")
    return made, False


def _routing_trace(config: RunConfig, built: BuiltRun) -> Hook:
    state = built.run.state
    return RoutingTrace(config.log, state.context.rank, state.chunks, state.iteration)


def _profiles(config: RunConfig, folder: Path, console: RunConsole, built: BuiltRun) -> list[Hook]:
    log, context = config.log, built.run.state.context
    hooks: list[Hook] = []
    if log.profile and context.rank in (log.profile_ranks or (0,)):
        profiler = build_profiler(log, context.device, context.rank, folder)
        iteration = built.run.state.iteration
        hooks.append(Profile(profiler, log.profile_step_start, log.profile_step_end, iteration, console.print))
    if log.record_memory_history and context.rank == 0:
        if is_cuda(context.device):
            hooks.append(MemoryHistory(folder / log.memory_snapshot_path))
        else:
            console.print("--record-memory-history has no effect without a GPU")
    return hooks
