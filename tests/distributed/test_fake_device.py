"""Whole training steps and serving on an accelerator that there is none of (`tests/fake_device.py`).

No tensor of the CPU meets one of the device, in an operator or in a collective; every collective gets contiguous
memory; the losses are those of the CPU; and the host waits for the device once a step, when it reads what the step
found. No GPU and no compiler is needed; compiled layers are traced as for a GPU, but have no kernels of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.devices import H100, RTX_4090, V100

from megalith.checkpoint import DirectoryStore
from megalith.device import Capability
from megalith.layout import Layout
from megalith.models.gpt import GPT
from megalith.nn.attend import AttentionRule
from megalith.serve.cache import PagedKVCache
from megalith.serve.engine import Engine, Limits
from megalith.serve.model_runner import ModelRunner
from megalith.serve.request import Request, Sampling
from megalith.serve.runner import Batch, Chunk
from megalith.train.checkpoint_fit import Identity
from megalith.train.checkpoint_saver import AsyncSaver, CheckpointSaver
from megalith.train.results import StepResult
from megalith.train.step import train_step

from .. import fake_device
from ..front_end import front_end, graphs
from ..unit.serve.models import STYLES, Letters, collect, model_of, tokens_of
from .conftest import Ranks
from .test_parity import Case, batches_of, state_of
from .test_train_checkpoint import plain_tensors

pytestmark = pytest.mark.skipif(bool(fake_device.missing()), reason=fake_device.missing())

STEPS, MICRO_BATCHES = 2, 2
KV = "--kv-channels 8"  # a size of heads that flash attention takes
BF16, FP16 = f"--bf16 {KV}", f"--fp16 --initial-loss-scale 4096 {KV}"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
READ_ONCE = ["copy to the host at train/step.py"]


def steps_of(case: Case, flags: str, device: str = "cpu") -> Iterator[tuple[StepResult, fake_device.Record]]:
    """A few steps, and what the device would have done in each."""
    config, state = state_of(case, flags, device=device)
    batches, per_replica = batches_of(case, state.context.dp.index, STEPS), MICRO_BATCHES // case.layout.dp
    for _ in range(STEPS):
        loaded = list(islice(batches, per_replica))
        with fake_device.recorded() as record:
            result = train_step(state, iter(loaded), per_replica, pipeline_schedule=config.pipeline_schedule)
        yield result, record
    for chunk in state.chunks:
        assert {weight.device.type for weight in chunk.parameters()} == {torch.device(device).type}


def found_on_the_device(case: Case, flags: str, able: Capability) -> dict[str, Any]:
    """What a rank found in a few steps on the device."""
    device = fake_device.install(able)
    fake_device.check_collectives()
    without_triton = patch("megalith.assemble.model.require_compiler")
    with without_triton, front_end() if case.compiled else nullcontext({}) as breaks:
        found = list(steps_of(case, flags, str(device)))
        compiled = graphs() if case.compiled else 0
    return {
        "graphs": (compiled, dict(breaks)),
        "losses": [result.loss for result, _ in found],
        "applied": all(result.applied for result, _ in found),
        "waits": [[wait.rsplit(":", 1)[0] for wait in record.waits] for _, record in found],
        "launches": [dict(record.launches) for _, record in found],
        "collectives": [dict(record.collectives) for _, record in found],
    }


@cache
def losses_on_the_cpu(model: str, data: str, flags: str) -> list[float]:
    """The losses of one process."""
    return [result.loss for result, _ in steps_of(Case(Layout(), model, data=data), flags)]


_TP, _PP, _CP, _DP = Layout(tp=2), Layout(pp=2), Layout(cp=2), Layout(dp=2)
CASES = {
    "gpt2": (Case(Layout(), recompute="parts-core_attn+mlp+layernorm"), f"{BF16} {DROPOUT}", H100),
    "llama": (Case(Layout(), "llama"), BF16, H100),
    "recomputed": (Case(Layout(), "llama", recompute="uniform-2"), BF16, RTX_4090),
    "llama on Volta": (Case(Layout(), "llama"), f"{FP16} --log-num-zeros-in-grad", V100),
    "gpt2 on Volta": (Case(Layout()), f"{FP16} {DROPOUT}", V100),
    "fp64": (Case(Layout(), "llama"), "", RTX_4090),
    "sinks": (Case(Layout(), "sinks"), f"{BF16} --use-precision-aware-optimizer --exp-avg-dtype bf16", H100),
    "gates": (
        Case(Layout(), "gates", recompute="block-2"),
        f"{BF16} --use-precision-aware-optimizer --main-params-dtype fp16",
        H100,
    ),
    "latent": (Case(Layout(), "latent"), "--bf16", H100),
    "prediction": (Case(Layout(), "prediction"), BF16, H100),
    "documents": (Case(Layout(), "llama", data="documents"), BF16, H100),
    "t5": (Case(Layout(), "t5-relative", data="spans"), f"{BF16} {DROPOUT}", H100),
    "bert": (Case(Layout(), "bert", data="pairs"), BF16, H100),
    "muon": (Case(Layout(), "muon"), BF16, H100),
    "soap": (Case(Layout(), "soap"), "", H100),
    "per token": (Case(Layout(), "per-token"), BF16, H100),
    "experts": (Case(Layout(), "mixture"), BF16, H100),
    "TP": (Case(_TP), BF16, H100),
    "TP, SP": (Case(_TP, "llama", sequence_parallel=True), BF16, H100),
    "TP, SP, dropout": (Case(_TP, sequence_parallel=True), f"{FP16} {DROPOUT}", V100),
    "PP": (Case(_PP), BF16, H100),
    "PP, virtual stages": (Case(_PP, "llama", virtual_stages=2), FP16, V100),
    "PP, zero bubble": (Case(_PP, "llama", schedule="zb-h1"), BF16, H100),
    "CP": (Case(_CP, "llama"), BF16, H100),
    "CP, all to all": (Case(_CP, "llama", exchange="a2a"), FP16, V100),
    "CP, documents": (Case(_CP, data="documents"), BF16, H100),
    "DP": (Case(_DP), BF16, RTX_4090),
    "ZeRO-1": (Case(_DP, "llama", zero1=True), BF16, RTX_4090),
    "ZeRO-2": (Case(_DP, fsdp="zero2"), BF16, H100),
    "ZeRO-3": (Case(_DP, "llama", fsdp="zero3"), BF16, H100),
    "gpt2, compiled": (Case(Layout(), recompute="parts-core_attn+mlp+layernorm", compiled=True), BF16, H100),
    "llama, compiled": (Case(Layout(), "llama", compiled=True), BF16, H100),
    "latent, compiled": (Case(Layout(), "latent", compiled=True), "--bf16", H100),
    "sinks, compiled": (Case(Layout(), "sinks", compiled=True), BF16, H100),
    "documents, compiled": (Case(Layout(), "llama", data="documents", compiled=True), BF16, H100),
    "TP, SP, compiled": (Case(_TP, "llama", sequence_parallel=True, compiled=True), BF16, H100),
    "CP, compiled": (Case(_CP, "llama", compiled=True), BF16, H100),
    "ZeRO-3, compiled": (Case(_DP, "llama", fsdp="zero3", compiled=True), BF16, H100),
    "EP": (Case(Layout(dp=2, ep=2), "mixture", dispatcher="alltoall", zero1=True), BF16, H100),
    "EP, all-gather": (Case(Layout(dp=2, ep=2), "mixture"), FP16, V100),
}
LONG = {name for name, (case, *_) in CASES.items() if case.compiled} - {"llama, compiled", "TP, SP, compiled"}
GRAPHS = {
    "gpt2, compiled": 1,
    "llama, compiled": 1,
    "latent, compiled": 1,
    "TP, SP, compiled": 1,
    "ZeRO-3, compiled": 1,
}
"""Of a dense layer; a layer without its attention is more."""
_ROWS, _SENT = (f"copy to the host at {place}" for place in ("nn/moe/permutation.py", "parallel/experts.py"))
READS_OF_EXPERTS = {"experts": [_ROWS] * 6, "EP": [_SENT, _ROWS] * 3, "EP, all-gather": [_ROWS] * 3}
"""How many rows each expert gets decides shapes: read in each of the 3 MoE layers for each micro-batch of the rank."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if name in LONG else ()) for name in CASES])
def test_a_step(name: str, ranks: Ranks) -> None:
    case, flags, able = CASES[name]
    reference = KV if KV in flags else "--log-num-zeros-in-grad" if flags else ""  # with any flag in fp32, else in fp64
    wanted = losses_on_the_cpu(case.model, case.data, reference)
    for found in ranks.run(case.layout.world_size, found_on_the_device, case, flags, able):
        assert found["applied"]
        assert found["losses"] == pytest.approx(wanted, rel=0.1 if DROPOUT in flags else 2e-2 if flags else 1e-9)
        count, breaks = found["graphs"]
        assert bool(count) is case.compiled
        assert name not in GRAPHS or (count, breaks) == (GRAPHS[name], {})
        assert all(map(bool, found["collectives"])) is (case.layout.world_size > 1)
        for waits in found["waits"]:
            assert waits[-1:] == READ_ONCE and waits[:-1] == READS_OF_EXPERTS.get(name, [])


