"""Recipes: precedence, what is wrong in them, and the recipe that a configuration prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalith.config import from_values, load
from megalith.config.render import recipe_text
from megalith.errors import ConfigError

RECIPE = """
[model]
num_layers = 2
hidden_size = 16
num_attention_heads = 4
max_position_embeddings = 64
hidden_dropout = 0
[train]
micro_batch_size = 2
train_iters = 10
[schedule]
lr = 1e-3
[data]
seq_length = 64
mock_data = true
[tokenizer]
tokenizer_type = "NullTokenizer"
vocab_size = 100
"""


def violations(tmp_path: Path, recipe: str, *flags: str) -> tuple[str, ...]:
    path = tmp_path / "r.toml"
    path.write_text(recipe, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(["--config", str(path), *flags], {})
    return tuple(text.replace(f"{path}", "r.toml") for text in caught.value.violations)


def test_defaults_then_recipe_then_flags(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE, encoding="utf-8")
    run = load([f"--config={path}", "--num-layers", "3", "--no-mock-data", "--data-path", "x"], {}, files=False)
    assert (run.model.num_layers, run.model.hidden_size, run.model.attention_dropout) == (3, 16, 0.1)
    assert run.model.hidden_dropout == 0.0 and isinstance(run.model.hidden_dropout, float)
    assert run.data.mock_data is False and run.data.data_path == ("x",)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("[model]\nnum_layer = 2", ("[model]", "num_layer;", "num_layers")),
        ("[model]\nlr = 1", ("[model]", "lr", "[schedule]")),
        ("[modell]\nnum_layers = 2", ("[modell]", "[model]")),
        ("seed = 1", ("seed", "[train]")),
        ("[train]\nseed = '1'", ("[train] seed = '1'",)),
        ("[train]\nseed = true", ("[train] seed = True",)),
        ("[precision]\nfp16 = 1", ("[precision] fp16 = 1",)),
        ("[optimizer]\nadam_beta1 = 'x'", ("[optimizer] adam_beta1 = 'x'",)),
        ("[optimizer]\nadam_beta1 = nan", ("[optimizer] adam_beta1 = nan",)),
        ("[checkpoint]\nsave = 3", ("[checkpoint] save = 3",)),
        ("[launch]\nrank = 3", ("[launch]", "model", "train", "schedule")),
    ],
)
def test_mistakes_in_a_recipe(change: str, named: tuple[str, ...], tmp_path: Path) -> None:
    flags = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64 "
        "--micro-batch-size 2 --train-iters 10 --lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 9"
    )
    (message,) = violations(tmp_path, change, *flags.split())
    assert message.startswith("r.toml: ") and all(fact in message for fact in named)


def test_a_misspelt_required_setting_is_not_reported_twice(tmp_path: Path) -> None:
    (message,) = violations(tmp_path, RECIPE.replace("num_layers", "num_layer"))
    assert "num_layers" in message


def test_recipes_that_cannot_be_read(tmp_path: Path) -> None:
    assert violations(tmp_path, "[model")[0].startswith("--config r.toml")
    assert len(violations(tmp_path, "[model")) == 1  # and nothing that the recipe may have
    with pytest.raises(ConfigError) as caught:
        load(["--config", "none.toml", "--lr", "-1"], {})
    assert [text.split(":")[0] for text in caught.value.violations] == ["--config none.toml", "--lr -1.0"]
    with pytest.raises(ConfigError, match="--config"):
        load(["--config"], {})


def test_values_from_a_recipe_obey_the_rules(tmp_path: Path) -> None:
    (message,) = violations(tmp_path, RECIPE.replace("hidden_size = 16", "hidden_size = 18"))
    assert message.startswith("--hidden-size 18 ") and "--num-attention-heads 4" in message


def test_the_printed_recipe_gives_the_same_configuration(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE, encoding="utf-8")
    flags = ["--fp16", "--save", 'a "b" \\ \U0001f600', "--save-interval", "5", "--lr-decay-style", "WSD"]
    run = load(["--config", str(path), *flags, "--lr-wsd-decay-iters", "3", "--adam-eps", "1e-9"], {})
    printed = tmp_path / "printed.toml"
    printed.write_text(recipe_text(run), encoding="utf-8")
    assert load(["--config", str(printed)], {}) == run
    assert 'lr_decay_style = "WSD"  # default linear\n' in recipe_text(run)
    assert re.search(r"(?m)^# lr_decay_iters\b(?! =)", recipe_text(run))


def test_remote_paths_are_refused_in_recipes_and_by_the_library(tmp_path: Path) -> None:
    """They became folders called `s3:`."""
    (message,) = violations(tmp_path, RECIPE + '[checkpoint]\nsave = "s3://b/c"\nsave_interval = 1\n')
    assert "--save s3://b/c" in message
    values = load(["--config", str(tmp_path / "r.toml"), "--save", "c"], {}).to_dict()
    flat = {name: value for group in values.values() for name, value in group.items() if value is not None}
    with pytest.raises(ConfigError, match="--load gs://b/c"):
        from_values({**flat, "load": "gs://b/c"}, files=False)
