"""`megalith from-megatron SCRIPT.sh`: a launch script of Megatron translated to a recipe and a command."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from megalith.compat.megatron.script import Launch, Script, find_launch, read_script
from megalith.config import load
from megalith.config.command_line import read_command_line
from megalith.config.environment import read_launch
from megalith.config.families import FAMILIES
from megalith.config.reading import read_recipe
from megalith.config.render import given_recipe, note_lines
from megalith.errors import ConfigError

HELP = """usage: megalith from-megatron SCRIPT.sh [ARGUMENTS OF THE SCRIPT]

Reads a launch script of Megatron-LM (bash) and prints the recipe of its run, the command that starts it here, and
notes. The script also runs unchanged. Nothing is executed: variables, arrays, comments, continued lines, functions and
nested scripts (bash -c, here-documents of sbatch) are parsed; expressions that need a shell stay as they are. Exit
code 2: the configuration is invalid; the recipe is printed nevertheless. Command lines of Megatron's tools are checked
and printed.
MEGALITH_EXPLAIN=1 bash SCRIPT.sh lets bash interpret the script: the training programs that it starts print the same
about their own command line, on rank 0, and exit."""

# Program -> flags that it implies.
_TRAINING: dict[str, tuple[str, ...]] = {
    **{f"pretrain_{family}.py": ("--model-family", family) for family in FAMILIES},
    **dict.fromkeys(("pretrain_gpt.py", "pretrain_gpt_core.py", "pretrain_llama.py"), ()),
}
_OTHER = {
    "pretrain_mamba.py": "state-space and hybrid models are not built",
    "pretrain_hybrid.py": "state-space and hybrid models are not built",
    "pretrain_ict.py": "retrieval models are not built",
    "pretrain_retro.py": "retrieval models are not built",
    "pretrain_vision_classify.py": "images are not trained on",
    "pretrain_vision_dino.py": "images are not trained on",
    "pretrain_vision_inpaint.py": "images are not trained on",
    "pretrain_vlm.py": "images are not trained on",
    "train_rl.py": "reinforcement learning is not built",
    "tasks/msdp/*.py": "multi-stage dialogue prompting is not built",
    "tasks/*/*.py": "of Megatron's tasks those of tasks/main.py are built (LAMBADA and WIKITEXT103)",
}


# Last parts of the paths of programs whose command lines run unchanged here.
_TOOLS = (
    "preprocess_data.py",
    "merge_datasets.py",
    "checkpoint/convert.py",
    "checkpoint_util.py",
    "tasks/main.py",
    "run_text_generation_server.py",
    "text_generation_cli.py",
)
_RECIPE_FILE = "recipe.toml"


def run(argv: Sequence[str]) -> int:
    """Print the recipe to stdout and notes to stderr."""
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    path = Path(argv[0])
    script = _read(path, argv[1:], os.environ)
    launches = find_launch(script)
    for line in script.notes:
        print(f"note: {path}: {line}", file=sys.stderr)
    training = [launch for launch in launches if _implied_flags(launch) is not None]
    if not training:
        return _show_tools(path, launches)
    if len(training) > 1:
        lines = ", ".join(str(launch.line) for launch in training)
        print(f"note: {path} starts {len(training)} trainings (lines {lines}); the last one is shown", file=sys.stderr)
    return _show(path, training[-1], script)


def _read(
    path: Path, arguments: Sequence[str], environ: Mapping[str, str], wanted: str = "a launch script of bash"
) -> Script:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(f"{path}: {reason}; give {wanted}") from error
    return read_script(text, arguments, environ)


def run_of(words: Sequence[str]) -> tuple[list[str], int | None]:
    """Return the flags of a run, and its number of processes where a script says it; print notes to stderr.

    Args:
        words: Flags; a recipe and flags; or a launch script, whose last training counts, with its arguments up to the
            first flag, and flags that override its own.

    Raises:
        ConfigError: The file is no script, or starts no training.
    """
    first = words[0]
    if first.startswith("-"):
        return list(words), None
    if first.endswith(".toml"):
        return ["--config", *words], None
    end = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    script = _read(Path(first), words[1:end], os.environ, "a launch script of bash, a recipe (FILE.toml), or flags")
    for note in script.notes:
        print(f"note: {first}: {note}", file=sys.stderr)
    training = [launch for launch in find_launch(script) if _implied_flags(launch) is not None]
    if not training:
        raise ConfigError(f"{first}: the script starts no training (such as pretrain_gpt.py with torchrun)")
    launch = training[-1]
    processes = None if launch.processes is None else launch.processes * (launch.hosts or 1)
    return [*(_implied_flags(launch) or ()), *launch.flags, *words[end:]], processes


def _implied_flags(launch: Launch) -> tuple[str, ...] | None:
    """Return the flags that a training program implies; None for any other program.

    Forks have their own programs: one whose name begins with `pretrain`, or that receives flags for a model and a
    number of steps, is treated as Megatron's program for that family.
    """
    if launch.name in _TRAINING:
        return _TRAINING[launch.name]
    if _path_in(launch, (*_OTHER, *_TOOLS)):
        return None
    given = {word.partition("=")[0].replace("_", "-") for word in launch.flags}
    trains = "--num-layers" in given and bool({"--train-iters", "--train-samples"} & given)
    if not (launch.name.startswith("pretrain") or trains):
        return None
    words = launch.name.removesuffix(".py").split("_")
    return next((_TRAINING[f"pretrain_{family}.py"] for family in reversed(tuple(FAMILIES)) if family in words), ())


def _path_in(launch: Launch, paths: Iterable[str]) -> str | None:
    """Return the first of `paths` that the launched program's path ends with, or None."""
    return next((path for path in paths if PurePath(launch.program).match(path)), None)


