"""Between the state of a run and a checkpoint: what is written, what must fit, what is restored.

A resumed run continues bit for bit: parameters, moments, loss scaler, schedule, random streams and the position in the
data all come from the checkpoint. Where files are, and that they are whole, is the store's business.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megalith.checkpoint import CheckpointContent, Store
from megalith.checkpoint.formats.torch_dist import (
    CHECKPOINT_VERSION,
    CONTENT_METADATA,
    extra_state_objects,
    model_chunks,
    optimizer_chunks,
    optimizer_common,
    read_optimizer_common,
    rng_object_key,
)
from megalith.config import RunConfig
from megalith.config.saved_args import megatron_args
from megalith.errors import CheckpointError
from megalith.models.gpt import named_placements
from megalith.schedules.parameters import ResumedSchedule, resume_schedule
from megalith.train.faults import Probe, no_probe
from megalith.train.results import SavedCheckpoint
from megalith.train.state import TrainState

# Arguments that decide the shape or the meaning of the weights, with the flag that a user knows each by.
ARCHITECTURE = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "group_query_attention": "--group-query-attention",
    "num_query_groups": "--num-query-groups",
    "kv_channels": "--kv-channels",
    "ffn_hidden_size": "--ffn-hidden-size",
    "max_position_embeddings": "--max-position-embeddings",
    "position_embedding_type": "--position-embedding-type",
    "rotary_base": "--rotary-base",
    "rotary_percent": "--rotary-percent",
    "rotary_interleaved": "--rotary-interleaved",
    "normalization": "--normalization",
    "norm_epsilon": "--norm-epsilon",
    "swiglu": "--swiglu",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "add_bias_linear": "--disable-bias-linear",
    "add_qkv_bias": "--add-qkv-bias",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "params_dtype": "--fp16/--bf16",
}


@dataclass(frozen=True)
class Identity:
    """What a run reads besides its configuration; a checkpoint keeps it so that a resume can compare.

    Attributes:
        tokenizer: the tokenizer's card.
        tokenizer_files: file name -> content; laid into every checkpoint so that it can be used alone.
        data: the fingerprint of the training data.
    """

    tokenizer: Mapping[str, Any]
    tokenizer_files: Mapping[str, bytes]
    data: Mapping[str, Any]


@dataclass(frozen=True)
class FoundCheckpoint:
    """A sound checkpoint to continue from.

    Attributes:
        notes: what the user must hear about the way to it: damaged or missing checkpoints passed over.
        args: Megatron's arguments of the run that wrote it.
        manifest: None if another program wrote it.
    """

    iteration: int
    notes: tuple[str, ...]
    args: Mapping[str, Any]
    manifest: Mapping[str, Any] | None

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, kept over all resumes: the padding logits take part in the loss."""
        with _reading(self.iteration):
            return int(self.args["padded_vocab_size"])


@dataclass(frozen=True)
class Resumed:
    """What a resume restored, for the console. `schedule` is None if the schedule starts afresh."""

    iteration: int
    version: float
    schedule: ResumedSchedule | None


class CheckpointSaver:
    """Writes the state of a run into a store."""

    def __init__(self, store: Store, run: RunConfig, identity: Identity, probe: Probe = no_probe) -> None:
        self._store, self._run, self._identity, self._probe = store, run, identity, probe

    def save(self, state: TrainState) -> SavedCheckpoint:
        """Write a checkpoint of the state as it is; returns when it is durable.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are untouched.
        """
        report = self._store.save(
            state.iteration,
            content_of(state, self._run),
            self._manifest(),
            files=self._identity.tokenizer_files,
            on_point=lambda point: self._probe(point, state.iteration),
        )
        return SavedCheckpoint(state.iteration, str(report.path or ""), report.seconds, report.bytes)

    def _manifest(self) -> dict[str, Any]:
        return {
            "config": self._run.to_dict(),
            "tokenizer": dict(self._identity.tokenizer),
            "tokenizer_files": sorted(self._identity.tokenizer_files),
            "data": dict(self._identity.data),
        }


def content_of(state: TrainState, run: RunConfig) -> CheckpointContent:
    """Everything that a checkpoint of this run holds."""
    settings, layers = run.checkpoint, run.model.num_layers
    content = CheckpointContent(
        chunks=model_chunks(named_placements(state.model), layers),
        objects=dict(extra_state_objects(layers)),
        common={
            "args": _saved_args(state, run),
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": state.iteration,
            "num_floating_point_operations_so_far": state.flops,
            "content_metadata": CONTENT_METADATA,
        },
    )
    if not settings.no_save_optim:
        scalars = state.optimizer.scalars()
        content.chunks += optimizer_chunks(state.optimizer.state_tensors(), state.model.placements(), layers)
        content.common["optimizer"] = optimizer_common(
            scalars["param_groups"],
            scalars["step"],
            scalars["grad_scaler"] if run.precision.dynamic_loss_scale else None,
            run.precision.params_dtype,
        )
        content.common["opt_param_scheduler"] = state.schedule.state_dict(state.schedule_samples)
    if not settings.no_save_rng:
        content.objects[rng_object_key()] = [state.streams.state()]
    return content


def _saved_args(state: TrainState, run: RunConfig) -> Namespace:
    return Namespace(
        **megatron_args(run),
        padded_vocab_size=state.model.vocab_size,
        consumed_train_samples=state.consumed_samples,
        consumed_valid_samples=state.consumed_valid_samples,
        skipped_train_samples=0,
    )


