"""The engine's laws: what it answers is what the model says, whatever else it has to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.serve import cache as kv_cache
from megalith.serve.engine import Engine, Limits
from megalith.serve.model_runner import ModelRunner, pack, unpack
from megalith.serve.request import (
    Beams,
    Finished,
    PromptLogprobs,
    QueueFullError,
    Request,
    RequestError,
    Sampling,
    Token,
)
from megalith.serve.runner import Batch, Chunk

from ...fake_runner import FakeRunner
from .models import CONTEXT, STYLES, VOCABULARY, Letters, collect, full_forward, model_of, text_of, tokens_of

GREEDY = Sampling(temperature=0.0)
PLAIN: dict[str, Any] = {"sampling": GREEDY, "stop_ids": ()}


def _engine(limits: Limits | None = None, **runner: Any) -> Engine:
    return Engine(FakeRunner(VOCABULARY, **runner), Letters(), limits)


_BASES = ((0, 1) * 15, (1,) * 30, (0, 1, 0, 1, 0, 1, 5, 5, 9, 2, 8, 3) * 2)
POOL = [base[:length] for base in _BASES for length in (1, 5, 12, 23)]
LONGEST = 12
MIXTURES = {
    "prompts": st.lists(st.sampled_from(POOL), min_size=1, max_size=6),
    "count": st.integers(1, LONGEST),
    "gaps": st.lists(st.integers(0, 3), max_size=6),
    "max_num_batched_tokens": st.integers(1, 24),
    "running": st.integers(1, 6),
    "block_size": st.integers(1, 6),
    "tight": st.booleans(),
}
"""The prompts share beginnings."""


@cache
def _wanted(style: str, prompt: tuple[int, ...]) -> list[int]:
    return full_forward(model_of(style), prompt, LONGEST)[0]


def _mixed(
    model: Any, requests: Sequence[Request], block_size: int, tight: bool, limits: Limits, grouped: bool = False
) -> Engine:
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    num_blocks = -(-longest // block_size) + 1 if tight else 400 // block_size
    runner = ModelRunner(model, num_blocks, block_size)
    runner.cache.groups_decoding = grouped
    return Engine(runner, Letters(), limits)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=25, deadline=None)
@given(**MIXTURES, grouped=st.booleans())
def test_greedy_answers_are_those_of_full_passes(
    style: str,
    prompts: list[tuple[int, ...]],
    count: int,
    gaps: list[int],
    max_num_batched_tokens: int,
    running: int,
    block_size: int,
    tight: bool,
    grouped: bool,
) -> None:
    model = model_of(style)
    requests = [Request(prompt, count, **PLAIN) for prompt in prompts]
    engine = _mixed(model, requests, block_size, tight, Limits(max_num_batched_tokens, running), grouped)
    for request, events in zip(requests, collect(engine, requests, gaps), strict=True):
        assert tokens_of(events) == _wanted(style, request.prompt)[:count]
        assert events[-1] == Finished("length")
    assert engine.stats().blocks_used == 0


@settings(max_examples=25, deadline=None)
@given(**MIXTURES, seed=st.integers(0, 99))
def test_a_seed_means_the_same_answer_in_every_batch(
    prompts: list[tuple[int, ...]],
    count: int,
    gaps: list[int],
    max_num_batched_tokens: int,
    running: int,
    block_size: int,
    tight: bool,
    seed: int,
) -> None:
    model = model_of("llama")
    kinds = [Sampling(1.3), Sampling(top_p=0.9), Sampling(2.0, top_k=5), Sampling(frequency_penalty=0.5)]
    requests = [
        Request(prompt, count, kinds[index % 4], seed=seed + index, n=1 + index % 3, logprobs=index % 2)
        for index, prompt in enumerate(prompts)
    ]
    engine = _mixed(model, requests, block_size, tight, Limits(max_num_batched_tokens, running))
    alone = Engine(ModelRunner(model, 300, 16), Letters())
    for request, events in zip(requests, collect(engine, requests, gaps), strict=True):
        wanted = list(alone.run(request))
        for sample in range(request.n):
            assert tokens_of(events, sample) == tokens_of(wanted, sample)
            assert text_of(events, sample) == text_of(wanted, sample)


def test_on_an_accelerator_sequences_that_get_one_token_share_a_call_of_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, attention = list[int](), kv_cache.scaled_dot_product_attention

    def counted(q: torch.Tensor, *keys_and_values: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(len(q))
        return attention(q, *keys_and_values, **options)

    monkeypatch.setattr(kv_cache, "scaled_dot_product_attention", counted)
    model = model_of("llama")
    for grouped, rows, wanted in ((False, 1 << 17, [1] * 5), (True, 1 << 17, [5]), (True, 21, [3, 2])):
        monkeypatch.setattr(kv_cache, "_ROWS_AT_ONCE", rows)
        requests = [Request((1, 2, 3)[:length], 9, **PLAIN) for length in (2, 3, 2, 3, 2)]
        engine = _mixed(model, requests, 4, False, Limits(), grouped)
        for request in requests:
            engine.submit(request)
        for _ in range(4):  # the prompts, then tokens: sequences of 5 and 6 positions at the end
            calls.clear()
            engine.step()
        assert calls == wanted * model.config.num_layers


def test_in_single_precision_only_close_calls_may_differ(record_property: Callable[[str, object], None]) -> None:
    model = model_of("gpt2", torch.float32)
    prompts = [tuple((start * 7 + i * 3) % 26 for i in range(1 + start)) for start in range(12)]
    requests = [Request(prompt, 20, **PLAIN) for prompt in prompts]
    engine = Engine(ModelRunner(model, 200, 4), Letters(), Limits(max_num_batched_tokens=16))
    close = 0
    for request, events in zip(requests, collect(engine, requests), strict=True):
        wanted, margins = full_forward(model, request.prompt, 20)
        for token, other, margin in zip(tokens_of(events), wanted, margins, strict=True):
            if token != other:
                assert margin < 1e-4
                close += 1
                break
    record_property("answers_that_differ_at_a_close_call", close)


@pytest.mark.parametrize("max_num_batched_tokens", [3, 64])
def test_scores_of_a_prompt_are_those_of_one_full_pass(max_num_batched_tokens: int) -> None:
    model, prompt = model_of("llama"), (3, 1, 4, 1, 5, 9, 2, 6)
    engine = Engine(ModelRunner(model, 20, 4), Letters(), Limits(max_num_batched_tokens))
    for _ in range(2):  # the second time the blocks are there already, and must be read all the same
        events = list(engine.run(Request(prompt, 0, prompt_logprobs=True, logprobs=2)))
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt]))[0, :, :VOCABULARY].log_softmax(-1)
        scores, finished = events
        assert isinstance(scores, PromptLogprobs) and finished == Finished("length")
        assert scores.logprobs[0] is None and len(scores.logprobs) == len(prompt)
        assert scores.logprobs[1:] == pytest.approx([float(wanted[i, t]) for i, t in enumerate(prompt[1:])])
        assert [top[0][0] for top in scores.top[1:]] == wanted.argmax(-1).tolist()[:-1]
        assert all(len(top) == 2 for top in scores.top[1:])


def test_log_probabilities_of_an_answer() -> None:
    model, prompt = model_of("gpt2"), (3, 1, 4)
    events = list(Engine(ModelRunner(model, 20, 4), Letters()).run(Request(prompt, 6, seed=1, logprobs=3)))
    ids = list(prompt)
    for event in events[:-1]:
        assert isinstance(event, Token) and event.logprob is not None
        with torch.inference_mode():
            wanted = model(torch.tensor([ids]))[0, -1, :VOCABULARY].log_softmax(-1)
        assert event.logprob == pytest.approx(float(wanted[event.id]))
        assert [token for token, _ in event.top] == wanted.topk(3).indices.tolist()
        ids.append(event.id)


# --- ends ---


def _says(text: str) -> Any:
    """A model that says this text after the prompt "a"."""
    return lambda tokens: Letters().encode(text)[len(tokens) - 1]


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        ((" is",), "the king", " is"),
        (("kings", "e k"), "th", "e k"),
        (("queen",), "the king is heavy", None),
        (("heavyx",), "the king is heavy", None),
        (("t",), "", "t"),
        (("ing is heavy",), "the k", "ing is heavy"),
    ],
)
def test_stop_texts_cut_the_answer_and_are_never_shown(stops: tuple[str, ...], text: str, stop: str | None) -> None:
    engine = _engine(follow=_says("the king is heavy"))
    events = list(engine.run(Request((0,), 17, GREEDY, stop_texts=stops)))
    assert text_of(events) == text
    assert events[-1] == (Finished("stop", stop=stop) if stop else Finished("length"))
    shown = ""
    for event in events[:-1]:
        assert isinstance(event, Token)
        shown += event.text
        assert not any(stop in shown for stop in stops)


def test_stop_ids_come_without_text() -> None:
    engine = _engine(follow=lambda tokens: Letters.eod if len(tokens) == 4 else 1)
    request = Request((0,), 9, GREEDY)
    events = list(engine.run(request))
    assert (tokens_of(events), text_of(events)) == ([1, 1, 1, Letters.eod], "bbb")
    assert events[-1] == Finished("stop", stop=Letters.eod)
    assert list(_engine(follow=lambda tokens: 5).run(Request((0,), 9, GREEDY, stop_ids=(5,))))[-1] == Finished(
        "stop", stop=5
    )
    assert tokens_of(list(engine.run(Request((0,), 5, **PLAIN)))) == [1, 1, 1, Letters.eod, 1]


def test_the_context_ends_an_answer() -> None:
    engine = _engine(context_length=10)
    events = list(engine.run(Request((1, 2, 3), 100, **PLAIN)))
    assert len(tokens_of(events)) == 7 and events[-1] == Finished("length")


def test_a_cancelled_request_leaves_no_trace() -> None:
    engine = _engine()
    first = engine.submit(Request((1, 2, 3), 50, GREEDY, n=2))
    second = engine.submit(Request((1, 2, 3), 5, **PLAIN))
    engine.step()
    engine.cancel(first)
    engine.cancel(first)
    events = []
    while engine.has_work:
        events += engine.step()
    assert [event for handle, event in events if handle is first and isinstance(event, Finished)] == [
        Finished("cancelled", sample=0),
        Finished("cancelled", sample=1),
    ]
    assert sum(isinstance(event, Token) for handle, event in events if handle is second) >= 4
    assert engine.stats().blocks_used == 0


def test_a_diverged_model_fails_the_request_and_not_the_engine() -> None:
    model = model_of("gpt2")
    engine = Engine(ModelRunner(model, 20, 4), Letters())
    model.output_weight[3] = float("nan")
    (finished,) = engine.run(Request((1, 2), 5))
    assert isinstance(finished, Finished) and finished.reason == "error" and "not finite" in finished.message
    assert engine.stats().blocks_used == 0


# --- what cannot be served ---


@pytest.mark.parametrize(
    ("request_", "field", "text"),
    [
        (Request((), 5), "prompt", "empty"),
        (Request((99,), 5), "prompt", "token 99"),
        (Request((-1,), 5), "prompt", "token -1"),
        (Request((1,) * 128, 5), "prompt", "has 128 tokens, and the model reads 128 .* by 1 or more"),
        (Request((1,), 0), "max_new_tokens", "0 is not 1 or more"),
        (Request((1,), 5, n=0), "n", "0 is not 1 to 128"),
        (Request((1,), 5, n=10**6), "n", "1000000"),
        (Request((1,), 5, logprobs=21), "logprobs", "21 is not 0 to 20"),
        (Request((1,), 5, Sampling(temperature=-1)), "temperature", "-1"),
        (Request((1,), 5, stop_texts=("",)), "stop_texts", "empty"),
        (Request((1,), 5, stop_texts=("a",) * 33), "stop_texts", "32"),
        (Request((1,), 5, beam_width=15), "beam_width", "half"),
        (Request((1,), 5, beam_width=2, n=2), "beam_width", "n=1"),
    ],
)
def test_what_cannot_be_served_names_its_field(request_: Request, field: str, text: str) -> None:
    engine = _engine()
    with pytest.raises(RequestError, match=text) as raised:
        engine.submit(request_)
    assert raised.value.field == field
    assert not engine.has_work


def test_the_queue_is_bounded() -> None:
    engine = _engine(Limits(max_num_seqs=2, max_waiting=3))
    for _ in range(3):
        engine.submit(Request((1,), 5))
    with pytest.raises(QueueFullError, match="3 of at most 3"):
        engine.submit(Request((1,), 5))
    engine.step()
    engine.submit(Request((1,), 5))


# --- beams ---


def _naive_beams(model: Any, prompt: list[int], count: int, width: int, penalty: float, eod: int) -> list[Any]:
    """Megatron's search over full passes, written down plainly."""
    beams = [(0.0, list(prompt))]
    found: list[tuple[float, list[int]]] = []
    for length in range(1, count + 1):
        totals = []
        for score, ids in beams:
            with torch.inference_mode():
                logprobs = model(torch.tensor([ids]))[0, -1, :VOCABULARY].log_softmax(-1)
            totals += [(score + float(value), [*ids, token]) for token, value in enumerate(logprobs)]
        totals.sort(key=lambda total: -total[0])
        beams = []
        for rank, (score, ids) in enumerate(totals[: 2 * width]):
            if ids[-1] != eod:
                beams.append((score, ids))
            elif rank < width:
                found = sorted([*found, (score / length**penalty, ids[len(prompt) : -1])], reverse=True)[:width]
            if len(beams) == width:
                break
        if len(found) == width and found[-1][0] >= totals[0][0] / length**penalty:
            return found
    found += [(score / count**penalty, ids[len(prompt) :]) for score, ids in beams]
    return sorted(found, reverse=True)[:width]


