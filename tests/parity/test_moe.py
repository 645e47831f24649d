"""Mixtures of experts of the real Megatron: weights, logits, every gradient, losses and curves (golden `moe`)."""

from __future__ import annotations

import json
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
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise_as_megatron_cpu
from megalith.optim import Optimizer, build_optimizer
from megalith.tokenizers.null import NullTokenizer
from megalith.train.moe import auxiliary_losses, begin_step, loss_names, move_biases

from .goldens import Goldens

RANK = "tp0_pp0"
SINGLE = (
    *("topk2_aux", "topk1_aux_preSoftmax", "topk2_presoftmax", "seq_aux", "global_aux", "none_zloss", "sinkhorn"),
    *("sigmoid_bias_deepseek", "shared_expert", "capacity_drop", "capacity_pad", "alltoall_tp1"),
    *("gelu_layernorm_moe", "layer_freq"),
)
WITH_WEIGHTS = ("alltoall_tp1", "gelu_layernorm_moe", "layer_freq", "shared_expert", "sigmoid_bias_deepseek")
"""Those whose initial weights are kept; the others begin with those of one of these."""
WITH_LOGITS = (
    *WITH_WEIGHTS,
    *("capacity_drop", "capacity_pad", "sinkhorn", "topk1_aux_preSoftmax", "topk2_presoftmax"),
)
ELSEWHERE = {"moe_token_dispatcher_type"}  # says how ranks exchange tokens, which one process does not


def _config(case: dict[str, Any]) -> ModelConfig:
    model, fields = case["model"], case["model"]["config"]
    routing = {name: value for name, value in fields.items() if name.startswith("moe_") and name not in ELSEWHERE}
    routing["moe_router_load_balancing_type"] = (routing["moe_router_load_balancing_type"],)
    routing["moe_aux_loss_coeff"] = (routing["moe_aux_loss_coeff"],)
    routing["moe_layer_freq"] = str(routing.get("moe_layer_freq", 1))
    return ModelConfig(
        num_layers=fields["num_layers"],
        hidden_size=fields["hidden_size"],
        num_attention_heads=fields["num_attention_heads"],
        max_position_embeddings=model["seq"],
        group_query_attention=True,
        num_query_groups=fields["num_query_groups"],
        ffn_hidden_size=fields["ffn_hidden_size"],
        kv_channels=fields["kv_channels"],
        position_embedding_type=model["pos"],
        normalization=fields["normalization"],
        norm_epsilon=fields["layernorm_epsilon"],
        swiglu=fields["gated_linear_unit"],
        add_bias_linear=fields["add_bias_linear"],
        untie_embeddings_and_output_weights=not model["tied"],
        bias_gelu_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        transformer_impl="local",
        num_experts=fields["num_moe_experts"],
        **routing,
    )


def _model(case: dict[str, Any]) -> GPT:
    model = GPT(_config(case), case["model"]["vocab_size"])
    initialise_as_megatron_cpu(model, torch.Generator().manual_seed(case["train"]["seed"]))
    return model.train()


def _optimizer(case: dict[str, Any], model: GPT) -> Optimizer:
    settings = case["train"]
    config = OptimizerConfig(
        adam_beta1=settings["b1"], adam_beta2=settings["b2"], adam_eps=settings["eps"], clip_grad=settings["clip"]
    )
    return build_optimizer(model, config, PrecisionConfig(), count_zeros=True)


def _loader(golden: Goldens, case: dict[str, Any], tmp_path: Path) -> BatchLoader:
    settings, prefix = case["train"], str(golden.path("train/data") / "shakes_text_document")
    options = GPTDatasetOptions(
        sequence_length=case["model"]["seq"],
        seed=settings["seed"],
        eod_mask_loss=False,
    )
    dataset = GPTDataset(
        IndexedDataset(prefix),
        SplitSpec(0, settings["steps"] * settings["gbs"], SplitRatios.parse("100,0,0"), prefix, cache_folder=tmp_path),
        options=options,
        tokenizer=NullTokenizer(511),
        class_name="GPTDataset",
    )
    return BatchLoader(dataset, micro_batch_size=settings["mbs"], consumed_samples=0)


