"""What users register: imported by --import alone, chosen by the flags that exist, with settings of its own."""

from __future__ import annotations

import importlib
import pickle
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import pytest

from megalith.assemble.schedule import build_schedule
from megalith.config import RunConfig, from_values, load, megatron_args
from megalith.config.build import imported
from megalith.config.changes import changes_since
from megalith.config.fields import settings_of
from megalith.config.from_args import model_from_args, refuse_registered_parts
from megalith.config.render import recipe_text
from megalith.errors import CheckpointError, ConfigError
from megalith.registry import EMPTY, Entry, Registered, Registry, collect, mark

MODULE = """
from dataclasses import dataclass
from megalith.registry import mark

@dataclass(frozen=True)
class Settings:
    own_power: float = 2.0
    own_sizes: tuple[int, ...] = ()

@mark("schedule", "own-decay", settings=Settings)
def decay(num_samples, schedule, settings):
    return schedule.max_lr * (1 - num_samples / schedule.decay_samples) ** settings.own_power

@mark("norm", "own-norm")
class Norm: ...

@mark("attention", "own-attention")
class Attention: ...

@mark("mlp", "own-mlp")
class MLP: ...

@mark("position", "own-positions", rotary=True)
def positions(config, size): ...

@mark("router", "own-router")
def router(logits, top_k): ...

@mark("loss", "own-loss", on="logits")
def loss(logits, labels, mask, vocabulary): ...

@mark("model", "own-model")
class Model: ...

@mark("dataset", "own-data")
def data(config, tokenizer, split, seed): ...
"""
WORDS = """--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --max-position-embeddings 4
    --micro-batch-size 1 --train-iters 4 --lr 1.0 --mock-data --tokenizer-type NullTokenizer --vocab-size 10"""
RUN = WORDS.split()


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a user's module of a name of its own for each test, as modules are imported once."""
    name = f"own_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_registered_object_is_chosen_with_its_settings(module: str) -> None:
    run = load([*RUN, "--import", module, "--lr-decay-style", "own-decay", "--own-power", "3", "--own-sizes", "1", "2"])
    style = run.schedule.lr_decay_style
    assert style == "own-decay" and isinstance(style, Registered)
    assert (style.settings.own_power, style.settings.own_sizes) == (3.0, (1, 2))
    assert build_schedule(run).learning_rate.lr(2) == 0.5**3
    assert run.registered == ("own-decay",) and [one.name for one in run.registry.imports] == [module]
    saved = run.to_dict()
    assert type(saved["schedule"]["lr_decay_style"]) is str and saved["own-decay"]["own_sizes"] == [1, 2]
    assert RunConfig.from_dict(saved, run.registry) == run
    assert pickle.loads(pickle.dumps(style)) == style


