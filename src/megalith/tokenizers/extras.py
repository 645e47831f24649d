"""Libraries that only some tokenizers need: imported when one is built, and named with their extra if absent."""

from __future__ import annotations

import importlib
from typing import Any

from megalith.errors import DataError, install_command


def import_for(tokenizer: str, module: str, extra: str) -> Any:
    """A module that an extra of this package brings.

    Args:
        tokenizer: what needs it, for the message.
        module: its name.
        extra: the extra that installs it.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{tokenizer} needs the package {module}, which is not installed here: {install_command(extra)}"
        ) from error
