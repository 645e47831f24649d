"""`megalith ladder`: train a family of sizes, fit the law of their losses, and predict and check a larger model.

Each run is a `megalith train` in a folder of its own, trained one after the other; the same command continues where the
runs are. A signal is forwarded to the run, which saves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megalith.cli.arguments import CommandParser
from megalith.cli.compare import show
from megalith.cli.ladder_plan import Plan, Rung, make_plan
from megalith.cli.launch import package_environment
from megalith.cli.report import write_page
from megalith.distributed.supervise import SECOND_SIGNAL, STOPPED, Signals, suspend_with
from megalith.errors import ConfigError, DataError, MegalithError, install_command
from megalith.report.ladder import (
    Ladder,
    Result,
    amount,
    has_diverged,
    interrupted,
    sentences,
    shortfall,
    tables,
    to_dict,
)
from megalith.report.ladder_picture import draw
from megalith.report.scaling_law import Fit
from megalith.report.settings import differing, settings_of
from megalith.report.verdict import Table
from megalith.tokenizers.protocol import json_object
from megalith.train.signals import STOP_SIGNALS
from megalith.train.streams import warn

_TRAIN = (sys.executable, "-m", "megalith", "train")
_POLL_SECONDS = 0.1
_SHOWN_LINES = 12


class _StoreGiven(argparse.Action):
    """Stores a value, and that it was given: `NAME_given`."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"{self.dest}_given", True)


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="megalith ladder",
        usage="megalith ladder --folder DIR [--depths N ...] [--widths N ...] [--tokens-per-parameter R R ...] "
        "[flags of megalith train]",
        description="Train a family of model sizes one after the other, fit L(N, D) = E + A / N^alpha + B / D^beta to "
        "their final validation losses, and predict the loss of a larger model. All other flags are those of megalith "
        "train, such as --config RECIPE.toml. The same command, or --folder DIR alone, continues the ladder.",
        epilog="Exit codes: those of megalith train; 75: stopped by a signal after saving, start it again to continue.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--folder", required=True, metavar="DIR", help="folder of the ladder: ladder.json, picture and runs")
    add("--depths", type=int, nargs="+", default=[], metavar="N", help="layers of each size; width in proportion")
    add("--widths", type=int, nargs="+", default=[], metavar="N", help="width of each size; with --depths in pairs")
    about = "training tokens for each parameter without embeddings: a run of each size and ratio"
    add("--tokens-per-parameter", type=float, nargs="+", default=[], metavar="R", help=about)
    about = "leave the largest size out of the fit, train it at these ratios and compare it with the prediction"
    add("--check", type=float, nargs="+", default=[], metavar="R", help=about)
    about = "learning rates to try at the smallest size, whose best one is used"
    add("--sweep-lr", type=float, nargs="+", default=[], metavar="LR", help=about)
    about = "number of sizes to sweep, from the smallest (1)"
    add("--sweep-sizes", type=int, default=1, action=_StoreGiven, metavar="N", help=about)
    parser.set_defaults(sweep_sizes_given=False)
    add("--sweep-iters", type=int, metavar="N", help="iterations of the sweep (default: those at the lowest ratio)")
    about = (
        "learning rate of a run: that of the sweep (without one --lr, at the shortest run) times (its tokens / those "
        "of the sweep at the smallest size)^-B (0: one rate for all lengths; 0.32 in arXiv:2409.19913)"
    )
    add("--lr-horizon-exponent", type=float, default=0.0, metavar="B", help=about)
    add("--plan", action="store_true", help="print the runs and train nothing")
    return parser


def run(argv: Sequence[str]) -> int:
    """Train what is not yet trained, and print what the runs say."""
    parser = make_parser()
    if not argv:
        parser.print_help()
        return 0
    words = list(argv)
    options, training = parser.parse_known_args(words)
    folder = Path(options.folder)
    if _own(words) == []:
        words += _stored(folder)["arguments"]
        options, training = parser.parse_known_args(words)
    plan = make_plan(options, training)
    if options.plan:
        show([], [_table(plan)])
        return 0
    climb = _Climb(plan, folder, _own(words))
    with Signals(STOP_SIGNALS) as signals:
        return climb.run(signals)


