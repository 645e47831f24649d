"""Where the loaders of a resumed run go on, and when its data does not do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megalith.assemble.data import build_loaders, compare_tokenizers, run_sizes
from megalith.config import RunConfig
from megalith.config.build import from_values
from megalith.data.build import Datasets
from megalith.data.gpt_dataset import GPTDataset
from megalith.errors import ConfigError, DataError
from megalith.tokenizers.fingerprint import write_fingerprint


class Samples:
    """Only as many as they are."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number


def run_of(batch: int, environ: dict[str, str] | None = None, **more: Any) -> RunConfig:
    values: dict[str, Any] = {
        **{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 8, "seq_length": 8},
        **{"micro_batch_size": 2, "global_batch_size": batch, "train_iters": 10, "lr": 1e-3, "mock_data": True},
        **{"tokenizer_type": "NullTokenizer", "vocab_size": 10, "eval_interval": 5, "eval_iters": 2, "num_workers": 0},
    }
    return from_values({**values, **more}, environ=environ)


def datasets(train: int, valid: int) -> Datasets:
    return Datasets(cast(GPTDataset, Samples(train)), cast(GPTDataset, Samples(valid)), None)


def test_validation_goes_on_where_it_stands_while_that_does() -> None:
    # Steps 5 to 10: one evaluation at 10 and the last one, of 2 x 4 samples each.
    loaders = build_loaders(run_of(4), datasets(40, 24), iteration=5, consumed_train=20, consumed_valid=8)
    assert loaders.consumed_valid == 8


def test_validation_that_does_not_do_starts_over_and_says_so() -> None:
    loaders = build_loaders(run_of(4), datasets(40, 23), iteration=5, consumed_train=20, consumed_valid=8)
    assert loaders.consumed_valid == 0


def test_smaller_batches_that_need_more_samples_than_there_are() -> None:
    with pytest.raises(DataError, match=r"20 .*25 .* 10 .*4"):
        build_loaders(run_of(2), datasets(25, 24), iteration=5, consumed_train=20)
    assert build_loaders(run_of(2), datasets(30, 24), iteration=5, consumed_train=20).train is not None


GROWING = {"global_batch_size": None, "step_batch_size_schedule": "0:2 160:8"}  # 8 after 20 samples


@pytest.mark.parametrize(("consumed", "legal"), [(0, False), (18, False), (20, True), (28, True)])
def test_batches_too_small_for_the_replicas_are_refused_until_they_are_passed(consumed: int, legal: bool) -> None:
    run = run_of(8, **GROWING, load="there", environ={"WORLD_SIZE": "4", "RANK": "0"})
    many = datasets(500, 500)
    if legal:
        build_loaders(run, many, consumed_train=consumed).close()
        return
    with pytest.raises(ConfigError, match=r"--step-batch-size-schedule.*\d+ samples .* 2 samples.* 20 "):
        build_loaders(run, many, consumed_train=consumed)


def test_only_a_resumed_run_may_be_past_them() -> None:
    four = {"WORLD_SIZE": "4", "RANK": "0"}
    with pytest.raises(ConfigError, match="2 samples"):
        run_of(8, **GROWING, environ=four)
    with pytest.raises(ConfigError, match="10 samples"):
        run_of(8, **{**GROWING, "step_batch_size_schedule": "0:2 160:8 320:10"}, load="there", environ=four)


@pytest.mark.parametrize("number", [0, -1])
def test_no_evaluation(number: int) -> None:
    run = run_of(4)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, eval_iters=number))
    assert run_sizes(run, 0) == (40, 0, 0)
    loaders = build_loaders(run, datasets(40, 24), iteration=0, consumed_train=0)
    assert loaders.valid is None


class Numbers(Samples):
    """Samples that hold their numbers."""

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {"tokens": np.array([item])}


def test_a_phase_draws_its_own_samples_from_the_first_on() -> None:
    run = run_of(4)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, phase_transition_iterations="6, 3"))
    assert [run_sizes(run, iteration)[0] for iteration in (0, 2, 3, 5, 6, 9)] == [12, 12, 12, 12, 16, 16]
    for iteration, first, number in ((0, 0, 12), (2, 8, 12), (3, 0, 12), (5, 8, 12), (6, 0, 16)):
        data = Datasets(cast(GPTDataset, Numbers(number)), None, None)
        loaders = build_loaders(run, data, iteration=iteration, consumed_train=4 * iteration)
        assert next(loaders.train)["tokens"].flatten().tolist() == [first, first + 1]
        loaders.close()
        with pytest.raises(DataError, match="are needed"):
            build_loaders(run, datasets(number - 1, 24), iteration=iteration, consumed_train=4 * iteration)
    with pytest.raises(DataError, match="--phase-transition-iterations: 6 samples .* 3 iterations"):
        build_loaders(run, datasets(12, 24), iteration=3, consumed_train=6)


def test_every_dataset_is_held_against_the_tokenizer(tmp_path: Path) -> None:
    card = {"class": "GPT2BPETokenizer", "vocab_size": 9, "special": {"eod": 8}, "files": {}}
    prefixes = [str(tmp_path / name) for name in ("a", "b", "c")]
    run = run_of(4)
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, mock_data=False, data_path=tuple(prefixes)))
    (said,) = compare_tokenizers(run, card)
    assert "a.card" in said and " 2 " in said
    for prefix in prefixes:
        write_fingerprint(prefix, card)
    assert compare_tokenizers(run, card) == []
    write_fingerprint(prefixes[2], {**card, "vocab_size": 10})
    with pytest.raises(DataError, match=r"vocab_size +10 +9"):
        compare_tokenizers(run, card)
    assert compare_tokenizers(run_of(4), card) == []  # made-up data has no tokenizer of its own
