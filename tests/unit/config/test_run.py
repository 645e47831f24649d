"""The configuration as an object: derived numbers, dictionaries, and Megatron's names for all of it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    all_settings,
    check_groups,
    check_run,
    from_values,
    group_types,
    load,
    megatron_args,
)
from megalith.config.fields import Setting, settings_of
from megalith.errors import ConfigError

VALUES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "seq_length": 64,
    "micro_batch_size": 2,
    "train_iters": 10,
    "lr": 1e-3,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 100,
}


def test_the_model_is_a_library_object() -> None:
    model = ModelConfig(num_layers=2, hidden_size=12, num_attention_heads=4, max_position_embeddings=64)
    assert (model.head_size, model.query_groups, model.ffn_size, model.rotary_size) == (3, 4, 48, 0)
    llama = dataclasses.replace(
        model,
        hidden_size=1024,
        kv_channels=64,
        swiglu=True,
        group_query_attention=True,
        num_query_groups=2,
        add_bias_linear=False,
        position_embedding_type="rope",
        rotary_percent=0.5,
    )
    assert (llama.ffn_size, llama.head_size, llama.query_groups, llama.rotary_size) == (2688, 64, 2, 32)
    assert not llama.qkv_bias and dataclasses.replace(llama, add_qkv_bias=True).qkv_bias


@pytest.mark.parametrize(
    ("given_values", "dtype", "dynamic", "grads_in_fp32", "stop"),
    [
        ({}, "float32", False, True, True),
        ({"bf16": True}, "bfloat16", False, True, True),
        ({"fp16": True}, "float16", True, False, False),
        ({"fp16": True, "loss_scale": 8.0}, "float16", False, False, True),
        ({"fp16": True, "accumulate_allreduce_grads_in_fp32": True}, "float16", True, True, False),
    ],
)
def test_precision(given_values: dict[str, Any], dtype: str, dynamic: bool, grads_in_fp32: bool, stop: bool) -> None:
    precision = from_values({**VALUES, **given_values}).precision
    assert (precision.params_dtype, precision.dynamic_loss_scale) == (dtype, dynamic)
    assert (precision.grads_in_fp32, precision.stop_on_nan) == (grads_in_fp32, stop)


@pytest.mark.parametrize(
    ("megatrons", "torchs"),
    [
        ("--use-megatron-fsdp", "--use-torch-fsdp2"),
        ("--use-custom-fsdp --use-distributed-optimizer", "--use-torch-fsdp2"),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
            "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
        ),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", "--use-distributed-optimizer"),
        ("--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy no_shard", ""),
        ("--data-parallel-sharding-strategy optim", ""),
    ],
)
def test_megatrons_strategies_are_the_kinds_of_zero(megatrons: str, torchs: str) -> None:
    words = [f"--{name.replace('_', '-')} {value}" for name, value in VALUES.items() if name != "mock_data"]
    argv = " ".join([*words, "--mock-data --global-batch-size 8"]).split()
    runs = [
        load([*argv, *flags.split()], {"WORLD_SIZE": "2", "RANK": "0"}, files=False) for flags in (megatrons, torchs)
    ]
    one, other = (
        (
            run.fully_sharded,
            run.parallel.shards_optimizer_only,
            run.fully_sharded and run.parallel.reshard_after_forward,
        )
        for run in runs
    )
    assert one == other


def test_length_in_samples() -> None:
    values = {**VALUES, "train_iters": None, "train_samples": 50, "global_batch_size": 8}
    run = from_values(values)
    assert (run.train_iters, run.num_micro_batches) == (6, 4)


def value_of(setting: Setting) -> st.SearchStrategy[Any]:
    kinds: dict[type, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(1, 10**9),
        float: st.floats(allow_nan=False),
        str: st.text(),
    }
    one = kinds[setting.kind]
    return st.lists(one).map(tuple) if setting.many else (st.none() | one) if setting.optional else one


@settings(deadline=None, max_examples=20)
@given(st.fixed_dictionaries({name: value_of(setting) for name, setting in all_settings().items()}))
def test_to_and_from_dictionaries_and_json(values: dict[str, Any]) -> None:
    run = RunConfig(
        **{
            group: kind(**{setting.name: values[setting.name] for setting in settings_of(group, kind)})
            for group, kind in group_types().items()
        }
    )
    assert RunConfig.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_what_is_saved_may_be_older_but_not_foreign() -> None:
    saved = from_values(VALUES).to_dict()
    del saved["precision"], saved["model"]["swiglu"]
    assert RunConfig.from_dict(saved) == from_values(VALUES)
    with pytest.raises(ConfigError, match="'model'.*'colour'"):
        RunConfig.from_dict({**saved, "model": {**saved["model"], "colour": 1}})
    with pytest.raises(ConfigError, match="'train'.*'micro_batch_size'"):
        RunConfig.from_dict({**saved, "train": {}})
    with pytest.raises(ConfigError, match="'paint'"):
        RunConfig.from_dict({**saved, "paint": {}})


def test_values_are_checked_like_flags() -> None:
    with pytest.raises(ConfigError) as caught:
        from_values({**VALUES, "hidden_size": 18, "colour": 1})
    unknown, wrong = caught.value.violations
    assert "colour" in unknown and wrong.startswith("--hidden-size 18 ")


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("optimizer", "adamw", "adam?"),
        ("optimizer", "myopt", "sgd"),
        ("position_embedding_type", "ropee", "rope?"),
        ("normalization", "LayerNrom", "LayerNorm?"),
        ("bf16", "no", ""),
        ("bf16", 1, ""),
        ("num_layers", "2", ""),
        ("num_layers", 2.5, ""),
        ("num_layers", True, ""),
        ("num_layers", None, ""),
        ("lr", float("nan"), ""),
        ("lr", "1e-3", ""),
        ("rampup_batch_size", (2, "2", 8), ""),
        ("mock_data", "false", ""),
    ],
)
def test_values_have_the_types_and_choices_of_flags(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_values({**VALUES, name: value})
    (violation,) = caught.value.violations
    assert violation.startswith(f"{name} = {value!r}: ") and remedy in violation


def test_a_name_near_a_setting_is_one_violation() -> None:
    values = {name: value for name, value in VALUES.items() if name != "num_layers"}
    with pytest.raises(ConfigError) as caught:
        from_values({**values, "num_layer": 2, "optimizer": "adamw", "hidden_size": 18})
    name, optimizer, size = sorted(caught.value.violations, key=len)
    assert "num_layer;" in name and "num_layers" in name, "and not that --num-layers is required"
    assert "adamw" in optimizer and "--hidden-size 18" in size


def test_values_of_python_become_those_of_flags(tmp_path: Path) -> None:
    one = from_values({**VALUES, "mock_data": False, "data_path": tmp_path / "x", "lr": 1}, files=False)
    assert one.data.data_path == (str(tmp_path / "x"),), "one prefix, not its letters"
    assert isinstance(one.schedule.lr, float)
    assert from_values({**VALUES, "loss_scale": None}).precision.loss_scale is None


def test_what_has_no_effect_is_noted_for_programs_too() -> None:
    run = from_values({**VALUES, "lr_wsd_decay_style": "cosine"})
    assert any("--lr-wsd-decay-style" in str(note) for note in run.notes)
    assert from_values(VALUES).notes == ()


MODEL = {name: VALUES[name] for name in ("num_layers", "num_attention_heads", "max_position_embeddings")}


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ([ModelConfig(**MODEL, hidden_size=66)], ["--hidden-size 66"]),
        ([ModelConfig(**MODEL, hidden_size=66, normalization="LayerNrom")], ["LayerNrom", "--hidden-size 66"]),
        ([ModelConfig(**MODEL, hidden_size=0)], ["hidden_size = 0"]),
        ([ModelConfig(**MODEL, hidden_size="64")], ["hidden_size = '64'"]),  # type: ignore[arg-type]
        ([OptimizerConfig(optimizer="myopt")], ["myopt"]),
        ([PrecisionConfig(fp16=True, bf16=True)], ["--fp16"]),
        ([DataConfig(seq_length=64, data_path="/data/x")], ["data_path = '/data/x'"]),  # type: ignore[arg-type]
        (
            [DataConfig(seq_length=65, mock_data=True), ModelConfig(**MODEL, hidden_size=64)],
            ["--max-position-embeddings 64"],
        ),
    ],
)
def test_groups_by_hand_are_checked(groups: list[Any], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_groups(*groups)
    assert len(caught.value.violations) == len(names)
    for name, violation in zip(names, caught.value.violations, strict=True):
        assert name in violation


def test_a_run_changed_by_hand_is_checked_by_all_rules() -> None:
    run = from_values(VALUES)
    check_run(run)
    with pytest.raises(ConfigError, match="--global-batch-size 3 "):
        check_run(dataclasses.replace(run, train=dataclasses.replace(run.train, global_batch_size=3)))


def test_values_with_what_a_launcher_says() -> None:
    by_hand = {"RANK": "1", "WORLD_SIZE": "2"}
    assert from_values({**VALUES, "tensor_model_parallel_size": 2}, environ=by_hand).launch.rank == 1
    with pytest.raises(ConfigError, match="--context-parallel-size 3 "):
        from_values({**VALUES, "context_parallel_size": 3}, environ=by_hand)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2 .*RANK"):
        from_values(VALUES, environ={"WORLD_SIZE": "2"})
    assert from_values(VALUES).launch.world_size == 1, "the environment is read where it is given"


def test_groups_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        from_values(VALUES).model.num_layers = 3  # type: ignore[misc]


def test_names_are_unique_over_the_groups() -> None:
    names = [setting.name for group, kind in group_types().items() for setting in settings_of(group, kind)]
    assert len(names) == len(set(names)) == len(all_settings())


def test_arguments_under_megatrons_names_are_megatrons(shared: Path) -> None:
    """Against the argument dump of the real program for the same command line."""
    golden = shared / "golden" / "pretrain"
    cases = json.loads((golden / "manifest.json").read_text(encoding="utf-8"))["cases"]
    run = load(next(case["args"] for case in cases if case["name"] == "gpt2_torch_dist"), {}, files=False)
    dump = (golden / "gpt2_torch_dist" / "log_rank0.txt").read_text(encoding="utf-8")
    theirs = dict(re.findall(r"^  (\w+) \.+ (.*)$", dump, flags=re.MULTILINE))
    ours = {name: str(value) for name, value in megatron_args(run).items()}
    # Their folder of the run, enums and dtypes; and some of their switches are None instead of False.
    spelled_differently = {"save", "data_cache_path", "attention_backend", "params_dtype"}
    spelled_differently |= {"exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "main_params_dtype"}
    of_other_versions = {"muon_tp_mode", "profile_ranks", "wandb_project", "wandb_exp_name", "wandb_save_dir"}
    of_other_versions |= {"data_parallel_sharding_strategy", "sft_tokenizer_prompt_format"}
    spelled_differently |= of_other_versions  # their defaults
    switches = {name for name, value in ours.items() if value == "False" and theirs.get(name) == "None"}
    common = set(ours) & set(theirs) - spelled_differently - switches
    assert len(common) > 100
    assert {name: ours[name] for name in common} == {name: theirs[name] for name in common}
    ours_alone = set(ours) - set(theirs)
    assert {"norm_epsilon", "apply_layernorm_1p", "iteration"} <= ours_alone
    assert ours_alone - set(all_settings()) <= {"iteration"}, "what other versions have, but for what a run sets"
