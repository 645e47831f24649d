"""Reading Hugging Face model folders (config.json beside safetensors files) in model space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalith.checkpoint.content import CheckpointContent
from megalith.checkpoint.fit import Contents
from megalith.errors import CheckpointError


class HuggingFaceSource:
    """A folder that `save_pretrained` of Hugging Face wrote, or the snapshot of one in the hub's cache.

    Args:
        path: the folder.
    """

    format = "huggingface"

    def __init__(self, path: Path) -> None:
        self.path = path

    def contents(self) -> Contents:
        raise CheckpointError(f"{self.path}: Hugging Face folders are not read yet")

    def common(self) -> dict[str, Any]:
        raise CheckpointError(f"{self.path}: Hugging Face folders are not read yet")

    def read(self, content: CheckpointContent) -> dict[str, Any]:
        raise CheckpointError(f"{self.path}: Hugging Face folders are not read yet")

    def problems(self) -> list[str]:
        return [f"{self.path}: Hugging Face folders are not read yet"]
