"""What programs and modules of yours may rely on. Everything else may change from version to version.

Decorators register objects that flags choose by name, once `--import` names their module (docs/extending.md). The rest
is a library for loops of one's own. Names that need torch are loaded when they are first used, so that a module that
only registers things starts quickly.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from megalith.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TokenizerConfig, from_values
from megalith.config import load as load_config
from megalith.config.build import ArgsReader
from megalith.config.fields import setting
from megalith.errors import CheckpointError, ConfigError, DataError, MegalithError
from megalith.registry import EMPTY, Registry, collect, mark
from megalith.schedules.parameters import LearningRateSchedule

if TYPE_CHECKING:
    from megalith.assemble.trained import Trained, load_trained
    from megalith.data.indexed import IndexedDataset
    from megalith.models.gpt import GPT
    from megalith.models.language_model import LanguageModel
    from megalith.nn.linear import Linear, column, row
    from megalith.nn.placement import Replicated, Split
    from megalith.nn.region import Region
    from megalith.nn.registered_attention import Attend
    from megalith.nn.registered_loss import Vocabulary
    from megalith.optim.rules import UpdateBatch, UpdateRule
    from megalith.plan.plan import Plan
    from megalith.plan.plan import plan_for as plan
    from megalith.text_model import Completion, TextModel
    from megalith.train.loop import TrainingRun
    from megalith.train.results import Evaluation, SavedCheckpoint, StepResult
    from megalith.train.step import train_step
    from megalith.train.user_hooks import Control
    from megalith.train.user_hooks import UserHook as Hook

Thing = TypeVar("Thing")

_LATER = {
    "Completion": "megalith.text_model:Completion",
    "TextModel": "megalith.text_model:TextModel",
    "Control": "megalith.train.user_hooks:Control",
    "Evaluation": "megalith.train.results:Evaluation",
    "Hook": "megalith.train.user_hooks:UserHook",
    "SavedCheckpoint": "megalith.train.results:SavedCheckpoint",
    "StepResult": "megalith.train.results:StepResult",
    "Trained": "megalith.assemble.trained:Trained",
    "TrainingRun": "megalith.train.loop:TrainingRun",
    "Attend": "megalith.nn.registered_attention:Attend",
    "GPT": "megalith.models.gpt:GPT",
    "IndexedDataset": "megalith.data.indexed:IndexedDataset",
    "LanguageModel": "megalith.models.language_model:LanguageModel",
    "Linear": "megalith.nn.linear:Linear",
    "Region": "megalith.nn.region:Region",
    "Replicated": "megalith.nn.placement:Replicated",
    "Split": "megalith.nn.placement:Split",
    "column": "megalith.nn.linear:column",
    "row": "megalith.nn.linear:row",
    "UpdateBatch": "megalith.optim.rules:UpdateBatch",
    "UpdateRule": "megalith.optim.rules:UpdateRule",
    "Vocabulary": "megalith.nn.registered_loss:Vocabulary",
    "Plan": "megalith.plan.plan:Plan",
    "plan": "megalith.plan.plan:plan_for",
    "load_trained": "megalith.assemble.trained:load_trained",
    "train_step": "megalith.train.step:train_step",
}

__all__ = [
    "Attend",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Control",
    "DataConfig",
    "DataError",
    "Evaluation",
    "GPT",
    "Hook",
    "IndexedDataset",
    "LanguageModel",
    "LearningRateSchedule",
    "Linear",
    "MegalithError",
    "ModelConfig",
    "OptimizerConfig",
    "Plan",
    "Region",
    "Registry",
    "Replicated",
    "RunConfig",
    "SavedCheckpoint",
    "Split",
    "StepResult",
    "TextModel",
    "TokenizerConfig",
    "Trained",
    "TrainingRun",
    "UpdateBatch",
    "UpdateRule",
    "Vocabulary",
    "collect",
    "column",
    "from_values",
    "load",
    "load_trained",
    "plan",
    "register_attention",
    "register_dataset",
    "register_loss",
    "register_mlp",
    "register_model",
    "register_norm",
    "register_optimizer",
    "register_position_embedding",
    "register_router",
    "register_schedule",
    "register_tokenizer",
    "row",
    "setting",
    "train",
    "train_step",
    "training",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LATER[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def register_attention(name: str, *, settings: type | None = None) -> Callable[[Thing], Thing]:
    """Register a module for `--attention name`: `(config: ModelConfig, layer, *, region, dtype, device)`.

    Its `forward(hidden [S, B, D], attend: Attend)` returns [S, B, D]. It makes queries, keys and values of its heads
    and calls `attend(q, k, v)`, which knows the run's mask, dropout, KV cache, documents and context parallelism. A GPT
    has it in every layer, numbered from 0.

    With tensor parallelism it is built from `Linear`, `column` and `row`, or its modules have a method `placements`.
    Modules with a `reset_parameters` draw their own initial weights; others get those of Megalith's layers.

    Args:
        settings: As of `register_dataset`.
    """
    return mark("attention", name, settings=settings)


def register_loss(name: str, *, on: str = "logits", settings: type | None = None) -> Callable[[Thing], Thing]:
    """Register a function `(logits, labels, mask, vocabulary: Vocabulary) -> losses` for `--loss name`.

    `labels` and `mask` are [B, S], `logits` [B, S, V here]: of the part of the vocabulary on this tensor-parallel rank,
    over which `vocabulary` reduces. It returns the loss of each token [B, S]; the mask and the mean over tokens follow.
    It takes the place of GPT's cross-entropy in training and evaluation, also of multi-token prediction.

    Args:
        on: "logits", or "hidden" for a function that takes hidden states [B, S, D] instead, of the whole sequence. It
            calls `vocabulary.logits` on those of which it needs logits. Not for plain modules.
        settings: As of `register_dataset`.

    Raises:
        ValueError: There is no such `on`.
    """
    if on not in ("logits", "hidden"):
        raise ValueError(f"on={on!r}: give 'logits' or 'hidden'")
    return mark("loss", name, settings=settings, on=on)


def register_mlp(name: str, *, settings: type | None = None) -> Callable[[Thing], Thing]:
    """Register a module for `--mlp name`: constructed as of `register_attention`, `forward(hidden) -> [S, B, D]`."""
    return mark("mlp", name, settings=settings)


def register_model(name: str, *, settings: type | None = None) -> Callable[[Thing], Thing]:
    """Register a model for `--model name`: a plain `torch.nn.Module`, or what builds a `LanguageModel`.

    A plain class is constructed as `(config: ModelConfig, vocab_size)`, and its `forward(tokens [B, S])` returns logits
    [B, S, V]. It is trained with data parallelism, ZeRO-1 (`--use-distributed-optimizer`) and FSDP2
    (`--use-torch-fsdp2`), and generates by full passes without a KV cache. Its constructor draws the initial weights,
    from a generator of `--seed`. It is refused with tensor, pipeline or context parallelism.

    A function, or a subclass of `LanguageModel` or `GPT`, is called as `(config, vocab_size, *, region, mixer, peers,
    stage, recompute, dtype, device)`. A model of `Linear`, `column`, `row` and modules with `placements` works in every
    layout.

    Args:
        settings: As of `register_dataset`.
    """
    return mark("model", name, settings=settings)


def register_norm(name: str, *, settings: type | None = None) -> Callable[[Thing], Thing]:
    """Register a module for `--normalization name`: `(size, epsilon, *, dtype, device)`, over the last dimension."""
    return mark("norm", name, settings=settings)


def register_dataset(name: str, *, settings: type | None = None, shuffle: bool = True) -> Callable[[Thing], Thing]:
    """Register a function `(config: DataConfig, tokenizer, split, seed) -> samples` for `--data-source name`.

    `samples` has `len` and `[i]`: the S + 1 token ids of a sample, or a mapping with tokens and labels [S], and with
    loss_mask and position_ids [S] where they are not ones and 0 to S - 1. None stands for a split (train, valid, test)
    that does not exist. The order of an epoch is drawn from --seed, so that a run resumes by the number of its samples.

    Args:
        settings: Dataclass whose fields become flags and recipe keys; the function takes one of them as `settings=`.
        shuffle: Whether each epoch has an order of its own.
    """
    return mark("dataset", name, settings=settings, shuffle=shuffle)


def register_optimizer(name: str, *, unit: str = "element", settings: type | None = None) -> Callable[[Thing], Thing]:
    """Register a subclass of `UpdateRule`, or any class of `torch.optim.Optimizer`, for `--optimizer name`.

    Master weights, gradient clipping, the loss scale, weight decay groups and checkpoints are the run's. The fields of
    the settings are the keyword arguments of a torch optimizer, beside lr and weight_decay.

    Args:
        unit: "element" if the update of an element depends on that element's values alone, so that ZeRO-1 may divide a
            parameter anywhere; "matrix" for rules that need whole matrices of the layers.
        settings: As of `register_dataset`.

    Raises:
        ValueError: There is no such unit.
    """
    if unit not in ("element", "matrix"):
        raise ValueError(f"unit={unit!r}: give 'element' or 'matrix'")
    return mark("optimizer", name, settings=settings, unit=unit)


def register_position_embedding(
    name: str, *, rotary: bool = False, settings: type | None = None
) -> Callable[[Thing], Thing]:
    """Register a module for `--position-embedding-type name`: `(config: ModelConfig, *, dtype, device)`.

    Its `forward(positions [B, S])` returns [B, S, D], which is added to the embeddings of the tokens.

    Args:
        rotary: Register a function `(config, size) -> frequencies [size / 2]` instead, in radians per position: RoPE
            rotates pairs of channels of queries and keys by them. `size` is the rotated part of a head.
        settings: As of `register_dataset`.
    """
    return mark("position", name, settings=settings, rotary=rotary)


def register_router(name: str, *, settings: type | None = None) -> Callable[[Thing], Thing]:
    """Register a function `(logits [T, E], top_k) -> (experts, weights)` for `--moe-router name`.

    It chooses `top_k` (`--moe-router-topk`) of the E experts of each token: their numbers, int64 [T, K], and what their
    outputs are multiplied by, [T, K], with a gradient to the logits. The projection to logits, jitter, z-loss,
    auxiliary losses, capacities, dispatch and expert parallelism are the run's.

    Args:
        settings: As of `register_dataset`.
    """
    return mark("router", name, settings=settings)


def register_schedule(name: str, *, settings: type | None = None) -> Callable[[Thing], Thing]:
    """Register a function `(num_samples, schedule: LearningRateSchedule) -> learning rate` for `--lr-decay-style name`.

    It is asked after the warm-up, which stays as the flags say. `num_samples` are those of applied steps; the function
    must depend on nothing else that changes.

    Args:
        settings: As of `register_dataset`.
    """
    return mark("schedule", name, settings=settings)


def register_tokenizer(name: str, *, settings: type | None = None) -> Callable[[Thing], Thing]:
    """Register a class for `--tokenizer-type name`, constructed with a TokenizerConfig.

    An instance has `vocab_size`, `eod`, `encode(text) -> ids` and `decode(ids) -> text`; it may have `special`, `pad`,
    `encode_batch` and `files` (`megalith.tokenizers.registered.TextCodec`).

    Args:
        settings: As of `register_dataset`.
    """
    return mark("tokenizer", name, settings=settings)


@overload  # a str is a folder, never a list of flags
def load(folder: str | os.PathLike[str], /, *, registry: Registry | None = None) -> TextModel: ...  # type: ignore[overload-overlap]


@overload
def load(
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    files: bool = True,
    saved_args: ArgsReader | None = None,
    registry: Registry | None = None,
) -> RunConfig: ...


def load(
    argv: Sequence[str] | str | os.PathLike[str],
    environ: Mapping[str, str] | None = None,
    *,
    files: bool = True,
    saved_args: ArgsReader | None = None,
    registry: Registry | None = None,
) -> RunConfig | TextModel:
    """Load a trained model from a folder, or the configuration of a run from a list of flags.

    The folder is a save folder of any format, one `iter_*` folder of it, a Hugging Face model folder, or
    `hf:ORG/NAME[@REVISION]`, which is fetched. The model is loaded onto the GPU if there is one;
    `TextModel(load_trained(...))` takes device, dtype and tokenizer. What `megalith generate` prints as a warning is a
    `UserWarning` here.

    Args:
        argv: The folder, or a list of flags, to which the other arguments belong as of `megalith.config.load`.
        registry: Registered objects that the model or the run may use, as of `collect`.

    Raises:
        ConfigError: The model writes no text, or the flags violate a rule.
        CheckpointError, DataError: As of `load_trained`.
    """
    if not isinstance(argv, str | os.PathLike):
        return load_config(argv, environ, files=files, saved_args=saved_args, registry=registry)
    from megalith.assemble.model import choose_device
    from megalith.assemble.trained import load_trained
    from megalith.text_model import TextModel

    trained = load_trained(Path(argv).expanduser(), choose_device("auto"), registry=registry or EMPTY)
    for note in trained.notes:
        warnings.warn(note, stacklevel=2)
    return TextModel(trained)


def train(run: TrainingRun | RunConfig) -> Iterator[StepResult]:
    """Train, and yield the result of each step; evaluate and save as the configuration says. Nothing is printed.

    Of a configuration the run is built first and closed at the end, also after a `break` of the loop, which loses the
    steps since the last save. Of a run of `training` the remaining iterations are trained.

    Raises:
        MegalithError: As `megalith train` ends with.
    """
    from megalith.train.loop import train

    return _train_configuration(run) if isinstance(run, RunConfig) else train(run)


def _train_configuration(config: RunConfig) -> Iterator[StepResult]:
    with training(config) as run:
        yield from train(run)


@contextmanager
def training(config: RunConfig, hooks: Sequence[Hook] = ()) -> Iterator[TrainingRun]:
    """Build a run as `megalith train` does, restore the checkpoint of `--load`, and hold the lock of `--save`.

    All processes of the run enter it together. Drive the run by `train(run)`, or by
    `train_step(run.state, run.train, num_micro_batches)` and `run.saver.save(run.state)`. Nothing is printed.

    Raises:
        MegalithError: As `megalith train` ends with.
    """
    from megalith.assemble.ranks import join_ranks
    from megalith.assemble.training import build_run
    from megalith.checkpoint import DirectoryStore
    from megalith.train.results import Hooks
    from megalith.train.user_hooks import UserHooks, registered_hooks

    if config.train.prove:
        raise ConfigError("--prove first is for `megalith train`; run `megalith prove` before this program")
    with ExitStack() as stack:
        context = stack.enter_context(join_ranks(config))
        for place in config.checkpoint.save_folders:
            stack.enter_context(DirectoryStore(place, context).claim())
        built = build_run(config, context)
        stack.callback(built.loaders.close)
        stack.callback(built.run.close)
        if of_user := [*registered_hooks(config), *hooks]:
            built.run.hook = Hooks([UserHooks(of_user, config, built.run)])
            stack.callback(built.run.hook.close)
        yield built.run
