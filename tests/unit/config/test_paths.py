"""`~` and `$VAR` in paths, wherever the shell does not see them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megalith.config import from_values, load
from megalith.config.values import local_path
from megalith.errors import ConfigError

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --save-interval 5 --tokenizer-type NullTokenizer --vocab-size 9"
)


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("DATA", "/big")
    monkeypatch.delenv("UNSET", raising=False)


def test_in_flags() -> None:
    words = ["--save=~/c", "--load", "${DATA}/c", "--data-path", "0.3", "$DATA/a", "0.7", "~/b"]
    run = load([*RUN.split(), *words], {}, files=False)
    assert (run.checkpoint.save, run.checkpoint.load) == ("/home/ada/c", "/big/c")
    assert run.data.data_path == ("0.3", "/big/a", "0.7", "/home/ada/b")


def test_in_recipes_and_the_path_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.toml").write_text('[checkpoint]\nsave = "~/c"\n[data]\ndata_path = ["$DATA/x"]\n')
    run = load([*RUN.split(), "--config", "~/run.toml"], {}, files=False)
    assert (run.checkpoint.save, run.data.data_path) == (f"{tmp_path}/c", ("/big/x",))


def test_in_values_of_a_program_and_arguments_of_commands() -> None:
    values: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8}
    values |= {"max_position_embeddings": 8, "micro_batch_size": 2, "train_iters": 10, "lr": 1e-3, "mock_data": True}
    values |= {"tokenizer_type": "NullTokenizer", "vocab_size": 9}
    assert from_values({**values, "load": "~/c"}).checkpoint.load == "/home/ada/c"
    assert local_path("$DATA/x") == Path("/big/x")
    with pytest.raises(argparse.ArgumentTypeError, match="UNSET"):
        local_path("$UNSET/x")


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load([*RUN.split(), "--mock-data", "--save", "$UNSET/c", "--load=${UNSET}/c"], {}, files=False)
    assert [text.split()[0] for text in caught.value.violations] == ["--save", "--load"]
    assert all("UNSET" in text for text in caught.value.violations)


def test_names_and_what_exists_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$UNSET").mkdir()
    run = load([*RUN.split(), "--mock-data", "--save", "$UNSET", "--wandb-exp-name", "~$5"], {}, files=False)
    assert (run.checkpoint.save, run.log.wandb_exp_name) == ("$UNSET", "~$5")
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "tcp://host"}  # not a path, and no flag either
    assert load([*RUN.split(), "--mock-data", "--save", "c"], variables, files=False).launch.master_addr == "tcp://host"


def test_a_run_does_not_save_into_the_folder_of_one_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "copy" / "mp_rank_00").mkdir(parents=True)
    for place in (tmp_path / "iter_0000010", tmp_path / "copy"):
        with pytest.raises(ConfigError) as caught:
            load([*RUN.split(), "--mock-data", "--save", str(place)], {})
        assert [text.split()[:2] for text in caught.value.violations] == [["--save", str(place)]]