def _own(words: Sequence[str]) -> list[str]:
    """Return the arguments that make the ladder: those without --folder DIR and --plan."""
    place = next(place for place, word in enumerate(words) if word.partition("=")[0] == "--folder")
    return [word for word in (*words[:place], *words[place + 2 - ("=" in words[place]) :]) if word != "--plan"]


def _stored(folder: Path) -> dict[str, Any]:
    """Return what ladder.json holds; DataError if there is none, or it is not a ladder's."""
    if not (folder / "ladder.json").exists():
        raise DataError(f"--folder {folder}: there is no ladder.json in it; give the arguments of the ladder")
    stored = _read_object(folder / "ladder.json", "give the arguments of the ladder again")
    if not all(_are_texts(stored.get(name)) for name in ("arguments", "failed")):
        raise _not_of_a_ladder(folder / "ladder.json")
    return stored


def _saved_settings(file: Path, names: Collection[str]) -> dict[str, Any]:
    """Return the settings in a ladder's config.json, which has groups of these names; DataError if it is another's."""
    saved = _read_object(file, "remove it if the arguments are those of the runs")
    if not saved.keys() & names or not all(isinstance(group, dict) for group in saved.values()):
        raise _not_of_a_ladder(file)
    return settings_of(saved)


def _not_of_a_ladder(file: Path) -> DataError:
    return DataError(f"--folder {file.parent}: not a folder of a ladder ({file} is of something else); give another")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _read_object(file: Path, remedy: str) -> dict[str, Any]:
    """Return `json_object` of a file; its DataError gets a remedy."""
    try:
        return json_object(file)
    except DataError as error:
        raise DataError(f"{error}; {remedy}") from error


def _table(plan: Plan) -> Table:
    """Return the runs of a plan as a table; 6 N D are the FLOPs without embeddings and attention scores."""
    rows = []
    for rung in plan.rungs():
        size, tokens = rung.size, rung.tokens
        numbers = [amount(size.parameters), amount(tokens), f"{tokens / size.parameters:.3g}", f"{rung.iterations:,}"]
        rows.append([rung.purpose, str(size), *numbers, f"{rung.lr:g}", f"{6 * size.parameters * tokens:.2g}"])
    names = ["", "size", "parameters", "tokens", "of each", "iterations", "lr", "6 N D"]
    return Table("Runs; where rates are swept, the best one replaces --lr", names, rows, 2)


