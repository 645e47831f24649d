"""From the configuration to datasets and loaders."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config import RunConfig
from megalith.data.build import Datasets, build_gpt_datasets
from megalith.data.gpt_dataset import GPTDataset
from megalith.data.loader import BatchLoader
from megalith.data.splits import target_sizes
from megalith.errors import DataError
from megalith.tokenizers import Tokenizer


@dataclass(frozen=True)
class Loaders:
    """Micro-batches of each split, where the split exists and the run draws from it.

    Attributes:
        consumed_valid: where the validation samples go on.
    """

    train: BatchLoader
    valid: BatchLoader | None
    test: BatchLoader | None
    consumed_valid: int = 0

    def close(self) -> None:
        """Stop the threads that read ahead."""
        for loader in (self.train, self.valid, self.test):
            if loader is not None:
                loader.close()


def run_sizes(run: RunConfig) -> tuple[int, int, int]:
    """What the run draws: its training samples, all the evaluations in it with the final one, and one test."""
    return target_sizes(
        train_iters=run.train_iters,
        train_samples=run.train.train_samples,
        eval_interval=run.train.eval_interval,
        eval_iters=run.train.eval_iters,
        global_batch_size=run.global_batch_size,
    )


def build_datasets(run: RunConfig, tokenizer: Tokenizer) -> Datasets:
    """The datasets of all three splits, sized for the run."""
    return build_gpt_datasets(run.data, tokenizer, sizes=run_sizes(run), seed=run.train.seed)


def build_loaders(
    run: RunConfig,
    datasets: Datasets,
    replica: int = 0,
    *,
    iteration: int = 0,
    consumed_train: int = 0,
    consumed_valid: int = 0,
) -> Loaders:
    """Loaders that go on where the run stands.

    Args:
        run: batch sizes, evaluations and workers.
        datasets: the splits.
        replica: which of the data-parallel replicas of the model reads.
        iteration: steps done.
        consumed_train: training samples drawn.
        consumed_valid: validation samples drawn. If what is left does not do for the evaluations to come (the
            interval was changed in between), they start at the head of the split again; the result says so.

    Raises:
        DataError: the training samples do not do for the remaining steps.
    """
    assert datasets.train is not None, "a run without training data is refused when the datasets are built"
    _refuse_too_few(run, datasets.train, iteration, consumed_train)
    train = _loader(run, datasets.train, replica, consumed_train)
    if not run.train.eval_iters:
        return Loaders(train, None, None, consumed_valid)
    valid, test = datasets.valid, datasets.test
    if valid is not None:
        to_come = run.train_iters // run.train.eval_interval - iteration // run.train.eval_interval + 1
        fits = consumed_valid + to_come * run.train.eval_iters * run.global_batch_size <= len(valid)
        consumed_valid = consumed_valid if fits else 0
    return Loaders(
        train,
        None if valid is None else _loader(run, valid, replica, consumed_valid),
        None if test is None else _loader(run, test, replica, 0),
        consumed_valid,
    )


def _refuse_too_few(run: RunConfig, train: GPTDataset, iteration: int, consumed: int) -> None:
    """A run that resumes with smaller batches has drawn more samples than its steps so far account for."""
    to_come = (run.train_iters - iteration) * run.global_batch_size
    if consumed + to_come <= len(train):
        return
    former = f" (then {consumed // iteration})" if iteration else ""
    raise DataError(
        f"the training data does not do for the {run.train_iters - iteration} iterations to come: {consumed} of its "
        f"{len(train)} samples are consumed in {iteration} iterations and {to_come} more are needed. It is built for "
        f"--train-iters x --global-batch-size, and --global-batch-size was another before{former}: give that one, or "
        "--finetune to start anew from the weights"
    )


def _loader(run: RunConfig, dataset: GPTDataset, replica: int, consumed: int) -> BatchLoader:
    return BatchLoader(
        dataset,
        run.train.micro_batch_size,
        consumed,
        num_workers=run.data.num_workers,
        rank=replica,
        num_ranks=run.data_parallel_size,
    )
