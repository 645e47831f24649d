"""`megalith train`, and behind `pretrain_gpt.py`: the edge of a training run.

Here the environment is read, signals are taken, files of the run are opened, and the way a run ends becomes an exit
code and a last line that says how to go on. Nothing heavy is imported before the configuration is found sound.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.cli.launch import command_line, starts_ranks, supervise
from megalith.cli.threads import keep_native_code_quiet, share_cores, wait_asleep
from megalith.cli.train_convert import convert_instead
from megalith.config import RunConfig, load
from megalith.config.command_line import given_settings, without_settings
from megalith.config.environment import first_of_machine
from megalith.config.render import flags_text
from megalith.config.run import all_settings
from megalith.errors import ConfigError, MegalithError
from megalith.train.faults import Probe, parse_fault
from megalith.train.signals import StopSignals
from megalith.train.streams import warn

if TYPE_CHECKING:
    from megalith.cli.train_start import Started
    from megalith.compat.megatron.screen import Screen
    from megalith.distributed.watch import Watch
    from megalith.train.hooks import Hook
    from megalith.train.results import Ending

EXIT_FINISHED = 0
EXIT_RESUME_ME = 75  # EX_TEMPFAIL of sysexits.h: try again later
_FORWARDED_WITHIN_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
# Settings that say how to begin with a checkpoint: they are done with when the run has begun.
_ONCE = ("finetune", "ckpt_step", "no_load_optim", "no_load_rng", "override_opt_param_scheduler")

_HELP = """usage: megalith train [--nproc N] [--config RECIPE.toml] [flags]
       python pretrain_gpt.py [flags]

