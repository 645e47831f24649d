"""Composition root of training: builds a `TrainingRun` from a configuration, without printing.

`build_run` reports to a `StartObserver`, in the order of Megatron's lines (docs/reference/console.md#start-up), which
`megalith train` prints (cli/train_start.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from megalith.assemble.observer import StartObserver
from megalith.assemble.schedule import build_schedule
from megalith.assemble.start import find_start, load_start, padded_vocabulary
from megalith.checkpoint import DirectoryStore, Retention
from megalith.checkpoint.rank_group import RankGroup
from megalith.config import DataConfig, RunConfig, all_settings
from megalith.config.changes import Change, changes_since
from megalith.config.data_sources import data_sources, is_text, with_prefixes
from megalith.config.flops import step_flops
from megalith.data.build import Datasets, fingerprint
from megalith.data.indexed import TEMPLATE
from megalith.device import is_host
from megalith.distributed import comm
from megalith.distributed.consistency import require_equal
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.errors import DamagedCheckpointError
from megalith.models.language_model import LanguageModel
from megalith.progress import task
from megalith.tokenizers import Tokenizer, build_tokenizer
from megalith.tokenizers.huggingface import CHAT_TEMPLATE_FILE
from megalith.train.anomalies import AnomalyPolicy
from megalith.train.checkpoint_fit import FoundCheckpoint, Identity, check_fits, other_products
from megalith.train.checkpoint_saver import AsyncSaver, CheckpointSaver
from megalith.train.consensus import NeverStop
from megalith.train.evaluation import EvaluationSet
from megalith.train.faults import Probe, no_probe
from megalith.train.loop import LoopConfig, TrainingRun
from megalith.train.signals import StopSignals
from megalith.train.state import TrainState
from megalith.train.step_hooks import NaNInjector
from megalith.train.throughput import datasheet_peak, measure_peak, registered_flops
from megalith.train.timers import Timers, gather_times


@dataclass(frozen=True)
class BuiltRun:
    """Run that is ready for its first step.

    Attributes:
        loaders: Close them when the run ends.
        resumed_at: Iteration of the loaded checkpoint; None on a fresh start.
        changes: Settings that differ from the checkpoint's.
    """

    run: TrainingRun
    loaders: Loaders
    resumed_at: int | None
    changes: tuple[Change, ...] = ()


@task("starting")
def build_run(
    config: RunConfig,
    context: ParallelContext,
    *,
    stop: StopSignals | NeverStop | None = None,
    probe: Probe = no_probe,
    began: float | None = None,
    observer: StartObserver | None = None,
    dtype: torch.dtype | None = None,
) -> BuiltRun:
    """Build every part of a run on this rank and restore its checkpoint, if any; all ranks call it together.

    Args:
        stop: Requests to stop the run; none by default.
        probe: Called at each point of a step, to inject faults.
        began: `time.monotonic()` at the start of the program; now by default.
        observer: Receives the progress of the start.
        dtype: Of weights; the run's if None.

    Raises:  MegalithError with the exit codes of `megalith train`.
    """
    observer, began = observer or StartObserver(), time.monotonic() if began is None else began
    observer.configured(config, context.device)
    tokenizer = build_tokenizer(config.tokenizer)
    reads = _with_prepared_text(config, tokenizer, context, observer)
    identity = _identity(reads, tokenizer, context, observer)
    store, found = find_start(config, context)
    _check_fits(config, found, identity, observer, context.device)
    changes = _changes(config, found, observer)
    padded, streams = padded_vocabulary(config, tokenizer, found), RandomStreams(config.train.seed, context)
    observer.vocabulary_padded(config, tokenizer, padded, resumed=found is not None)
    observer.initialized(config, time.monotonic() - began)
    timers = Timers(config.log.timing_log_level, context.device)
    with timers.time("model-and-optimizer-setup"):
        start = _Start(config, context, tokenizer, identity, streams, observer, probe, dtype)
        state, found, identity = _build_and_load(start, padded, store, found)
    observer.setup_done()
    with timers.time("train/valid/test-data-iterators-setup"):
        loaders = _build_loaders(reads, tokenizer, state, observer)
    loop_config = build_loop_config(config, state.chunks, context, observer)
    observer.data_done()
    observer.timed(config, gather_times(timers.take(), context))
    saver, valid_sets = _saver(config, context, identity, probe), _validation_sets(config, loaders)
    run = TrainingRun(
        loop_config,
        state,
        loaders.train,
        None if valid_sets else loaders.valid,
        loaders.test,
        saver,
        stop=stop or NeverStop(),
        probe=probe,
        started=began,
        async_saver=_async_saver(config, saver, state),
        timers=timers,
        valid_sets=valid_sets,
        blend_dataset_names=loaders.blend_dataset_names,
        anomalies=anomaly_policy(config, state),
    )
    return BuiltRun(run, loaders, None if found is None else state.iteration, changes)


@dataclass(frozen=True)
class _Start:
    """Inputs for building and loading the state of a run."""

    config: RunConfig
    context: ParallelContext
    tokenizer: Tokenizer
    identity: Identity
    streams: RandomStreams
    observer: StartObserver
    probe: Probe
    dtype: torch.dtype | None


def _build_and_load(
    start: _Start, padded: int, store: DirectoryStore | None, found: FoundCheckpoint | None
) -> tuple[TrainState, FoundCheckpoint | None, Identity]:
    """Build the state of the run and load the checkpoint; an older one if the first turns out damaged.

    Returns:
        State, checkpoint, and identity with the record of the frozen base of LoRA.
    """
    config, context, observer = start.config, start.context, start.observer
    state = _build_state(start, padded, fresh=found is None)
    began, loaded, base = time.perf_counter(), False, None
    with suppress(DamagedCheckpointError):  # the verification below reports the damage
        base = load_start(config, store, found, state, observer, start.probe)
        loaded = True
    if not loaded:
        store, found = find_start(config, context, thorough=True)
        _check_fits(config, found, start.identity, observer, context.device)
        if (rows := padded_vocabulary(config, start.tokenizer, found)) != padded:
            state = _build_state(start, rows, fresh=False)
        base = load_start(config, store, found, state, observer, start.probe)
    if found is not None:
        observer.timed(config, gather_times({"load-checkpoint": time.perf_counter() - began}, context))
    return state, found, replace(start.identity, base=base)


def _validation_sets(config: RunConfig, loaders: Loaders) -> Sequence[EvaluationSet]:
    """Return the sets that are evaluated in full or by name; empty for a single set evaluated in part."""
    if loaders.valid is None or not (loaders.further_valid or loaders.passes):
        return ()
    batches = (loaders.valid, *loaders.further_valid)
    lengths = loaders.passes or (config.train.eval_batches,) * len(batches)
    numbers = [str(number) for number in range(len(batches))]
    names = [f"validation-{name}" for name in config.data.validation_set_names or numbers]
    if not loaders.further_valid:
        names = ["validation"]
    return [EvaluationSet(*held_out) for held_out in zip(names, batches, lengths, strict=True)]


def anomaly_policy(config: RunConfig, state: TrainState) -> AnomalyPolicy:
    """Build the anomaly policy, and configure which steps count as anomalous."""
    precision = config.precision
    state.check.not_finite = precision.stop_on_nan
    state.check.spiky_loss, state.check.large_norm = precision.check_for_spiky_loss, precision.check_for_large_grads
    rate = 0 if precision.rerun_mode == "disabled" else precision.error_injection_rate
    return AnomalyPolicy(
        state,
        config.pipeline_schedule,
        policy=precision.bad_step_policy,
        compare=precision.rerun_mode == "report_stats",
        injector=NaNInjector(rate, precision.error_injection_type, config.train.seed),
    )


def _changes(config: RunConfig, found: FoundCheckpoint | None, observer: StartObserver) -> tuple[Change, ...]:
    """Return the settings that differ from those of the checkpoint; empty if only its weights are loaded."""
    if found is None or found.weights_only or config.checkpoint.finetune:
        return ()
    changes = tuple(changes_since(found.saved_settings, config))
    observer.changed(changes, found.iteration)
    return changes


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
    folder = settings.ephemeral_dir(settings.save) if settings.non_persistent_save_interval else None
    passing = (
        None
        if folder is None
        else DirectoryStore(folder, context, Retention(keep_last=1), save_format=settings.ckpt_format, claimed=True)
    )
    return CheckpointSaver(store, config, identity, probe, passing)


def _async_saver(config: RunConfig, saver: CheckpointSaver | None, state: TrainState) -> AsyncSaver | None:
    if saver is None or not config.checkpoint.async_save:
        return None
    async_saver = AsyncSaver(saver)
    async_saver.reserve(state)
    return async_saver


def _with_prepared_text(
    config: RunConfig, tokenizer: Tokenizer, context: ParallelContext, observer: StartObserver
) -> RunConfig:
    """Return the configuration with the datasets that conversations given as text become (`data.prepared`).

    The first rank makes them; then the first rank of every machine, which finds them on a shared file system.
    """
    prefixes = data_sources(config.data).prefixes if config.data.sft else ()
    texts, named = [prefix for prefix in prefixes if is_text(prefix)], config.data.sft_tokenizer_prompt_format
    if not texts:
        if prefixes and named:
            observer.info(f"--sft-tokenizer-prompt-format {named} has no effect: the conversations are tokens already")
        return config
    from megalith.data.prepared import Preparation  # which imports jinja2

    ranks, preparation = RankGroup(context.world), Preparation(config.data, config.tokenizer, tokenizer)
    keys = ranks.run_on_first(lambda: [preparation.key(text) for text in texts])

    def prepare() -> None:
        for text, key in zip(texts, keys, strict=True):
            preparation.prepare(text, key, observer.info)

    ranks.run_on_first(prepare)
    ranks.run_on_all(prepare if config.launch.local_rank == 0 and not context.world.is_first else lambda: None)
    names = {text: preparation.prefix(text, key) for text, key in zip(texts, keys, strict=True)}
    return replace(config, data=with_prefixes(config.data, names))


def _identity(config: RunConfig, tokenizer: Tokenizer, context: ParallelContext, observer: StartObserver) -> Identity:
    """Return the fingerprints of tokenizer and data; ConfigError if they differ between ranks."""
    identity = Identity(
        tokenizer=tokenizer.fingerprint(),
        tokenizer_files={
            **{name: path.read_bytes() for name, path in tokenizer.files().items()},
            **_template_of(config.data, tokenizer),
        },
        data=fingerprint(config.data, seed=config.train.seed),
    )
    require_equal(content_facts(identity.tokenizer, identity.data), context.world)
    for note in compare_tokenizers(config, identity.tokenizer):
        observer.info(note)
    return identity


def _template_of(data: DataConfig, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the chat template of the conversations as a file of the tokenizer; empty if it is the tokenizer's own.

    Empty too if it is not known, or conversations of several are learnt.
    """
    training = data_sources(data).training if data.sft else None
    files = [Path(prefix + TEMPLATE) for prefix in (training.prefixes if training else ())]
    found = {file.read_bytes() if file.is_file() else b"" for file in files}
    if len(found) != 1 or not tokenizer.files() or found == {b""}:
        return {}
    from megalith.tokenizers.chat_template import template_beside  # which imports jinja2

    (source,), own = found, template_beside(tokenizer)
    return {} if own is not None and own.source.encode() == source else {CHAT_TEMPLATE_FILE: source}


