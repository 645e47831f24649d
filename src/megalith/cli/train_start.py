"""The start of a training run: from a configuration to a `TrainingRun`, said step by step on the screen.

The composition root of training. The order of the lines is Megatron's (docs/reference/console.md#start-up); what its
users never read goes to the log only.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import torch

from megalith.assemble.data import Loaders, build_datasets, build_loaders, compare_tokenizers, run_sizes
from megalith.assemble.facts import content_facts
from megalith.assemble.model import (
    build_chunks,
    build_run_optimizer,
    defer_weight_gradients,
    draw_weights,
    params_dtype,
)
from megalith.assemble.schedule import build_schedule
from megalith.checkpoint import DirectoryStore, Retention, split_path
from megalith.checkpoint.crew import Crew
from megalith.checkpoint.store import TRACKER_FILE
from megalith.compat.megatron import console
from megalith.compat.megatron.screen import Screen
from megalith.config import RunConfig
from megalith.config.changes import Change, changes_lines, changes_since
from megalith.config.groups import CheckpointConfig
from megalith.config.render import notes_lines
from megalith.config.saved_args import megatron_args
from megalith.data.build import Datasets, fingerprint
from megalith.distributed import comm
from megalith.distributed.agreement import refuse_unequal
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.errors import CheckpointError, ConfigError, DamagedCheckpointError
from megalith.models.families import title
from megalith.models.language_model import LanguageModel
from megalith.models.plain import PlainModel
from megalith.tokenizers import Tokenizer, build_tokenizer
from megalith.tokenizers.protocol import padded_vocab_size, padding_message, tensor_parallel_note
from megalith.train.anomalies import AnomalyPolicy
from megalith.train.checkpoint_fit import (
    FoundCheckpoint,
    Identity,
    check_fits,
    find_checkpoint,
    other_products,
    products_of,
)
from megalith.train.checkpoint_restore import restore
from megalith.train.checkpoint_saver import BackgroundSaver, CheckpointSaver
from megalith.train.consensus import NeverStop
from megalith.train.faults import Probe
from megalith.train.loop import HeldOut, Plan, TrainingRun
from megalith.train.results import Hook
from megalith.train.signals import StopSignals
from megalith.train.state import TrainState
from megalith.train.step_hooks import NaNInjector
from megalith.train.throughput import datasheet_peak, measure_peak, step_flops
from megalith.train.timers import Timers, over_ranks


@dataclass(frozen=True)
class Started:
    """A run that is ready for its first step."""

    run: TrainingRun
    loaders: Loaders
    resumed_at: int | None  # the iteration it goes on from; None on a fresh start
    changes: tuple[Change, ...] = ()  # what is asked for in another way than when its checkpoint was written


def start(
    config: RunConfig,
    context: ParallelContext,
    screen: Screen,
    *,
    stop: StopSignals | NeverStop,
    probe: Probe,
    began: float,
) -> Started:
    """Build every part of the run on this rank and restore its checkpoint, if any; all ranks call it together."""
    _say_configuration(config, screen, context.device)
    screen.say(console.building_tokenizer_line(config.tokenizer.tokenizer_type))
    tokenizer = build_tokenizer(config.tokenizer)
    identity = _identity(config, tokenizer)
    refuse_unequal(content_facts(identity.tokenizer, identity.data), context.world)
    for note in compare_tokenizers(config, identity.tokenizer):
        screen.say(note)
    store, found = _find(config, context)
    _check_fits(config, found, identity, screen, context.device)
    changes = _say_changes(config, found, screen)
    padded = _padded_vocabulary(config, tokenizer, found)
    screen.say(padding_message(tokenizer.vocab_size, padded))
    if found is None and config.data.padded_vocab_size is None:
        _say_padding(config, tokenizer, screen)
    screen.say(console.seeds_line(config.train.seed))
    streams = RandomStreams(config.train.seed, context)
    screen.say(console.initialised_line(time.monotonic() - began))
    screen.say(console.milestone_line("after megatron is initialized", datetime.now()))

    timers = Timers(config.log.timing_log_level, context.device)
    building = time.perf_counter()
    state = _state(config, padded, streams, context, screen, fresh=found is None)
    loading = time.perf_counter()
    loaded = False
    with suppress(DamagedCheckpointError):  # the thorough search below says what is damaged
        _load(config, store, found, state, screen, probe)
        loaded = True
    if not loaded:
        store, found = _find(config, context, thorough=True)
        _check_fits(config, found, identity, screen, context.device)
        if _padded_vocabulary(config, tokenizer, found) != padded:
            padded = _padded_vocabulary(config, tokenizer, found)
            state = _state(config, padded, streams, context, screen, fresh=False)
        _load(config, store, found, state, screen, probe)
    if found is not None:
        _say_times(config, screen, context, {"load-checkpoint": time.perf_counter() - loading})
    timers.add("model-and-optimizer-setup", time.perf_counter() - building)
    screen.say(console.milestone_line("after model, optimizer, and learning rate scheduler are built", datetime.now()))
    with timers.time("train/valid/test-data-iterators-setup"):
        loaders = _loaders(config, tokenizer, state, screen)
    plan = _plan(config, state.model, context, screen)
    screen.say(console.milestone_line("after dataloaders are built", datetime.now()))
    screen.note("done with setup ...")
    _say_times(config, screen, context, timers.take())
    saver = _saver(config, context, identity, probe)
    background = None
    if saver is not None and config.checkpoint.async_save:
        background = BackgroundSaver(saver)
        background.reserve(state)
    valid_sets = _validation_sets(config, loaders)
    run = TrainingRun(
        plan,
        state,
        loaders.train,
        None if valid_sets else loaders.valid,
        loaders.test,
        saver,
        Hook(),
        stop,
        probe,
        started=began,
        background=background,
        timers=timers,
        valid_sets=valid_sets,
        sources=loaders.sources,
        anomalies=anomaly_policy(config, state),
    )
    return Started(run, loaders, None if found is None else state.iteration, changes)


def _validation_sets(config: RunConfig, loaders: Loaders) -> Sequence[HeldOut]:
    """Several validation sets, or one that is gone through as a whole; empty for a part of one."""
    if loaders.valid is None or not (loaders.further_valid or loaders.passes):
        return ()
    batches = (loaders.valid, *loaders.further_valid)
    lengths = loaders.passes or (config.train.eval_batches,) * len(batches)
    numbers = [str(number) for number in range(len(batches))]
    names = [f"validation-{name}" for name in config.data.validation_set_names or numbers]
    if not loaders.further_valid:
        names = ["validation"]
    return [HeldOut(*held_out) for held_out in zip(names, batches, lengths, strict=True)]


def anomaly_policy(config: RunConfig, state: TrainState) -> AnomalyPolicy:
    """Build the anomaly policy, and set what makes a step anomalous."""
    precision = config.precision
    state.check.not_finite = precision.stop_on_nan
    state.check.spiky_loss, state.check.large_norm = precision.check_for_spiky_loss, precision.check_for_large_grads
    rate = 0 if precision.rerun_mode == "disabled" else precision.error_injection_rate
    return AnomalyPolicy(
        state,
        config.pipeline_schedule,
        policy=precision.bad_step_policy,
        twice=precision.rerun_mode == "report_stats",
        injector=NaNInjector(rate, precision.error_injection_type, config.train.seed),
    )


def _say_changes(config: RunConfig, found: FoundCheckpoint | None, screen: Screen) -> tuple[Change, ...]:
    """Tell what is asked for in another way than when the checkpoint was written; weights to begin from say nothing."""
    if found is None or found.weights_only or config.checkpoint.finetune:
        return ()
    changes = changes_since(found.saved_settings, config)
    for line in changes_lines(changes, found.iteration):
        screen.say(line)
    return tuple(changes)


def _say_times(config: RunConfig, screen: Screen, context: ParallelContext, own: Mapping[str, float]) -> None:
    screen.say(console.timing_lines(over_ranks(own, context), config.log.timing_log_option))


def _saver(config: RunConfig, context: ParallelContext, identity: Identity, probe: Probe) -> CheckpointSaver | None:
    settings = config.checkpoint
    if settings.save is None:
        return None
    store = DirectoryStore(
        settings.save,
        context,
        Retention(keep_last=settings.keep_last, retain_interval=settings.save_retain_interval),
        save_format=settings.ckpt_format,
        claimed=True,
    )
    folder = settings.passing_folder(settings.save) if settings.non_persistent_save_interval else None
    passing = (
        None
        if folder is None
        else DirectoryStore(folder, context, Retention(keep_last=1), save_format=settings.ckpt_format, claimed=True)
    )
    return CheckpointSaver(store, config, identity, probe, passing)


def _say_configuration(config: RunConfig, screen: Screen, device: torch.device) -> None:
    parallel = config.parallel
    screen.say(
        console.world_size_line(
            config.launch.world_size,
            config.data_parallel_size,
            parallel.context_parallel_size,
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
        )
    )
    virtual = parallel.virtual_stages(config.model.num_layers)
    screen.note(f"Number of virtual stages per pipeline stage: {virtual if virtual > 1 else None}")
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' if count > 1 else ''}" if device.type == "cpu" else ""
    screen.say(f"running on {_device_name(device)}{threads}, torch {torch.__version__}{_products(config, device)}")
    nccl_asked_for = "distributed_backend" in config.given and parallel.distributed_backend == "nccl"
    if device.type == "cpu" and nccl_asked_for:
        screen.say("no GPU here: --distributed-backend nccl becomes gloo")
    if device.type == "cpu" and config.optimizer.offloaded:
        screen.say("no GPU here: --optimizer-cpu-offload has nothing to move")
    screen.say(console.parameter_type_line(config.precision.params_dtype))
    if config.precision.bf16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        screen.warn(f"WARNING: {_device_name(device)} only emulates bf16, slowly; use --fp16 there")
    screen.note(console.argument_dump(megatron_args(config)))
    for line in notes_lines(config):
        screen.say(line)
    sizes = config.batch_sizes
    if len(sizes.stages) == 1:
        screen.say(console.micro_batches_line(config.num_micro_batches))
    elif config.train.rampup_batch_size:
        start, increment, samples = config.train.rampup_batch_size
        screen.say(console.ramp_lines(start, increment, samples, sizes.final))
    else:
        stages = ", ".join(f"{stage.size} from sample {stage.start} on" for stage in sizes.stages)
        screen.say(f"global batch sizes: {stages}")
    if config.train.train_samples is not None:
        screen.note(console.train_iterations_line(config.train_iters))


def _products(config: RunConfig, device: torch.device) -> str:
    """What to say where half precision is multiplied in fp32; nothing where it is not."""
    if not (config.precision.bf16 or config.precision.fp16) or products_of(config, device.type) != "float32":
        return ""
    kept = "bf16" if config.precision.bf16 else "fp16"
    return f"; no fast {kept} products on this processor: computed in fp32 and rounded to {kept}"


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"


def _identity(config: RunConfig, tokenizer: Tokenizer) -> Identity:
    return Identity(
        tokenizer=tokenizer.card(),
        tokenizer_files={name: path.read_bytes() for name, path in tokenizer.files().items()},
        data=fingerprint(config.data, seed=config.train.seed),
    )


def _check_fits(
    config: RunConfig, found: FoundCheckpoint | None, identity: Identity, screen: Screen, device: torch.device
) -> None:
    if found is not None:
        if differing := other_products(found, config, device.type):
            screen.warn(f"WARNING: {differing}")
        for note in check_fits(found, config, identity):
            screen.warn(f"WARNING: {note}")


def _find(
    config: RunConfig, context: ParallelContext, *, thorough: bool = False
) -> tuple[DirectoryStore | None, FoundCheckpoint | None]:
    """The checkpoint to begin from and its store; one that is there is found unless none can be used."""
    settings = config.checkpoint
    store, found = None, None
    if settings.load is not None:
        store, found = _newest(settings, settings.load, context, thorough=thorough)
        if found is None and settings.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"--load {settings.load} holds no checkpoint, and --exit-on-missing-checkpoint is given"
            )
    if found is None and settings.pretrained_checkpoint is not None:
        pretrained, found = _checkpoint_in(settings.pretrained_checkpoint, None, context, thorough=thorough)
        if found is None:
            raise CheckpointError(f"--pretrained-checkpoint {settings.pretrained_checkpoint} holds no checkpoint")
        return pretrained, replace(found, weights_only=True)
    return store, found


def _newest(
    settings: CheckpointConfig, load: str, context: ParallelContext, *, thorough: bool
) -> tuple[DirectoryStore, FoundCheckpoint | None]:
    """The checkpoint in --load, or the one of which only the last is kept if that is newer."""
    folder, step = settings.passing_folder(load), settings.ckpt_step
    if folder is None:
        return _checkpoint_in(load, step, context, thorough=thorough)
    passing, persistent = DirectoryStore(folder, context), DirectoryStore(load, context)
    if step is not None:
        there = step in passing.iterations() and step not in persistent.iterations()
        return _checkpoint_in(folder if there else load, step, context, thorough=thorough)
    last, saved = passing.latest(), persistent.latest()
    notes: tuple[str, ...] = ()
    if last is not None and (saved is None or last > saved):
        found, problems = passing.newest_verified(deferred=not thorough)
        if found is not None and (saved is None or found > saved):
            return _checkpoint_in(folder, found, context, thorough=thorough)
        notes = tuple(problems)
    store, older = _checkpoint_in(load, None, context, thorough=thorough)
    return store, older and replace(older, notes=notes + older.notes)


def _checkpoint_in(
    path: str, step: int | None, context: ParallelContext, *, thorough: bool
) -> tuple[DirectoryStore, FoundCheckpoint | None]:
    """The store that a path names, itself or one of its checkpoints, and the checkpoint to begin from."""
    folder, named = split_path(Path(path))
    store = DirectoryStore(folder, context)
    return store, find_checkpoint(store, named if step is None else step, thorough=thorough)


def _padded_vocabulary(config: RunConfig, tokenizer: Tokenizer, found: FoundCheckpoint | None) -> int:
    """Rows of the embedding: those of the checkpoint, else what the flags say."""
    given = config.data.padded_vocab_size
    if found is not None:
        if given not in (None, found.padded_vocab_size):
            raise ConfigError(
                f"--padded-vocab-size {given}: the checkpoint has {found.padded_vocab_size} rows, which are kept; "
                f"leave it out, or use --padded-vocab-size {found.padded_vocab_size}"
            )
        return found.padded_vocab_size
    if given is not None:
        if given < tokenizer.vocab_size:
            raise ConfigError(
                f"--padded-vocab-size {given} is less than the {tokenizer.vocab_size} tokens of the tokenizer; use at "
                f"least {tokenizer.vocab_size}"
            )
        return given
    return padded_vocab_size(
        tokenizer.vocab_size, config.model.make_vocab_size_divisible_by, config.parallel.tensor_model_parallel_size
    )


def _say_padding(config: RunConfig, tokenizer: Tokenizer, screen: Screen) -> None:
    """Say whether the losses depend on the layout; a resumed run keeps the rows of its checkpoint in any layout."""
    divisible_by, parallel = config.model.make_vocab_size_divisible_by, config.parallel
    if note := tensor_parallel_note(tokenizer.vocab_size, divisible_by, parallel.tensor_model_parallel_size):
        screen.say(note)


def _state(
    config: RunConfig, padded: int, streams: RandomStreams, context: ParallelContext, screen: Screen, *, fresh: bool
) -> TrainState:
    screen.say(f"building {title(config.model)} model ...")
    chunks = build_chunks(config, padded, context, streams.own)
    if fresh:
        draw_weights(config, chunks, streams, context)
    for line in _parameter_lines(chunks, context):
        screen.say(line)
    optimizer = build_run_optimizer(config, chunks, context)
    screen.say(console.decay_style_line(config.schedule.lr_decay_style))
    deferred = defer_weight_gradients(config, chunks, optimizer)
    return TrainState(chunks, optimizer, streams, build_schedule(config), context=context, deferred=deferred)


def _parameter_lines(chunks: Sequence[LanguageModel], context: ParallelContext) -> list[str]:
    """The number of parameters of each (tensor, pipeline) rank, as the first of its copies counts them."""
    own = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    numbers = comm.all_gather_objects(own, context.world)
    places = [context.layout.coordinates(rank) for rank in range(context.world.size)]
    return [
        console.parameters_line(number, place["tp"], place["pp"])
        for number, place in zip(numbers, places, strict=True)
        if place["dp"] == place["cp"] == 0
    ]


def _load(
    config: RunConfig,
    store: DirectoryStore | None,
    found: FoundCheckpoint | None,
    state: TrainState,
    screen: Screen,
    probe: Probe,
) -> None:
    load, save = config.checkpoint.load, config.checkpoint.save
    if store is None:
        if save and (held := DirectoryStore(save).iterations()):
            screen.warn(
                f"WARNING: {save} already holds checkpoints up to iteration {held[-1]}; without --load "
                f"{shlex.quote(save)} this run starts from random and replaces them"
            )
        return
    if found is None:
        screen.say(console.no_checkpoint_lines(f"{load}/{TRACKER_FILE}"))
        return
    for note in found.notes:
        screen.warn(f"WARNING: {note}")
    where = console.as_typed(str(store.path), load)
    screen.say(console.loading_line(where, found.iteration, distributed=store.format(found.iteration) != "torch"))
    resumed = restore(store, found, state, config, probe)
    for note in resumed.notes:
        screen.warn(f"WARNING: {note}")
    screen.say(console.checkpoint_version_line(resumed.version))
    if resumed.schedule is not None:
        for line in console.schedule_lines(resumed.schedule.values, overridden=resumed.schedule.overridden):
            screen.say(line)
    layout = state.context.layout
    screen.say(console.loaded_line(where, found.iteration, tensor=layout.tp, pipeline=layout.pp))
    held = DirectoryStore(save).iterations() if save else []
    anew = config.checkpoint.finetune or config.checkpoint.ckpt_step is not None
    if save and held and held[-1] > state.iteration and (load != save or anew):
        screen.warn(
            f"WARNING: {save} already holds checkpoints up to iteration {held[-1]}; this run starts at iteration "
            f"{state.iteration} and replaces them. To go on from there, give --load {shlex.quote(save)} "
            "without --finetune or --ckpt-step"
        )


def _loaders(config: RunConfig, tokenizer: Tokenizer, state: TrainState, screen: Screen) -> Loaders:
    screen.note("> building train, validation, and test datasets ...")
    screen.say(console.target_sizes_lines(*run_sizes(config, state.iteration)))
    datasets = _datasets(config, tokenizer, state)
    for dataset in (*datasets, *datasets.further_valid):
        if dataset is not None:
            screen.say(f"    {dataset.name}: {dataset.summary}")
    screen.say(f"> finished creating {title(config.model)} datasets ...")
    loaders = build_loaders(
        config,
        datasets,
        state.context.dp.index,
        iteration=state.iteration,
        consumed_train=state.consumed_samples,
        consumed_valid=state.consumed_valid_samples,
    )
    if loaders.consumed_valid != state.consumed_valid_samples:
        screen.say(
            f"after {state.consumed_valid_samples} validation samples too few are left for the evaluations to come "
            "(their interval or number was changed): they start at the head of the split again"
        )
        state.consumed_valid_samples = loaders.consumed_valid
    return loaders


def _datasets(config: RunConfig, tokenizer: Tokenizer, state: TrainState) -> Datasets:
    """Build the datasets. The first rank builds or checks their indices, the others load them from the same cache.

    The first rank of every machine checks too: its cache is another one where the file system is not shared.
    """
    crew, built = Crew(state.context.world), list[Datasets]()
    has_cache = config.data.names_sources or config.data.data_cache_path is not None

    def build(*, cache_is_checked: bool) -> None:
        if not built:
            built.append(build_datasets(config, tokenizer, state.iteration, cache_is_checked=cache_is_checked))

    if has_cache:
        crew.first(partial(build, cache_is_checked=False))
        # The first of each machine before its others, which rely on the check and would not see a damaged file.
        crew.all(partial(build, cache_is_checked=False) if config.launch.local_rank == 0 else lambda: None)
    crew.all(partial(build, cache_is_checked=has_cache))
    return built[0]


def _peaks(config: RunConfig, device: torch.device, screen: Screen) -> tuple[float, float | None]:
    """FLOP/s of a matrix product as measured and by the datasheet, both noted in the log."""
    dtype = params_dtype(config.precision)
    measured, known = measure_peak(device, dtype), datasheet_peak(device, dtype)
    by_datasheet = f"; {known[1] / 1e12:.4g} by the datasheet ({known[0]}, dense)" if known else ""
    screen.note(f"peak of a matrix product, TFLOP/s: {measured / 1e12:.3g} measured{by_datasheet}")
    return measured, None if known is None else known[1]


def _plan(config: RunConfig, model: LanguageModel, context: ParallelContext, screen: Screen) -> Plan:
    train, batch = config.train, config.num_micro_batches * config.batch_sizes.unit
    measured, by_datasheet = _peaks(config, context.device, screen)
    flops = step_flops(config.model, model.vocab_size, config.data.seq_length, batch, config.data.decoder_seq_length)
    if isinstance(model, PlainModel):  # 6 for each parameter and token (Kaplan et al. 2020, arXiv:2001.08361)
        flops = 6.0 * batch * config.data.seq_length * sum(parameter.numel() for parameter in model.parameters())
    return Plan(
        train_iterations=config.train_iters,
        global_batch_size=batch,
        num_micro_batches=config.num_micro_batches,
        log_interval=config.log.log_interval,
        eval_interval=train.eval_interval,
        eval_iterations=train.eval_batches,
        eval_batch_size=config.eval_batch_size,
        eval_micro_batches=config.eval_micro_batches,
        flops_per_step=flops / context.world.size,
        peak_flops=measured,
        datasheet_flops=by_datasheet,
        save_interval=config.checkpoint.save_interval,
        passing_save_interval=config.checkpoint.non_persistent_save_interval,
        exit_interval=train.exit_interval,
        phase_ends=frozenset(train.phase_ends),
        skip_training=train.skip_train,
        first_evaluation=train.start_eval_at_iter or 0,
        exit_minutes=train.exit_duration_in_mins,
        log_params_norm=config.log.log_params_norm,
        pipeline_schedule=config.pipeline_schedule,
        batch_sizes=config.batch_sizes if len(config.batch_sizes.stages) > 1 else None,
        skipped=frozenset(train.iterations_to_skip),
        log_noise=config.log.log_gradient_noise_scale,
    )