class _Climb:
    """The runs of a ladder in its folder."""

    def __init__(self, plan: Plan, folder: Path, arguments: Sequence[str]) -> None:
        self._plan, self._folder, self._arguments = plan, folder, list(arguments)
        config = plan.config()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--folder {folder}: cannot be made ({error.strerror}); choose another path") from error
        before = folder / "config.json"
        self._failed: set[str] = set()
        if before.is_file():
            saved = _saved_settings(before, config.keys())
            now = settings_of(config)
            changed = differing([saved, now])
            if saved["seed"] != now["seed"]:  # runs that differ in it alone are one configuration
                changed["--seed"] = str(saved["seed"]), str(now["seed"])
            if changed:
                shown = ", ".join(f"{flag} {old} -> {new}" for flag, (old, new) in changed.items())
                raise ConfigError(
                    f"{folder} holds runs with other settings ({shown}); give those they have, or another --folder"
                )
            if (folder / "ladder.json").exists():  # else the ladder was killed before it wrote one: no run has failed
                self._failed = set(_stored(folder)["failed"])
        write_page(before, json.dumps(config, indent=1), "--folder")

    def run(self, signals: Signals) -> int:
        """Train the runs that are not finished, write and print the results; return the exit code."""
        predicted = False
        while True:
            rungs, ladder = self._read()
            law = ladder.fit()
            self._write(to_dict(ladder, law))
            number = next((n for n, result in enumerate(ladder.results) if not result.finished), None)
            if law and not predicted and number is not None:
                show(sentences(ladder, law), [])
                predicted = True
            if number is None:
                break
            print(f"{number + 1} of {len(rungs)}: {_described(rungs[number])}", flush=True)
            code = self._train(rungs[number], signals)
            if code:
                warn(f"stopped; continue with: megalith ladder --folder {self._folder}")
                return code
        show(sentences(ladder, law), tables(ladder, law))
        if ladder.of("fit") and law is None:
            names = ", ".join(run.name for run in ladder.of("fit") if not math.isfinite(run.loss))
            raise MegalithError(f"no law is fitted: the loss of {names} is not finite; choose a lower --lr")
        if law:
            self._draw(ladder, law)
        return 0

    def _read(self) -> tuple[list[Rung], Ladder]:
        """Return the runs and their results."""
        plan = self._plan
        sweep = plan.sweep()
        swept = Ladder([self._result(rung) for rung in sweep], plan.ratios)
        best = swept.best(str(plan.sizes[0]))
        if sweep and best is None and all(result.finished for result in swept.results):
            self._write(to_dict(swept, None))
            raise MegalithError("all runs of --sweep-lr have diverged; give lower rates")
        lr = best.lr if best else plan.base.schedule.lr
        rest = [*plan.fitted(lr), *plan.checked(lr)]
        return [*sweep, *rest], replace(swept, results=[*swept.results, *map(self._result, rest)])

    def _result(self, rung: Rung) -> Result:
        result = Result(rung.name, rung.purpose, str(rung.size), rung.size.parameters, rung.tokens, rung.lr)
        failed = rung.name in self._failed
        return replace(result, loss=math.inf) if failed else result.measured(self._folder / rung.name)

    def _write(self, results: Any) -> None:
        stored = {"arguments": self._arguments, "failed": sorted(self._failed), **results}
        write_page(self._folder / "ladder.json", json.dumps(stored, indent=1), "--folder")

    def _train(self, rung: Rung, signals: Signals) -> int:
        """Train a run to its end, return 0, or the exit code of one that a signal has stopped."""
        if signals.received:
            return STOPPED
        log, started, forwarded = self._folder / f"{rung.name}.log", time.monotonic(), list[int]()
        command = [*_TRAIN, *self._plan.arguments(rung, self._folder)]
        with log.open("a", encoding="utf-8") as output:
            process = subprocess.Popen(
                command,
                env={**package_environment(), "MEGALITH_SUPERVISOR": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C must not reach it twice
            )
            while process.poll() is None:
                if signals.suspended:
                    signals.suspended = False
                    suspend_with(partial(os.killpg, process.pid))
                while signals.received:
                    forwarded.append(signals.received.pop(0))
                    process.send_signal(forwarded[-1])
                time.sleep(_POLL_SECONDS)
        code, result = process.returncode, self._result(rung)
        if code in (STOPPED, SECOND_SIGNAL):
            return code
        if code in {sign * number + base for number in forwarded for sign, base in ((-1, 0), (1, 128))}:
            return STOPPED  # before its first step: there was nothing to save
        if code == MegalithError.exit_code and rung.purpose == "sweep" and has_diverged(self._folder / rung.name):
            self._failed.add(rung.name)
            result = self._result(rung)
        elif code:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
            error = MegalithError("\n".join([f"{rung.name} ended with exit code {code}:", *lines, f"(all in {log})"]))
            error.exit_code = code if code > 0 else 128 - code
            raise error
        elif not result.finished:
            folder = self._folder / rung.name
            if interrupted(folder):
                return STOPPED
            raise DataError(
                f"{folder}: the run has ended, but its loss is not known ({shortfall(folder)}; log: {log}); remove the "
                "folder to train it again"
            )
        print(f"    loss {result.loss:.4f} in {time.monotonic() - started:,.0f} s", flush=True)
        return 0

    def _draw(self, ladder: Ladder, law: Fit) -> None:
        file = self._folder / "ladder.png"
        try:
            draw(ladder, law, file)
        except ImportError:
            print(f"for a picture install matplotlib: {install_command('plot')}")
        else:
            print(f"{file}: the losses and the law")


def _described(rung: Rung) -> str:
    size = rung.size
    return (
        f"{rung.purpose} {size}, {amount(size.parameters)} parameters, {amount(rung.tokens)} tokens in "
        f"{rung.iterations:,} iterations, --lr {rung.lr:g}"
    )