def _check_fits(
    config: RunConfig, found: FoundCheckpoint | None, identity: Identity, observer: StartObserver, device: torch.device
) -> None:
    if found is not None:
        if differing := other_products(found, config, device):
            observer.warn(f"WARNING: {differing}")
        for note in check_fits(found, config, identity):
            observer.warn(f"WARNING: {note}")


def _build_state(start: _Start, padded: int, *, fresh: bool) -> TrainState:
    config, context, streams = start.config, start.context, start.streams
    start.observer.building_model(config)
    chunks = build_chunks(config, padded, context, streams.own, dtype=start.dtype)
    if fresh or config.model.lora_rank is not None:
        draw_weights(config, chunks, streams, context, frozen=fresh)
    start.observer.model_built(config, _parameter_counts(chunks, context))
    optimizer = build_run_optimizer(config, chunks, context)
    deferred = defer_weight_gradients(config, chunks, optimizer)
    return TrainState(chunks, optimizer, streams, build_schedule(config), context=context, deferred=deferred)


def _parameter_counts(chunks: Sequence[LanguageModel], context: ParallelContext) -> list[tuple[int, int, int]]:
    """Return (number of parameters, tensor rank, pipeline rank) for the first replica of each part."""
    own = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    numbers = comm.all_gather_objects(own, context.world)
    places = [context.layout.coordinates(rank) for rank in range(context.world.size)]
    return [
        (number, place["tp"], place["pp"])
        for number, place in zip(numbers, places, strict=True)
        if place["dp"] == place["cp"] == 0
    ]


