"""`megalith train` and `pretrain_gpt.py`: entry point of a training run.

It reads the environment, installs signal handlers, opens the files of the run, and turns the outcome into an exit code
and a last line with the command to resume. torch is imported only after the configuration has passed its checks.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.cli.checkpoint_convert import convert_instead
from megalith.cli.importing import collections_paused
from megalith.cli.launch import command_line, starts_ranks, supervise
from megalith.cli.threads import divide_cores, limit_spinning, suppress_native_traces
from megalith.config import RunConfig, load
from megalith.config.build import imported
from megalith.config.command_line import given_settings, without_settings
from megalith.config.environment import first_of_machine
from megalith.config.from_args import TOKENIZER_FILES, tokenizer_from_args
from megalith.config.render import common_flags_text, flags_text
from megalith.config.rules.file import TRACKER_FILE
from megalith.config.rules.rule import Draft, Rule
from megalith.config.run import all_settings
from megalith.errors import ConfigError, MegalithError
from megalith.kernels.cpu.process import keep_freed_memory, return_freed_memory
from megalith.registry import IMPORT_FLAG, Import, Registry
from megalith.train.faults import Probe, parse_fault
from megalith.train.signals import StopSignals
from megalith.train.streams import warn

if TYPE_CHECKING:
    import torch

    from megalith.assemble.training import BuiltRun
    from megalith.compat.megatron.run_console import RunConsole
    from megalith.distributed.context import ParallelContext
    from megalith.distributed.watchdog import Watchdog
    from megalith.train.loop import TrainingRun

EXIT_FINISHED = 0
EXIT_RESUME_ME = 75  # EX_TEMPFAIL of sysexits.h: try again later
_FORWARDED_WITHIN_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_SMALL = 2**23  # layers x width^2 of about 100 million parameters, whose states any device holds
# Settings about how a run starts from a checkpoint; they do not apply when it resumes.
_ONCE = ("finetune", "ckpt_step", "no_load_optim", "no_load_rng", "override_opt_param_scheduler")

HELP = """usage: megalith train [--nproc N] [--config RECIPE.toml] [flags]
       python pretrain_gpt.py [flags]

