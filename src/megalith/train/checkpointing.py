"""Between the state of a run and a checkpoint: what is written, what must fit, what is restored.

A resumed run continues bit for bit: parameters, moments, loss scaler, schedule, random streams and the position in the
data all come from the checkpoint. Where files are, and that they are whole, is the store's business.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from megalith.checkpoint import CheckpointContent, Chunk, LoadedContent, PendingSave, SaveReport, Staging, Store
from megalith.checkpoint.content import share_of
from megalith.checkpoint.formats.megatron_optimizer import decays
from megalith.checkpoint.formats.stacking import is_of_experts, stacking_of
from megalith.checkpoint.formats.torch_dist import (
    CHECKPOINT_VERSION,
    CONTENT_METADATA,
    OPTIMIZER_PREFIX,
    WORD_EMBEDDINGS,
    Whole,
    is_rng_object,
    optimizer_chunks,
    optimizer_common,
    read_optimizer_common,
    rng_object_key,
    weight_chunks,
    with_expert_groups,
)
from megalith.config import ModelConfig, RunConfig
from megalith.config.checkpoint_args import MODEL_SETTINGS
from megalith.config.foreign_args import model_of
from megalith.config.run import all_settings
from megalith.config.saved_args import megatron_args
from megalith.distributed import comm
from megalith.distributed.context import Axis
from megalith.errors import CheckpointError
from megalith.models.language_model import named_placements
from megalith.models.saved import saved_tensors, whole_names
from megalith.nn.placement import Placement, Replicated
from megalith.optim.optimizer import StateBox
from megalith.schedules.parameters import ResumedSchedule, resume_schedule
from megalith.tokenizers.card import card_differences, side_by_side
from megalith.train.faults import Probe, no_probe
from megalith.train.results import SavedCheckpoint
from megalith.train.state import TrainState

# Arguments that decide the shape or the meaning of the weights, with the flag that a user knows each by.
ARCHITECTURE = {name: all_settings()[name].flag for name in MODEL_SETTINGS if name != "make_vocab_size_divisible_by"}


EXPERTS = ".mlp.experts."
"""In the names of the parameters of experts."""
STEP_CHECK = "megalith_step_check"
"""Key of what `TrainState.check` remembers, in common.pt; Megatron passes over it."""


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
        weights_only: it is weights to begin from, not the state of a run.
    """

    iteration: int
    notes: tuple[str, ...]
    args: Mapping[str, Any]
    manifest: Mapping[str, Any] | None
    weights_only: bool = False

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, kept over all resumes: the padding logits take part in the loss."""
        with _reading(self.iteration):
            return int(self.args["padded_vocab_size"])


@dataclass(frozen=True)
class Resumed:
    """What a resume restored, for the console.

    Attributes:
        schedule: None if the schedule starts afresh.
        notes: what the user must hear.
    """

    iteration: int
    version: float
    schedule: ResumedSchedule | None
    notes: tuple[str, ...] = ()


class CheckpointSaver:
    """Writes the state of a run into a store.

    Args:
        store: where checkpoints go.
        run: the configuration.
        identity: what the run reads.
        probe: called at the points of a save.
        passing: where those go of which only the last one is kept; None if there are none.
    """

    def __init__(
        self,
        store: Store,
        run: RunConfig,
        identity: Identity,
        probe: Probe = no_probe,
        passing: Store | None = None,
    ) -> None:
        self._store, self._run, self._identity, self._probe, self._passing = store, run, identity, probe, passing

    def save(self, state: TrainState, *, persistent: bool = True) -> SavedCheckpoint:
        """Write a checkpoint of the state as it is; returns when it is durable.

        Args:
            state: of the run.
            persistent: one to keep, rather than one of which only the last is kept.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are untouched.
        """
        report = self._store_for(state, persistent=persistent).save(
            state.iteration,
            content_of(state, self._run),
            self._manifest(),
            files=self._identity.tokenizer_files,
            on_point=self._points(state.iteration),
        )
        return saved_checkpoint(state.iteration, report, report.stall_seconds)

    def schedule(self, state: TrainState, staging: Staging, *, persistent: bool = True) -> PendingSave:
        """Begin to copy the state and to write the copy; arguments and errors as of `save`.

        Args:
            state, persistent: as of `save`.
            staging: memory for the copy.
        """
        return self._store_for(state, persistent=persistent).schedule(
            state.iteration,
            content_of(state, self._run),
            self._manifest(),
            staging=staging,
            files=self._identity.tokenizer_files,
            on_point=self._points(state.iteration),
        )

    def chunks_of(self, state: TrainState) -> list[Chunk]:
        """The tensors that this rank saves."""
        return chunks_to_save(state, self._run, with_optimizer=not self._run.checkpoint.no_save_optim)

    def folder(self, *, persistent: bool = True) -> str:
        """Where `save` writes."""
        save = self._run.checkpoint.save or ""
        return save if persistent else self._run.checkpoint.passing_folder(save) or ""

    def _store_for(self, state: TrainState, *, persistent: bool) -> Store:
        if self._passing is None:
            assert persistent, "there is no folder for checkpoints of which only the last one is kept"
            return self._store
        # A run that went back would otherwise find the last one of the way that it has left, and resume from that.
        self._passing.delete_after(state.iteration)
        return self._store if persistent else self._passing

    def _points(self, iteration: int) -> Callable[[str], None]:
        return lambda point: self._probe(point, iteration)

    def _manifest(self) -> dict[str, Any]:
        return {
            "config": self._run.to_dict(),
            "tokenizer": dict(self._identity.tokenizer),
            "tokenizer_files": sorted(self._identity.tokenizer_files),
            "data": dict(self._identity.data),
        }


def saved_checkpoint(iteration: int, report: SaveReport, stall_seconds: float) -> SavedCheckpoint:
    """What the listeners of a run hear of a save."""
    speed = report.bytes / report.write_seconds / 1e9 if report.write_seconds else 0.0
    return SavedCheckpoint(
        iteration,
        str(report.path or ""),
        report.seconds,
        report.bytes,
        stall_seconds,
        report.waited_seconds,
        speed,
    )


def content_of(state: TrainState, run: RunConfig) -> CheckpointContent:
    """Everything of a checkpoint that this rank writes; all ranks call this together."""
    settings, first, stacking = run.checkpoint, _replicas(state).is_first, stacking_of(run.model)
    chunks = chunks_to_save(state, run, with_optimizer=not settings.no_save_optim)
    content = CheckpointContent(
        chunks=chunks,
        written_as=stacking.written_keys(chunk.key for chunk in chunks),
        objects=dict(stacking.extra_state_objects(_layers(state))) if first and state.context.tp.is_first else {},
        common={
            "args": _saved_args(state, run),
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": state.iteration,
            "num_floating_point_operations_so_far": state.flops,
            "content_metadata": CONTENT_METADATA,
            STEP_CHECK: state.check.state(),
        },
    )
    if not settings.no_save_optim:
        scalars = state.optimizer.scalars()
        content.common["optimizer"] = optimizer_common(
            _groups(scalars["param_groups"], state),
            scalars["step"],
            scalars["grad_scaler"] if run.precision.dynamic_loss_scale else None,
            run.precision.params_dtype,
        )
        content.common["opt_param_scheduler"] = state.schedule.state_dict(state.schedule_samples)
    if not settings.no_save_rng:
        alike = _sharing_a_key(state)
        states = comm.all_gather_objects(state.streams.state(), alike)
        if alike.is_first:
            content.objects[_rng_key(state)] = states
    return content


def chunks_to_save(state: TrainState, run: RunConfig, *, with_optimizer: bool) -> list[Chunk]:
    """What this rank writes of the model and its optimizer: over all ranks, each element once.

    The replicas of the model write a share each of what they hold alike; fully sharded they hold nothing alike.
    """
    alike, buffers = _model_chunks(state, run, once=True), _buffer_chunks(state, run, once=True)
    divided = _optimizer_chunks(state, run, once=True) if with_optimizer else []
    if run.fully_sharded:
        alike, divided = [], alike + divided
    elif not run.parallel.divides_states:
        alike, divided = alike + divided, []
    shares = []
    for of_experts, holders in ((False, _replicas(state)), (True, _expert_replicas(state))):
        part = [chunk for chunk in alike + buffers if is_of_experts(chunk.key) == of_experts]
        shares += share_of(part, holders.index, holders.size)
    return shares + divided


def chunks_to_load(state: TrainState, run: RunConfig, *, with_optimizer: bool) -> list[Chunk]:
    """Everything that this rank holds of the model and its optimizer, to be filled in place."""
    chunks = _model_chunks(state, run, once=False) + _buffer_chunks(state, run, once=False)
    return chunks + _optimizer_chunks(state, run, once=False) if with_optimizer else chunks


def _model_chunks(state: TrainState, run: RunConfig, *, once: bool) -> list[Chunk]:
    names = _stored_names(state, once=once)
    boxes = [replace(box, name=names[box.name]) for box in state.optimizer.weight_boxes() if box.name in names]
    placements, stacking = _stored_placements(state, names), stacking_of(run.model)
    return [
        chunk
        for axis, part in _by_axis(boxes, state)
        for chunk in weight_chunks(part, placements, stacking, rank=axis.index, size=axis.size, once=once)
    ]


def _by_axis(boxes: Sequence[StateBox], state: TrainState) -> Iterator[tuple[Axis, list[StateBox]]]:
    """The ranks that share layers with what is cut over them, then those that share experts."""
    for of_experts, axis in ((False, state.context.tp), (True, state.context.etp)):
        yield axis, [box for box in boxes if (EXPERTS in box.name) == of_experts]


def _buffer_chunks(state: TrainState, run: RunConfig, *, once: bool) -> list[Chunk]:
    """Of what no optimizer moves: the biases for the choice of experts."""
    tp, kept = state.context.tp, [item for model in state.chunks for item in saved_tensors(model)]
    buffers = {name: (tensor, placement) for name, tensor, placement in kept if not isinstance(tensor, Parameter)}
    boxes = [Whole(name, tensor) for name, (tensor, _) in buffers.items()]
    placements = {name: placement for name, (_, placement) in buffers.items()}
    return weight_chunks(boxes, placements, stacking_of(run.model), rank=tp.index, size=tp.size, once=once)


def _optimizer_chunks(state: TrainState, run: RunConfig, *, once: bool) -> list[Chunk]:
    names = _stored_names(state, once=once)
    boxes = []
    for box in state.optimizer.state_boxes():
        kind, _, name = box.name.partition(".")
        if name in names:
            boxes.append(replace(box, name=f"{kind}.{names[name]}"))
    placements, stacking = _stored_placements(state, names), stacking_of(run.model)
    placements |= {box.name: Replicated() for box in boxes if box.whole}
    return [
        chunk
        for axis, part in _by_axis(boxes, state)
        for chunk in optimizer_chunks(part, placements, stacking, rank=axis.index, size=axis.size, once=once)
    ]


def _stored_placements(state: TrainState, names: Mapping[str, str]) -> dict[str, Placement]:
    return {names[name]: placement for name, _, placement in _parameters(state) if name in names}


def _parameters(state: TrainState) -> Iterator[tuple[str, Tensor, Placement]]:
    for model in state.chunks:
        yield from named_placements(model)


def _stored_names(state: TrainState, *, once: bool) -> dict[str, str]:
    """Parameter name -> the name that it is stored under.

    The second copy of a tied embedding is loaded from the first, and is left out where each element counts once.
    """
    copies = {model.copied_weight for model in state.chunks}
    names = [name for name, _, _ in _parameters(state) if not (once and name in copies)]
    whole = {name: stored for model in state.chunks for name, stored in whole_names(model).items()}
    return {name: WORD_EMBEDDINGS if name in copies else whole[name] for name in names}


def _layers(state: TrainState) -> list[int]:
    return [layer for model in state.chunks for layer in model.stage.layers]


def _replicas(state: TrainState) -> Axis:
    """The ranks that hold the same part of the model."""
    return state.context.join("cp", "dp")


def _expert_replicas(state: TrainState) -> Axis:
    """The ranks that hold the same part of the model and the same experts."""
    return state.context.edp


def _groups(groups: Sequence[Mapping[str, Any]], state: TrainState) -> list[Mapping[str, Any]]:
    """The groups of the optimizer, with those that Megatron has for experts that are spread over ranks."""
    if not state.context.experts_apart:
        return list(groups)
    kinds = {decays(name, tensor.shape) for name, tensor, _ in _parameters(state) if EXPERTS in name}
    return with_expert_groups(groups, kinds)


def _by_experts(state: TrainState) -> bool:
    """Whether random states have a key for each expert-parallel rank of a (tensor, pipeline) place. Where experts are
    shared by other ranks than layers are, these are no axis beside the two."""
    return state.context.layout.expert_tp == state.context.layout.tp


def _sharing_a_key(state: TrainState) -> Axis:
    """The ranks whose random states stand under one key."""
    return _expert_replicas(state) if _by_experts(state) else _replicas(state)


def _rng_key(state: TrainState) -> str:
    tp, pp = state.context.tp, state.context.pp
    ep = (state.context.ep.index, state.context.ep.size) if _by_experts(state) else (0, 1)
    return rng_object_key(tp.index, tp.size, pp.index, pp.size, *ep)


def _saved_args(state: TrainState, run: RunConfig) -> Namespace:
    return Namespace(
        **megatron_args(run),
        padded_vocab_size=state.model.vocab_size,
        consumed_train_samples=state.consumed_samples,
        consumed_valid_samples=state.consumed_valid_samples,
        skipped_train_samples=state.skipped_samples,
    )


def find_checkpoint(store: Store, step: int | None = None, *, thorough: bool = False) -> FoundCheckpoint | None:
    """The checkpoint to continue from: the newest sound one, or that of iteration `step`.

    Args:
        store: where to look.
        step: which one; by default the newest that is sound.
        thorough: read all its files through. Otherwise `restore` does that with the files of its tensors, and what it
            finds damaged is passed over by a thorough search.

    Returns:
        None if the store holds none at all.

    Raises:
        CheckpointError: there are checkpoints and none of them can be used.
    """
    notes: list[str] = []
    iteration: int | None = step
    if step is not None:
        if problems := store.verify(step, deferred=not thorough):
            raise CheckpointError("\n  ".join([f"--ckpt-step {step}: that checkpoint is damaged:", *problems]))
    else:
        iteration, notes = store.newest_verified(deferred=not thorough)
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
    weights_only = store.weights_only(iteration)
    return FoundCheckpoint(iteration, tuple(notes), vars(args), store.manifest(iteration), weights_only)


def check_fits(found: FoundCheckpoint, run: RunConfig, identity: Identity) -> tuple[str, ...]:
    """Compare a checkpoint with what the command line asks for.

    Returns:
        What the user must hear: the changes of the data that `--accept-data-change` accepts.

    Raises:
        CheckpointError: it is of another architecture, tokenizer or (unless `--finetune` or `--accept-data-change`)
            data; names every difference.
    """
    with _reading(found.iteration):
        was, now = architecture(model_of(found.args)), architecture(run.model)
    model = [
        f"{flag}: {was[name]} in the checkpoint, {now[name]} here"
        for name, flag in ARCHITECTURE.items()
        if was[name] != now[name]
    ]
    ids, rows = int(identity.tokenizer.get("vocab_size", 0)), found.args.get("padded_vocab_size")
    if rows is not None and ids > rows:
        model.append(f"the tokenizer has {ids} ids, and the embedding of the checkpoint {rows} rows")
    data: list[str] = []
    if found.manifest is not None:
        model += _other_tokenizer(found.manifest.get("tokenizer") or {}, identity.tokenizer)
        begins = found.iteration in run.train.phase_ends  # with data of its own
        if not (run.checkpoint.finetune or found.weights_only or begins):
            data = _changes("the training data", found.manifest.get("data", {}), identity.data)
    if model or (data and not run.checkpoint.accept_data_change):
        remedy = (
            "give the flags, tokenizer and data of that run (--use-checkpoint-args takes the flags), or another --load"
        )
        if not model:
            remedy = (
                "give the data of that run, another --load, --accept-data-change to go on with this data from the "
                "sample where that run stood, or --finetune to start anew from its weights"
            )
        head = f"the checkpoint of iteration {found.iteration} in {run.checkpoint.load} is of another run:"
        raise CheckpointError("\n  ".join([head, *model, *data, remedy]))
    return tuple(f"{change}; --accept-data-change: going on with it" for change in data)


def architecture(model: ModelConfig) -> dict[str, Any]:
    """The settings of `ARCHITECTURE`, derived ones filled in, and those without effect as if they were not given."""
    values = {name: getattr(model, name) for name in ARCHITECTURE}
    values |= _of_experts(model)
    values |= {
        "num_query_groups": model.query_groups,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "kv_channels": model.head_size,
        "ffn_hidden_size": model.ffn_size,
        "add_qkv_bias": model.qkv_bias,
    }
    if model.multi_latent_attention:
        values |= {"kv_channels": None, "rope_type": model.rotary_kind}
    else:
        values |= dict.fromkeys(
            ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type")
        )
    if not model.activation.startswith("gelu_") or not model.add_bias_linear:
        values["bias_gelu_fusion"] = None
    if not model.use_rope_scaling:
        values["rope_scaling_factor"] = None
    if model.rotary_size == 0:
        values |= dict.fromkeys(("rotary_base", "rotary_percent", "rotary_interleaved"))
    if model.rotary_kind != "yarn":
        values |= dict.fromkeys(name for name in values if name.startswith(("yarn_", "mscale", "rotary_scaling")))
    return values


def _of_experts(model: ModelConfig) -> dict[str, Any]:
    """The settings of mixtures of experts as they are compared; None where there are none."""
    names = [name for name in ARCHITECTURE if name.startswith("moe_") or name == "num_experts"]
    if not model.mixture:
        return dict.fromkeys(names)
    pattern = "".join("1" if experts else "0" for experts in model.experts)
    given = {name: getattr(model, name) for name in names}
    return {**given, "moe_layer_freq": pattern, "moe_ffn_hidden_size": model.expert_size}


def _other_tokenizer(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Both cards side by side, where they differ; nothing where the checkpoint has none."""
    differing = card_differences(saved, own) if saved else {}
    if not differing:
        return []
    rows = side_by_side(("the checkpoint", "this run"), differing)
    return ["the tokenizer is another (what is equal is left out):", *(f"  {row}" for row in rows)]


