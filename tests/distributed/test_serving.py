"""The engine over ranks answers as it does in one process, in fp64, whatever the layout."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.api import Attend, Linear, Region, Split, column, row
from megalith.assemble.adapters import adapter_reader
from megalith.assemble.model import copy_shared_weight
from megalith.assemble.trained import load_trained
from megalith.config import ModelConfig
from megalith.config.groups import TokenizerConfig
from megalith.distributed.context import ParallelContext
from megalith.errors import LayoutError, PeerError
from megalith.layout import Layout, shard_range
from megalith.models.families import model_class
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.models.language_model import Stage
from megalith.models.t5 import T5
from megalith.parallel.tensor import TensorParallel
from megalith.registry import Entry, Registered
from megalith.serve.engine import Engine, Limits
from megalith.serve.model_runner import DecoderPrompt, ModelRunner, RankRunner, unpack
from megalith.serve.request import Beams, Event, Request, Sampling, Token

from ..unit.serve import models
from .conftest import Ranks


class OwnAttention(nn.Module):
    """As a user writes one for tensor parallelism (docs/extending.md)."""

    def __init__(self, config: ModelConfig, layer: int, *, region: Region, **factory: Any) -> None:
        super().__init__()
        self.region, self.size = region, config.head_size
        self.heads = region.shard(config.num_attention_heads).size
        width = self.heads * self.size
        self.qkv = nn.ModuleList(Linear(config.hidden_size, width, Split(0), bias=False, **factory) for _ in range(3))
        self.linear_proj = Linear(width, config.hidden_size, Split(1), bias=False, **factory)
        self.temperature = nn.Parameter(torch.ones(self.heads, **factory))

    def placements(self) -> dict[str, Any]:
        return {"temperature": Split(0)}

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        linears = cast("Any", self.qkv)
        q, k, v = (x.unflatten(-1, (self.heads, self.size)) for x in column(hidden, self.region, *linears))
        q = attend.rotate(q) * self.temperature[:, None] * 1.5
        return row(attend(q, attend.rotate(k), v).flatten(2), self.region, self.linear_proj)


REGISTERED = dataclasses.replace(
    models.GPT2,
    position_embedding_type="rope",
    attention=Registered(Entry("attention", "own", OwnAttention)),
)
VOCABULARY, PADDED = 27, 30  # 30 divides over neither 4 ranks nor evenly into heads
STYLES = {
    name: dataclasses.replace(config, num_layers=3, max_position_embeddings=40)
    for name, config in {**models.STYLES, **models.ANSWERING, "registered": REGISTERED}.items()
}
BLOCKS = {"num_blocks": 14, "block_size": 4}  # too few for all at once


class Numbers:
    """A tokenizer whose text is ids."""

    vocab_size, eod, pad = VOCABULARY, 0, None

    def decode(self, ids: Any) -> str:
        return "".join(f"<{token}>" for token in ids)


def _requests(*, answers: bool) -> list[Request]:
    greedy = Sampling(0.0)
    return [
        Request((1, 2, 3, 4, 5, 6, 7), 12, greedy, stop_ids=()),
        Request((1, 2, 3, 4, 5, 6, 8, 9, 10), 9, greedy, stop_ids=(), logprobs=2, prompt_logprobs=not answers),
        Request((3,), 14, Sampling(1.5), seed=5, n=3),
        Request((1, 2, 3, 4), 10, Sampling(top_p=0.8), seed=6),
        Request((9, 9, 4), 6, beam_width=3),
    ]


def _answers(engine: Engine) -> list[Any]:
    handles = [engine.submit(request) for request in _requests(answers=engine.decoder_prompt is not None)]
    events: dict[Any, list[Event]] = {handle: [] for handle in handles}
    while engine.has_work:
        for handle, event in engine.step():
            events[handle].append(event)
    answers: list[Any] = []
    for handle in handles:
        for event in events[handle]:
            if isinstance(event, Beams):
                answers.append(event.hypotheses)
            if isinstance(event, Token):
                answers.append((handle.id, event.sample, event.id, event.text))
    return answers


def _alone(style: str) -> list[Any]:
    model = model_class(STYLES[style])(STYLES[style], PADDED, dtype=torch.float64)
    initialise(model, 3)
    assert isinstance(model, GPT | T5)
    return _answers(_engine(ModelRunner(model, **BLOCKS), style))


def _engine(runner: ModelRunner | RankRunner, style: str) -> Engine:
    opening = DecoderPrompt(1, 0) if style in models.ANSWERING else None
    return Engine(runner, cast("Any", Numbers()), Limits(max_num_batched_tokens=9), decoder_prompt=opening)


def _model(style: str, context: ParallelContext) -> GPT | T5:
    config, pipeline = STYLES[style], context.pp
    stage = Stage(
        range(*shard_range(config.num_layers, pipeline.size, pipeline.index)), pipeline.is_first, pipeline.is_last
    )
    region = TensorParallel(context.tp) if context.tp.size > 1 else None
    model = model_class(config)(config, PADDED, region=region, stage=stage, dtype=torch.float64)
    initialise(model, 3)
    copy_shared_weight([model], context)
    assert isinstance(model, GPT | T5)
    return model


def serve_on_rank(style: str, tp: int, pp: int) -> list[Any]:
    context = ParallelContext.create(Layout(tp=tp, pp=pp), torch.device("cpu"))
    runner = RankRunner(_model(style, context), context, **BLOCKS)
    if context.rank:
        runner.follow()
        return []
    engine = _engine(runner, style)
    engine.step()  # nothing to do: a ping
    answers = _answers(engine)
    engine.close()
    engine.close()
    return answers


LAYOUTS = [
    *((style, *layout) for style in ("gpt2", "llama") for layout in ((2, 1), (1, 2), (2, 2), (1, 3), (4, 1))),
    *((style, 2, 2) for style in ("experts", "latent")),
    *((style, 2, 1) for style in models.ANSWERING),
    ("published", 4, 1),
    ("registered", 2, 1),
]


@pytest.mark.parametrize(("style", "tp", "pp"), LAYOUTS)
def test_every_layout_gives_the_same_answers(ranks: Ranks, style: str, tp: int, pp: int) -> None:
    found, *others = ranks.run(tp * pp, serve_on_rank, style, tp, pp)
    assert found == _alone(style)
    assert not any(others)


LORA = Path(__file__).parents[1] / "parity" / "fixtures" / "lora" / "llama"


def _adapted(context: ParallelContext) -> tuple[GPT, dict[str, Any]]:
    """The model of a fixture on this rank in fp64, and its adapters."""
    trained = load_trained(
        LORA / "base",
        torch.device("cpu"),
        tokenizer=TokenizerConfig("NullTokenizer", vocab_size=47),
        context=context,
        dtype=torch.float64,
    )
    assert isinstance(trained.model, GPT)
    return trained.model, dict(adapter_reader(trained, LORA / "base", context)(LORA / "adapter"))


def _adapted_answers(runner: ModelRunner, adapters: dict[str, Any]) -> list[Any]:
    engine = Engine(runner, cast("Any", Numbers()))
    engine.add_adapters(1, adapters)
    requests = [Request((5, 6, 7, 8), 10, Sampling(0.0), stop_ids=(), logprobs=1, adapter=n) for n in (0, 1, 0, 1)]
    found = [[event for event in events if isinstance(event, Token)] for events in models.collect(engine, requests)]
    engine.close()
    return [[(token.id, round(token.logprob or 0.0, 9)) for token in tokens] for tokens in found]


def serve_adapters_on_rank(tp: int, pp: int) -> list[Any]:
    context = ParallelContext.create(Layout(tp=tp, pp=pp), torch.device("cpu"))
    model, adapters = _adapted(context)
    runner = RankRunner(model, context, num_blocks=14, adapts=True)
    if context.rank:
        runner.add_adapters(1, adapters)
        runner.follow()
        return []
    return _adapted_answers(runner, adapters)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_adapters_of_a_request_are_those_of_every_layout(ranks: Ranks, tp: int, pp: int) -> None:
    model, adapters = _adapted(ParallelContext.solo())
    alone = _adapted_answers(ModelRunner(model, num_blocks=14, adapts=True), adapters)
    assert alone[0] == alone[2] != alone[1] == alone[3]
    assert ranks.run(2, serve_adapters_on_rank, tp, pp)[0] == alone


def replicas_on_rank() -> str:
    context = ParallelContext.create(Layout(dp=2), torch.device("cpu"))
    try:
        RankRunner(_model("gpt2", context), context, **BLOCKS)
    except LayoutError as error:
        return str(error)
    return ""


def test_replicas_are_refused(ranks: Ranks) -> None:
    assert all("--tensor-model-parallel-size 1" in text for text in ranks.run(2, replicas_on_rank))


def _lose_a_rank(rank: int, folder: str, tp: int) -> None:
    """Rank 1 dies after a few messages; rank 0 ends with 0 if it hears of it as an error."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    context = ParallelContext.create(Layout(tp=tp, pp=2 // tp), torch.device("cpu"))
    runner = RankRunner(_model("gpt2", context), context, **BLOCKS)
    if rank:
        for _ in range(3):
            runner._run_guarded(unpack(runner._receive_command()[1]))
        os._exit(9)
    engine = Engine(runner, cast("Any", Numbers()))
    engine.submit(Request((1, 2, 3), 30, stop_ids=()))
    began = time.monotonic()
    with suppress(PeerError):
        while True:
            engine.step()
    os._exit(0 if time.monotonic() - began < 20 else 1)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_that_dies_is_an_error_of_the_step_and_no_hang(tmp_path: Path, tp: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_lose_a_rank, args=(rank, str(tmp_path), tp)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0, 9]
