"""Settings of the data that have no effect are said to have none, and those that have are not."""

from __future__ import annotations

import pytest

from megalith.config import load

MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 8 --seq-length 8 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 100 "
)
MOCK, SPLITS = "--mock-data", "--train-data-path a --valid-data-path 1 b 2 c"


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (f"{MOCK} --reset-position-ids --position-embedding-type rope", "--reset-position-ids "),
        (f"{SPLITS} --multiple-validation-sets", "--valid-data-path 1 b 2 c "),
        (f"{SPLITS} --validation-set-names x y", "--validation-set-names x y "),
        ("--data-path a b --split 1,1,1 --mid-level-dataset-surplus 0.1", "--mid-level-dataset-surplus 0.1 "),
        (f"{MOCK} --split 99,1,0", "--split 99,1,0 "),
        ("--data-path a --split 100,0,0", "--split 100,0,0 "),
        ("--train-data-path a --test-data-path b", "--valid-data-path "),
        (f"{MOCK} --full-validation --eval-iters 3", "--eval-iters 3 "),
        (f"{MOCK} --eval-interval 5 --early-stopping-patience 2", "--early-stopping-patience 2 "),
        (
            f"{MOCK} --eval-interval 5 --start-eval-at-iter 10 --early-stopping-patience 1",
            "--early-stopping-patience 1 ",
        ),
        (f"{MOCK} --eval-interval 11 --keep-best --save c --save-interval 5", "--keep-best "),
    ],
)
def test_what_has_no_effect_is_noted(words: str, note: str) -> None:
    notes = [str(each) for each in load((MODEL + words).split(), {}, files=False).notes]
    assert any(note in each for each in notes), notes


@pytest.mark.parametrize(
    "words",
    [
        f"{MOCK} --reset-position-ids --reset-attention-mask --eod-mask-loss --dataloader-type cyclic",
        f"{SPLITS} --mid-level-dataset-surplus 0.1 --num-dataset-builder-threads 4",
        "--train-data-path a --valid-data-path b c --multiple-validation-sets --validation-set-names x y",
        "--data-args-path w --split 1,1,1 --mid-level-dataset-surplus 0.1",
        f"{MOCK} --full-validation",
        f"{MOCK} --eval-interval 5 --early-stopping-patience 1 --keep-best --save c --save-interval 5",
    ],
)
def test_what_has_an_effect_needs_no_notice(words: str) -> None:
    assert load((MODEL + words).split(), {}, files=False).notes == ()