Trains a GPT, or a BERT or T5 with --model-family. Flags have Megatron's names and override those of a recipe.
--nproc N starts N processes on this machine; torchrun, srun and mpirun work too.
With MEGALITH_EXPLAIN=1 in the environment nothing is started: rank 0 prints the recipe of the run and notes about it.
Exit codes: 0 finished, 1 mismatch (--prove first), 2 configuration, 3 data, 4 checkpoint, 6 another process failed, 75
stopped by a signal after saving (start it again to resume).
"""


def run(argv: Sequence[str]) -> int:
    """Train as the flags say and return one of the exit codes that the help text lists."""
    began = time.monotonic()
    if not {"-h", "--help", "--help-all"}.isdisjoint(argv):
        print(HELP)
        print(flags_text(imported(argv)) if "--help-all" in argv else common_flags_text(), end="")
        return EXIT_FINISHED
    if os.environ.get("MEGALITH_EXPLAIN", "0") not in ("", "0"):
        from megalith.cli.from_megatron import explain

        return explain(argv, os.environ)
    supervised = os.environ.get("MEGALITH_LAUNCHER") == "megalith"
    launched = supervised or "TORCHELASTIC_RUN_ID" in os.environ
    # torchrun forwards Ctrl-C to ranks that have already received it from the terminal; one rank per machine prints.
    answers = not supervised and (not launched or first_of_machine(os.environ))
    acknowledge = _Acknowledgement()
    stop = StopSignals(_FORWARDED_WITHIN_SECONDS if launched else 0.0, acknowledge if answers else None)
    try:
        checked = () if supervised else (Rule("memory_holds_the_weights", _check_memory),)
        registry = imported(argv, follows_recipe=True)
        config = load(argv, saved_args=partial(_saved_args, registry), registry=registry, rules=checked)
        if launched or "MEGALITH_SUPERVISOR" in os.environ:
            _stop_with_parent()
        converts = config.checkpoint.ckpt_convert_format is not None
        if converts or starts_ranks(config):
            stop.close()
            if stop.requested is not None:
                return 128 + signal.Signals[stop.requested].value
            if converts:
                return convert_instead(config)
            before = _save_times(config)
            return supervise(config, argv, lambda: _saved_and_argv(config, argv, before), run)
        threads = divide_cores(config.launch)
        limit_spinning(config.launch.local_world_size or 1)
        suppress_native_traces(config.launch)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=2)  # print the Python stack on a crash in native code
        code = _train(config, argv, stop, acknowledge, began, threads)
        if launched:
            stop.finish()  # else a signal while the interpreter ends would count as this rank's failure
        return code
    finally:
        stop.close()


def _check_memory(draft: Draft) -> str:
    """Return why the devices of this machine cannot hold the weights of the run; "" if they may."""
    model = draft.run.model
    if model.num_layers * model.hidden_size**2 * (model.num_experts or 1) < _SMALL:
        return ""
    from megalith.plan.bound import check_memory  # small runs need not wait for its import

    return check_memory(draft)


def _saved_args(registry: Registry, folder: str, step: int | None) -> Mapping[str, Any] | None:
    """Return the args of the checkpoint that `--load` names, for `--use-checkpoint-args`; None if there is none.

    Files of its tokenizer are those that the checkpoint has a copy of.
    """
    from megalith.checkpoint import DirectoryStore, split_path
    from megalith.tokenizers.build import with_files_in

    path, named = split_path(Path(folder), step)
    store = DirectoryStore(path)
    there = store.iterations()
    wanted = store.latest() if named is None else named
    if wanted is None and not there:
        return None
    wanted = there[-1] if wanted is None else wanted
    common = store.common(wanted)
    if "args" not in common:
        return {}
    args = vars(common["args"])
    own = with_files_in(store.folder(wanted), tokenizer_from_args(args, registry))
    return args | {name: getattr(own, name) for name in TOKENIZER_FILES}


@dataclass
class _Acknowledgement:
    """Signal callback that prints what happens next; the current step may take a while."""

    training: bool = False  # whether there is a step to finish, and something to save

    def __call__(self, signal_name: str) -> None:
        doing = "finishing this step and saving" if self.training else "stopping before the first step"
        warn(f"\n{signal_name}: {doing}; repeat to exit at once")


def _stop_with_parent() -> None:
    """Ask the kernel for SIGTERM when the launcher dies, so that this process saves and ends instead of living on."""
    if sys.platform == "linux":
        launcher = int(os.environ.get("MEGALITH_SUPERVISOR", os.getppid()))
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:  # it died before prctl
            os.kill(os.getpid(), signal.SIGTERM)


def _train(
    config: RunConfig, argv: Sequence[str], stop: StopSignals, acknowledge: _Acknowledgement, began: float, threads: str
) -> int:
    with collections_paused():
        from megalith.assemble.model import choose_device
        from megalith.assemble.ranks import build_watchdog, join_ranks
        from megalith.checkpoint import DirectoryStore
        from megalith.checkpoint.rank_group import RankGroup
        from megalith.cli.train_hooks import build_hooks, dump_groups, open_rank_log, open_run_folder, run_folder
        from megalith.distributed import comm
        from megalith.train.loop import train
        from megalith.train.results import Hooks
        from megalith.train.timers import WaitClock

    with ExitStack() as stack:
        watchdog = build_watchdog(config, trains=True)
        device = choose_device(config.train.device, config.launch)
        set_deterministic(config, device)
        _keep_freed_memory(config, device)
        clock = WaitClock(device) if _reports_stragglers(config) else None
        context = stack.enter_context(join_ranks(config, watchdog, clock, lambda: stop.requested is not None))
        first = context.rank == 0
        _require_same_source(config, comm.all_gather_objects(config.registry.imports, context.world))
        folder = Path(comm.all_gather_objects(str(run_folder(config)) if first else "", context.world)[0])
        consoles: list[RunConsole] = []
        RankGroup(context.world).run_on_first(
            lambda: consoles.append(open_run_folder(config, command_line(argv), folder))
        )
        consoles.extend([] if first else [open_rank_log(folder, context.rank)])
        stack.callback(consoles[0].close)
        for place in config.checkpoint.save_folders:
            stack.enter_context(DirectoryStore(place, context).claim())
        console = consoles[0]
        if threads:
            console.print(threads)
        try:
            options: dict[str, Any] = {"stop": stop, "probe": _build_probe(config, watchdog, console), "began": began}
            built = _build(config, argv, context, folder, console, options)
            stack.callback(built.loaders.close)
            stack.callback(built.run.close)
            if config.optimizer.dump_param_to_param_group_map:
                dump_groups(config.optimizer.dump_param_to_param_group_map, built.run.state)
            built.run.hook = Hooks(build_hooks(config, folder, console, built, clock))
            stack.callback(built.run.hook.close)
            _print_first_step(config, built, console, began)
            acknowledge.training = True
            try:
                for _ in train(built.run):
                    pass
            finally:
                _print_progress(built, console)
        except MegalithError as error:
            console.log(traceback.format_exc() if error.__cause__ else f"{type(error).__name__}: {error}")
            raise
        except Exception:
            console.log(traceback.format_exc())
            raise
        return _print_outcome(built.run, config, argv, console, folder)


def _build(
    config: RunConfig,
    argv: Sequence[str],
    context: ParallelContext,
    folder: Path,
    console: RunConsole,
    options: Mapping[str, Any],
) -> BuiltRun:
    """Build the run on this rank; with `--prove first` its first rank proves it before, with errors on all of them."""
    from megalith.assemble.training import build_run
    from megalith.checkpoint.rank_group import RankGroup
    from megalith.cli.prove import prove_first
    from megalith.cli.train_start import StartConsole
    from megalith.device import is_host

    certificate = ""
    if config.train.prove:
        if not context.world.is_first:
            console.log("rank 0 proves the configuration (--prove first)")
        certificate = RankGroup(context.world).run_on_first(lambda: prove_first(config, argv, folder, console.print))
    built = build_run(config, context, observer=StartConsole(console), **options)
    if built.run.saver is not None:
        built.run.saver.certificate = certificate
    if is_host(context.device):
        return_freed_memory()
    return built


def _require_same_source(config: RunConfig, imports: Sequence[tuple[Import, ...]]) -> None:
    """Raise ConfigError if imported modules (`--import`) differ between ranks."""
    for rank, theirs in enumerate(imports):
        if theirs != config.registry.imports:
            names = [one.name for one, other in zip(config.registry.imports, theirs, strict=False) if one != other]
            raise ConfigError(
                f"{IMPORT_FLAG} {' '.join(names)}: source code on rank {config.launch.rank} differs from rank {rank}; "
                "copy the same files to all machines"
            )


def _print_first_step(config: RunConfig, built: BuiltRun, console: RunConsole, began: float) -> None:
    from megalith.compat.megatron import console_lines

    iteration = built.run.state.iteration
    if config.train.skip_train:
        console.print(console_lines.skipping_training_line())
    elif iteration >= built.run.loop_config.train_iterations:
        console.print(f"iteration {iteration} of {config.train_iters} is already done: evaluating only")
    else:
        console.print("training ...")
        console.print(console_lines.milestone_line("before the start of training step", datetime.now()))
        console.log(f"start-up took {time.monotonic() - began:.2f} s")


def _print_progress(built: BuiltRun, console: RunConsole) -> None:
    progress = built.run.progress
    if progress.none_applied:
        which = "initial" if built.resumed_at is None else "loaded"
        console.warn(f"WARNING: all {progress.skipped} steps were skipped: the {which} weights are unchanged")
    elif progress.applied:
        console.print(str(progress))


def _keep_freed_memory(config: RunConfig, device: torch.device) -> None:
    """Keep freed memory for later tensors in a run on a CPU."""
    from megalith.device import is_host

    if is_host(device):
        keep_freed_memory(config.launch.local_world_size or 1)


def set_deterministic(config: RunConfig, device: torch.device) -> None:
    """Select deterministic kernels on a GPU (`--deterministic-mode`); on a CPU all kernels are deterministic."""
    import torch

    from megalith.device import is_host

    if config.train.deterministic_mode and not is_host(device):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # for finding bugs
        torch.use_deterministic_algorithms(True)


def _reports_stragglers(config: RunConfig) -> bool:
    return config.log.log_straggler and config.launch.world_size > 1


def _build_probe(config: RunConfig, watchdog: Watchdog, console: RunConsole) -> Probe:
    """Build the callback for each point of a step: the watchdog, and a fault injector if MEGALITH_FAULT is set."""

    training_thread = threading.current_thread()

    def at(point: str, iteration: int) -> None:
        if threading.current_thread() is training_thread:  # not a thread that saves
            watchdog.at(point, iteration)

    text = os.environ.get("MEGALITH_FAULT")
    if not text:
        return at
    fault = parse_fault(text, config.launch.world_size)
    console.warn(f"WARNING: MEGALITH_FAULT={text} is set: a fault is injected into this run")
    if not fault.applies_to(config.launch.rank, _attempt()):
        return at

    def both(point: str, iteration: int) -> None:
        at(point, iteration)
        fault(point, iteration)

    return both


def _attempt() -> int:
    """Return how often the launcher has restarted the run."""
    return int(os.environ.get("MEGALITH_ATTEMPT") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0")


def _last_saved(config: RunConfig) -> int | None:
    """Return the iteration of the newest checkpoint in the save folders; None if there is none."""
    from megalith.checkpoint import DirectoryStore

    return max(
        (saved for folder in config.checkpoint.save_folders if (saved := DirectoryStore(folder).latest()) is not None),
        default=None,
    )


def _save_times(config: RunConfig) -> list[int]:
    """Return when each save folder got its newest checkpoint, in nanoseconds; 0 where it has none."""
    trackers = [Path(folder) / TRACKER_FILE for folder in config.checkpoint.save_folders]
    return [tracker.stat().st_mtime_ns if tracker.is_file() else 0 for tracker in trackers]


def _saved_and_argv(config: RunConfig, argv: Sequence[str], before: Sequence[int]) -> tuple[int | None, list[str]]:
    """Return the iteration to resume from (None if none was saved) and the arguments that resume from it.

    Args:
        before: `_save_times` at the start of this run. As long as they stay, the checkpoints are an earlier run's, and
            the arguments say which of them to load, as they did at the start.
    """
    settings, saved = config.checkpoint, _last_saved(config)
    if settings.save is None or saved is None:
        return None, list(argv)
    if _save_times(config) == before:
        continues = settings.load == settings.save and not settings.finetune and settings.ckpt_step is None
        return (saved if continues else None), list(argv)
    return saved, _resume_argv(config, argv, saved, settings.save)


def _resume_argv(config: RunConfig, argv: Sequence[str], iteration: int, save: str) -> list[str]:
    """Return the arguments that resume from the checkpoint of `iteration`; `argv` if it was not saved.

    Flags that applied to the checkpoint at the start of this run (`_ONCE`) are removed; those of a recipe are negated.
    `--use-checkpoint-opt-param-scheduler` stays, as the schedule in the checkpoint still differs from the flags.
    """
    if _last_saved(config) != iteration:
        return list(argv)
    settings = config.checkpoint
    lacking = {"no_load_optim": settings.no_save_optim, "no_load_rng": settings.no_save_rng}
    done = [name for name in _ONCE if not lacking.get(name)]
    words, registry = without_settings(argv, done, config.registry), config.registry
    if settings.load != save or "load" not in given_settings(words, registry):
        words = [*without_settings(words, ["load"], registry), "--load", save]
    again = load(words, files=False, registry=registry)
    for name in done:
        if getattr(again.checkpoint, name, None) or getattr(again.schedule, name, None):
            words += ["--ckpt-step", str(iteration)] if name == "ckpt_step" else [all_settings()[name].off_spellings[0]]
    for name, needed in lacking.items():
        if needed and not getattr(again.checkpoint, name):
            words.append(all_settings()[name].flag)
    return words


def _example_prompt(config: RunConfig) -> str:
    """Return a prompt in the characters of the run's tokenizer; the usual one if its file has gone meanwhile."""
    from megalith.tokenizers import build_tokenizer

    prompt = "Once upon a <extra_id_0>" if config.model.family.encoder_decoder else "Once upon a time"
    if config.tokenizer.tokenizer_type != "CharacterTokenizer":
        return prompt
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except (MegalithError, OSError):
        return prompt
    characters = [tokenizer.decode([number]) for number in range(tokenizer.vocab_size)]
    letters = [one for one in characters if len(one) == 1 and one.isalpha()] or characters
    return prompt if {*prompt} <= {*characters} else "".join(letters[:4])


