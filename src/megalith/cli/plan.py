"""`megalith plan`: whether a run fits its devices, and what takes the memory, before they are there."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from megalith.cli.arguments import CommandParser
from megalith.cli.from_megatron import run_of
from megalith.cli.report import write_page
from megalith.config.command_line import read_command_line, without_settings
from megalith.config.reading import read_recipe
from megalith.errors import ConfigError
from megalith.plan.devices import DEVICES, Device
from megalith.plan.presets import PRESETS, preset_words
from megalith.progress import task
from megalith.report import find_run, read_history

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
        "--nodes", type=int, metavar="M", help="machines of the run (default: as few as hold its devices)"
    )
    parser.add_argument("--preset", metavar="NAME", help="plan a known model: " + ", ".join(PRESETS))
    parser.add_argument(
        "--search",
        action="store_true",
        help="propose the fastest layouts that fit, whatever layout the flags have; so without --micro-batch-size too",
    )
    parser.add_argument("--hours", type=float, metavar="H", help="say which size to train in so many hours")
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
) -> int:
    """Print which sizes the hours pay for."""
    from megalith.plan.budget import Purchase, afford, read_number
    from megalith.plan.plan import Plan, search_run

    if options.data is None or options.preset or options.hours <= 0:
        raise ConfigError("--hours needs a number above 0 and --data TOKENS, such as 2B, and takes no --preset")
    seconds, unique = 3600 * options.hours, read_number("--data", options.data)

    def plan_of(flags: list[str]) -> Plan:
        return search_run([*flags, *words], device, world_size=world_size, nodes=nodes, number=1)[0]

    with task("planning sizes"):
        sizes = afford(device, seconds, unique, world_size, plan_of)
    best = sizes[0]

    def command(one: Purchase) -> str:
        assert one.plan.found is not None
        length = ["--train-iters", str(one.iterations)]
        kept = [*without_settings(one.plan.words, ["train_iters"]), *length]
        return replace(one.plan, words=kept).command(one.plan.found.best[0])

    if options.json:
        rows = [
            {
                "parameters": one.parameters,
                "tokens": one.tokens,
                "epochs": one.epochs,
                "loss": one.loss,
                "train_iters": one.iterations,
                "step_seconds": one.plan.time.step_seconds,
                "command": command(one),
            }
            for one in sizes
        ]
        print(json.dumps({"hours": options.hours, "device": device.name, "sizes": rows}))
        return 0
    print(f"In {options.hours:g} hours on {world_size} x {device.name}, of {unique:.3g} tokens of text:\n")
    print("parameters     tokens  epochs  loss by the law  s a step    MFU  layout")
    for one in sizes:
        time, layout = one.plan.time, one.plan.run.layout
        figures = f"{one.tokens:9.3g}  {one.epochs:6.2f}  {one.loss:15.3f}  {time.step_seconds:8.3f}  {time.mfu:5.1%}"
        print(f"{one.parameters / 1e6:8,.0f} M  {figures}  {layout}")
    end = datetime.now() + timedelta(seconds=best.iterations * best.plan.time.step_seconds)
    print(f"\nTrain the first; started now it ends on {end:%Y-%m-%d at %H:%M}, without evaluations and saves:")
    print(f"  {command(best)}")
    print("Put your data and tokenizer in place of --mock-data and NullTokenizer.")
    return 0


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


def run(argv: Sequence[str]) -> int:
    """Print the plan of a command line or a launch script; ConfigError lists all violations."""
    options, words = make_parser().parse_known_args(list(argv))
    if options.calibrate is not None:
        if len(argv) > 2:
            raise ConfigError("--calibrate takes the folder of a run and no other flags")
        print(_calibrate(Path(options.calibrate)))
        return 0
    words, number = run_of(words) if words else ([], None)
    if options.gpus is None:
        raise ConfigError(f"--gpus is not given; give the devices as NxDEVICE, such as {number or 8}xH100")
    of_script = number is not None and not options.gpus[:1].isdigit()
    gpus = f"{number}x{options.gpus}" if of_script else options.gpus
    from megalith.plan.plan import machines, plan_for, savings

    world_size, device, nodes = machines(gpus, options.nodes)
    if options.hours is not None:
        if options.html:
            raise ConfigError("--html writes the page of one run; leave it out beside --hours")
        return _print_budget(options, words, device, world_size, nodes)
    if options.preset:
        words = [*preset_words(options.preset, device), *words]
    search = options.search or bool(options.preset) or not _has_micro_batches(words)
    with task("searching layouts" if search else "planning") as progress:
        plan = plan_for(words, gpus, nodes=nodes, search=search, task=progress)
    if options.html:
        from megalith.plan.page import render_plan

        write_page(Path(options.html), render_plan(plan), "--html")
    if options.json:
        print(plan.to_json())
    else:
        here = os.environ.get("LC_ALL") or os.environ.get("LANG") or ""
        language = options.lang or ("zh" if here.startswith("zh") else "en")
        less = [] if plan.found else savings(plan, words, world_size=world_size, nodes=nodes, language=language)
        print(plan.text(less, language))
    return 0
