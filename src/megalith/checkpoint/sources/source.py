"""Checkpoint folders of any format, read in model space.

Model space, Megatron's term, is the tensors of the `torch_dist` format (`formats.torch_dist`): global, under stacked
keys, the optimizer's as `optimizer.state.<exp_avg | exp_avg_sq | fp32_param>.<key>`. A source translates a format
into it: it says which tensors there are, and fills any box of them. What a load, a conversion, a comparison or an
inspection does is thus written once.

To read a further format is to write one more `Source` and to recognise its folders in `open_source`. Whether a source
holds what a load asks for is checked by `fitted`, with one message for all differences.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from megalith.checkpoint.content import CheckpointContent, Chunk, by_key, volume
from megalith.checkpoint.files.manifest import refuse_newer
from megalith.checkpoint.formats.torch_dist import OPTIMIZER_PREFIX, is_extra_state
from megalith.config.rules.file import TRACKER_FILE as TRACKER_FILE
from megalith.config.rules.file import is_huggingface as is_huggingface
from megalith.config.rules.file import is_one_checkpoint as is_one_checkpoint
from megalith.config.rules.file import is_peft as is_peft
from megalith.errors import CheckpointError, DamagedCheckpointError

MAIN_PREFIX = f"{OPTIMIZER_PREFIX}fp32_param."
"""Prefix of a weight's key in the key of its fp32 master weight."""
HALF_PRECISION = (torch.float16, torch.bfloat16)


class Source(Protocol):
    """The tensors, objects and common state of one checkpoint folder.

    A source opens files as it needs them and keeps no tensor in memory: what `read` costs is bounded by the largest
    tensor of the checkpoint, and by what it fills.
    """

    @property
    def format(self) -> str:
        """Name of the format, as in `--ckpt-format`, or `huggingface`."""

    def contents(self) -> Contents:
        """Return the tensors in model space and the keys of the objects."""

    def common(self) -> dict[str, Any]:
        """Return the state that all ranks share, as in common.pt: args (Namespace), checkpoint_version, iteration and,
        where they were saved, `optimizer` as `formats.torch_dist.optimizer_common` writes it and opt_param_scheduler.
        """

    def read(self, content: CheckpointContent) -> dict[str, Any]:
        """Fill the chunks, which `fitted` has checked, in place and cast to their dtypes; return the objects named."""

    def problems(self) -> list[str]:
        """List what is wrong with the files, not reading them through; an OtherModelError if it is no model for us."""

    def changed(self, part: int = 0, parts: int = 1) -> list[str]:
        """List what differs from the format's own checksums, without a manifest; reads one of `parts` of the files."""


def open_source(path: Path) -> Source:
    """Return the reader for the format of a checkpoint folder. `NewerFormatError` if a later version wrote it."""
    from megalith.checkpoint.sources.torch_dist import TorchDistSource

    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint folder: it does not exist")
    refuse_newer(path)
    if not (path / ".metadata").exists() and any(path.glob("mp_rank_*")):
        from megalith.checkpoint.sources.per_rank import PerRankSource

        return PerRankSource(path)
    if is_peft(path):
        from megalith.checkpoint.sources.peft import PeftSource

        return PeftSource(path)
    if is_huggingface(path):
        from megalith.checkpoint.sources.huggingface import HuggingFaceSource

        return HuggingFaceSource(path)
    return TorchDistSource(path)


def check_save_folder(path: Path) -> None:
    """Refuse to save into the folder of one checkpoint or Hugging Face model, which would then be read as neither."""
    if is_huggingface(path):
        raise CheckpointError(
            f"{path} is the folder of a Hugging Face model, which would lie among the checkpoints; save into a folder "
            "of its own"
        )
    if is_one_checkpoint(path):
        raise CheckpointError(f"{path} is the folder of one checkpoint; give the folder that is to hold it and others")


def no_save_folder(path: Path) -> str | None:
    """Return why a path is not a save folder (a single checkpoint, an incomplete model), with the remedy; else None."""
    if is_one_checkpoint(path):
        return "is the folder of one checkpoint under another name; rename it iter_0000100 or the like, its iteration"
    if _describes_a_model(path / "config.json"):
        return "has config.json, as a Hugging Face folder, and no weights (*.safetensors) beside it; copy it again"
    return None


def _describes_a_model(config: Path) -> bool:
    """Return whether a config.json is one of Hugging Face's; other programs write files of that name too."""
    try:
        text = config.read_text("utf-8", "replace")
    except OSError:
        return False
    return '"model_type"' in text or '"architectures"' in text


