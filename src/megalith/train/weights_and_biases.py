"""Weights & Biases: the same curves, sent to its server, or kept in files where it is not to be reached.

Nothing is sent unless the user asks by --wandb-project. Where no key is known the run is recorded offline instead of
waiting for someone to log in: `wandb sync FOLDER` sends it later. WANDB_MODE says otherwise.
"""

from __future__ import annotations

import importlib.util
import netrc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalith.config.groups import LogConfig
from megalith.errors import ConfigError, install_command

_HOST = "api.wandb.ai"


def require_wandb() -> None:
    """Check, before anything is built, that W&B can be used.

    Raises:
        ConfigError: the package is not installed.
    """
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"--wandb-project needs the package wandb: {install_command('track')}")


def mode(environ: Mapping[str, str], home: Path) -> str:
    """What W&B is to do: what WANDB_MODE says, else online where a key is known, else offline.

    Args:
        environ: the environment.
        home: the folder in which .netrc may hold a key.
    """
    if environ.get("WANDB_MODE"):
        return environ["WANDB_MODE"]
    if environ.get("WANDB_API_KEY"):
        return "online"
    host = environ.get("WANDB_BASE_URL", f"https://{_HOST}").partition("//")[2].partition("/")[0]
    try:
        known = netrc.netrc(home / ".netrc").authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        known = False
    return "online" if known else "offline"


class WandB:
    """A run of a W&B project: a `records.Sink`.

    Args:
        log: names of project, run, entity, and the folder.
        folder: for W&B's files unless the flags name one.
        arguments: of the run.
        environ: the environment, which `mode` reads; W&B itself reads its own.

    Attributes:
        mode: "online", "offline" or what WANDB_MODE says.
        folder: where its files are.

    Raises:
        ConfigError: W&B does not begin, such as online without a network.
    """

    name = "W&B"

    def __init__(self, log: LogConfig, folder: Path, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        import wandb

        self.mode, self.folder = mode(environ, Path.home()), log.wandb_save_dir or str(folder)
        self.errors: tuple[type[Exception], ...] = (OSError, wandb.Error)
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                dir=self.folder,
                name=log.wandb_exp_name,
                project=log.wandb_project,
                entity=log.wandb_entity,
                config=dict(arguments),
                mode=self.mode,
            )
        except wandb.Error as error:
            raise ConfigError(
                f"--wandb-project {log.wandb_project}: W&B does not begin: {error}; WANDB_MODE=offline records in files"
            ) from error

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        """A point of each curve."""
        extra = {} if samples is None else {"samples vs steps": samples}
        self._run.log({**values, **extra}, step=iteration)

    def close(self) -> None:
        """Write what waits."""
        self._run.finish()
