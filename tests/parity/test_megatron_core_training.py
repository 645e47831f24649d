"""Training settings drawn at random mean what they mean to the real Megatron: schedules, batch sizes, optimizer steps.

Never a dependency: runs where MEGALITH_MEGATRON_CORE names a folder with megatron-core 0.16.1 (`test_megatron_core`).
The goldens hold some dozens of settings, chosen by hand; here there are hundreds. Muon is not among them: the classes
of Megatron's are those of a package that no registry has.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.errors import ConfigError
from megalith.models.gpt import GPT
from megalith.optim import Optimizer, build_optimizer
from megalith.optim.loss_scale import DynamicLossScale
from megalith.schedules.batch_size import constant, ramped

from .megatron_core_training import LENGTH, VOCABULARY
from .test_megatron_core import core  # noqa: F401
from .test_schedules import build

SCHEDULES, BATCH_SIZES, SCALERS, OPTIMIZERS = 400, 400, 60, 40


def draw_schedule(draw: random.Random) -> dict[str, Any]:
    """A schedule with the groups of Megatron: plain, without decay, with a rate of its own."""
    decay = draw.choice([1, 7, 100, 997])
    style = draw.choice(["constant", "linear", "cosine", "inverse-square-root", "WSD"])
    growth = draw.choice(["constant", "linear", "cosine"])
    start, end = sorted([draw.choice([0.0, 0.01, 0.1]), draw.choice([0.0, 0.1, 0.3])])
    peak = draw.choice([1e-3, 3e-4, 0.1])
    config = {
        "init_lr": draw.choice([0.0, 0.0, 1e-5]),
        "max_lr": peak,
        "min_lr": draw.choice([0.0, 1e-5, peak]),
        "lr_warmup_steps": draw.choice([0, 0, 1, decay // 10, decay / 3, decay - 1, decay]),
        "lr_decay_steps": decay,
        "lr_decay_style": style,
        "start_wd": end if growth == "constant" else start,
        "end_wd": end,
        "wd_incr_steps": draw.choice([1, 50, decay, 2 * decay]),
        "wd_incr_style": growth,
    }
    if style == "WSD":
        config |= {
            "wsd_decay_steps": draw.choice([1, decay // 3 + 1, decay]),
            "lr_wsd_decay_style": draw.choice(["exponential", "linear", "cosine", "minus_sqrt"]),
        }
    points = {0, 1, 2, decay - 1, decay, decay + 1, 3 * decay, *(draw.randrange(2 * decay + 1) for _ in range(20))}
    apart = {"max_lr": draw.choice([1e-4, 0.05]), "min_lr": draw.choice([0.0, 1e-6])}
    return {"config": config, "groups": [{}, {"wd_mult": 0.0}, apart], "samples": sorted(points)}


def check_schedule(case: dict[str, Any], wanted: Any) -> None:
    if isinstance(wanted, str):
        with pytest.raises(ConfigError):
            build(case["config"])
        return
    schedule = build(case["config"])
    rates = [replace(schedule.learning_rate, **{k: g[k] for k in g if k != "wd_mult"}) for g in case["groups"]]
    for samples, told in zip(case["samples"], wanted, strict=True):
        decay = schedule.weight_decay.weight_decay(samples)
        found = [
            [rate.lr(samples), decay * group.get("wd_mult", 1.0)]
            for rate, group in zip(rates, case["groups"], strict=True)
        ]
        assert found == told, samples


def draw_batch_sizes(draw: random.Random) -> dict[str, Any]:
    """A constant size or a ramp, whole micro-batches or rounded ones."""
    micro, replicas, ramp = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 5, 8]), None
    unit = micro * replicas
    increment, start = draw.choice([unit, 2 * unit, 7, 1]), draw.choice([unit, 3 * unit, 16])
    final = start + increment * draw.choice([1, 2, 3, 10, 33])
    if draw.random() < 0.8:
        ramp = [start, increment, draw.choice([1, 10, 1000, 4999, 333333, 10**7])]
    length = ramp[2] if ramp else 100
    points = {0, 1, length - 1, length, length + 1, *(draw.randrange(length + 2) for _ in range(30))}
    if ramp:  # where a quotient of floats decides
        points |= {round(number * length / ((final - start) // increment)) for number in range(12)}
    return {
        "config": {
            "rampup_batch_size": ramp,
            "global_batch_size": final,
            "micro_batch_size": micro,
            "data_parallel_size": replicas,
            "decrease_batch_size_if_needed": draw.random() < 0.6,
        },
        "samples": sorted(points),
    }


def check_batch_sizes(case: dict[str, Any], wanted: Any) -> bool:
    """Whether there was something to compare: what Megatron refuses is refused by rules of the configuration."""
    if isinstance(wanted, str):
        return False
    config, ramp = case["config"], case["config"]["rampup_batch_size"]
    unit, final = config["micro_batch_size"] * config["data_parallel_size"], config["global_batch_size"]
    sizes = ramped(*ramp, final, unit) if ramp else constant(final, unit)
    for samples, told in zip(case["samples"], wanted, strict=True):
        assert [
            sizes.num_micro_batches(samples),
            sizes.nominal_size(samples),
            sizes.num_micro_batches(samples) * sizes.unit,
        ] == told, samples
    return True


def draw_scaler(draw: random.Random) -> dict[str, Any]:
    """A loss scale, and which steps overflow."""
    initial = draw.choice([2.0**32, 65536.0, 3.0, 1.0, 1e5])
    share = draw.choice([0.02, 0.3, 0.9])
    return {
        "config": {
            "initial_scale": initial,
            "min_scale": draw.choice([1.0, initial, initial / 7]),
            "growth_interval": draw.choice([1, 2, 10, 1000]),
            "hysteresis": draw.choice([1, 2, 5]),
        },
        "overflows": [draw.random() < share for _ in range(120)],
    }


def check_scaler(case: dict[str, Any], wanted: Any) -> None:
    config = case["config"]
    scale = DynamicLossScale(
        config["initial_scale"], config["min_scale"], config["growth_interval"], config["hysteresis"]
    )
    for number, (overflow, told) in enumerate(zip(case["overflows"], wanted, strict=True)):
        scale.update(overflow)
        assert [scale.value, scale.inverse] == told, number


def draw_optimizer(draw: random.Random) -> dict[str, Any]:
    """A small model, an optimizer for it, and what it is told in each of a few steps."""
    dtype = draw.choice(["float32", "bfloat16", "float16"])
    rates = {"lr": draw.choice([1e-2, 1e-3]), "min_lr": 0.0, "weight_decay": draw.choice([0.0, 0.1])}
    if draw.random() < 0.4:
        rates["decoupled_lr"] = 3e-3
    optimizer = rates | {
        "optimizer": draw.choice(["adam", "adam", "sgd"]),
        "clip_grad": draw.choice([0.0, 1.0, 0.1, 1e4]),
        "adam_beta1": draw.choice([0.9, 0.8]),
        "adam_beta2": draw.choice([0.999, 0.95]),
        "adam_eps": draw.choice([1e-8, 1e-5]),
        "sgd_momentum": draw.choice([0.0, 0.9]),
        "apply_wd_to_qk_layernorm": draw.random() < 0.4,
    }
    if dtype == "float16":
        optimizer |= {"initial_loss_scale": 2.0**14, "hysteresis": draw.choice([1, 2]), "loss_scale_window": 2}
    if dtype != "float32" and draw.random() < 0.3:
        optimizer["loss_scale"] = 512.0
    scaled = dtype == "float16" or "loss_scale" in optimizer
    steps = [
        {
            "lr": rates["lr"] * draw.random(),
            "decoupled_lr": 3e-3 * draw.random(),
            "weight_decay": rates["weight_decay"] * draw.random(),
            "size": draw.choice([1e-3, 1.0]),
            "bad": draw.choice([0.0, float("inf"), float("nan")]) if scaled and draw.random() < 0.3 else 0.0,
        }
        for _ in range(5)
    ]
    heads = draw.choice([2, 4])
    model = {
        "num_layers": 2,
        "hidden_size": 8 * heads,
        "num_attention_heads": heads,
        "ffn_hidden_size": 24,
        "normalization": "LayerNorm",
        "add_bias_linear": draw.random() < 0.7,
        "qk_layernorm": draw.random() < 0.5,
    }
    return {"dtype": dtype, "seed": draw.randrange(10**6), "untied": draw.random() < 0.5, "model": model} | {
        "optimizer": optimizer,
        "steps": steps,
    }


def own_optimizer(case: dict[str, Any]) -> tuple[GPT, Optimizer]:
    told = dict(case["optimizer"])
    half = {"float16": "fp16", "bfloat16": "bf16"}
    scales: dict[str, Any] = {
        name: told.pop(name) for name in list(told) if name in PrecisionConfig.__dataclass_fields__
    }
    told.pop("lr")
    told.pop("min_lr")
    precision = PrecisionConfig(
        accumulate_allreduce_grads_in_fp32=True,
        **scales,
        **({half[case["dtype"]]: True} if case["dtype"] in half else {}),
    )
    model = GPT(
        ModelConfig(
            **case["model"],
            max_position_embeddings=LENGTH,
            untie_embeddings_and_output_weights=case["untied"],
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        VOCABULARY,
        dtype=getattr(torch, case["dtype"]),
    )
    return model, build_optimizer(model, OptimizerConfig(**told), precision, count_zeros=True)


def check_optimizer(case: dict[str, Any], path: Path) -> None:
    kept, wanted = load_file(path.with_suffix(".safetensors")), json.loads(path.with_suffix(".json").read_text())
    model, optimizer = own_optimizer(case)
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        parameter.data.copy_(kept[f"initial.{name}"])
    optimizer.reload_master_weights()
    sizes = {
        (float(group["wd_mult"]), group["max_lr"] != case["optimizer"]["lr"]): group["size"]
        for group in wanted["groups"]
        if group["size"]
    }
    own = {(g.wd_mult, g.decoupled): sum(named[name].numel() for name in g.names) for g in optimizer.groups}
    assert own == sizes
    for number, (told, result) in enumerate(zip(case["steps"], wanted["steps"], strict=True)):
        optimizer.zero_grad()
        optimizer.gradients.finish()
        for name in named:
            optimizer.gradients.grad_shards[name].copy_(kept[f"gradient.{number}.{name}"] * optimizer.loss_scale)
        decoupled = told["decoupled_lr"] if "decoupled_lr" in case["optimizer"] else None
        outcome = optimizer.step(told["lr"], told["weight_decay"], decoupled_lr=decoupled)
        assert outcome.applied == result["applied"], number
        assert optimizer.loss_scale == result["scale"], number
        if outcome.applied:
            assert outcome.grad_norm == pytest.approx(result["norm"], rel=1e-6), number
            assert outcome.num_zeros == result["zeros"], number
        for name, parameter in named.items():
            there = kept[f"after.{number}.{name}"]
            rounding = {"float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}[case["dtype"]]
            assert torch.allclose(parameter, there, rtol=rounding, atol=1e-7), f"{name} after step {number}"


@pytest.mark.full
def test_settings_drawn_at_random(core: Path, tmp_path: Path) -> None:  # noqa: F811
    draw = random.Random(7)
    cases = {
        "schedules": [draw_schedule(draw) for _ in range(SCHEDULES)],
        "batch_sizes": [draw_batch_sizes(draw) for _ in range(BATCH_SIZES)],
        "scalers": [draw_scaler(draw) for _ in range(SCALERS)],
        "optimizers": [draw_optimizer(draw) for _ in range(OPTIMIZERS)],
    }
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("megatron_core_training.py")
    environ = {**os.environ, "PYTHONPATH": str(core), "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(script), str(tmp_path / "cases.json"), str(tmp_path)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    results, compared, problems = json.loads((tmp_path / "results.json").read_text()), 0, []
    for kind, check in (("schedules", check_schedule), ("batch_sizes", check_batch_sizes), ("scalers", check_scaler)):
        for number, (case, wanted) in enumerate(zip(cases[kind], results[kind], strict=True)):
            try:
                compared += check(case, wanted) is not False
            except Exception as error:
                problems.append(f"{kind} {number} {case}: {error!r}")
    for number, case in enumerate(cases["optimizers"]):
        try:
            check_optimizer(case, tmp_path / str(number))
        except Exception as error:
            problems.append(f"optimizer {number} {case}: {error!r}")
    assert not problems, "\n".join(problems[:10])
    assert compared > 600
