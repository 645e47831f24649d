"""Traces of routing: what is in the files is what the routers chose, for the steps that are asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config import LogConfig, ModelConfig
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.nn.moe.router import Router
from megalith.nn.moe.routing import Choice
from megalith.train.moe import begin_step, routers
from megalith.train.routing_trace import RoutingTrace

MODEL = ModelConfig(
    num_layers=3,
    hidden_size=8,
    num_attention_heads=2,
    max_position_embeddings=6,
    num_experts=4,
    moe_ffn_hidden_size=8,
    moe_layer_freq="[0,1,1]",
    position_embedding_type="rope",
    mtp_num_layers=1,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


@pytest.fixture
def model() -> GPT:
    model = GPT(MODEL, 16, dtype=torch.float32)
    initialise(model, 1)
    return model.train()


def log_of(
    folder: Path, *, steps: int | None = None, hidden_states: bool = False, logits: bool = False, weights: bool = False
) -> LogConfig:
    return LogConfig(
        moe_routing_trace_path=str(folder),
        moe_routing_trace_max_training_iters=steps,
        moe_routing_trace_capture_hidden_states=hidden_states,
        moe_routing_trace_capture_logits=logits,
        moe_routing_trace_dump_weights=weights,
    )


def step(model: GPT, number: int = 1) -> None:
    begin_step([model], 1.0)
    for _ in range(number):
        ids = torch.randint(16, (2, 6))
        batch = {"tokens": ids, "labels": ids, "loss_mask": torch.ones(2, 6)}
        batch["position_ids"] = torch.arange(6).expand(2, 6)
        torch.stack([loss.summed for loss in model.losses(model.prepare(batch), None)]).sum().backward()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "router_trace_rank3.jsonl").read_text().splitlines()]


def numbers(folder: Path, file: str, record: dict[str, Any], name: str) -> Tensor:
    start, size, shape = (record[f"{name}_{part}"] for part in ("offset", "bytes", "shape"))
    raw = bytearray((folder / f"{file}_rank3.bin").read_bytes()[start : start + size])
    return torch.frombuffer(raw, dtype=torch.bfloat16).view(shape)


def test_every_choice_of_the_steps_is_there(model: GPT, tmp_path: Path) -> None:
    trace = RoutingTrace(log_of(tmp_path / "new", steps=2, hidden_states=True, logits=True, weights=True), 3, [model])
    seen: list[tuple[int, Tensor, list[list[int]]]] = []

    def watch(router: Router, inputs: tuple[Tensor], choice: Choice) -> None:
        if router.training:
            seen.append((router.layer, inputs[0].detach().reshape(12, 8), choice.experts_TK.sort().values.tolist()))

    for router in routers([model]):
        router.register_forward_hook(watch)
    weights = {router.layer: router.weight.detach().clone() for router in routers([model])}
    biases = {router.layer: router.get_parameter("bias").detach() for router in routers([model])}
    for micro_batches in (2, 1, 1):
        step(model, micro_batches)
        with torch.no_grad():
            model.eval()(torch.zeros(1, 6, dtype=torch.long))
        model.train()
        trace.after_step(None)  # type: ignore[arg-type]
    trace.close()
    found = lines(tmp_path / "new")
    assert [record["step"] for record in found] == [0] * 6 + [1] * 3  # the third step is not asked for
    for record, (layer, x_TD, experts) in zip(found, seen, strict=False):
        place = {"block": "mtp", "layer": 0, "mtp_idx": 0} if layer == 3 else {"block": "decoder", "layer": layer}
        assert record.items() >= {**place, "stage": "pre_dispatch", "rank": 3, "num_tokens": 12, "topk": 2}.items()
        assert record["top_indices"] == experts
        assert torch.equal(numbers(tmp_path / "new", "hidden_states", record, "hs"), x_TD.bfloat16())
        logits = (x_TD @ weights[layer].t() + biases[layer]).bfloat16()
        torch.testing.assert_close(numbers(tmp_path / "new", "logits", record, "logit"), logits)
    state = torch.load(tmp_path / "new" / "router_state_rank3.pt", weights_only=True)
    assert state.keys() == {1, 2} and all(torch.equal(own["weight"], weights[layer]) for layer, own in state.items())
    assert state[1]["topk"] == 2 and state[1]["score_function"] == "softmax" and state[1]["expert_bias"] is None


def test_a_repeated_forward_pass_is_traced_once(model: GPT, tmp_path: Path) -> None:
    trace = RoutingTrace(log_of(tmp_path), 3, [model])
    step(model)
    with model.auxiliary.repeated():
        step(model)
    trace.close()
    assert [record["layer"] for record in lines(tmp_path)] == [1, 2, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["router_trace_rank3.jsonl"]


def test_of_a_step_that_is_computed_anew_the_last_time_counts(model: GPT, tmp_path: Path) -> None:
    trace = RoutingTrace(log_of(tmp_path), 3, [model])
    for micro_batches in (1, 2):  # as for the gradient noise, or where a step is doubted
        step(model, micro_batches)
    trace.after_step(None)  # type: ignore[arg-type]
    step(model)
    trace.close()
    assert [record["step"] for record in lines(tmp_path)] == [0] * 6 + [1] * 3


def test_a_resumed_run_goes_on_behind_its_trace(model: GPT, tmp_path: Path) -> None:
    for start in (0, 1):
        trace = RoutingTrace(log_of(tmp_path, steps=1, logits=True), 3, [model], start)
        for _ in range(2):
            step(model)
            trace.after_step(None)  # type: ignore[arg-type]
        trace.close()
    found = lines(tmp_path)
    assert [record["step"] for record in found] == [0] * 3 + [1] * 3
    size = found[0]["logit_bytes"]
    assert [record["logit_offset"] for record in found] == [size * number for number in range(6)]