@pytest.mark.parametrize(
    ("width", "penalty", "tight"), [(1, 1.0, False), (3, 0.0, True), (3, 2.0, False), (4, 1.0, True)]
)
def test_beam_search_is_megatrons(width: int, penalty: float, tight: bool) -> None:
    model, prompt = model_of("gpt2", seed=3), [3, 1, 4, 1, 5]
    model.output_weight[Letters.eod] *= 3  # so that some hypotheses end
    limits = Limits(max_num_batched_tokens=4) if tight else None
    engine = Engine(ModelRunner(model, 5 if tight else 60, 4), Letters(), limits)
    beams, finished = engine.run(Request(tuple(prompt), 7, beam_width=width, length_penalty=penalty))
    assert isinstance(beams, Beams) and isinstance(finished, Finished)
    wanted = _naive_beams(model, prompt, 7, width, penalty, Letters.eod)
    assert [list(hypothesis) for hypothesis in beams.hypotheses] == [ids for _, ids in wanted]
    assert beams.scores == pytest.approx([score for score, _ in wanted])
    assert engine.stats().blocks_used == 0


@pytest.mark.parametrize("penalty", [1e300, -1e300, -1e3, 1e3])
def test_beam_search_survives_every_length_penalty(penalty: float) -> None:
    model = model_of("gpt2", seed=3)
    model.output_weight[Letters.eod] *= 3
    engine = Engine(ModelRunner(model, 60, 4), Letters())
    beams, _ = engine.run(Request((3, 1, 4), 7, beam_width=3, length_penalty=penalty))
    assert isinstance(beams, Beams)
    assert len(beams.hypotheses) == 3 and all(map(math.isfinite, beams.scores))
    assert engine.stats().blocks_used == 0


