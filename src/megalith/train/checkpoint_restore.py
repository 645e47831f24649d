"""The state of a run, filled from a checkpoint.

A resumed run continues bit for bit: parameters, moments, loss scaler, schedule, random streams and the position in the
data all come from the checkpoint. Where files are, and that they are whole, is the store's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megalith.checkpoint import CheckpointContent, DirectoryStore, LoadedContent
from megalith.checkpoint.formats.torch_dist import OPTIMIZER_PREFIX, is_rng_object, read_optimizer_common
from megalith.config import ModelConfig, RunConfig, all_settings
from megalith.config.changes import HARMLESS, changes_since
from megalith.device import is_host
from megalith.errors import CheckpointError, DamagedCheckpointError
from megalith.schedules.parameters import ResumedSchedule, resume_schedule
from megalith.train.checkpoint_content import (
    BEST,
    LR_SCALE,
    NOISE,
    STEP_CHECK,
    WANDB_RUN,
    chunks_to_load,
    frozen_chunks,
    rng_key,
    sharing_a_key,
)
from megalith.train.checkpoint_fit import FoundCheckpoint, reading
from megalith.train.faults import Probe, no_probe
from megalith.train.state import TrainState

_OF_SCHEDULES = {
    setting.flag
    for setting in all_settings().values()
    if setting.group == "schedule"
    or "weight_decay" in setting.name
    or setting.name.endswith(("batch_size", "batch_size_schedule"))
    or setting.name in ("train_iters", "train_samples")
}
"""The flags that the schedules of a run follow from."""


@dataclass(frozen=True)
class Resumed:
    """What a resume restored, for the console."""

    iteration: int
    version: float
    schedule: ResumedSchedule | None  # None if the schedule starts afresh
    notes: tuple[str, ...] = ()


def restore(
    store: DirectoryStore, found: FoundCheckpoint, state: TrainState, run: RunConfig, probe: Probe = no_probe
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
    is_base = run.model.lora_rank is not None and not found.has_adapters
    chunks = frozen_chunks(state, run) if is_base else chunks_to_load(state, run, with_optimizer=with_optimizer)
    content = CheckpointContent(chunks)
    with reading(found.iteration):
        _require_states(store, found, optimizer=with_optimizer, streams=with_streams)
        if with_streams and rng_key(state) in store.contents(found.iteration).objects:
            content.objects[rng_key(state)] = None
        schedule = _resumed_schedule(store, found, state, run) if with_optimizer else None
        probe("load", found.iteration)
        try:
            loaded = store.load(found.iteration, content)
        except CheckpointError as error:
            if isinstance(error, DamagedCheckpointError) or not (with_optimizer and _other_optimizer(found, run)):
                raise
            raise CheckpointError(_other_optimizer(found, run)) from error
        if with_optimizer:
            scalars = read_optimizer_common(loaded.common["optimizer"])
            state.optimizer.load_scalars({"step": scalars.step, "grad_scaler": scalars.scaler})
        else:
            state.optimizer.reload_master_weights()
        if schedule is not None:
            state.schedule, state.lr_schedule_samples = schedule.schedule, schedule.num_samples
        notes = _load_streams(loaded, found, state, run) if with_streams else ()
        if not anew:
            state.iteration = int(loaded.common["iteration"])
            state.consumed_samples = int(found.args["consumed_train_samples"])
            state.consumed_valid_samples = int(found.args["consumed_valid_samples"])
            state.skipped_samples = int(found.args.get("skipped_train_samples") or 0)
            state.check.load_state(loaded.common.get(STEP_CHECK, {}))
            state.noise.load_state(loaded.common.get(NOISE, {}))
            state.best.load_state(loaded.common.get(BEST, {}))
            state.lr_scale = float(loaded.common.get(LR_SCALE, 1.0))
            state.wandb_run_id = loaded.common.get(WANDB_RUN) if _records_the_same(found, run) else None
            state.flops = float(loaded.common.get("num_floating_point_operations_so_far", 0.0))
            notes += thread_notes(found, state.context.device)
        notes += _precision_notes(found, run) + strictness_notes(loaded, run, with_optimizer=with_optimizer)
        return Resumed(state.iteration, float(loaded.common["checkpoint_version"]), schedule, notes)


def _records_the_same(found: FoundCheckpoint, run: RunConfig) -> bool:
    """Return whether to continue the checkpoint's W&B run, not if this run has another W&B name."""
    saved = found.saved_settings.get("log", {})
    names = ("wandb_project", "wandb_exp_name", "tracker_project", "tracker_run")
    return all(saved.get(name, getattr(run.log, name)) == getattr(run.log, name) for name in names)