Trains a GPT. Takes Megatron's flags under Megatron's names; a recipe gives defaults, flags override it.
--nproc N starts N processes on this machine; torchrun, srun and mpirun do too.
Exit codes: 0 finished, 2 configuration, 3 data, 4 checkpoint, 6 another process failed, 75 stopped by a signal after
saving: run it again.
"""


def run(argv: Sequence[str]) -> int:
    """Train as the flags say; the exit codes are those of the help text."""
    began = time.monotonic()
    if "--help" in argv or "-h" in argv:
        print(_HELP)
        print(flags_text(), end="")
        return EXIT_FINISHED
    supervised = os.environ.get("MEGALITH_LAUNCHER") == "megalith"
    launched = supervised or "TORCHELASTIC_RUN_ID" in os.environ
    # torchrun forwards to each rank the Ctrl-C that the terminal has already sent to it; one of them answers.
    answers = not supervised and (not launched or first_of_machine(os.environ))
    stop = StopSignals(_FORWARDED_WITHIN_SECONDS if launched else 0.0, _acknowledge if answers else None)
    try:
        config = load(argv, saved_args=_saved_args)
        if config.checkpoint.ckpt_convert_format is not None:
            return convert_instead(config)
        if starts_ranks(config):
            stop.close()
            return supervise(config, argv, lambda: _saved_and_words(config, argv))
        if launched:
            _stop_with_parent()
        wait_asleep()
        keep_native_code_quiet(config.launch)
        threads = share_cores(config.launch)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=2)  # a crash in native code then shows where Python was
        return _train(config, argv, stop, began, threads)
    finally:
        stop.close()


def _saved_args(folder: str, step: int | None) -> Mapping[str, Any] | None:
    """The args of the checkpoint that `--load` means, for `--use-checkpoint-args`; whether it is sound, its load sees.

    Raises:
        CheckpointError: it cannot be read.
    """
    from megalith.checkpoint import DirectoryStore, split_path

    path, named = split_path(Path(folder))
    store = DirectoryStore(path)
    there = store.iterations()
    wanted = next((number for number in (named, step, store.latest()) if number is not None), None)
    if wanted is None and not there:
        return None
    common = store.common(there[-1] if wanted is None else wanted)
    return vars(common["args"]) if "args" in common else {}


def _acknowledge(signal_name: str) -> None:
    """Answer a signal at once: the end of the step may be a while away."""
    warn(f"\n{signal_name}: finishing this step and saving; once more to leave at once")


def _stop_with_parent() -> None:
    """Ask the kernel for SIGTERM when the launcher dies, so that this process saves and ends instead of living on."""
    if sys.platform == "linux":
        launcher = int(os.environ.get("MEGALITH_SUPERVISOR", os.getppid()))
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:  # it died before the kernel was asked
            os.kill(os.getpid(), signal.SIGTERM)


def _train(config: RunConfig, argv: Sequence[str], stop: StopSignals, began: float, threads: str) -> int:
    from megalith.assemble.model import choose_device
    from megalith.assemble.ranks import build_watch, join_ranks
    from megalith.checkpoint import DirectoryStore
    from megalith.checkpoint.crew import Crew
    from megalith.cli.train_start import start
    from megalith.compat.megatron import console
    from megalith.compat.megatron.screen import SilentScreen
    from megalith.distributed.wait_clock import WaitClock
    from megalith.train.hooks import Hooks
    from megalith.train.loop import train
    from megalith.train.straggler import StragglerReport

    with ExitStack() as stack:
        watch = build_watch(config)
        clock = WaitClock(choose_device(config.train.device, config.launch)) if _reports(config) else None
        context = stack.enter_context(join_ranks(config, watch, clock, lambda: stop.requested is not None))
        first = context.rank == 0
        folder = run_folder(config) if first else Path()
        screens: list[Screen] = [SilentScreen()]
        Crew(context.world).first(lambda: screens.insert(0, _open_folder(config, argv, folder, stack)))
        for place in config.checkpoint.save_folders:
            stack.enter_context(DirectoryStore(place, context).claim())
        screen = screens[0]
        if threads:
            screen.say(threads)
        try:
            started = start(config, context, screen, stop=stop, probe=_probe(config, watch, screen), began=began)
            stack.callback(started.loaders.close)
            stack.callback(started.run.close)
            hooks = [_hooks(config, folder, screen, started)] if first else []
            if clock is not None:
                named = config.log.straggler_minmax_count
                hooks.append(StragglerReport(context.world, clock, screen.say, named))
            started.run.hook = Hooks(hooks)
            stack.callback(started.run.hook.close)
            if started.run.state.iteration >= started.run.plan.train_iterations:
                screen.say(f"iteration {started.run.state.iteration} of {config.train_iters} is done: only evaluating")
            else:
                screen.say("training ...")
                screen.say(console.milestone_line("before the start of training step", datetime.now()))
                screen.note(f"start-up took {time.monotonic() - began:.2f} s")
            for _ in train(started.run):
                pass
        except MegalithError as error:
            screen.note(f"{type(error).__name__}: {error}")
            raise
        ending = started.run.ending
        assert ending is not None
        return _last_words(ending, config, argv, screen, folder)


def _reports(config: RunConfig) -> bool:
    return config.log.log_straggler and config.launch.world_size > 1


def _open_folder(config: RunConfig, argv: Sequence[str], folder: Path, stack: ExitStack) -> Screen:
    """See that the folders of the run can be written to, and open its log; the stack closes it.

    Raises:
        ConfigError: a folder cannot be written to.
    """
    from megalith.compat.megatron.screen import Screen
    from megalith.train.tensorboard import require_tensorboard

    if config.log.tensorboard_dir:
        require_tensorboard()
        with _naming("--tensorboard-dir", config.log.tensorboard_dir):
            _try_to_write(Path(config.log.tensorboard_dir))
    save = config.checkpoint.save
    with _naming("--save", save) if save else _naming("the folder of a run without --save,", str(folder)):
        _try_to_write(folder)
        screen = Screen(folder / "log.txt")
        stack.callback(screen.close)
        screen.note(f"\n{command_line(argv)}")
        (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=1) + "\n", encoding="utf-8")
    return screen


def _hooks(config: RunConfig, folder: Path, screen: Screen, started: Started) -> Hook:
    """Everything that records and shows the run."""
    from megalith.compat.megatron.screen import MegatronConsole
    from megalith.train.hooks import Hooks
    from megalith.train.memory import memory_in_use
    from megalith.train.metrics import MetricsWriter
    from megalith.train.tensorboard import TensorBoardWriter

    device = started.run.state.context.device
    metrics = MetricsWriter(folder / "metrics.jsonl", lambda: memory_in_use(device))
    save = config.checkpoint.save
    console = MegatronConsole(
        screen,
        save,
        config.layout,
        throughput=config.log.log_throughput,
        passing=config.checkpoint.passing_folder(save or ""),
        save_format=config.checkpoint.ckpt_format,
    )
    hooks: list[Hook] = [metrics, console]
    if config.log.tensorboard_dir:
        hooks.append(TensorBoardWriter(config.log.tensorboard_dir, config.log.tensorboard_log_interval))
    metrics.event("start" if started.resumed_at is None else "resume", iteration=started.resumed_at or 0)
    return Hooks(hooks)


def _probe(config: RunConfig, watch: Watch, screen: Screen) -> Probe:
    """What hears of each point of a step: the watch, and a fault where a test puts one in."""

    def at(point: str, iteration: int) -> None:
        if threading.current_thread() is threading.main_thread():  # the watch is of that one, not of a saving thread
            watch.at(point, iteration)

    text = os.environ.get("MEGALITH_FAULT")
    if not text:
        return at
    screen.warn(f"WARNING: MEGALITH_FAULT={text} is set: this run harms itself at that point, as a test of crashes")
    fault = parse_fault(text)
    attempt = os.environ.get("MEGALITH_ATTEMPT") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    if not fault.concerns(config.launch.rank, int(attempt)):
        return at

    def both(point: str, iteration: int) -> None:
        at(point, iteration)
        fault(point, iteration)

    return both


@contextmanager
def _naming(flag: str, folder: str) -> Iterator[None]:
    """Turn a refusal of the file system, before anything is built, into a word about the flag.

    Raises:
        ConfigError: names the flag, the folder and the reason.
    """
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename and str(error.filename) != folder else ""
        raise ConfigError(
            f"{flag} {folder}: cannot be written to: {error.strerror}{where}; give a folder that can"
        ) from error


def _try_to_write(folder: Path) -> None:
    """Make the folder and a file in it.

    Raises:
        OSError: that is not possible.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x" * 4096)


