"""Training as an iterator over a configuration, in any thread."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megalith.api import load, train, training
from megalith.config import RunConfig
from megalith.data import mock
from megalith.errors import ConfigError

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --max-position-embeddings 4 --eval-iters 0 "
    "--micro-batch-size 1 --train-iters 5 --lr 1e-2 --mock-data --tokenizer-type NullTokenizer --vocab-size 10"
)


@pytest.fixture(autouse=True)
def few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mock, "NUM_DOCUMENTS", 100)


def config_of(folder: Path) -> RunConfig:
    return load([*FLAGS.split(), "--save", str(folder), "--save-interval", "2"])


def test_a_configuration_is_trained_as_its_run(tmp_path: Path) -> None:
    with training(config_of(tmp_path / "a")) as run:
        wanted = [result.loss for result in train(run)]
    assert len(wanted) == 5
    assert [result.loss for result in train(config_of(tmp_path / "b"))] == wanted
    assert (tmp_path / "b/iter_0000005").is_dir(), "saved at the end"


def test_a_loop_that_is_left_frees_the_folder(tmp_path: Path) -> None:
    for result in train(config_of(tmp_path / "a")):
        if result.iteration == 3:
            break
    assert sorted(folder.name for folder in tmp_path.glob("a/iter_*")) == ["iter_0000002"]
    assert len(list(train(config_of(tmp_path / "a")))) == 5, "nothing holds the lock"


def test_another_thread_trains_and_writes_without_signal_handlers(tmp_path: Path) -> None:
    """With data workers; the results are those of the main thread."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]

    def work() -> tuple[list[float], str, float]:
        losses = [result.loss for result in train(config_of(tmp_path / "thread"))]
        model = load(tmp_path / "thread")
        return (
            losses,
            model.generate("1 2", temperature=0, max_new_tokens=2).text,
            float(model.score(" 3", "1 2").sum()),
        )

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(work).result()
    assert [signal.getsignal(number) for number in numbers] == before
    losses = [result.loss for result in train(config_of(tmp_path / "main"))]
    model = load(str(tmp_path / "main"))
    written = model.generate("1 2", temperature=0, max_new_tokens=2).text
    assert found == (losses, written, float(model.score(" 3", "1 2").sum()))


def test_flags_are_no_folder(tmp_path: Path) -> None:
    assert isinstance(load(FLAGS.split()), RunConfig)
    with pytest.raises(ConfigError, match="--no-such-flag"):
        load(["--no-such-flag"])