def _on_both() -> None:
    device = fake_device.install(H100)
    torch.ones(2, 2, device=device) @ torch.ones(2, 2)


def test_a_tensor_on_the_cpu_would_be_found(ranks: Ranks) -> None:
    with pytest.raises(pytest.fail.Exception, match="DeviceMismatch"):
        ranks.run(1, _on_both)


def _answers(style: str, device: str, dtype: torch.dtype) -> list[list[int]]:
    model = GPT(STYLES[style], 32, dtype=dtype, device=torch.device(device))
    model.load_state_dict(model_of(style).state_dict())
    engine = Engine(ModelRunner(model, 64, 4), Letters(), Limits(max_num_seqs=4))
    prompts = [(0, 1, 0, 1, 5), (7,) * 9, (3, 4), (9, 8, 7, 6, 5, 4, 3, 2, 1)]
    requests = [Request(prompt, 8, sampling=Sampling(temperature=0.0), stop_ids=()) for prompt in prompts]
    return [tokens_of(events) for events in collect(engine, requests)]


def answers_of_the_device(style: str, able: Capability, dtype: torch.dtype) -> list[list[int]]:
    return _answers(style, str(fake_device.install(able)), dtype)


@pytest.mark.parametrize("style", STYLES)
def test_answers_are_those_of_the_cpu(style: str, ranks: Ranks) -> None:
    assert ranks.run(1, answers_of_the_device, style, H100, torch.float64) == [_answers(style, "cpu", torch.float64)]