def _changes(what: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    # What has a digest is described completely, and may differ in what there is to describe.
    complete = "digest" in saved and "digest" in own
    names = dict.fromkeys((*saved, *own)) if complete else [name for name in saved if name in own]
    pairs = [(name, saved.get(name, "not there"), own.get(name, "not there")) for name in names if name != "digest"]
    return [f"{what}: {name} was {before} and is {now}" for name, before, now in pairs if before != now]


def restore(
    store: Store, found: FoundCheckpoint, state: TrainState, run: RunConfig, probe: Probe = no_probe
) -> Resumed:
    """Fill the state from the checkpoint; its model has the checkpoint's padded vocabulary. All ranks call it together.

    Raises:
        DamagedCheckpointError: a file of its tensors is not as it was saved; the state must not be used.
        CheckpointError: the checkpoint holds other tensors than the model needs, or another schedule than the flags
            ask for without a flag that says which counts.
    """
    settings = run.checkpoint
    anew = settings.finetune or found.weights_only
    with_optimizer = not (anew or settings.no_load_optim or run.train.skip_train)
    with_streams = not (anew or settings.no_load_rng)
    content = CheckpointContent(chunks_to_load(state, run, with_optimizer=with_optimizer))
    if with_streams and _holds_streams(store, found, state):
        content.objects[_rng_key(state)] = None
    with _reading(found.iteration):
        schedule = _resumed_schedule(store, found, state, run) if with_optimizer else None
        probe("load", found.iteration)
        loaded = store.load(found.iteration, content)
        if with_optimizer:
            scalars = read_optimizer_common(loaded.common["optimizer"])
            state.optimizer.load_scalars({"step": scalars.step, "grad_scaler": scalars.scaler})
        else:
            state.optimizer.reload_main_params()
        if schedule is not None:
            state.schedule, state.schedule_samples = schedule.schedule, schedule.num_samples
        notes = _load_streams(loaded, found, state, run) if with_streams else ()
        if not anew:
            state.iteration = int(loaded.common["iteration"])
            state.consumed_samples = int(found.args["consumed_train_samples"])
            state.consumed_valid_samples = int(found.args["consumed_valid_samples"])
            state.skipped_samples = int(found.args.get("skipped_train_samples") or 0)
            state.check.load_state(loaded.common.get(STEP_CHECK, {}))
            state.flops = float(loaded.common.get("num_floating_point_operations_so_far", 0.0))
        notes += _precision_notes(found, run) + strictness_notes(loaded, run, with_optimizer=with_optimizer)
        return Resumed(state.iteration, float(loaded.common["checkpoint_version"]), schedule, notes)


def strictness_notes(loaded: LoadedContent, run: RunConfig, *, with_optimizer: bool) -> tuple[str, ...]:
    """What `--dist-ckpt-strictness` says about tensors that were not asked for.

    Main parameters beside weights in fp32 are the same numbers, and random states of other places no tensors.

    Raises:
        CheckpointError: it says that there must be none.
    """
    how = run.checkpoint.dist_ckpt_strictness
    beside = f"{OPTIMIZER_PREFIX}fp32_param." if with_optimizer else OPTIMIZER_PREFIX
    unexpected = [key for key in loaded.unexpected if not key.startswith(beside) and not is_rng_object(key)]
    if how in ("assume_ok_unexpected", "ignore_all") or not unexpected:
        return ()
    text = f"the checkpoint holds what this run does not ask for: {', '.join(unexpected)}"
    if how.startswith("raise"):
        raise CheckpointError(f"{text}; --dist-ckpt-strictness {how} refuses it")
    return (text,)


def _precision_notes(found: FoundCheckpoint, run: RunConfig) -> tuple[str, ...]:
    """What the user must hear where the run that wrote the checkpoint computed in another precision."""
    was, now = str(found.args.get("params_dtype", "")).removeprefix("torch."), run.precision.params_dtype
    return () if was in ("", now) else (f"the checkpoint is of a run in {was}; this one goes on from it in {now}",)


def _holds_streams(store: Store, found: FoundCheckpoint, state: TrainState) -> bool:
    """Whether to ask for the random states of this place: not if there are those of other places, or were before the
    checkpoint was converted.
    """
    objects = store.contents(found.iteration).objects
    converted = "converted_from" in (found.manifest or {})
    return _rng_key(state) in objects or not (converted or any(map(is_rng_object, objects)))


def _load_streams(loaded: LoadedContent, found: FoundCheckpoint, state: TrainState, run: RunConfig) -> tuple[str, ...]:
    """Continue this rank's random streams if the checkpoint has them; returns what the user must hear if not.

    Megatron's replicas have one state in common, unless told otherwise.
    """
    states, replicas = loaded.objects.get(_rng_key(state), ()), _sharing_a_key(state)
    if len(states) == replicas.size:
        state.streams.load_state(states[replicas.index])
    elif len(states) == 1 and found.manifest is None:
        state.streams.load_state(states[0])
    elif run.model.hidden_dropout > 0.0 or run.model.attention_dropout > 0.0:
        seed = run.train.seed
        return (f"the random states of the checkpoint are those of another layout: dropout starts from --seed {seed}",)
    return ()


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
