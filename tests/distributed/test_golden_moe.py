"""Expert parallelism of the real Megatron: weights, gradients and curves of two ranks (golden `moe`)."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalith.assemble.model import build_chunks, build_run_optimizer, draw_weights
from megalith.config import load
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.schedules.parameters import ParameterSchedule
from megalith.train.consensus import NeverStop, RankConsensus
from megalith.train.state import TrainState
from megalith.train.step import train_step

from .test_golden_train import _check_gradients, _flags, _loader, _Rates

CASES = ("ep2_allgather", "ep2_alltoall")
RANKS = 2


def _run(case: dict[str, Any], log: list[dict[str, Any]], data: str, cache: str) -> dict[str, Any]:
    fields, train = case["model"]["config"], case["train"]
    words = [word for word in _flags(case).split(" ") if word]
    run = load(words, {"WORLD_SIZE": str(RANKS), "RANK": "0"}, files=False)
    run = dataclasses.replace(
        run,
        model=dataclasses.replace(
            run.model,
            num_experts=fields["num_moe_experts"],
            moe_ffn_hidden_size=fields["moe_ffn_hidden_size"],
            moe_router_topk=fields["moe_router_topk"],
            moe_router_load_balancing_type=(fields["moe_router_load_balancing_type"],),
            moe_aux_loss_coeff=(fields["moe_aux_loss_coeff"],),
            moe_token_dispatcher_type=fields["moe_token_dispatcher_type"],
        ),
        parallel=dataclasses.replace(run.parallel, expert_model_parallel_size=case["parallel"]["ep"]),
    )
    context = ParallelContext.create(run.layout, torch.device("cpu"))
    streams = RandomStreams(train["seed"], context)
    chunks = build_chunks(run, case["model"]["vocab_size"], context)
    draw_weights(run, chunks, streams, context)
    optimizer = build_run_optimizer(run, chunks, context)
    rates = _Rates(tuple(entry["lr"] for entry in log), train["gbs"])
    decays = _Rates(tuple(entry["wd"][0] for entry in log), train["gbs"])
    state = TrainState(chunks, optimizer, streams, ParameterSchedule(rates, decays), context=context)  # type: ignore[arg-type]
    weights = {name: parameter.detach().clone() for name, parameter in chunks[0].named_parameters()}
    loader, sum_over_ranks = (
        _loader(case, data, cache, context),
        RankConsensus(NeverStop(), context, contributes=state.contributes_losses).sum_over_ranks,
    )
    steps, gradients = [], None
    for _ in log:
        result = train_step(state, loader, run.num_micro_batches, sum_over_ranks=sum_over_ranks)
        gradients = gradients or {name: grad.clone() for name, grad in optimizer.gradients.grad_shards.items()}
        own = chunks[0].auxiliary.recorded["load_balancing_loss"]
        steps.append((result.loss, result.grad_norm, result.num_zeros, [float(own[layer]) for layer in sorted(own)]))
    return {"weights": weights, "gradients": gradients, "steps": steps}


def _file(root: Path, name: str, stem: str) -> dict[str, Tensor]:
    """A file of a case, or of the first one, where byte-identical files are kept."""
    path = root / name / f"{stem}_tp0_pp0_ep0.safetensors"
    return load_file(path if path.exists() else root / CASES[0] / path.name)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_with_half_of_the_experts_each_repeat_the_golden(
    name: str, shared: Path, ranks: Any, tmp_path: Path
) -> None:
    root = shared / "golden" / "moe"
    cases = {case["name"]: case for case in json.loads((root / "manifest.json").read_text())["cases"] if "name" in case}
    case = cases[name]
    log = json.loads((root / name / "log_tp0_pp0_ep0.json").read_text())["log"]
    data = str(shared / "golden" / "train" / "data" / "shakes_text_document")
    results = ranks.run(RANKS, _run, case, log, data, str(tmp_path))
    weights = _file(root, name, "weights_init")
    assert set(results[0]["weights"]) == set(weights)
    for key, value in weights.items():
        assert torch.equal(results[0]["weights"][key], value), key
    _check_gradients(results[0]["gradients"], _file(root, name, "grads_step0"), 1.0)
    for result in results:
        for entry, (loss, norm, zeros, _) in zip(log, result["steps"], strict=True):
            assert math.isclose(loss, entry["lm_loss"], rel_tol=1e-6), entry["step"]
            assert math.isclose(norm, entry["grad_norm"], rel_tol=1e-5), entry["step"]
            assert zeros == entry["num_zeros"], entry
    for entry, (*_, balancing) in zip(log, results[0]["steps"], strict=True):  # kept of the first replica
        assert balancing == pytest.approx(entry["aux"]["load_balancing_loss"], rel=1e-6), entry["step"]
