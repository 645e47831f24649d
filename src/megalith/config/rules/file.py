"""Rules that look at the file system: what is named exists, and is what it should be."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from megalith.config.data_sources import SPLIT_FLAGS, data_sources, is_text
from megalith.config.rules.rule import Draft, Rule, rule, show, value_of
from megalith.config.values import closest, remote
from megalith.errors import ConfigError

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""In a save folder: the iteration of its last checkpoint."""
ITERATION = re.compile(r"iter_(\d{7,})")
"""Name of the folder of one checkpoint."""


def _file_exists(name: str) -> Rule:
    def check(draft: Draft) -> str:
        of_kinds = name == "tokenizer_model"  # of some it is a folder or a name
        path = draft.run.tokenizer.named_files.get(name) if of_kinds else value_of(draft, name)
        if not path or remote(path) or Path(path).is_file():
            return ""
        what = "is a folder" if Path(path).is_dir() else f"no such file{_from_here(path)}"
        return f"{show(draft, name)}: {what}{_near(Path(path))}"

    return Rule(f"{name}_exists", check)


def _from_here(path: str) -> str:
    return "" if Path(path).is_absolute() else f" from {Path.cwd()}"


def _near(path: Path) -> str:
    """Return a question that names a similar file in the same folder, or the folder if it is missing."""
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist"
    guess = closest(path.name, (entry.name for entry in path.parent.iterdir() if entry.is_file()), cutoff=0.6)
    return f"; did you mean {path.parent / guess}?" if guess and guess != path.name else ""


files_of_the_tokenizer_exist = tuple(map(_file_exists, ("vocab_file", "merge_file", "tokenizer_model")))


@rule
def datasets_exist(draft: Draft) -> str:
    try:
        sources = data_sources(draft.run.data)
    except ConfigError as error:
        in_file = draft.run.data.data_args_path or draft.run.data.per_split_data_args_path
        return (
            str(error) if in_file and not remote(in_file) else ""
        )  # what stands on the command line has a rule of its own
    named = [prefix for prefix in sources.prefixes if not (draft.run.data.sft and is_text(prefix))]
    return "; ".join(filter(None, (_missing_dataset(_naming(draft, prefix), prefix) for prefix in named)))


def _naming(draft: Draft, prefix: str) -> str:
    """Return the flag or file that names a dataset."""
    data = draft.run.data
    lists = {"--data-path": data.data_path, **dict(zip(SPLIT_FLAGS, data.paths_of_splits, strict=True))}
    by_itself = next((flag for flag, words in lists.items() if prefix in words), None)
    return by_itself or ("--data-args-path" if data.data_args_path else "--per-split-data-args-path")


def _missing_dataset(flag: str, prefix: str) -> str:
    missing = [prefix + ending for ending in (".bin", ".idx") if not Path(prefix + ending).is_file()]
    if not missing or remote(prefix):
        return ""
    found = prefix_that_was_meant(prefix)
    make = f"`megalith preprocess --input {prefix}`, or give --sft for conversations" if Path(prefix).is_file() else ""
    hint = f"; did you mean {flag} {found}?" if found else f"; make them with {make or '`megalith preprocess`'}"
    verb = "does" if len(missing) == 1 else "do"
    return f"{flag} {prefix}: {' and '.join(missing)} {verb} not exist{_from_here(prefix)}{hint}"


def prefix_that_was_meant(prefix: str) -> str:
    """Return the prefix of a dataset that there is whose name is nearest to this one, "" if none is near."""
    whole = [prefix.removesuffix(".bin"), prefix.removesuffix(".idx"), prefix + "_text_document"]
    for candidate in whole:
        if candidate != prefix and Path(candidate + ".bin").is_file() and Path(candidate + ".idx").is_file():
            return candidate
    folder = Path(prefix).parent
    if not folder.is_dir():
        return ""
    stems = [entry.name.removesuffix(".idx") for entry in folder.glob("*.idx")]
    guess = closest(Path(prefix).name, stems)
    return str(folder / guess) if guess and guess != Path(prefix).name else ""


def _is_a_folder(name: str) -> Rule:
    def check(draft: Draft) -> str:
        path = value_of(draft, name)
        return f"{show(draft, name)} is a file; give a folder" if path is not None and Path(path).is_file() else ""

    return Rule(f"{name}_is_a_folder", check)


_FOLDERS_OF_CHECKPOINTS = ("save", "non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir")
folders_are_no_files = tuple(
    map(_is_a_folder, ("load", *_FOLDERS_OF_CHECKPOINTS, "data_cache_path", "tensorboard_dir"))
)


@rule
def save_is_no_model_folder(draft: Draft) -> str:
    for name in _FOLDERS_OF_CHECKPOINTS:
        path = getattr(draft.run.checkpoint, name)
        if path is not None and is_huggingface(Path(path)):
            return (
                f"{show(draft, name)} is the folder of a Hugging Face model, which would lie among the checkpoints; "
                f"give a folder of its own (to begin with that model: --load {shlex.quote(path)})"
            )
        if path is not None and is_one_checkpoint(Path(path)):
            return f"{show(draft, name)} is the folder of one checkpoint; give the folder that is to hold it and others"
    return ""


def is_one_checkpoint(path: Path) -> bool:
    """Return whether a folder has the name or the files of one checkpoint, in whatever state."""
    patterns = (".metadata", "__*_*.distcp", "mp_rank_*")
    named = ITERATION.fullmatch(Path(os.path.realpath(path)).name)  # Path.resolve raises in a loop of links
    return bool(named) or any(any(path.glob(pattern)) for pattern in patterns)


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_peft(path: Path) -> bool:
    """Return whether a folder holds adapters of PEFT."""
    return (path / ADAPTER_CONFIG).is_file() and (path / ADAPTER_WEIGHTS).is_file()


def is_huggingface(path: Path) -> bool:
    """Return whether a folder is one of `save_pretrained`: config.json beside weights or their index, or adapters.

    One into which a run has saved since is the save folder of that run.
    """
    weights = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")
    if is_peft(path):
        return True
    if (path / TRACKER_FILE).exists() or not (path / "config.json").is_file():
        return False
    return any(any(path.glob(pattern)) for pattern in weights)