def test_nothing_is_imported_unless_it_is_typed(module: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--lr-decay-style own-decay"):
        load([*RUN, "--lr-decay-style", "own-decay"])
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'[run]\nimport = ["{module}"]\n[schedule]\nlr_decay_style = "own-decay"\n[own-decay]\nown_power = 1.0'
    )
    words = [*RUN, "--config", str(recipe)]
    with pytest.raises(ConfigError, match=f"import = {module}.*--import {module}"):
        load(words)
    assert imported([*words, "--trust-recipe"]) is EMPTY, "only commands that run the recipe follow it"
    assert imported(words, follows_recipe=True) is EMPTY, "without --trust-recipe nobody does"
    for registry in (imported([*words, "--trust-recipe"], follows_recipe=True), imported([*words, "--import", module])):
        run = load(words, registry=registry)
        assert run.schedule.lr_decay_style.settings.own_power == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--import no_such_module", "no_such_module"),
        ("--import", "--import needs a value"),
        ("--import {module} --own-power 3", "--own-power 3.0.*--lr-decay-style own-decay"),
        ("--import {module} --lr-decay-style own-decy", "did you mean own-decay"),
        ("--import {module} --lr-decay-style own-decay --own-power x", "--own-power x"),
        ("--import {module} --lr-decay-style own-norm", "--lr-decay-style own-norm"),
        ("--import {module} --data-source own-data", "--mock-data and --data-source exclude each other"),
        ("--import {module} --no-mock-data --data-source own-data own-data", "--data-source-weights"),
        ("--import {module} --no-mock-data --data-source own-data --model-family bert", "--data-source own-data: BERT"),
        ("--import {module} --no-mock-data --data-source own-data --model-family t5", "--data-source own-data: T5"),
        ("--import {module} --attention own-attention --multi-latent-attention", "--attention own-attention"),
        ("--import {module} --mlp own-mlp --num-experts 2", "--mlp own-mlp"),
        ("--import {module} --mlp own-mlp --lora-rank 4 --load c", "--lora-rank 4.*--mlp"),
        ("--import {module} --position-embedding-type own-positions --kv-channels 5", "--kv-channels 6"),
        ("--import {module} --position-embedding-type own-positions --multi-latent-attention", "own-positions is for"),
        *(
            ("--import {module} --num-experts 4 --moe-router own-router " + words, f"--moe-router own-router.*{words}")
            for words in (
                *("--moe-router-pre-softmax", "--moe-router-score-function sigmoid", "--moe-router-num-groups 2"),
                *("--moe-router-group-topk 2", "--moe-router-topk-scaling-factor 2", "--moe-router-enable-expert-bias"),
                *("--moe-router-load-balancing-type sinkhorn", "--moe-router-load-balancing-type quantile_balancing"),
            )
        ),
        ("--import {module} --loss own-loss --label-smoothing 0.1", "--loss own-loss.*--label-smoothing"),
        ("--import {module} --model own-modle", "did you mean own-model"),
        ("--model own-model", "--model own-model.*--import"),
        ("--import {module} --model own-model --ckpt-format torch", "--ckpt-format torch with --model own-model"),
        ("--import {module} --normalization own-norm --ckpt-format torch", "--normalization own-norm"),
    ],
)
def test_a_wrong_choice_names_flag_and_value(module: str, words: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load([*RUN, *words.format(module=module).split()])


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("1 / 0", r"ZeroDivisionError.*broken\.py:1"),
        ("def f(:", r"broken\.py:1"),
        ("import no_such_thing", "no_such_thing"),
        (
            "from megalith.registry import mark\n@mark('norm', 'a')\ndef f(): ...\n@mark('norm', 'a')\ndef g(): ...",
            "a is",
        ),
        (
            "from megalith.registry import mark\n@mark('norm', 'a')\ndef f(): ...\n@mark('norm', 'a')\ndef f(): ...",
            "--normalization a ",
        ),
        ("import sys\nsys.exit(3)", r"SystemExit: 3.*broken\.py:2"),
        (
            "from megalith.api import register_norm\n\n\n@register_norm\nclass Norm: ...",
            r"Norm.*--normalization.*broken\.py:4",
        ),
        (
            "from megalith.api import register_optimizer\n@register_optimizer('a', unit='row')\nclass A: ...",
            r"unit='row'.*'matrix'.*broken\.py:2",
        ),
        ("from megalith.api import setting\nx = setting(3)", r"setting\(\).*'help'.*broken\.py:2"),
        ("import json\njson.loads('{')", r"JSONDecodeError.*broken\.py:2"),
    ],
)
def test_a_module_that_fails_is_named(tmp_path: Path, source: str, named: str) -> None:
    name = f"of_{abs(hash(tmp_path))}_broken"
    (tmp_path / f"{name}.py").write_text(source)
    with pytest.raises(ConfigError, match=f"(?s){named}"):
        collect([name])


@pytest.mark.parametrize("name", ["", "./own.py", "folder/own", "/tmp/own.py", "own..part", ".own"])
def test_a_path_in_place_of_a_name_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit(9)")
    with pytest.raises(ConfigError, match=re.escape(f"--import {name or chr(39) * 2}:")):
        collect([name])


def test_a_missing_module_of_a_module_is_no_wrong_import(tmp_path: Path) -> None:
    (tmp_path / "own_project.py").write_text("\nimport own")
    with pytest.raises(ConfigError, match=r"'own'.*own_project\.py:2"):
        collect(["own_project"])


def test_a_package_registers_what_it_imports_from_its_modules(tmp_path: Path) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    for part in ("first", "second"):
        text = f"from megalith.registry import mark\n@mark('norm', 'own-{part}')\nclass Norm: ..."
        (package / f"{part}.py").write_text(text)
    (package / "__init__.py").write_text("from . import second\nfrom .first import Norm")
    assert collect(["own_package"]).names("norm") == ("own-first",)
    assert collect(["own_package", "own_package.first"]).names("norm") == ("own-first",)
    assert collect(["own_package", "own_package.second"]).names("norm") == ("own-first", "own-second")


def test_a_module_may_be_run_again(module: str) -> None:
    collect([module])
    reloaded = importlib.reload(sys.modules[module])
    assert collect([module]).find("norm", "own-norm") == Entry("norm", "own-norm", reloaded.Norm)


def test_names_and_flags_of_ours_stay_ours() -> None:
    @dataclass(frozen=True)
    class Settings:
        hidden_size: int = 1

    @dataclass(frozen=True)
    class Flags:
        ffn_hidden_size: int = 1
        bias_linear: bool = False
        trust_recipe: bool = False

    for entry, named in (
        (Entry("norm", "own", object, Flags), "(?s)--ffn-hidden-size.*--bias-linear.*--trust-recipe"),
        (Entry("norm", "RMSNorm", object), "RMSNorm"),
        (Entry("norm", "own", object, Settings), "--hidden-size of own"),
        (Entry("norm", "model", object, Settings), r"\[model\]"),
    ):
        with pytest.raises(ConfigError, match=named):
            from_values({}, registry=Registry((entry,)))
    with pytest.raises(ValueError, match="no kind"):
        mark("nrm", "x")
    with pytest.raises(ValueError, match="a b"):
        mark("norm", "a b")
    with pytest.raises(TypeError, match="dataclass"):
        mark("norm", "a", settings=int)