def strictness_notes(loaded: LoadedContent, run: RunConfig, *, with_optimizer: bool) -> tuple[str, ...]:
    """Return warnings about unexpected tensors, as `--dist-ckpt-strictness` asks for.

    A CheckpointError where it says that there must be none. Master weights beside weights in fp32 are the same
    numbers, and random states of other places no tensors.
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


def thread_notes(found: FoundCheckpoint, device: torch.device) -> tuple[str, ...]:
    """Return a warning if a CPU computed the checkpoint with other threads, which changes the order of sums."""
    was, now = (found.manifest or {}).get("threads"), torch.get_num_threads()
    if not is_host(device) or was in (None, now):
        return ()
    return (
        f"the checkpoint was computed with {was} thread{'s' if was != 1 else ''} on each rank, and this run has {now}: "
        f"the same numbers up to rounding; OMP_NUM_THREADS={was} keeps the bits, on a processor of the same kind",
    )


def _precision_notes(found: FoundCheckpoint, run: RunConfig) -> tuple[str, ...]:
    """Return a warning where the run that wrote the checkpoint had another precision."""
    was, now = str(found.args.get("params_dtype", "")).removeprefix("torch."), run.precision.params_dtype
    return () if was in ("", now) else (f"the checkpoint is of a run in {was}; this one continues it in {now}",)


def _require_states(store: DirectoryStore, found: FoundCheckpoint, *, optimizer: bool, streams: bool) -> None:
    """Raise CheckpointError if the checkpoint was saved without states that the run asks for."""
    fresh = {
        "optimizer state (saved with --no-save-optim); add --no-load-optim": optimizer
        and not {"optimizer", "opt_param_scheduler"} <= store.common(found.iteration).keys(),
        "RNG states (saved with --no-save-rng); add --no-load-rng": streams
        and "converted_from" not in (found.manifest or {})
        and not any(map(is_rng_object, store.contents(found.iteration).objects)),
    }
    where = f"the checkpoint of iteration {found.iteration} has no"
    if lines := [f"{where} {what} to start afresh" for what, missing in fresh.items() if missing]:
        raise CheckpointError("\n".join(lines))


def _other_optimizer(found: FoundCheckpoint, run: RunConfig) -> str:
    """Return that the checkpoint is of a run with another optimizer, and the remedy; "" if it is not."""
    was, now = found.args.get("optimizer"), str(run.optimizer.optimizer)
    if was in (None, now):
        return ""
    return (
        f"--optimizer {now}: the checkpoint of iteration {found.iteration} holds the states of {was}, which do not "
        f"fit; use --optimizer {was}, or add --no-load-optim to start with fresh states"
    )


def _load_streams(loaded: LoadedContent, found: FoundCheckpoint, state: TrainState, run: RunConfig) -> tuple[str, ...]:
    """Continue this rank's random streams if the checkpoint has them; return a warning if not.

    By default Megatron's replicas share one state.
    """
    states, replicas = loaded.objects.get(rng_key(state), ()), sharing_a_key(state)
    if len(states) == replicas.size:
        state.rng_streams.load_state(states[replicas.index])
    elif len(states) == 1 and found.manifest is None:
        state.rng_streams.load_state(states[0])
    elif drawing := _drawing(run.model):
        again = f"those of {' and '.join(drawing)} start from --seed {run.train.seed}"
        return (f"the random states of the checkpoint are those of another layout: {again}",)
    return ()


def _drawing(model: ModelConfig) -> list[str]:
    """Return the flags whose random numbers a model draws in training."""
    names = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps", "lora_dropout")
    return [all_settings()[name].flag for name in names if getattr(model, name)]


def _resumed_schedule(
    store: DirectoryStore, found: FoundCheckpoint, state: TrainState, run: RunConfig
) -> ResumedSchedule:
    common = store.common(found.iteration)
    return resume_schedule(
        state.schedule,
        common["opt_param_scheduler"],
        override=run.schedule.override_opt_param_scheduler,
        use_checkpoint=run.schedule.use_checkpoint_opt_param_scheduler,
        changed=[
            str(change)
            for change in changes_since(found.saved_settings, run)
            if change.flag in _OF_SCHEDULES and change.effect != HARMLESS
        ],
    )