# --- the fake runner, and messages between ranks ---


@settings(max_examples=50, deadline=None)
@given(**MIXTURES)
def test_the_fake_runner_sees_whole_sequences(
    prompts: list[tuple[int, ...]],
    count: int,
    gaps: list[int],
    max_num_batched_tokens: int,
    running: int,
    block_size: int,
    tight: bool,
) -> None:
    longest = max(map(len, prompts)) + count
    num_blocks = -(-longest // block_size) + 1 if tight else 200
    runner = FakeRunner(VOCABULARY, 128, block_size=block_size, num_blocks=num_blocks)
    requests = [Request(prompt, count, n=2, **PLAIN) for prompt in prompts]
    for request, events in zip(
        requests,
        collect(Engine(runner, Letters(), Limits(max_num_batched_tokens, running)), requests, gaps),
        strict=True,
    ):
        ids = list(request.prompt)
        for _ in range(count):
            ids.append(runner._mixture(ids))
        assert tokens_of(events, 0) == tokens_of(events, 1) == ids[len(request.prompt) :]


CHUNKS = st.builds(
    Chunk,
    tokens=st.lists(st.integers(0, 99), min_size=1, max_size=5),
    start=st.integers(0, 50),
    blocks=st.lists(st.integers(0, 99), min_size=1, max_size=5),
    num_logits=st.integers(0, 1),
    encoder_length=st.integers(0, 9),
)


@given(st.lists(CHUNKS, max_size=4), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3))
def test_a_batch_survives_its_way_to_other_ranks(chunks: list[Chunk], copies: list[tuple[int, int]]) -> None:
    assert unpack(pack(Batch(chunks, copies))) == Batch(chunks, copies)


def test_the_context_of_the_small_models() -> None:
    assert Engine(ModelRunner(model_of("gpt2"), 100, 16), Letters()).context_length == CONTEXT
    assert Engine(ModelRunner(model_of("gpt2"), 2, 16), Letters()).context_length == 32