def run_folder(config: RunConfig) -> Path:
    """Where metrics, log and configuration of the run go: beside its checkpoints, or under ./runs.

    A run without --save asked for no files, so a working folder that cannot be written to does not stop it: they go to
    a temporary folder then, which the last line of the run names.
    """
    if config.checkpoint.save:
        return Path(config.checkpoint.save) / "run"
    folder = Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
    try:
        _try_to_write(folder)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="megalith-run-"))
    return folder


def _last_saved(config: RunConfig) -> int | None:
    """The iteration of the newest checkpoint of this run."""
    from megalith.checkpoint import DirectoryStore

    return max(
        (saved for folder in config.checkpoint.save_folders if (saved := DirectoryStore(folder).latest()) is not None),
        default=None,
    )


def _saved_and_words(config: RunConfig, argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """The iteration of the last checkpoint of this run, None if there is none, and the flags that go on from it."""
    save, saved = config.checkpoint.save, _last_saved(config)
    if save is None or saved is None:
        return None, list(argv)
    return saved, _words_to_resume(config, argv, saved, save)


def _words_to_resume(config: RunConfig, argv: Sequence[str], iteration: int, save: str) -> list[str]:
    """The flags that go on from what was just saved; those of this run where nothing was saved yet.

    What only concerned the checkpoint that this run began with goes, unless a recipe says it: then it is taken back.
    `--use-checkpoint-opt-param-scheduler` stays, as the checkpoint still has another schedule than the flags.
    """
    if _last_saved(config) != iteration:
        return list(argv)
    settings = config.checkpoint
    lacking = {"no_load_optim": settings.no_save_optim, "no_load_rng": settings.no_save_rng}
    done = [name for name in _ONCE if not lacking.get(name)]
    words = without_settings(argv, done)
    if settings.load != save or "load" not in given_settings(words):
        words = [*without_settings(words, ["load"]), "--load", save]
    again = load(words, files=False)
    for name in done:
        if getattr(again.checkpoint, name, None) or getattr(again.schedule, name, None):
            words += ["--ckpt-step", str(iteration)] if name == "ckpt_step" else [all_settings()[name].off_spellings[0]]
    for name, needed in lacking.items():
        if needed and not getattr(again.checkpoint, name):
            words.append(all_settings()[name].flag)
    return words


def _last_words(ending: Ending, config: RunConfig, argv: Sequence[str], screen: Screen, folder: Path) -> int:
    """Say where things are and how to go on; returns the exit code."""
    save = config.checkpoint.save
    if ending.kind == "finished":
        screen.say(f"metrics and the full log are in {folder}")
        if save and config.tokenizer.tokenizer_type != "NullTokenizer":
            screen.say(f"try it: megalith generate {save} --prompt 'Once upon a time'")
        return EXIT_FINISHED
    if save is None:
        screen.say("nothing is saved: the run has no --save")
        return EXIT_FINISHED if ending.kind != "signal" else 128 + signal.Signals[ending.detail].value
    words = _words_to_resume(config, argv, ending.iteration, save)
    hint = "" if config.launch.launcher in ("", "megalith") else " (under the same launcher)"
    screen.say(f"stopped at iteration {ending.iteration}; resume{hint} with:\n  {command_line(words)}")
    return EXIT_RESUME_ME if ending.kind == "signal" else EXIT_FINISHED
