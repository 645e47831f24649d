"""TensorBoard event files, with each curve against consumed samples too where Megatron draws it so."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from megalith.errors import ConfigError, install_command


def require_tensorboard() -> None:
    """Check, before anything is built, that event files can be written.

    Raises:
        ConfigError: the package is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(f"--tensorboard-dir needs the package tensorboard: {install_command('track')}")


class TensorBoard:
    """Event files in `directory`: a `records.Sink`.

    A purge step after a resume would hide the points before it, and with them most of the curves over samples: the
    viewer compares it with either kind of step. So none is given.

    Args:
        queue_size: points that wait for the disk at most.
        arguments: of the run, kept as text as Megatron does.
        iteration: that the run begins with.
    """

    name = "TensorBoard"
    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(
        self, directory: str, *, queue_size: int = 32, arguments: Mapping[str, Any] | None = None, iteration: int = 0
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory, max_queue=queue_size, flush_secs=10)
        for name, value in (arguments or {}).items():
            self._writer.add_text(name, str(value), global_step=iteration)

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        """A point of each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
            if samples is not None:
                self._writer.add_scalar(f"{name} vs samples", value, samples)

    def close(self) -> None:
        """Write what waits."""
        self._writer.close()