def _build_loaders(config: RunConfig, tokenizer: Tokenizer, state: TrainState, observer: StartObserver) -> Loaders:
    observer.building_datasets(run_sizes(config, state.iteration))
    datasets = _datasets(config, tokenizer, state)
    observer.datasets_built(config, datasets)
    loaders = build_loaders(
        config,
        datasets,
        state.context.dp.index,
        iteration=state.iteration,
        consumed_train=state.consumed_samples,
        consumed_valid=state.consumed_valid_samples,
    )
    if loaders.consumed_valid != state.consumed_valid_samples:
        observer.info(
            f"after {state.consumed_valid_samples} validation samples too few are left for the remaining evaluations "
            "(their interval or number was changed): they restart at the beginning of the split"
        )
        state.consumed_valid_samples = loaders.consumed_valid
    return loaders


def _datasets(config: RunConfig, tokenizer: Tokenizer, state: TrainState) -> Datasets:
    """Build the datasets. The first rank builds or checks their indices, the others load them from the same cache.

    The first rank of every machine verifies too: without a shared file system its cache is a different one.
    """
    ranks, built = RankGroup(state.context.world), list[Datasets]()
    has_cache = config.data.has_data_source or config.data.data_cache_path is not None

    def build(*, cache_is_checked: bool) -> None:
        if not built:
            built.append(build_datasets(config, tokenizer, state.iteration, cache_is_checked=cache_is_checked))

    if has_cache:
        ranks.run_on_first(partial(build, cache_is_checked=False))
        # The first rank of each machine comes before its others, which rely on its verification.
        ranks.run_on_all(partial(build, cache_is_checked=False) if config.launch.local_rank == 0 else lambda: None)
    ranks.run_on_all(partial(build, cache_is_checked=has_cache))
    return built[0]