def test_fields_of_settings_are_what_a_flag_can_be() -> None:
    @dataclass(frozen=True)
    class Good:
        own_share: Optional[float] = None  # noqa: UP045 - as users write it
        own_sizes: tuple[int, ...] = field(default_factory=lambda: (1, 2))

    @dataclass(frozen=True)
    class Bad:
        own_map: dict[str, int] = field(default_factory=dict)
        own_list: list[int] | None = None
        own_both: int | str = 3

    share, sizes = settings_of("good", Good)
    assert (share.kind, share.optional, share.default) == (float, True, None)
    assert (sizes.kind, sizes.many, sizes.required, sizes.default) == (int, True, False, (1, 2))
    with pytest.raises(ConfigError) as caught:
        from_values({}, registry=Registry((Entry("norm", "bad", object, Bad), Entry("norm", "RMSNorm", object))))
    for flag in ("--own-map", "--own-list", "--own-both", "--normalization RMSNorm"):
        assert any(problem.startswith(flag) for problem in caught.value.violations), flag


def test_a_default_that_its_flag_would_refuse_is_named() -> None:
    @dataclass(frozen=True)
    class Bad:
        own_size: int = None  # type: ignore[assignment]
        own_sizes: tuple[int, ...] = 3  # type: ignore[assignment]
        own_rate: float = "fast"  # type: ignore[assignment]
        own_share: float | None = None
        own_count: float = 3

    with pytest.raises(ConfigError) as caught:
        from_values({}, registry=Registry((Entry("norm", "bad", object, Bad),)))
    flags = [problem.partition(":")[0] for problem in caught.value.violations]
    assert flags == ["--own-size", "--own-sizes", "--own-rate"]


def test_an_annotation_that_names_nothing_is_refused() -> None:
    @dataclass(frozen=True)
    class Bad:
        own_size: NoSuchType = 3  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigError, match="Bad.*NoSuchType"):
        from_values({}, registry=Registry((Entry("norm", "bad", object, Bad),)))


def test_settings_of_registered_objects_come_back_from_the_recipe(module: str, tmp_path: Path) -> None:
    chosen = ["--lr-decay-style", "own-decay", "--own-power", "3", "--own-sizes", "1", "2"]
    run = load([*RUN, "--import", module, *chosen])
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe_text(run))
    assert load(["--config", str(recipe), "--import", module]) == run
    with pytest.raises(ConfigError, match=f"--import {module}"):
        load(["--config", str(recipe)])


def test_a_changed_setting_of_a_registered_object_is_told(module: str) -> None:
    words = [*RUN, "--import", module, "--lr-decay-style", "own-decay", "--own-power"]
    (change,) = changes_since(load([*words, "3"]).to_dict(), load([*words, "4"]))
    assert str(change) == "--own-power 3 -> 4"


def test_a_checkpoint_says_which_import_is_missing(module: str) -> None:
    run = load([*RUN, "--import", module, "--normalization", "own-norm"])
    args = megatron_args(run)
    assert type(args["normalization"]) is str and set(args["megalith_registered"]["imports"]) == {module}
    with pytest.raises(CheckpointError, match=f"--import {module}"):
        model_from_args(args)
    found = model_from_args(args, run.registry).normalization
    assert isinstance(found, Registered) and found.entry.thing.__name__ == "Norm"


def test_what_another_module_defines_is_registered_where_it_is_marked(tmp_path: Path) -> None:
    for module in ("own_first", "own_second"):
        text = "import fractions\nfrom megalith.registry import mark\nmark('schedule', 'own')(fractions.Fraction)\n"
        (tmp_path / f"{module}.py").write_text(text)
        (entry,) = collect([module]).entries
        assert entry.thing.__name__ == "Fraction" and not [name for name in vars(entry.thing) if "megalith" in name]


def test_registered_parts_of_a_checkpoint_are_named_by_their_flags(module: str) -> None:
    words = ["--normalization", "own-norm", "--mlp", "own-mlp", "--lr-decay-style", "own-decay"]
    args = megatron_args(load([*RUN, "--import", module, *words]))
    with pytest.raises(CheckpointError, match=r"--normalization own-norm.*not here") as caught:
        refuse_registered_parts(args, "folder", "not here")
    assert "--mlp own-mlp" in str(caught.value) and "own-decay" not in str(caught.value)
    refuse_registered_parts(args, "folder", "not here", group="optimizer")
    refuse_registered_parts(megatron_args(load(RUN)), "folder", "not here")


def test_what_registered_layers_cost_zero1_is_said(module: str) -> None:
    words = [*RUN, "--import", module, "--use-distributed-optimizer"]
    two = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}

    def said(*more: str, environ: dict[str, str] = two) -> bool:
        return any("--mlp own-mlp" in str(note) for note in load([*words, *more], environ).notes)

    assert said("--mlp", "own-mlp") and not said() and not said("--mlp", "own-mlp", environ={})
