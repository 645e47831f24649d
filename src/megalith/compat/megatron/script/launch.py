"""Among the commands of a script the one that starts a program of Megatron, and on how many processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from megalith.compat.megatron.script.bash import Command

# Options of torchrun and torch.distributed.launch -> what they say here; those without a value are in `_SWITCHES`.
_OPTIONS = {
    "nproc-per-node": "processes",
    "nnodes": "hosts",
    "node-rank": "host",
    "master-addr": "address",
    "master-port": "port",
}
_SWITCHES = ("use-env", "standalone", "no-python", "run-path", "m", "module", "use_env")
_LAUNCHERS = ("torchrun", "torch.distributed.launch", "torch.distributed.run")


@dataclass(frozen=True)
class Launch:
    """A program with its flags, and how it is started.

    Attributes:
        program: path of the .py file, as the script writes it.
        flags: its words.
        launcher: "torchrun", "torch.distributed.launch", "srun", "mpirun" or "python".
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


def find_launch(commands: Sequence[Command]) -> list[Launch]:
    """The programs that a script starts, in order; helpers such as `mkdir` are not among them."""
    found = [_launch(command) for command in commands]
    return [launch for launch in found if launch is not None]


def _launch(command: Command) -> Launch | None:
    words = list(command.words)
    program = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if program is None:
        return None
    before, flags = words[:program], words[program + 1 :]
    launcher = next((word for word in before if word in _LAUNCHERS), "")
    launcher = launcher or next((word for word in before if PurePath(word).name in ("srun", "mpirun", "mpiexec")), "")
    runs = any(PurePath(word).name.startswith("python") for word in before) or program == 0
    if not launcher and not runs:
        return None
    return Launch(words[program], tuple(flags), PurePath(launcher or "python").name, _read(before), command.line)


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
        elif name in ("n", "np", "ntasks") and (has_value or rest):
            options["processes"] = value if has_value else rest.pop(0)
    return options


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) > 0 else None