def _accumulate(model: GPT, optimizer: Optimizer, loader: BatchLoader, case: dict[str, Any]) -> float:
    """One step's forward and backward passes; the mean loss."""
    count = case["train"]["gbs"] // case["train"]["mbs"]
    optimizer.zero_grad()
    begin_step([model], 1.0 / count)
    total = tokens = 0.0
    for _ in range(count):
        batch = next(loader)
        losses = model(batch["tokens"], position_ids_BS=batch["position_ids"], labels_BS=batch["labels"])
        mask = batch["loss_mask"]
        loss = (losses * mask).sum()
        (loss / mask.sum() / count).backward()
        total, tokens = total + float(loss.detach()), tokens + float(mask.sum())
    return total / tokens


def _close(actual: Tensor, wanted: Tensor, tolerance: float, what: str = "") -> None:
    difference = (actual.double() - wanted.double()).abs().max()
    assert difference <= tolerance * max(1e-2, float(wanted.double().abs().max())), what


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_initial_weights_bit_for_bit(golden: Goldens, name: str) -> None:
    wanted = load_file(golden.path(f"moe/{name}/weights_init_{RANK}.safetensors"))
    weights = dict(_model(golden.case("moe", name)).named_parameters())
    assert set(weights) == set(wanted)
    for key, value in weights.items():
        assert torch.equal(value, wanted[key]), key


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_logits_and_losses(golden: Goldens, name: str) -> None:
    wanted = load_file(golden.path(f"moe/{name}/forward_{RANK}.safetensors"))
    model = _model(golden.case("moe", name))
    with torch.no_grad():
        logits = model(wanted["tokens"])
    _close(logits.flatten(0, 1)[:16], wanted["logits_first16"], 1e-5)
    _close(logits.double().sum(-1), wanted["logits_rowsum_fp64"], 1e-5)
    _close(model(wanted["tokens"], labels_BS=wanted["labels"]), wanted["per_token_loss"], 1e-5)


@pytest.mark.parametrize("name", SINGLE)
def test_gradients_and_curves(golden: Goldens, tmp_path: Path, name: str) -> None:
    case = golden.case("moe", name)
    model = _model(case)
    optimizer, loader = _optimizer(case, model), _loader(golden, case, tmp_path)
    log = json.loads(golden.path(f"moe/{name}/log_{RANK}.json").read_text())["log"]
    gradients = golden.path(f"moe/{name}/grads_step0_{RANK}.safetensors")
    names = loss_names(model.config)
    for wanted in log:
        loss = _accumulate(model, optimizer, loader, case)
        if wanted["step"] == 0 and gradients.exists():
            _compare_gradients(optimizer, load_file(gradients))
        found = auxiliary_losses([model], names, 2, ParallelContext.solo()).tolist()
        outcome = optimizer.step(wanted["lr"], wanted["wd"][0])
        move_biases([model], ParallelContext.solo(), model.config.moe_router_bias_update_rate)
        assert loss == pytest.approx(wanted["lm_loss"], rel=1e-4)
        assert outcome.grad_norm == pytest.approx(wanted["grad_norm"], rel=1e-3)
        mixtures = sum(map(bool, model.config.experts))
        summed = {key: sum(values) / mixtures / 2 for key, values in wanted.get("aux", {}).items()}
        assert dict(zip(names, found, strict=True)) == pytest.approx(summed, rel=1e-4)


def _compare_gradients(optimizer: Optimizer, wanted: dict[str, Tensor]) -> None:
    optimizer.gradients.finish()
    assert {key.partition("#")[0] for key in wanted} == set(optimizer.gradients.grads)
    for key, value in wanted.items():
        name, _, part = key.partition("#")
        gradient = optimizer.gradients.grads[name]
        kept = {"": gradient, "first64rows": gradient[:64], "row_sums_fp64": gradient.double().sum(-1)}
        _close(kept[part], value, 1e-5, key)