def _peaks(config: RunConfig, context: ParallelContext, observer: StartObserver) -> tuple[float, float | None]:
    """Return the FLOP/s of a matrix product: measured, and the datasheet's (None if unknown).

    CPU ranks take the first one's: measuring at the same time on the same cores, they would measure each other.
    """
    dtype, device = params_dtype(config.precision), context.device
    measures = not is_host(device) or context.world.is_first
    measured, known = measure_peak(device, dtype) if measures else 0.0, datasheet_peak(device, dtype)
    if is_host(device):
        measured = comm.all_gather_objects(measured, context.world)[0]
    by_datasheet = f"; {known[1] / 1e12:.4g} by the datasheet ({known[0]}, dense)" if known else ""
    observer.log(f"peak of a matrix product, TFLOP/s: {measured / 1e12:.3g} measured{by_datasheet}")
    return measured, None if known is None else known[1]


def build_loop_config(
    config: RunConfig, chunks: Sequence[LanguageModel], context: ParallelContext, observer: StartObserver
) -> LoopConfig:
    """Return lengths and intervals of the training loop; measures the speed of the device."""
    train, batch = config.train, config.num_micro_batches * config.batch_sizes.unit
    measured, by_datasheet = _peaks(config, context, observer)
    model, length = config.model, config.data.seq_length
    flops = step_flops(model, chunks[0].vocab_size, length, batch, config.data.decoder_seq_length)
    if own := model.registered_layers:
        flops = registered_flops(chunks, context, batch * length, flops)
        flags = ", ".join(f"{all_settings()[name].flag} {getattr(model, name)}" for name in own)
        observer.info(f"model FLOPs count 6 for each parameter and token of {flags}")
    return LoopConfig(
        train_iterations=config.train_iters,
        global_batch_size=batch,
        num_micro_batches=config.num_micro_batches,
        log_interval=config.log.log_interval,
        eval_interval=train.eval_interval,
        eval_iterations=train.eval_batches,
        eval_batch_size=config.eval_batch_size,
        eval_micro_batches=config.eval_micro_batches,
        flops_per_step=flops / context.world.size,
        measured_peak_flops_per_s=measured,
        datasheet_flops_per_s=by_datasheet,
        save_interval=config.checkpoint.save_interval,
        ephemeral_save_interval=config.checkpoint.non_persistent_save_interval,
        exit_interval=train.exit_interval,
        early_stopping_patience=train.early_stopping_patience,
        keep_best=config.checkpoint.keep_best,
        phase_transition_iterations=frozenset(train.phase_ends),
        skip_training=train.skip_train,
        eval_start_iteration=train.start_eval_at_iter or 0,
        exit_minutes=train.exit_duration_in_mins,
        log_params_norm=config.log.log_params_norm,
        pipeline_schedule=config.pipeline_schedule,
        batch_size_schedule=config.batch_sizes if len(config.batch_sizes.stages) > 1 else None,
        iterations_to_skip=frozenset(train.iterations_to_skip),
        log_noise=config.log.log_gradient_noise_scale,
    )
