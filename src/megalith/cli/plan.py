"""`megalith plan`: whether a run fits its devices, and what takes the memory, before they are there."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.cli.arguments import CommandParser
from megalith.cli.from_megatron import run_of
from megalith.cli.report import write_page
from megalith.config.command_line import read_command_line, without_settings
from megalith.config.reading import read_recipe
from megalith.errors import ConfigError
from megalith.evaluate.request import unwritable
from megalith.plan.chinese import Words, right
from megalith.plan.devices import DEVICES, Device
from megalith.plan.presets import PRESETS, preset_problems, preset_words
from megalith.progress import task
from megalith.report import find_run, read_history

if TYPE_CHECKING:
    from megalith.plan.budget import Purchase

_DESCRIPTION = f"""Says whether a training fits its devices, how fast it is and what takes memory, without data or GPUs.
FLAGS are those of `megalith train`; with a launch script of Megatron its flags and its number of processes.
Devices: {", ".join(DEVICES)}. Exit code 2: the configuration is invalid; a plan that does not fit is a plan."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own flags."""
    parser = CommandParser(
        prog="megalith plan",
        usage="megalith plan FLAGS | run.sh ARGUMENTS | recipe.toml FLAGS | --preset NAME  --gpus NxDEVICE [options]\n"
        "       megalith plan --hours H --data TOKENS  --gpus NxDEVICE\n"
        "       megalith plan --calibrate RUN",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", metavar="NxDEVICE", help="devices of the run, of all nodes together: 8xH100")
    parser.add_argument(
        "--nodes", type=int, metavar="M", help="machines of the run (default: as few as hold its devices, each as many)"
    )
    parser.add_argument("--preset", metavar="NAME", help="plan a known model: " + ", ".join(PRESETS))
    parser.add_argument(
        "--search",
        action="store_true",
        help="propose the fastest layouts that fit, whatever layout the flags have; so without --micro-batch-size too",
    )
    parser.add_argument(
        "--hours", type=float, metavar="H", help="with --data: say which size to train in so many hours"
    )
    parser.add_argument("--data", metavar="TOKENS", help="with --hours: tokens of the text, such as 500M or 2B")
    parser.add_argument("--json", action="store_true", help="print one object on one line")
    parser.add_argument(
        "--calibrate",
        metavar="RUN",
        help="learn from what a finished run measured beside its plan; alone, without --gpus",
    )
    parser.add_argument(
        "--lang", choices=("en", "zh"), help="language of the text (default: zh where LC_ALL or LANG names it, else en)"
    )
    parser.add_argument("--html", metavar="FILE.html", help="also write a page with pictures of memory and pipeline")
    return parser


def _print_budget(
    options: argparse.Namespace, words: Sequence[str], device: Device, world_size: int, nodes: int
) -> None:
    """Print which sizes the hours pay for."""
    from megalith.plan.budget import afford, completed, read_number
    from megalith.plan.plan import Plan, left_out, search_run

    seconds, unique = 3600 * options.hours, read_number("--data", options.data)

    def plan_of(flags: list[str]) -> Plan:
        return search_run(completed(flags, words), device, world_size=world_size, nodes=nodes, number=1)[0]

    with task("planning sizes"):
        sizes = afford(device, seconds, unique, world_size, plan_of)
    if options.json:
        rows = [
            {
                "parameters": one.parameters,
                "tokens": one.tokens,
                "epochs": one.epochs,
                "loss": one.loss,
                "train_iters": one.iterations,
                "step_seconds": one.plan.time.step_seconds,
                "command": _command(one),
            }
            for one in sizes
        ]
        print(json.dumps({"hours": options.hours, "device": device.name, "sizes": rows, "notes": left_out(words)}))
        return
    say = Words(_language(options))
    own = {"hours": options.hours, "number": world_size, "device": device.name, "unique": unique}
    print(say("In {hours:g} hours on {number} x {device}, of {unique:.3g} tokens of text:", **own) + "\n")
    widths = {"parameters": 10, "tokens": 9, "epochs": 6, "loss by the law": 15, "s a step": 8, "MFU": 5}
    print("  ".join([*(right(say(name), columns) for name, columns in widths.items()), say("layout")]))
    for one in sizes:
        time, layout = one.plan.time, say(str(one.plan.run.layout))
        figures = f"{one.tokens:9.3g}  {one.epochs:6.2f}  {one.loss:15.3f}  {time.step_seconds:8.3f}  {time.mfu:5.1%}"
        print(f"{one.parameters / 1e6:8,.0f} M  {figures}  {layout}")
    best = sizes[0]
    end = datetime.now() + timedelta(seconds=best.iterations * best.plan.time.step_seconds)
    ends = "Train the first; started now it ends on {end:%Y-%m-%d at %H:%M}, without evaluations and saves:"
    print(f"\n{say(ends, end=end)}\n  {_command(best)}")
    if best.plan.run.data.mock_data:
        print(say("Put your data and tokenizer in place of --mock-data and NullTokenizer."))
    for note in left_out(words):
        print(say("note: {note}", note=note))


def _command(one: Purchase) -> str:
    """Return the command that trains a size for as long as the hours last."""
    assert one.plan.found is not None
    kept = [*without_settings(one.plan.words, ["train_iters"]), "--train-iters", str(one.iterations)]
    return replace(one.plan, words=kept).command(one.plan.found.best[0])


def _language(options: argparse.Namespace) -> str:
    here = os.environ.get("LC_ALL") or os.environ.get("LANG") or ""
    return options.lang or ("zh" if here.startswith("zh") else "en")


def _calibrate(path: Path) -> str:
    """Learn from a run; return a line about it."""
    from megalith.plan.calibration import calibrate

    folder = find_run(path)
    plans = [event.record for event in read_history(folder).events if event.kind == "plan"]
    return calibrate(plans[-1] if plans else None, folder)


def _has_micro_batches(words: Sequence[str]) -> bool:
    """Return whether flags or their recipe set the size of micro-batches, so that they are a layout to plan."""
    flags = read_command_line(words)
    recipe = read_recipe(Path(flags.recipe)).values if flags.recipe else {}
    return "micro_batch_size" in {**flags.values, **recipe}


def _misplaced(options: argparse.Namespace) -> list[str]:
    """Return what is wrong with options beside others."""
    found = [] if options.preset is None else preset_problems(options.preset)
    if options.html == "":
        found.append("--html '' names no file; give FILE.html, or leave it out")
    elif options.html is not None:
        found += unwritable(Path(options.html), "--html")
    if options.hours is None:
        if options.data is not None:
            found.append(f"--data {options.data}: only --hours reads it; give --hours H too, or leave it out")
        return found
    beside = {
        f"--preset {options.preset}": options.preset is not None,
        "--search": options.search,
        f"--html {options.html}": bool(options.html),
    }
    rule = "is of one model, and --hours chooses among sizes; leave it or --hours out"
    return found + [f"{flag} {rule}" for flag, is_given in beside.items() if is_given]


def run(argv: Sequence[str]) -> int:
    """Print the plan of a command line or a launch script; ConfigError lists all violations."""
    parser = make_parser()
    options, words = parser.parse_known_args(list(argv))
    if options.calibrate is not None:
        if words or vars(options) != vars(parser.parse_args([f"--calibrate={options.calibrate}"])):
            raise ConfigError("--calibrate takes the folder of a run and no other flags; leave them out")
        print(_calibrate(Path(options.calibrate)))
        return 0
    words, number = run_of(words) if words else ([], None)
    problems = _misplaced(options)
    if options.gpus is None:
        problems.append(f"--gpus is not given; give the devices as NxDEVICE, such as {number or 8}xH100")
        raise ConfigError(problems)
    of_script = number is not None and not options.gpus[:1].isdigit()
    gpus = f"{number}x{options.gpus}" if of_script else options.gpus
    from megalith.plan.budget import problems_of
    from megalith.plan.plan import machines

    try:
        world_size, device, nodes = machines(gpus, options.nodes)
    except ConfigError as error:
        raise ConfigError([*problems, *error.violations]) from error
    if options.hours is not None:
        problems += problems_of(options.hours, options.data, words, device, world_size)
    if problems:
        raise ConfigError(problems)
    if options.hours is not None:
        _print_budget(options, words, device, world_size, nodes)
    else:
        _print_plan(options, words, gpus, device, world_size, nodes)
    return 0


def _print_plan(
    options: argparse.Namespace, words: list[str], gpus: str, device: Device, world_size: int, nodes: int
) -> None:
    """Print whether a run fits, or its fastest layouts."""
    from megalith.plan.plan import plan_for, savings

    if options.preset is not None:
        words = [*preset_words(options.preset, device), *words]
    search = options.search or options.preset is not None or not _has_micro_batches(words)
    with task("searching layouts" if search else "planning") as progress:
        plan = plan_for(words, gpus, nodes=nodes, search=search, task=progress)
    if options.html is not None:
        from megalith.plan.page import render_plan

        write_page(Path(options.html), render_plan(plan), "--html")
    if options.json:
        print(plan.to_json())
        return
    language = _language(options)
    less = [] if plan.found else savings(plan, words, world_size=world_size, nodes=nodes, language=language)
    print(plan.text(less, language))