def _print_outcome(run: TrainingRun, config: RunConfig, argv: Sequence[str], console: RunConsole, folder: Path) -> int:
    """Print the outcome and how to continue; return the exit code."""
    if summary := run.anomalies.summary():
        console.print(summary)
    exit_reason, save = run.exit_reason, config.checkpoint.save
    assert exit_reason is not None
    if exit_reason.kind in ("finished", "early stopping"):
        console.print(f"metrics and the full log are in {folder}")
        generates = config.tokenizer.tokenizer_type != "NullTokenizer" and config.model.family.generates
        if save and generates and not run.progress.none_applied:
            names = [one.name for one in config.registry.imports]
            best = run.state.best.iteration if config.checkpoint.keep_best else None
            iteration = [] if best is None else ["--iteration", str(best)]
            words = ["megalith", "generate", save, *iteration, *([IMPORT_FLAG, *names] if names else [])]
            words += ["--chat", "--prompt", "Hello"] if config.data.sft else ["--prompt", _example_prompt(config)]
            console.print(f"try it: {shlex.join(words)}")
        return EXIT_FINISHED
    if save is None:
        console.print("nothing was saved: the run has no --save")
        return EXIT_FINISHED if exit_reason.kind != "signal" else 128 + signal.Signals[exit_reason.detail].value
    words = _resume_argv(config, argv, exit_reason.iteration, save)
    hint = "" if config.launch.launcher in ("", "megalith") else " (under the same launcher)"
    console.print(f"stopped at iteration {exit_reason.iteration}; resume{hint} with:\n  {command_line(words)}")
    return EXIT_RESUME_ME if exit_reason.kind == "signal" else EXIT_FINISHED
