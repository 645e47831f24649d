"""Among the commands of a script the one that starts a program of Megatron, and on how many processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from megalith.compat.megatron.script.bash import Command, Script

# Options of torchrun and torch.distributed.launch -> what they say here; those without a value are in `_SWITCHES`.
_OPTIONS = {
    "nproc-per-node": "processes",
    "nnodes": "hosts",
    "num-gpus": "processes",
    "num-nodes": "hosts",
    "node-rank": "host",
    "master-addr": "address",
    "master-port": "port",
}
_SWITCHES = ("use-env", "standalone", "no-python", "run-path", "m", "module", "use_env")
_LAUNCHERS = ("torchrun", "torch.distributed.launch", "torch.distributed.run", "deepspeed")
_SAYING = ("echo", "printf")
_TASKS = ("srun", "mpirun", "mpiexec")


@dataclass(frozen=True)
class Launch:
    """A program with its flags, and how it is started.

    Attributes:
        program: path of the .py file, as the script writes it.
        flags: its words.
        launcher: "torchrun", "torch.distributed.launch", "deepspeed", "srun", "mpirun" or "python".
        options: what the launcher is told: processes (of each host), hosts, host, address, port.
        line: of the script.
    """

    program: str
    flags: tuple[str, ...]
    launcher: str
    options: dict[str, str]
    line: int

    @property
    def name(self) -> str:
        """File name of the program."""
        return PurePath(self.program).name

    @property
    def processes(self) -> int | None:
        """Of each host; None where the script does not say a number."""
        return _whole(self.options.get("processes", "1"))

    @property
    def hosts(self) -> int | None:
        """None where the script does not say a number."""
        return _whole(self.options.get("hosts", "1"))


def find_launch(script: Script) -> list[Launch]:
    """The programs that a script starts, in order; helpers such as `mkdir` are not among them."""
    found = [_launch(command, script.directives) for command in script.commands]
    return [launch for launch in found if launch is not None]


def _launch(command: Command, directives: Mapping[str, str]) -> Launch | None:
    words = list(command.words)
    program = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if program is None or words[0] in _SAYING:
        return None
    before, flags = words[:program], words[program + 1 :]
    if any(word.endswith(".sh") for word in before):  # a script that hands its arguments on, which may be one text
        flags = [piece for word in flags for piece in (word.split() if word.lstrip().startswith("--") else [word])]
    launcher = next((PurePath(word).name for word in before if PurePath(word).name in _LAUNCHERS), "")
    launcher = launcher or next((PurePath(word).name for word in before if PurePath(word).name in _TASKS), "")
    runs = any(PurePath(word).name.startswith("python") for word in before) or program == 0
    if not launcher and not runs:
        return None
    options = _tasks(before, directives) if launcher in _TASKS else _read(before)
    return Launch(words[program], tuple(flags), launcher or "python", options, command.line)


def _tasks(words: Sequence[str], directives: Mapping[str, str]) -> dict[str, str]:
    """Processes of each host and hosts of what starts one process for each task; its own words come first."""
    said = dict(directives)
    names = {"N": "nodes", "nodes": "nodes", "ntasks-per-node": "ntasks-per-node", "npernode": "ntasks-per-node"}
    names |= {"n": "ntasks", "np": "ntasks", "ntasks": "ntasks"}
    for place, word in enumerate(words):
        name, has_value, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name in names and (has_value or place + 1 < len(words)):
            said[names[name]] = value if has_value else words[place + 1]
    hosts, each, tasks = (said.get(name, "") for name in ("nodes", "ntasks-per-node", "ntasks"))
    if not each and tasks.isdigit():
        each = str(int(tasks) // int(hosts)) if hosts.isdigit() and int(hosts) else tasks
    return {name: value for name, value in (("processes", each), ("hosts", hosts)) if value}


def _read(words: Sequence[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.lstrip("-").partition("=")
        said = _OPTIONS.get(name.replace("_", "-"))
        if not word.startswith("-") or name in _SWITCHES:
            continue
        if said is not None and (has_value or rest):
            options[said] = value if has_value else rest.pop(0)
    return options


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) > 0 else None
