"""Weights & Biases: the same curves, sent to its server, or kept in files where it is not to be reached.

Nothing is sent unless the user asks by --wandb-project. Where W&B knows no credentials the run is recorded offline
instead of waiting for someone to log in: `wandb sync FOLDER` sends it later. WANDB_MODE says otherwise.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalith.config.groups import LogConfig
from megalith.errors import ConfigError, install_command


def require_wandb() -> None:
    """Check, before anything is built, that W&B can be used.

    Raises:
        ConfigError: the package is not installed.
    """
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"--wandb-project needs the package wandb: {install_command('track')}")


def chosen_mode(wandb: Any, environ: Mapping[str, str]) -> str | None:
    """Return the mode that the user chose by WANDB_MODE, `wandb offline` or `wandb disabled`; None without a choice."""
    if environ.get("WANDB_MODE"):
        return environ["WANDB_MODE"]
    settings = wandb.setup().settings
    return settings.mode if settings.mode not in (None, "online") else None


def is_logged_in(wandb: Any) -> bool:
    """Ask the package, which knows its hosts and its files, for credentials, without a prompt or a verification."""
    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False, verify=False))
    return bool(wandb.api.api_key)  # before 0.31


class WandB:
    """A run of a W&B project: a `records.Sink`.

    Args:
        log: names of project, run, entity, and the folder.
        folder: for W&B's files unless the flags name one.
        arguments: of the run.
        environ: the environment; W&B itself reads its own.
        run_id: of the run that a resume continues; WANDB_RUN_ID wins.

    Attributes:
        mode: "online", "offline" or what WANDB_MODE says.
        logged_in: whether credentials were found; None where the user chose the mode.
        folder: where its files are.
        run_id: by which a resume continues the run.

    Raises:
        ConfigError: W&B does not begin, such as online without a network.
    """

    name = "W&B"

    def __init__(
        self,
        log: LogConfig,
        folder: Path,
        arguments: Mapping[str, Any],
        environ: Mapping[str, str],
        run_id: str | None = None,
    ) -> None:
        import wandb

        self.folder = log.wandb_save_dir or str(folder)
        self.errors: tuple[type[Exception], ...] = (OSError, wandb.Error)
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        try:
            chosen = chosen_mode(wandb, environ)
            self.logged_in = is_logged_in(wandb) if chosen is None else None
            self.mode = chosen or ("online" if self.logged_in else "offline")
            self._run = wandb.init(
                dir=self.folder,
                name=log.wandb_exp_name,
                project=log.wandb_project,
                entity=log.wandb_entity,
                config=dict(arguments),
                mode=self.mode,
                **self._continued(environ, run_id),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"--wandb-project {log.wandb_project}: W&B does not begin: {error}; WANDB_MODE=offline records in files"
            ) from error

        self.run_id: str = self._run.id

    def _continued(self, environ: Mapping[str, str], run_id: str | None) -> dict[str, Any]:
        """The arguments of `wandb.init` that continue a run."""
        if run_id is None or environ.get("WANDB_RUN_ID"):
            return {}
        resumes = self.mode == "online" and not environ.get("WANDB_RESUME")
        return {"id": run_id, **({"resume": "allow"} if resumes else {})}

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        """A point of each curve."""
        extra = {} if samples is None else {"samples vs steps": samples}
        self._run.log({**values, **extra}, step=iteration)

    def close(self) -> None:
        """Write what waits."""
        self._run.finish()