def _check_tool(tool: str, flags: Sequence[str]) -> None:
    """Check the flags of one of `_TOOLS` without opening files."""
    if tool == "preprocess_data.py":
        from megalith.cli.preprocess import parse

        parse(flags, {}, files=False)
    elif tool == "merge_datasets.py":
        from megalith.cli.data import check_merge, make_parser

        check_merge(make_parser().parse_args(["merge", *flags]))
    elif tool == "tasks/main.py":
        from megalith.compat.megatron import tasks

        tasks.read_flags(flags, files=False)
    elif tool == "run_text_generation_server.py":
        from megalith.cli.serve import check_flags

        check_flags(flags)
    elif tool == "text_generation_cli.py":
        if len(flags) != 1:
            raise ConfigError(f"{shlex.join(flags) or 'no argument'}: give one argument, HOST:PORT")
    else:
        from megalith.compat.megatron import convert

        convert.read_flags(PurePath(tool).name, flags, files=False)


def _show_tools(path: Path, launches: Sequence[Launch]) -> int:
    """Check and print the commands of a script that starts no training."""
    for launch in launches:
        if other := _path_in(launch, _OTHER):
            raise ConfigError(f"{path}, line {launch.line}: {launch.program}: {_OTHER[other]}")
    known = [(launch, tool) for launch in launches if (tool := _path_in(launch, _TOOLS))]
    if not known:
        others = ", ".join(dict.fromkeys(launch.name for launch in launches))
        raise ConfigError(
            f"{path}: the script starts no program of Megatron (such as pretrain_gpt.py with torchrun)"
            + (f"; unknown here: {others}" if others else "")
        )
    wrong = []
    for launch, tool in known:
        try:
            _check_tool(tool, launch.flags)
        except ConfigError as error:
            wrong += [f"{path}, line {launch.line}: {launch.name}: {violation}" for violation in error.violations]
            continue
        print(f"# {path}, line {launch.line} starts {launch.name}, whose command line runs here unchanged:")
        print(shlex.join(["python", launch.program, *launch.flags]))
    if wrong:
        sys.stdout.flush()
        raise ConfigError(wrong)
    return 0


def explain(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print recipe and notes of this process's command line on rank 0, then raise ConfigError if it is invalid."""
    started = read_launch(environ)
    if started.get("RANK", "0") != "0":
        return 0
    reading = read_command_line(argv)
    values = {**read_recipe(Path(reading.recipe)).values, **reading.values} if reading.recipe else reading.values
    world = started.get("WORLD_SIZE", str(values.get("nproc", 1)))
    processes = started.get("LOCAL_WORLD_SIZE", world)
    hosts = int(world) // int(processes) if world.isdigit() and processes.isdigit() and int(processes) else 1
    options = {"processes": processes, "hosts": str(hosts), "address": started.get("MASTER_ADDR", "HOST")}
    options["port"] = started.get("MASTER_PORT", "29500")
    launch = Launch("", tuple(argv), started.get("MEGALITH_LAUNCHER", "python"), options, 0)
    _print_recipe("this command line", launch, values)
    _print_notes(argv, environ)
    return 0


def _show(path: Path, launch: Launch, script: Script) -> int:
    processes, hosts = launch.processes, launch.hosts
    world = (processes or 1) * (hosts or 1)
    flags = (*(_implied_flags(launch) or ()), *launch.flags)
    if launch.name not in _TRAINING:
        print(f"note: {launch.name} is treated as Megatron's own program for this kind of model", file=sys.stderr)
    _print_recipe(f"{path} (line {launch.line})", launch, read_command_line(flags).values)
    for name, number in (("processes of a host", processes), ("hosts", hosts)):
        if number is None:
            print(f"note: the number of {name} is not in the script; assuming 1", file=sys.stderr)
    for variable in _unneeded_variables(script):
        print(f"note: {variable} is not needed here", file=sys.stderr)
    _print_notes(flags, {"RANK": "0", "WORLD_SIZE": str(world)})
    return 0


def _print_recipe(what: str, launch: Launch, values: Mapping[str, Any]) -> None:
    print(f"# Recipe of {what}. Start it with:")
    for line in _commands(launch):
        print(f"#   {line}")
    print(given_recipe(values), end="", flush=True)


def _print_notes(flags: Sequence[str], environ: Mapping[str, str]) -> None:
    """Print the notes about a command line to stderr."""
    for line in note_lines(load(flags, environ, files=False)):
        print(f"note: {line}", file=sys.stderr)


def _commands(launch: Launch) -> list[str]:
    options, train = launch.options, ["megalith", "train", "--config", _RECIPE_FILE]
    processes, hosts = options.get("processes", "1"), options.get("hosts", "1")
    if launch.launcher == "srun":
        return [shlex.join(["srun", "--nodes", hosts, "--ntasks-per-node", processes, *train])]
    if launch.launcher in ("mpirun", "mpiexec"):
        return [f"{launch.launcher} ... {shlex.join(train)}"]
    if hosts == "1":
        count = [] if processes == "1" else ["--nproc", processes]
        return [shlex.join([*train[:2], *count, *train[2:]])]
    words = ["torchrun", "--nproc-per-node", processes, "--nnodes", hosts]
    words += ["--node-rank", options.get("host", "N"), "--master-addr", options.get("address", "HOST")]
    words += ["--master-port", options.get("port", "29500")]
    return ["on each host, with its own --node-rank:", shlex.join([*words, "-m", *train])]


def _unneeded_variables(script: Script) -> list[str]:
    return [name for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_FUSED_ATTN") if name in script.exported]
