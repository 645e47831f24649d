"""The recipes that come with the program are sound, on the devices that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalith.config import RunConfig, load
from megalith.config.render import note_lines
from megalith.schedules.batch_size import BatchSizeSchedule

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))
MILLIONS = {"124m": 124, "345m": 355, "857m": 355, "1.1b": 1100, "1.3b": 1316, "8b": 8030, "175b": 174_600}
MILLIONS |= {"8x124m": 549, "8x7b": 46_700, "shakespeare-char": 10.74, "shakespeare-char-cpu": 0.803}
MILLIONS |= {"qwen3-0.6b": 596, "qwen3-8b": 8190}
MILLIONS |= {"shakespeare-speedrun": 2.92, "d20": 561, "machine-text-1m": 0.835, "machine-text-12m": 12.19}
VOCABULARIES = {"llama2": 32_000, "llama3": 128_256, "mixtral": 32_000, "shakespeare": 65, "nanochat": 65_536}
VOCABULARIES |= {"machine": 4096, "qwen3": 151_936, "llama3.1": 128_256}


def parameters(run: RunConfig, vocab_size: int) -> float:
    """Of all weights, biases and norms left out."""
    model = run.model
    attention = 2 * model.head_size * (model.num_attention_heads + model.query_groups)
    feed_forward = model.ffn_size * (3 if model.swiglu else 2) * (model.num_experts or 1)
    tables = vocab_size * (2 if model.untie_embeddings_and_output_weights else 1)
    positions = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
    return model.hidden_size * (model.num_layers * (attention + feed_forward) + tables + positions)


def gpus(path: Path) -> int:
    """What the head of a recipe says."""
    found = re.search(r"^# GPUs: (\d+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    return int(found[1])


def test_there_are_recipes_for_every_size_and_number_of_devices() -> None:
    assert {gpus(path) for path in RECIPES} == {0, 1, 2, 4, 8, 64, 128}
    assert {name for name in MILLIONS if any(name in path.name for path in RECIPES)} == set(MILLIONS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_sound_and_of_its_size(path: Path) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": str(max(1, gpus(path)))}
    run = load(["--config", str(path)], environ, files=False)
    assert note_lines(run) == []
    size = MILLIONS[max((name for name in MILLIONS if f"-{name}-" in f"-{path.stem}-"), key=len)]
    assert parameters(run, VOCABULARIES.get(path.name.partition("-")[0], 50_304)) / 1e6 == pytest.approx(size, rel=0.01)
    assert run.checkpoint.save == f"checkpoints/{path.stem}" == run.checkpoint.load
    assert f"recipes/{path.name}" in path.read_text(encoding="utf-8")


def test_the_batch_of_the_175b_recipe_grows() -> None:
    (path,) = [path for path in RECIPES if "175b" in path.name]
    run = load(["--config", str(path)], {"RANK": "0", "WORLD_SIZE": "128"}, files=False)
    sizes: BatchSizeSchedule = run.batch_sizes
    assert (sizes.stages[0].size, sizes.final) == (16, 1536)