# --- attention in serving ---

HEADS, GROUPS, SIZE = 4, 2, 8
RULES = {
    "plain": AttentionRule(scale=0.3),
    "window": AttentionRule(window=3),
    "sinks": AttentionRule(sink_H=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "both": AttentionRule(scale=0.3, window=5, sink_H=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}
SERVED = [  # blocks of four tokens that do not follow each other: prompts, then a chunk beside two decoded tokens
    Batch([Chunk([0] * 9, 0, [0, 3, 6]), Chunk([0] * 6, 0, [1, 4]), Chunk([0] * 7, 0, [2, 5])]),
    Batch([Chunk([0] * 5, 9, [0, 3, 6, 8]), Chunk([0], 6, [1, 4]), Chunk([0], 7, [2, 5])]),
]


def _attended(rule: AttentionRule, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, fake_device.Record]:
    """What the tokens of the second batch get, and what the device does for it."""
    here, generator = torch.device(device), torch.Generator().manual_seed(1)
    cache = PagedKVCache(1, 10, 4, GROUPS, SIZE, dtype=dtype, device=here)
    rule = rule if rule.sink_H is None else replace(rule, sink_H=rule.sink_H.to(here, dtype))
    for batch in SERVED:
        tokens = sum(len(chunk.tokens) for chunk in batch.chunks)
        drawn = [torch.randn(tokens, 1, heads, SIZE, generator=generator) for heads in (HEADS, GROUPS, GROUPS)]
        q, k, v = (x.bfloat16().to(here, dtype) for x in drawn)
        with fake_device.recorded() as record:
            (layer,) = cache.begin(batch).layers
            context = layer.attend(q, k, v, rule)
    return context.to("cpu", torch.float32), record


def attended_on_the_device(
    rule: str, able: Capability, dtype: torch.dtype
) -> tuple[torch.Tensor, list[str], list[str]]:
    context, record = _attended(RULES[rule], str(fake_device.install(able)), dtype)
    return context, record.waits, sorted(name for name in record.launches.elements() if "attention" in name)


CHUNK, GROUP = "_flash_attention_forward", "_scaled_dot_product_efficient_attention"
KERNELS = {"plain": ["_efficient_attention_forward", GROUP], "window": [GROUP] * 2, "sinks": [GROUP] * 2}


@pytest.mark.parametrize(("able", "dtype"), [(H100, torch.bfloat16), (V100, torch.float16)], ids=["H100", "V100"])
@pytest.mark.parametrize("rule", RULES)
def test_a_chunk_and_decoding_sequences_are_one_call_each(
    rule: str, able: Capability, dtype: torch.dtype, ranks: Ranks
) -> None:
    """A chunk needs no mask where a kernel aligns causality with the last key, and no copy waits for the device."""
    ((context, waits, kernels),) = ranks.run(1, attended_on_the_device, rule, able, dtype)
    assert waits == []
    assert kernels == ([CHUNK, GROUP] if able is H100 else KERNELS.get(rule, [GROUP] * 2))
    wanted, _ = _attended(RULES[rule], "cpu", torch.float32)
    torch.testing.assert_close(context, wanted, rtol=0, atol=2**-7 if dtype == torch.bfloat16 else 2**-10)


# --- saves ---


def saved_by_the_device(folder: str, able: Capability) -> tuple[list[str], list[str]]:
    """Save a state at once, and again beside a step; where the host waited, but for threads that copy."""
    device = fake_device.install(able)
    case = Case(Layout(), "llama")
    config, state = state_of(case, BF16, device=str(device))
    batches = batches_of(case, 0, STEPS)
    train_step(state, batches, MICRO_BATCHES)
    at_once, beside = (
        CheckpointSaver(DirectoryStore(f"{folder}/{name}", state.context), config, Identity({}, {}, {}))
        for name in ("at once", "beside")
    )
    at_once.save(state)
    saver = AsyncSaver(beside)
    saver.reserve(state)
    with fake_device.recorded() as record:
        saver.schedule(state)
        saver.wait_for_copies()
    train_step(state, batches, MICRO_BATCHES)
    while saver.advance() is None:
        pass
    saver.close()
    copies = [wait for wait in record.waits if "checkpoint/store/staging.py" in wait]
    return copies, [wait for wait in record.waits if wait not in copies]


def test_an_asynchronous_save_holds_what_a_synchronous_one_does(ranks: Ranks, tmp_path: Path) -> None:
    ((copies, waits),) = ranks.run(1, saved_by_the_device, str(tmp_path), H100)
    assert copies and waits == []
    wanted, found = (plain_tensors(DirectoryStore(tmp_path / name).folder(1)) for name in ("at once", "beside"))
    assert wanted.keys() == found.keys() and len(wanted) > 10
    assert [name for name, tensor in wanted.items() if not torch.equal(tensor, found[name])] == []
