"""Packages that only some sources need: imported when one is opened, and named with their extra where absent."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from megalith.errors import DataError, install_command


def import_for(path: Path, module: str) -> Any:
    """A module of the extra `data`.

    Args:
        path: the file that needs it, for the message.
        module: its name.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise DataError(
            f"{path}: reading it needs the package {package}, which is not installed: {install_command('data')}"
        ) from error
