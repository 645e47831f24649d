"""Models that read the prompt with an encoder: what the engine answers is what the model says, in every batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.models.t5 import T5
from megalith.serve.engine import Engine, Limits
from megalith.serve.model_runner import DecoderPrompt, ModelRunner
from megalith.serve.request import Beams, Finished, Request, RequestError, Sampling, Token
from megalith.serve.runner import Batch

from .models import (
    ANSWERING,
    CONTEXT,
    VOCABULARY,
    Letters,
    answering_of,
    collect,
    text_of,
    tokens_of,
)

START, END, LONGEST = 26, 27, 9
OPENING = DecoderPrompt(START, END)
GREEDY = Sampling(temperature=0.0)
POOL = [
    tuple((start * 7 + step * (start + 2)) % 26 for step in range(length))
    for start, length in ((0, 1), (1, 3), (2, 4), (3, 5), (3, 12), (4, 17), (5, 30))
]


def _engine(model: T5, *, num_blocks: int = 200, block_size: int = 4, limits: Limits | None = None) -> Engine:
    return Engine(ModelRunner(model, num_blocks, block_size), Letters(), limits, decoder_prompt=OPENING)


def _full_passes(model: T5, text: Sequence[int], count: int) -> list[int]:
    """The greedy answer by passes over the whole text and answer."""
    said = [START]
    for _ in range(count):
        with torch.inference_mode():
            said.append(int(model(torch.tensor([list(text)]), torch.tensor([said]))[0, -1, :VOCABULARY].argmax()))
    return said[1:]


@cache
def _wanted(style: str, text: tuple[int, ...]) -> list[int]:
    return _full_passes(answering_of(style), text, LONGEST)


@pytest.mark.parametrize("style", ANSWERING)
@settings(max_examples=12, deadline=None)
@given(
    texts=st.lists(st.sampled_from(POOL), min_size=1, max_size=6),
    count=st.integers(1, LONGEST),
    gaps=st.lists(st.integers(0, 3), max_size=6),
    max_num_batched_tokens=st.integers(1, 40),
    running=st.integers(1, 6),
    block_size=st.integers(1, 6),
    tight=st.booleans(),
)
def test_greedy_answers_are_those_of_full_passes(
    style: str,
    texts: list[tuple[int, ...]],
    count: int,
    gaps: list[int],
    max_num_batched_tokens: int,
    running: int,
    block_size: int,
    tight: bool,
) -> None:
    blocks = max(-(-len(text) // block_size) + -(-(1 + count) // block_size) for text in texts) + 1
    engine = _engine(
        answering_of(style),
        num_blocks=blocks if tight else 400 // block_size,
        block_size=block_size,
        limits=Limits(max_num_batched_tokens, running),
    )
    requests = [Request(text, count, GREEDY, stop_ids=()) for text in texts]
    for text, events in zip(texts, collect(engine, requests, gaps), strict=True):
        assert tokens_of(events) == _wanted(style, text)[:count]
        assert events[-1] == Finished("length")
    assert engine.stats().blocks_used == 0


def test_a_seed_means_the_same_answer_in_every_batch() -> None:
    model = answering_of("published")
    kinds = [Sampling(1.3), Sampling(top_p=0.9), Sampling(2.0, top_k=5), Sampling(repetition_penalty=1.5)]
    requests = [
        Request(text, 8, kinds[index % 4], seed=index, n=1 + index % 3, logprobs=2) for index, text in enumerate(POOL)
    ]
    crowded = _engine(model, num_blocks=14, limits=Limits(max_num_batched_tokens=10))
    for request, events in zip(requests, collect(crowded, requests), strict=True):
        alone = list(_engine(model).run(request))
        for sample in range(request.n):
            assert tokens_of(events, sample) == tokens_of(alone, sample)
            assert (
                text_of(events, sample)
                == text_of(alone, sample)
                == Letters().decode([token for token in tokens_of(events, sample) if token != END])
            )
    assert crowded.stats().preemptions > 0


def test_log_probabilities_are_those_of_the_whole() -> None:
    model, text = answering_of("megatron"), POOL[3]
    tokens = [
        event
        for event in _engine(model).run(Request(text, 6, GREEDY, stop_ids=(), logprobs=3))
        if isinstance(event, Token)
    ]
    said = [START, *(token.id for token in tokens)]
    with torch.inference_mode():
        expected = model(torch.tensor([text]), torch.tensor([said]))[0, :, :VOCABULARY].log_softmax(-1)
    for row, token in enumerate(tokens):
        assert token.logprob == pytest.approx(float(expected[row, token.id]), abs=1e-9)
        assert [number for number, _ in token.top] == expected[row].topk(3).indices.tolist()


def test_a_text_that_was_read_is_not_read_again() -> None:
    """Only the same text: one that begins alike is another, as an encoder sees all of it."""
    engine = _engine(answering_of("megatron"))
    text = (1, 2, 3, 4, 5, 6)
    list(engine.run(Request(text, 2, GREEDY, stop_ids=())))
    list(engine.run(Request((*text, 7), 2, GREEDY, stop_ids=())))
    list(engine.run(Request((*text, 0), 2, GREEDY, stop_ids=())))
    assert engine.stats().reused_tokens == 0
    again = list(engine.run(Request(text, 3, GREEDY, stop_ids=())))
    assert engine.stats().reused_tokens == 6
    assert tokens_of(again) == _full_passes(answering_of("megatron"), text, 3)


def test_samples_share_one_reading_of_the_text() -> None:
    engine, read = _engine(answering_of("megatron")), []
    run = engine.runner.run

    def counted(batch: Batch) -> torch.Tensor:
        read.extend(chunk.start < chunk.encoder_length for chunk in batch.chunks)
        return run(batch)

    engine.runner.run = counted  # type: ignore[method-assign]
    list(engine.run(Request((1, 2, 3), 5, Sampling(1.5), n=4, seed=1, stop_ids=())))
    assert sum(read) == 1


def test_an_answer_ends_with_its_token_or_a_text_and_continues_nothing() -> None:
    model, text, warm = answering_of("published"), POOL[4], {"sampling": Sampling(1.5), "seed": 3}
    whole = tokens_of(list(_engine(model).run(Request(text, 9, stop_ids=(), **warm))))
    end = next(index for index, token in enumerate(whole) if index and token not in whole[:index])
    engine = Engine(ModelRunner(model, 20, 4), Letters(), decoder_prompt=DecoderPrompt(START, whole[end]))
    ended = list(engine.run(Request(text, 9, **warm)))
    assert tokens_of(ended) == whole[: end + 1] and ended[-1] == Finished("stop", stop=whole[end])
    assert text_of(ended) == Letters().decode(whole[:end])
    letter = Letters().decode([whole[end]])
    stopped = list(_engine(model).run(Request(text, 9, stop_ids=(), stop_texts=(letter,), **warm)))
    assert text_of(stopped) == Letters().decode(whole[:end])
    banned = Sampling(1.5, banned_after=((text[-1], whole[0]),))
    assert tokens_of(list(_engine(model).run(Request(text, 1, banned, seed=3, stop_ids=())))) == whole[:1]


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beam_search_ends_with_the_best_of_its_hypotheses(penalty: float) -> None:
    """A beam as wide as there are answers of two tokens finds the best of all."""
    model = answering_of("published")
    engine = _engine(model, limits=Limits(samples=999))
    beams, _ = engine.run(Request(POOL[2], 2, beam_width=VOCABULARY // 2, length_penalty=penalty, stop_ids=()))
    assert isinstance(beams, Beams)
    with torch.inference_mode():
        text = torch.tensor([POOL[2]])
        first = model(text, torch.tensor([[START]]))[0, -1, :VOCABULARY].log_softmax(-1)
        pairs = {
            (one, two): float(first[one] + value)
            for one in first.topk(VOCABULARY // 2).indices.tolist()
            for two, value in enumerate(
                model(text, torch.tensor([[START, one]]))[0, -1, :VOCABULARY].log_softmax(-1).tolist()
            )
        }
    best = max(pairs, key=lambda pair: pairs[pair])
    assert beams.hypotheses[0] == best and beams.scores[0] == pytest.approx(pairs[best] / 2**penalty)


def test_texts_and_answers_have_room_of_their_own() -> None:
    engine = _engine(answering_of("megatron"))
    assert engine.context_length == CONTEXT and engine.max_output_tokens(CONTEXT) == CONTEXT
    assert engine.max_output_tokens(CONTEXT + 2) == -2
    events = list(engine.run(Request((3,) * CONTEXT, 99, GREEDY, stop_ids=())))
    assert len(tokens_of(events)) == CONTEXT and events[-1] == Finished("length")
    with pytest.raises(RequestError, match=f"{CONTEXT + 2} .*{CONTEXT}"):
        engine.submit(Request((3,) * (CONTEXT + 2), 1))
    with pytest.raises(RequestError, match="encoder-decoder"):
        engine.submit(Request((3,), 1, prompt_logprobs=True))
    small = _engine(answering_of("megatron"), num_blocks=5)
    assert small.context_length == 16 and small.max_output_tokens(16) == 3
    assert len(tokens_of(list(small.run(Request((3,) * 16, 99, GREEDY, stop_ids=()))))) == 3


def test_a_crowd_of_long_texts_is_served_in_turn() -> None:
    engine = _engine(answering_of("megatron"), num_blocks=13, limits=Limits(max_num_batched_tokens=4, max_num_seqs=8))
    texts = [POOL[6], POOL[5], POOL[6], POOL[4]]
    found = collect(engine, [Request(text, LONGEST, GREEDY, stop_ids=(), n=2) for text in texts])
    for text, events in zip(texts, found, strict=True):
        assert tokens_of(events, 0) == tokens_of(events, 1) == _wanted("megatron", text)