def find_checkpoint(store: Store, step: int | None = None) -> FoundCheckpoint | None:
    """The checkpoint to continue from: the newest sound one, or that of iteration `step`.

    Returns:
        None if the store holds none at all.

    Raises:
        CheckpointError: there are checkpoints and none of them can be used.
    """
    notes: list[str] = []
    iteration: int | None = step
    if step is not None:
        if problems := store.verify(step):
            raise CheckpointError("\n  ".join([f"--ckpt-step {step}: that checkpoint is damaged:", *problems]))
    else:
        iteration, notes = store.newest_verified()
    if iteration is None:
        if notes:
            raise CheckpointError(
                "\n  ".join(
                    [
                        "no checkpoint here can be used; give another --load, or move these away to start afresh:",
                        *notes,
                    ]
                )
            )
        return None
    args = store.common(iteration).get("args", Namespace())
    return FoundCheckpoint(iteration, tuple(notes), vars(args), store.manifest(iteration))


def check_fits(found: FoundCheckpoint, run: RunConfig, identity: Identity) -> None:
    """Compare a checkpoint with what the command line asks for.

    Raises:
        CheckpointError: it is of another architecture, tokenizer or (unless `--finetune`) data; names every difference.
    """
    own = megatron_args(run)
    without_effect = set() if run.model.add_bias_linear and not run.model.swiglu else {"bias_gelu_fusion"}
    model = [
        f"{flag}: {found.args[name]} in the checkpoint, {own[name]} here"
        for name, flag in ARCHITECTURE.items()
        if name in found.args and name not in without_effect and not _same(found.args[name], own[name])
    ]
    data: list[str] = []
    if found.manifest is not None:
        model += _changes("the tokenizer", found.manifest.get("tokenizer", {}), identity.tokenizer)
        if not run.checkpoint.finetune:
            data = _changes("the training data", found.manifest.get("data", {}), identity.data)
    if model or data:
        remedy = "give the flags, tokenizer and data of that run, or another --load"
        if not model:
            remedy = "give the data of that run, another --load, or --finetune to start anew from its weights"
        head = f"the checkpoint of iteration {found.iteration} in {run.checkpoint.load} is of another run:"
        raise CheckpointError("\n  ".join([head, *model, *data, remedy]))


def _same(saved: Any, own: Any) -> bool:
    """Equal values; a torch dtype is equal to its name."""
    return bool(saved == own) or str(saved) == f"torch.{own}"


def _changes(what: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    names = [name for name in saved if name in own and saved[name] != own[name]]
    return [f"{what}: {name} was {saved[name]} and is {own[name]}" for name in names if name != "digest"]


def restore(
    store: Store, found: FoundCheckpoint, state: TrainState, run: RunConfig, probe: Probe = no_probe
) -> Resumed:
    """Fill the state from the checkpoint; its model has the checkpoint's padded vocabulary.

    Raises:
        CheckpointError: the checkpoint holds other tensors than the model needs, or another schedule than the flags
            ask for without a flag that says which counts.
    """
    settings, layers = run.checkpoint, run.model.num_layers
    with_optimizer = not (settings.finetune or settings.no_load_optim)
    with_streams = not (settings.finetune or settings.no_load_rng)
    content = CheckpointContent(chunks=model_chunks(named_placements(state.model), layers))
    if with_optimizer:
        content.chunks += optimizer_chunks(state.optimizer.state_tensors(), state.model.placements(), layers)
    if with_streams:
        content.objects[rng_object_key()] = None
    with _reading(found.iteration):
        schedule = _resumed_schedule(store, found, state, run) if with_optimizer else None
        probe("load", found.iteration)
        loaded = store.load(found.iteration, content, verify=False)  # found means verified
        if with_optimizer:
            scalars = read_optimizer_common(loaded.common["optimizer"])
            state.optimizer.load_scalars({"step": scalars.step, "grad_scaler": scalars.scaler})
        else:
            state.optimizer.reload_main_params()
        if schedule is not None:
            state.schedule, state.schedule_samples = schedule.schedule, schedule.num_samples
        if with_streams:
            state.streams.load_state(loaded.objects[rng_object_key()][0])
        if not settings.finetune:
            state.iteration = int(loaded.common["iteration"])
            state.consumed_samples = int(found.args["consumed_train_samples"])
            state.consumed_valid_samples = int(found.args["consumed_valid_samples"])
            state.flops = float(loaded.common.get("num_floating_point_operations_so_far", 0.0))
        return Resumed(state.iteration, float(loaded.common["checkpoint_version"]), schedule)


@contextmanager
def _reading(iteration: int) -> Iterator[None]:
    """Turn what Python raises on values that are not there, or are of another kind, into a word about the file.

    Raises:
        CheckpointError: names the key.
    """
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"the checkpoint of iteration {iteration}: its common.pt has no {error}") from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint of iteration {iteration}: its common.pt has a value of another kind than expected: {error}"
        ) from error


def _resumed_schedule(store: Store, found: FoundCheckpoint, state: TrainState, run: RunConfig) -> ResumedSchedule:
    common = store.common(found.iteration)
    missing = [key for key in ("optimizer", "opt_param_scheduler") if key not in common]
    if missing:
        raise CheckpointError(
            f"the checkpoint of iteration {found.iteration} has no optimizer state (saved with --no-save-optim); "
            "add --no-load-optim to start with a fresh one"
        )
    return resume_schedule(
        state.schedule,
        common["opt_param_scheduler"],
        override=run.schedule.override_opt_param_scheduler,
        use_checkpoint=run.schedule.use_checkpoint_opt_param_scheduler,
    )
