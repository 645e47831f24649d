"""Datasets and loaders from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalith.config import DataConfig, ModelConfig, RunConfig, check_run
from megalith.config.data_sources import data_sources
from megalith.config.families import Objective
from megalith.data.blend import BlendedDataset
from megalith.data.build import Dataset, Datasets, build_gpt_datasets
from megalith.data.build import build_datasets as masked_datasets_of
from megalith.data.loader import BatchLoader, BatchSampler, CyclicSampler, FullValidationSampler, SequentialSampler
from megalith.data.masked.bert import BertDatasetFactory
from megalith.data.masked.t5 import T5DatasetFactory
from megalith.data.samples import DatasetFactory, Sizes, target_sizes
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.fingerprint import require_tokenizer_of_data


@dataclass(frozen=True)
class Loaders:
    """Loaders of micro-batches for each split that exists and that the run uses.

    Attributes:
        consumed_valid: validation samples consumed so far.
        further_valid: the validation sets after the first, with `--multiple-validation-sets`.
        passes: with `--full-validation` the global batches per pass over each validation set, else empty.
        blend_dataset_names: names of the datasets in the training blend; empty without a blend.
    """

    train: BatchLoader
    valid: BatchLoader | None
    test: BatchLoader | None
    consumed_valid: int = 0
    further_valid: tuple[BatchLoader, ...] = ()
    passes: tuple[int, ...] = ()
    blend_dataset_names: tuple[str, ...] = ()

    def close(self) -> None:
        """Stop the prefetching threads."""
        for loader in (self.train, self.valid, self.test, *self.further_valid):
            if loader is not None:
                loader.close()


def run_sizes(run: RunConfig, iteration: int = 0) -> Sizes:
    """Return the numbers of samples for training, all evaluations of the run, and one test.

    With phases, training samples are those of the phase that contains the step after `iteration`. None for validation
    is the whole split.
    """
    grows = len(run.batch_sizes.stages) > 1
    train, valid, test = target_sizes(
        train_iters=run.train_iters,
        train_samples=run.batch_sizes.consumed_after(run.train_iters)
        if grows and run.train.train_samples is None
        else run.train.train_samples,
        eval_interval=run.train.eval_interval,
        eval_iters=run.train.eval_batches,
        global_batch_size=run.global_batch_size,
        eval_batch_size=run.eval_batch_size,
    )
    if run.train.phase_ends:
        start, stop = run.train.phase(iteration, run.train_iters)
        train = (stop - start) * run.global_batch_size
    return train, None if run.data.full_validation else valid, test


def compare_tokenizers(run: RunConfig, card: Mapping[str, Any]) -> list[str]:
    """Check that every dataset of the run was made with its tokenizer.

    Returns:
        Notes for the user, such as that datasets have no card to compare.

    Raises:
        DataError: a dataset was made with another tokenizer; the message compares both cards.
    """
    prefixes = () if run.data.mock_data or run.data.data_source else data_sources(run.data).prefixes
    notes = [note for prefix in prefixes if (note := require_tokenizer_of_data(prefix, card)) is not None]
    return notes if len(notes) < 2 else [f"{notes[0]}; the same holds for {len(notes) - 1} other datasets"]


def build_datasets(
    run: RunConfig, tokenizer: Tokenizer, iteration: int = 0, *, cache_is_checked: bool = False
) -> Datasets:
    """Build the datasets of all splits, for the run or for its phase after `iteration` steps.

    With `cache_is_checked` another rank of this start has built them and verified their index caches.

    Raises:
        ConfigError: the configuration was changed after `load` and breaks a rule.
        DataError: a dataset is missing or damaged, or too small for a split.
    """
    check_run(run)
    sizes, seed = run_sizes(run, iteration), run.train.seed
    if run.model.family.objective == "causal":
        return build_gpt_datasets(run.data, tokenizer, sizes=sizes, seed=seed, cache_is_checked=cache_is_checked)
    factory = masked_dataset_factory(run.data, run.model, tokenizer, seed)
    return masked_datasets_of(run.data, factory, sizes=sizes, cache_is_checked=cache_is_checked)


def masked_dataset_factory(data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, seed: int) -> DatasetFactory:
    """Return the factory of masked datasets for the objective of the model (masked words or spans).

    Raises:
        ConfigError: the tokenizer lacks required special tokens.
    """
    return _MASKED_FACTORIES[model.family.objective](data, model, tokenizer, seed)


_MASKED_FACTORIES: Mapping[Objective, Callable[[DataConfig, ModelConfig, Tokenizer, int], DatasetFactory]] = {
    "masked": BertDatasetFactory.from_config,
    "spans": T5DatasetFactory.from_config,
}


def build_loaders(
    run: RunConfig,
    datasets: Datasets,
    replica: int = 0,
    *,
    iteration: int = 0,
    consumed_train: int = 0,
    consumed_valid: int = 0,
) -> Loaders:
    """Build the loaders of one data-parallel replica, starting at the consumed samples.

    If too few validation samples are left for the remaining evaluations (after a change of the interval), they restart
    at the beginning of the split, and `consumed_valid` of the result is 0.

    Raises:
        ConfigError: the batch of the next step does not divide over the replicas.
        DataError: too few training samples for the remaining steps.
    """
    _require_whole_batches(run, consumed_train)
    assert datasets.train is not None, "a run without training data is refused when the datasets are built"
    before, last = _samples_before_the_phase(run, iteration, consumed_train)
    _refuse_too_few(run, datasets.train, iteration, consumed_train - before, last)
    train = _loader(run, datasets.train, replica, consumed_train - before, run.train.micro_batch_size)
    names = datasets.train.sources if isinstance(datasets.train, BlendedDataset) else ()
    if not run.train.eval_batches and not run.data.full_validation:
        return Loaders(train, None, None, consumed_valid, blend_dataset_names=names)
    tested = datasets.test if run.train.eval_batches else None
    test = None if tested is None else _loader(run, tested, replica, 0, run.eval_micro_batch_size)
    sets = () if datasets.valid is None else (datasets.valid, *datasets.further_valid)
    if run.data.full_validation:
        _refuse_empty(sets)
        samplers = [_full_validation_sampler(run, dataset) for dataset in sets]
        loaders = [
            _loader(run, dataset, replica, 0, run.eval_micro_batch_size, sampler)
            for dataset, sampler in zip(sets, samplers, strict=True)
        ]
        passes = tuple(sampler.iterations(run.data_parallel_size) for sampler in samplers)
        return Loaders(train, next(iter(loaders), None), test, consumed_valid, tuple(loaders[1:]), passes, names)
    to_come = run.train_iters // run.train.eval_interval - iteration // run.train.eval_interval + 1
    needed = consumed_valid + to_come * run.train.eval_batches * run.eval_batch_size
    if _ends(run) and any(needed > len(dataset) for dataset in sets):
        consumed_valid = 0
    loaders = [_loader(run, dataset, replica, consumed_valid, run.eval_micro_batch_size) for dataset in sets]
    return Loaders(train, next(iter(loaders), None), test, consumed_valid, tuple(loaders[1:]), (), names)


def _require_whole_batches(run: RunConfig, consumed: int) -> None:
    """Raise ConfigError if a growing batch is resumed with replicas that do not divide it."""
    sizes = run.batch_sizes
    size = sizes.nominal_size(consumed)
    if (
        len(sizes.stages) == 1
        or sizes.is_whole(size)
        or (run.train.decrease_batch_size_if_needed and size >= sizes.unit)
    ):
        return
    later = next((stage for stage in sizes.stages if stage.start > consumed and sizes.is_whole(stage.size)), None)
    until = "" if later is None else f"; from {later.start} samples on they are {later.size}, which do"
    name = "--rampup-batch-size" if run.train.rampup_batch_size else "--step-batch-size-schedule"
    raise ConfigError(
        f"{name}: after {consumed} samples global batches have {size} samples, which do not divide into "
        f"--micro-batch-size {run.train.micro_batch_size} on each of {run.data_parallel_size} data-parallel replicas"
        f"{until}; start with fewer replicas or smaller micro-batches, or give other sizes"
    )


def _refuse_empty(sets: Sequence[Dataset]) -> None:
    for number, dataset in enumerate(sets):
        if not len(dataset):
            what = f"set {number}" if len(sets) > 1 else "split"
            raise DataError(
                f"--full-validation: validation {what} has no sample of --seq-length + 1 tokens; add text or "
                "remove --full-validation"
            )


def _ends(run: RunConfig) -> bool:
    """Return whether the samples are used only once; cyclic ones repeat."""
    return run.data.dataloader_type != "cyclic"


def _samples_before_the_phase(run: RunConfig, iteration: int, consumed: int) -> tuple[int, int]:
    """Return the samples consumed by earlier phases, and the last iteration of this phase."""
    if not run.train.phase_ends:
        return 0, run.train_iters
    start, stop = run.train.phase(iteration, run.train_iters)
    if consumed != iteration * run.global_batch_size:
        raise DataError(
            f"--phase-transition-iterations: {consumed} samples are consumed in {iteration} iterations, which are not "
            f"of --global-batch-size {run.global_batch_size}, so that the place in this phase cannot be known; give "
            "the batch size of the run so far"
        )
    return start * run.global_batch_size, stop


def _refuse_too_few(run: RunConfig, train: Dataset, iteration: int, consumed: int, last: int) -> None:
    """Raise DataError if the data is too small for the remaining steps, as after a resume with smaller batches."""
    to_come = run.batch_sizes.consumed_after(last - iteration, consumed) - consumed
    block = run.train.micro_batch_size * run.data_parallel_size
    if (len(train) >= block) if not _ends(run) else (consumed + to_come <= len(train)):
        return
    if not _ends(run):
        raise DataError(
            f"the training data has {len(train)} samples, and --dataloader-type cyclic needs at least "
            f"--micro-batch-size x data-parallel size = {block}"
        )
    former = f" (then {consumed // iteration})" if iteration else ""
    raise DataError(
        f"the training data is too small for the remaining {last - iteration} iterations: {consumed} of its "
        f"{len(train)} samples are consumed in {iteration} iterations and {to_come} more are needed. It is built for "
        f"--train-iters x --global-batch-size, and --global-batch-size was different before{former}: use that one, "
        "or --finetune to start from the weights only"
    )


def _full_validation_sampler(run: RunConfig, dataset: Dataset) -> FullValidationSampler:
    return FullValidationSampler(len(dataset), run.eval_micro_batch_size, run.eval_micro_batches)


def _loader(
    run: RunConfig, data: Dataset, rank: int, consumed: int, micro_batch_size: int, sampler: BatchSampler | None = None
) -> BatchLoader:
    if sampler is None:
        kind = SequentialSampler if _ends(run) else CyclicSampler
        sampler = kind(len(data), micro_batch_size)
    return BatchLoader(
        data,
        micro_batch_size,
        consumed,
        num_workers=run.data.num_workers,
        rank=rank,
        num_ranks=run.data_parallel_size,
        sampler=sampler,
    )