@dataclass(frozen=True)
class StoredTensor:
    """Global shape and dtype of a tensor in a checkpoint, and in how many chunks it is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: int = 1

    @property
    def numel(self) -> int:
        return volume(self.shape)


@dataclass(frozen=True)
class Contents:
    """The table of contents of a checkpoint: its tensors by key, and the keys of its objects."""

    tensors: dict[str, StoredTensor]
    objects: frozenset[str]
    unreadable: tuple[str, ...] = ()  # why tensors that are in the files cannot be read, such as those of an optimizer

    def unrequested(self, requested: Collection[str]) -> tuple[str, ...]:
        """Return the stored keys that are not in `requested`, without the empty extra states of FP8 linears."""
        stored = [*self.tensors, *sorted(self.objects)]
        return tuple(key for key in stored if key not in requested and not is_extra_state(key))


def keys_of(content: CheckpointContent) -> frozenset[str]:
    return frozenset(chunk.key for chunk in content.chunks) | frozenset(content.objects)


def fitted(source: str, stored: Contents, wanted: CheckpointContent, requested: Collection[str]) -> CheckpointContent:
    """Return `wanted` with the key of the checkpoint `source` that is read into each chunk.

    This is mostly the chunk's own key. fp32 master weights of a half-precision run are read from the weights of a
    checkpoint without any, which an fp32 run wrote; an fp32 run reads its weights from the master weights if there are
    any, since the weights are rounded.

    If keys or global shapes differ, a CheckpointError lists every difference and the keys of the checkpoint that no
    rank has `requested`.
    """
    key_of = {key: _read_from(key, chunks[0], stored) for key, chunks in by_key(wanted.chunks).items()}
    lines = [
        line
        for key, chunks in by_key(wanted.chunks).items()
        for line in _differences(key, chunks[0], stored.tensors.get(key_of[key]))
    ]
    lines += [f"{key} is not in the checkpoint" for key in wanted.objects if key not in stored.objects]
    if not lines:
        return replace(wanted, chunks=[replace(chunk, key=key_of[chunk.key]) for chunk in wanted.chunks])
    unrequested = [key for key in stored.unrequested(requested) if key in stored.tensors]
    if unrequested:
        lines.append(f"in the checkpoint and not requested: {', '.join(unrequested)}")
    raise CheckpointError(listing(f"{source} does not fit this model and optimizer", [*stored.unreadable, *lines]))


def _read_from(key: str, chunk: Chunk, stored: Contents) -> str:
    """Return the key of the tensor that a chunk of `key` is read from."""
    weight = key.removeprefix(MAIN_PREFIX)
    if weight != key:
        held = stored.tensors.get(weight)
        return key if key in stored.tensors or held is None or held.dtype in HALF_PRECISION else weight
    held = stored.tensors.get(key)
    finer = held is not None and held.dtype in HALF_PRECISION and chunk.tensor.dtype not in HALF_PRECISION
    return MAIN_PREFIX + key if finer and MAIN_PREFIX + key in stored.tensors else key


def _differences(key: str, chunk: Chunk, held: StoredTensor | None) -> list[str]:
    if held is None:
        return [f"{key} is not in the checkpoint"]
    lines = []
    if held.shape != chunk.global_shape:
        lines.append(f"{key} has shape {list(held.shape)} in the checkpoint and {list(chunk.global_shape)} here")
    if held.dtype != chunk.tensor.dtype and not (held.dtype.is_floating_point and chunk.tensor.dtype.is_floating_point):
        lines.append(f"{key} is {short(held.dtype)} in the checkpoint and {short(chunk.tensor.dtype)} here")
    return lines


def listing(head: str, lines: Sequence[str]) -> str:
    return "\n  ".join([f"{head}:", *lines])


def damaged(path: Path, problems: list[str]) -> DamagedCheckpointError:
    """Return the error that names the problems of a checkpoint, each on a line, and the remedy."""
    return DamagedCheckpointError(listing(f"{path} is damaged", with_remedy(problems)))


def with_remedy(problems: Sequence[str]) -> list[str]:
    """Return problems of a checkpoint followed by the remedy, unless one of them names it."""
    said = any(" again" in problem for problem in problems)
    return [
        *problems,
        *([] if said else ["copy the folder again from where it was written, or take another checkpoint"]),
    ]


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")
