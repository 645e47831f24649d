"""Rules that look at the file system: what is named exists, and is what it should be."""

from __future__ import annotations

import shlex
from pathlib import Path

from megalith.config.data_sources import SPLIT_FLAGS, data_sources
from megalith.config.rule import Draft, Rule, rule, show
from megalith.config.run import all_settings
from megalith.config.values import closest, holds_paths, remote
from megalith.errors import ConfigError

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""In a save folder: the iteration of its last checkpoint."""


_PATHS = tuple(setting.name for setting in all_settings().values() if holds_paths(setting))


@rule(*_PATHS)
def paths_are_local(draft: Draft) -> str:
    """Refuse `scheme://`, which would become a folder of that name."""
    found: dict[str, list[str]] = {}
    for setting in map(all_settings().__getitem__, _PATHS):
        value = getattr(getattr(draft.run, setting.group), setting.name)
        for word in filter(None, value if setting.many else (value,)):
            if problem := remote(str(word)):
                found.setdefault(problem, []).append(f"{setting.positive_flag} {word}")
    return "; ".join(f"{', '.join(words)}: {problem}" for problem, words in found.items())


def _file_problem(draft: Draft, name: str) -> str:
    path = draft.run.tokenizer.named_files.get(name)
    if path is None or remote(path) or Path(path).is_file():
        return ""
    what = "is a folder" if Path(path).is_dir() else f"no such file{_from_here(path)}"
    return f"{show(draft, name)}: {what}{_near(Path(path))}"


def _from_here(path: str) -> str:
    return "" if Path(path).is_absolute() else f" from {Path.cwd()}"


def _near(path: Path) -> str:
    """A file of a similar name in the same folder, as a question; the folder itself when that is missing."""
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist"
    guess = closest(path.name, (entry.name for entry in path.parent.iterdir() if entry.is_file()), cutoff=0.6)
    return f"; did you mean {path.parent / guess}?" if guess and guess != path.name else ""


@rule("vocab_file")
def vocabulary_file_exists(draft: Draft) -> str:
    return _file_problem(draft, "vocab_file")


@rule("merge_file")
def merges_file_exists(draft: Draft) -> str:
    return _file_problem(draft, "merge_file")


@rule("tokenizer_model")
def tokenizer_model_exists(draft: Draft) -> str:
    return _file_problem(draft, "tokenizer_model")


@rule(
    "data_path",
    "data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "per_split_data_args_path",
)
def datasets_exist(draft: Draft) -> str:
    try:
        sources = data_sources(draft.run.data)
    except ConfigError as error:
        in_file = draft.run.data.data_args_path or draft.run.data.per_split_data_args_path
        return (
            str(error) if in_file and not remote(in_file) else ""
        )  # what stands on the command line has a rule of its own
    return "; ".join(filter(None, (_missing_dataset(_naming(draft, prefix), prefix) for prefix in sources.prefixes)))


def _naming(draft: Draft, prefix: str) -> str:
    """The flag that names a dataset, by itself or in its file."""
    data = draft.run.data
    lists = {"--data-path": data.data_path, **dict(zip(SPLIT_FLAGS, data.paths_of_splits, strict=True))}
    by_itself = next((flag for flag, words in lists.items() if prefix in words), None)
    return by_itself or ("--data-args-path" if data.data_args_path else "--per-split-data-args-path")


def _missing_dataset(flag: str, prefix: str) -> str:
    missing = [prefix + ending for ending in (".bin", ".idx") if not Path(prefix + ending).is_file()]
    if not missing or remote(prefix):
        return ""
    found = _prefix_that_was_meant(prefix)
    hint = f"; did you mean {flag} {found}?" if found else "; make them with `megalith preprocess`"
    verb = "does" if len(missing) == 1 else "do"
    return f"{flag} {prefix}: {' and '.join(missing)} {verb} not exist{_from_here(prefix)}{hint}"


def _prefix_that_was_meant(prefix: str) -> str:
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


def _folder_is_no_file(name: str) -> Rule:
    def check(draft: Draft) -> str:
        path = getattr(getattr(draft.run, all_settings()[name].group), name)
        if path is None or not Path(path).is_file():
            return ""
        return f"{show(draft, name)} is a file; give a folder"

    return Rule(f"{name}_is_a_folder", (name,), check)


@rule("save", "non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir")
def save_is_no_model_folder(draft: Draft) -> str:
    for name in ("save", "non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir"):
        path = getattr(draft.run.checkpoint, name)
        if path is not None and is_huggingface(Path(path)):
            return (
                f"{show(draft, name)} is the folder of a Hugging Face model, which would lie among the checkpoints; "
                f"give a folder of its own (to begin with that model: --load {shlex.quote(path)})"
            )
    return ""


def is_huggingface(path: Path) -> bool:
    """Whether a folder is as Hugging Face's `save_pretrained` writes it: config.json beside weights or their index.

    One into which a run has saved since is the save folder of that run.
    """
    weights = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")
    if (path / TRACKER_FILE).exists() or not (path / "config.json").is_file():
        return False
    return any(any(path.glob(pattern)) for pattern in weights)


FILE_RULES: tuple[Rule, ...] = (
    vocabulary_file_exists,
    merges_file_exists,
    tokenizer_model_exists,
    datasets_exist,
    *(
        _folder_is_no_file(name)
        for name in (
            *("save", "load", "non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir"),
            *("data_cache_path", "tensorboard_dir"),
        )
    ),
    save_is_no_model_folder,
)
