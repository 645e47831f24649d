"""Initial weights, logits, every gradient and 50-step curves of the real Megatron (golden `train`)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.data.gpt_dataset import GPTDataset, GPTDatasetOptions
from megalith.data.indexed import IndexedDataset
from megalith.data.loader import BatchLoader
from megalith.data.samples import SplitRatios, SplitSpec
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.layout import Recompute
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise_as_megatron_cpu
from megalith.optim import DynamicLossScale, Optimizer, build_optimizer
from megalith.schedules.parameters import LearningRateSchedule, ParameterSchedule, WeightDecaySchedule
from megalith.tokenizers.null import NullTokenizer
from megalith.train.state import TrainState
from megalith.train.step import train_step

from .goldens import Goldens

RANK = "tp0_pp0"
CASES = ("gpt2", "llama", "llama_bf16", "var_qk_layernorm")
VARIANTS = (
    "var_squared_relu",
    "var_rope_interleaved",
    "var_apply_query_key_layer_scaling",
    "var_recompute_full",
    "var_fp32_residual",
    "var_qkv_bias_llama",
    "var_gelu_tanh_openai",
    "var_rope_percent50",
    "var_gpt2_rope_untied_gelu",
    "var_no_pos",
)
BESIDE_TWO_RANKS = ("gpt2_tp1_for_tp2", "llama_tp1_for_tp2")  # one process, of the model of the cases of two


SAME_NAMES = (
    "rotary_interleaved",
    "apply_query_key_layer_scaling",
    "softmax_scale",
    "init_method_std",
    "calculate_per_token_loss",
    "fp32_residual_connection",
    "qk_l2_norm",
)


def _config(case: dict[str, Any], implementation: str) -> ModelConfig:
    model, fields = case["model"], case["model"]["config"]
    gated = fields.get("gated_linear_unit", False)
    return ModelConfig(
        num_layers=fields["num_layers"],
        hidden_size=fields["hidden_size"],
        num_attention_heads=fields["num_attention_heads"],
        max_position_embeddings=model["seq"],
        group_query_attention="num_query_groups" in fields,
        num_query_groups=fields.get("num_query_groups", 1),
        ffn_hidden_size=fields.get("ffn_hidden_size"),
        kv_channels=fields.get("kv_channels"),
        qk_layernorm=fields.get("qk_layernorm", False),
        position_embedding_type=model["pos"],
        normalization=fields["normalization"],
        norm_epsilon=fields["layernorm_epsilon"],
        swiglu=gated and fields["activation_func"] == "silu",
        geglu=gated and fields["activation_func"] == "gelu",
        quick_geglu=gated and fields["activation_func"] == "quick_gelu",
        squared_relu=fields["activation_func"] == "squared_relu",
        rotary_percent=model.get("rotary_percent", 1.0),
        **{name: fields[name] for name in SAME_NAMES if name in fields},
        add_bias_linear=fields["add_bias_linear"],
        add_qkv_bias=fields["add_qkv_bias"],
        untie_embeddings_and_output_weights=not model["tied"],
        bias_gelu_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        transformer_impl=implementation,
    )


def _model(case: dict[str, Any], implementation: str) -> GPT:
    dtype = torch.bfloat16 if _is_bf16(case) else torch.float32
    fields = case["model"]["config"]
    full = fields.get("recompute_granularity") == "full"
    recompute = Recompute(fields["recompute_method"], fields["recompute_num_layers"]) if full else None
    model = GPT(_config(case, implementation), case["model"]["vocab_size"], recompute=recompute, dtype=dtype)
    initialise_as_megatron_cpu(model, torch.Generator().manual_seed(case["train"]["seed"]))
    return model


def _is_bf16(case: dict[str, Any]) -> bool:
    return bool(case.get("config_over", {}).get("bf16", False))


def _optimizer(case: dict[str, Any], model: GPT) -> Optimizer:
    settings = case["train"]
    config = OptimizerConfig(
        optimizer=case.get("optimizer", "adam"),
        adam_beta1=settings["b1"],
        adam_beta2=settings["b2"],
        adam_eps=settings["eps"],
        clip_grad=settings["clip"],
    )
    return build_optimizer(model, config, PrecisionConfig(bf16=_is_bf16(case)), count_zeros=True)


def _loader(golden: Goldens, case: dict[str, Any], tmp_path: Path) -> BatchLoader:
    settings, prefix = case["train"], str(golden.path("train/data") / "shakes_text_document")
    dataset = GPTDataset(
        IndexedDataset(prefix),
        SplitSpec(0, settings["steps"] * settings["gbs"], SplitRatios.parse("100,0,0"), prefix, cache_folder=tmp_path),
        options=GPTDatasetOptions(
            sequence_length=case["model"]["seq"],
            seed=settings["seed"],
            eod_mask_loss=False,
        ),
        tokenizer=NullTokenizer(511),
        class_name="GPTDataset",
    )
    return BatchLoader(dataset, micro_batch_size=settings["mbs"], consumed_samples=0)


def _close(actual: Tensor, wanted: Tensor, tolerance: float, at_least: float = 0.0) -> None:
    size = max(float(wanted.double().abs().max()), at_least)
    assert float((actual.double() - wanted.double()).abs().max()) <= tolerance * size


@pytest.mark.parametrize("name", [*CASES, *VARIANTS])
def test_initial_weights_bit_for_bit(golden: Goldens, name: str) -> None:
    wanted = load_file(golden.path(f"train/{name}/weights_init_{RANK}.safetensors"))
    weights = dict(_model(golden.case("train", name), "local").named_parameters())
    assert set(weights) == set(wanted)
    for key, value in weights.items():
        assert torch.equal(value, wanted[key]), key


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize("name", [*CASES, *VARIANTS])
def test_logits_and_losses(golden: Goldens, name: str, implementation: str) -> None:
    case = golden.case("train", name)
    wanted = load_file(golden.path(f"train/{name}/forward_{RANK}.safetensors"))
    model = _model(case, implementation)
    exact = implementation == "local"
    tolerance = (1e-5 if not _is_bf16(case) else 0.0) if exact else (1e-5 if not _is_bf16(case) else 2e-2)
    logits = model(wanted["tokens"]).float()
    _close(logits.flatten(0, 1)[:16], wanted["logits_first16"].float(), tolerance)
    _close(logits.double().sum(-1), wanted["logits_rowsum_fp64"], max(tolerance, 1e-5))
    losses = model(wanted["tokens"], labels_BS=wanted["labels"])
    _close(losses, wanted["per_token_loss"], max(tolerance, 1e-5))


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "var_qk_layernorm", *VARIANTS])
def test_every_gradient_of_the_first_step(golden: Goldens, tmp_path: Path, name: str, implementation: str) -> None:
    case = golden.case("train", name)
    model = _model(case, implementation)
    optimizer = _optimizer(case, model)
    _accumulate(model, optimizer, _loader(golden, case, tmp_path), case)
    optimizer.gradients.finish()
    wanted = load_file(golden.path(f"train/{name}/grads_step0_{RANK}.safetensors"))
    assert {key.partition("#")[0] for key in wanted} == set(optimizer.gradients.grads)
    for key, value in wanted.items():
        name, _, part = key.partition("#")
        gradient = optimizer.gradients.grads[name]
        kept = {"": gradient, "first64rows": gradient[:64], "row_sums_fp64": gradient.double().sum(-1)}
        # Sums over the rows of a normalised embedding are zero but for rounding.
        size = float(gradient.abs().max()) if part == "row_sums_fp64" else 0.0
        _close(kept[part], value, 1e-5, at_least=size)


def _accumulate(model: GPT, optimizer: Optimizer, loader: BatchLoader, case: dict[str, Any]) -> float:
    """One step's forward and backward passes; returns the mean loss."""
    micro_batches = case["train"]["gbs"] // case["train"]["mbs"]
    optimizer.zero_grad()
    total, count = 0.0, 0
    for _ in range(micro_batches):
        batch = next(loader)
        losses = model(batch["tokens"], position_ids_BS=batch["position_ids"], labels_BS=batch["labels"])
        loss = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum() / micro_batches
        loss.backward()
        total, count = total + float(losses.detach().sum()), count + losses.numel()
    return total / count


