"""Checkpoint folders of any format, read in model space.

Model space is what the `torch_dist` format calls its tensors (`formats.torch_dist`): global tensors under stacked
keys, the optimizer's as `optimizer.state.<exp_avg | exp_avg_sq | fp32_param>.<key>`. A source translates a format
into it: it says which tensors there are, and fills any box of them. What a load, a conversion, a comparison or an
inspection does is thus written once.

To read a further format is to write one more `Source` and to recognise its folders in `open_source`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from megalith.checkpoint.content import CheckpointContent
from megalith.checkpoint.fit import Contents
from megalith.checkpoint.manifest import refuse_newer
from megalith.config.file_rules import TRACKER_FILE as TRACKER_FILE
from megalith.config.file_rules import is_huggingface as is_huggingface
from megalith.errors import CheckpointError


class Source(Protocol):
    """The tensors, objects and common state of one checkpoint folder.

    A source opens files as it needs them and keeps no tensor in memory: what `read` costs is bounded by the largest
    tensor of the checkpoint, and by what it fills.
    """

    @property
    def format(self) -> str:
        """Its name as `--ckpt-format` has it, or `huggingface`."""
        ...

    def contents(self) -> Contents:
        """The tensors in model space and the keys of the objects.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        ...

    def common(self) -> dict[str, Any]:
        """The state that all ranks share, as `common.pt` has it: args (Namespace), checkpoint_version, iteration and,
        where they were saved, `optimizer` as `formats.torch_dist.optimizer_common` writes it and opt_param_scheduler.
        """
        ...

    def read(self, content: CheckpointContent) -> dict[str, Any]:
        """Fill the chunks in place, cast to their dtypes, and return the objects that are named.

        The caller has compared keys and global shapes with `contents`.

        Raises:
            CheckpointError: a file proves damaged or does not cover what is asked.
        """
        ...

    def problems(self) -> list[str]:
        """What is wrong with the files, so far as it can be seen without reading them through; empty if nothing is.

        Raises:
            OtherModelError: there may be nothing wrong, but it is no model that can be read.
        """
        ...

    def changed(self, part: int = 0, parts: int = 1) -> list[str]:
        """What has changed by the checksums that the format itself has, where there is no manifest.

        Args:
            part: which part of the files is read through here.
            parts: in how many they are divided.
        """
        ...


def open_source(path: Path) -> Source:
    """The reader for the format that a checkpoint folder is in.

    Args:
        path: a folder `iter_*` or `release` of Megatron's formats, or a Hugging Face model folder.

    Raises:
        NewerFormatError: a later version of Megalith wrote it.
        CheckpointError: there is no such folder, or nothing in it that a reader knows.
    """
    from megalith.checkpoint.torch_dist_source import TorchDistSource

    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint folder: it does not exist")
    refuse_newer(path)
    if not (path / ".metadata").exists() and any(path.glob("mp_rank_*")):
        from megalith.checkpoint.per_rank_source import PerRankSource

        return PerRankSource(path)
    if is_huggingface(path):
        from megalith.checkpoint.huggingface_source import HuggingFaceSource

        return HuggingFaceSource(path)
    return TorchDistSource(path)


def refuse_model_folder(path: Path) -> None:
    """Refuse to save into the folder of a Hugging Face model, which would then be read as neither.

    Raises:
        CheckpointError: it is one.
    """
    if is_huggingface(path):
        raise CheckpointError(
            f"{path} is the folder of a Hugging Face model, which would lie among the checkpoints; save into a folder "
            "of its own"
        )


def no_save_folder(path: Path) -> str | None:
    """What a folder is that holds parts of a checkpoint where folders of checkpoints should be; None if it does not."""
    if any(any(path.glob(pattern)) for pattern in (".metadata", "__*_*.distcp", "mp_rank_*")):
        return "is the folder of one checkpoint under another name; rename it iter_0000100 or the like, its iteration"
    if _describes_a_model(path / "config.json"):
        return "has config.json, as a Hugging Face folder, and no weights (*.safetensors) beside it; copy it again"
    return None


def _describes_a_model(config: Path) -> bool:
    """Whether a config.json is one of Hugging Face's; other programs that share the folder have such files too."""
    try:
        text = config.read_text("utf-8", "replace")
    except OSError:
        return False
    return '"model_type"' in text or '"architectures"' in text
