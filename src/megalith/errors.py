"""The errors that a user of Megalith meets, each carrying the process exit code that it ends with.

A message names the flag or file, the value, the rule and the remedy. `assert` is kept for our own invariants.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

EXIT_CODES = {
    0: "finished, also where --exit-interval, --exit-duration-in-mins or --early-stopping-patience ends a run",
    1: "an error in code of yours, or one that nobody foresaw; checkpoint diff: different; doctor: something is broken",
    2: "the configuration or the command line is invalid; every violation was printed and nothing was started",
    3: "data or tokenizer files are missing, damaged or unsuitable",
    4: "a checkpoint is missing, damaged, of another model or could not be written",
    5: "tensors or ranks cannot be divided as requested",
    6: "another rank ended, never came, or stopped taking part",
    7: "evaluate --fail-on-alarm: the result is implausible",
    75: "stopped by a signal after saving: run it again to resume",
    130: "interrupted: Ctrl-C, or a second one in a run that is saving",
    141: "the reader of the output left before the work was done",
}
"""Exit code of every command -> what it means; 128 + n: ended by signal n. docs/launch.md shows it as a table."""


class MegalithError(Exception):
    """Base of every error that is reported to the user as a message instead of a traceback."""

    exit_code = 1
    said = False
    """True if another process prints the message: a rank with the same error, or the supervisor."""


class ConfigError(MegalithError):
    """The configuration cannot run. Carries every violation found, not the first only."""

    exit_code = 2

    def __init__(self, violations: str | Sequence[str]) -> None:
        self.violations: tuple[str, ...] = (violations,) if isinstance(violations, str) else tuple(violations)
        super().__init__("\n".join(self.violations))


class DataError(MegalithError):
    """A dataset, a text file or a tokenizer file is missing, damaged or unsuitable."""

    exit_code = 3


class CheckpointError(MegalithError):
    """A checkpoint is missing, damaged, incomplete or does not fit the model to load it into."""

    exit_code = 4


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint have changed since it was saved; another checkpoint may be sound."""


class NewerFormatError(CheckpointError):
    """A later version wrote the checkpoint: it is sound as far as this version can tell, and not to be touched."""


class OtherModelError(CheckpointError):
    """The files of a checkpoint may be sound, but this version does not support their model."""


class LayoutError(MegalithError):
    """A tensor or a group of ranks cannot be divided as requested."""

    exit_code = 5


class PeerError(MegalithError):
    """The run ends because another rank never joined, died, or stopped taking part."""

    exit_code = 6

    def __init__(self, message: str, *, said: bool = False) -> None:
        self.said = said
        super().__init__(message)


class DeviceError(MegalithError):
    """A GPU or NCCL failed on one rank.

    Attributes:
        what: the message without the rank and its place.
        perhaps_of_peer: whether another rank may be the cause.
    """

    def __init__(self, what: str, where: str, *, perhaps_of_peer: bool = False) -> None:
        self.what, self.perhaps_of_peer = what, perhaps_of_peer
        super().__init__(f"{where}: {what}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package from its clone.

    No public index is named: Megalith is published on none, and anyone could register the name there.
    """
    clone = Path(__file__).resolve().parents[2]
    if not (clone / "pyproject.toml").is_file():  # a plain wheel
        return f"pip install 'CLONE[{extra}]' (CLONE: the folder of a clone of Megalith)"
    return make_install(f"EXTRAS={extra}") or f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"


def make_install(setting: str) -> str:
    """Return the make command that installs into the environment of this process; "" if it is not that of a clone."""
    clone = Path(__file__).resolve().parents[2]
    return f"make -C {shlex.quote(str(clone))} install {setting}" if Path(sys.prefix) == clone / ".venv" else ""
