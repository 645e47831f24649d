"""`megalith plan`: whether a run fits its devices, and what takes the memory, before they are there."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megalith.cli.arguments import CommandParser
from megalith.cli.from_megatron import run_of
from megalith.errors import ConfigError
from megalith.plan.devices import DEVICES, read_devices

_DESCRIPTION = f"""Says whether a training fits its devices and what takes their memory, without data or devices.
FLAGS are those of `megalith train`; with a launch script of Megatron its flags and its number of processes.
Devices: {", ".join(DEVICES)}. Exit code 2: the configuration is invalid; a plan that does not fit is a plan."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own flags."""
    parser = CommandParser(
        prog="megalith plan",
        usage="megalith plan FLAGS | run.sh ARGUMENTS | recipe.toml FLAGS  --gpus NxDEVICE [--nodes M] [--json]",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", metavar="NxDEVICE", help="devices of the run, of all nodes together: 8xH100")
    parser.add_argument("--nodes", type=int, default=1, metavar="M", help="machines of the run (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one object on one line")
    return parser


def run(argv: Sequence[str]) -> int:
    """Print the plan of a command line or a launch script; ConfigError lists all violations."""
    options, words = make_parser().parse_known_args(list(argv))
    words, number = run_of(words) if words else ([], None)
    if options.gpus is None:
        raise ConfigError(f"--gpus is not given; give the devices as NxDEVICE, such as {number or 8}xH100")
    of_script = number is not None and not options.gpus[:1].isdigit()
    world_size, device = read_devices(f"{number}x{options.gpus}" if of_script else options.gpus)
    from megalith.plan.plan import plan_run, savings

    plan = plan_run(words, device, world_size=world_size, nodes=options.nodes)
    if options.json:
        print(plan.to_json())
    else:
        print(plan.text(savings(plan, words, world_size=world_size, nodes=options.nodes)))
    return 0