@pytest.mark.parametrize("name", [*CASES, *VARIANTS, *BESIDE_TWO_RANKS, "var_sgd"])
def test_the_curve_of_losses_and_norms(golden: Goldens, tmp_path: Path, name: str) -> None:
    case = golden.case("train", name)
    model = _model(case, "local")
    optimizer, loader = _optimizer(case, model), _loader(golden, case, tmp_path)
    log = json.loads(golden.path(f"train/{name}/log_{RANK}.json").read_text())["log"]
    assert len(log) == case["train"]["steps"]
    for entry in log:
        loss = _accumulate(model, optimizer, loader, case)
        outcome = optimizer.step(entry["lr"], entry["wd"][0])
        assert outcome.grad_norm is not None
        assert math.isclose(loss, entry["lm_loss"], rel_tol=1e-4), entry["step"]
        assert math.isclose(outcome.grad_norm, entry["grad_norm"], rel_tol=1e-3), entry["step"]


def test_the_loss_per_token(golden: Goldens, tmp_path: Path) -> None:
    """The first two steps, whose rate is 0, through the step of a run; then the numbers of the original."""
    case = golden.case("train", "var_calc_per_token_loss")
    model = _model(case, "local")
    assert model.config.calculate_per_token_loss
    optimizer, loader = _optimizer(case, model), _loader(golden, case, tmp_path)
    streams = RandomStreams(1, ParallelContext.solo())
    schedule = ParameterSchedule(LearningRateSchedule(0.0, 0.0, 100, "constant"), WeightDecaySchedule(0.0, 0.0, 100))
    state = TrainState([model], optimizer, streams, schedule, context=ParallelContext.solo())
    log = json.loads(golden.path(f"train/var_calc_per_token_loss/log_{RANK}.json").read_text())["log"]
    result = train_step(state, iter(loader), case["train"]["gbs"] // case["train"]["mbs"])
    assert math.isclose(result.loss, log[0]["lm_loss"], rel_tol=1e-5)
    assert result.grad_norm is not None and math.isclose(result.grad_norm, log[0]["grad_norm"], rel_tol=1e-5)


def test_loss_scale_traces(golden: Goldens) -> None:
    for case in json.loads(golden.path("schedulers/grad_scaler.json").read_text()):
        config = case["config"]
        scale = DynamicLossScale(
            config["initial_scale"],
            config["min_scale"],
            config["growth_interval"],
            config["hysteresis"],
            config["growth_factor"],
            config["backoff_factor"],
        )
        for overflow, wanted in zip(case["found_inf"], case["trace"], strict=True):
            scale.update(bool(overflow))
            assert [scale.value, scale.inverse, scale.growth_tracker, scale.hysteresis_tracker] == wanted, case["name"]
