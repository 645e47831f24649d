"""Text that a loaded model writes and scores, with models without weights or without training."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from megalith import text_model
from megalith.assemble.trained import Trained
from megalith.errors import DataError
from megalith.evaluate.score import Sample, Scorer
from megalith.serve.request import RequestError
from megalith.text_model import TextModel

from ..fake_runner import FakeRunner
from .serve.models import CONTEXT, VOCABULARY, Letters, model_of

ANSWER = "n\u00e4chste \u20ac \U0001f600\u200d\U0001f525 \u4e00 ende"


class Bytes:
    """Tokens are bytes; a character of several is split over as many."""

    vocab_size, eod, end_ids, pad, special = 257, 256, (256,), None, {}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")


def _model(tokenizer: Any = None) -> TextModel:
    return TextModel(Trained(model_of("gpt2"), tokenizer or Letters(), 1, ()))


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> TextModel:
    """Writes ANSWER and the end of a document after a prompt of one token."""
    answer = [*ANSWER.encode(), 256]

    def fake(model: Any, num_blocks: int, *, context_length: int) -> FakeRunner:
        follow = lambda tokens: answer[min(len(tokens), len(answer)) - 1]  # noqa: E731
        return FakeRunner(257, context_length, num_blocks=num_blocks, block_size=16, follow=follow)

    monkeypatch.setattr(text_model, "runner_of", fake)
    return _model(Bytes())


def test_pieces_of_a_stream_are_whole_characters(writer: TextModel) -> None:
    pieces = list(writer.stream(">", temperature=0))
    assert pieces == list(ANSWER), "each character as soon as it is whole"


def test_a_completion_has_text_tokens_and_its_reason(writer: TextModel) -> None:
    whole = writer.generate(">", temperature=0)
    assert (whole.prompt, whole.text, whole.finish_reason) == (">", ANSWER, "stop")
    assert whole.token_ids == (*ANSWER.encode(), 256) and len(whole.logprobs) == len(whole.token_ids)
    cut = writer.generate(">", temperature=0, max_new_tokens=3)
    assert (cut.text, cut.finish_reason) == (ANSWER[:2], "length")
    for stop in ("ende", ["x", "ende"]):
        assert writer.generate(">", temperature=0, stop=stop).text == ANSWER.removesuffix("ende")


def test_texts_of_a_list_are_written_as_each_alone() -> None:
    model, prompts = _model(), ["a", "hello there", "a", "zz"]
    greedy = model.generate(prompts, temperature=0, max_new_tokens=7)
    assert [one.prompt for one in greedy] == prompts
    alone = [model.generate(prompt, temperature=0, max_new_tokens=7) for prompt in prompts]
    assert [one.token_ids for one in greedy] == [one.token_ids for one in alone]
    drawn = model.generate(["a", "b", "a"], temperature=1.0, top_p=0.0, seed=5, max_new_tokens=12)
    assert drawn[0].text != drawn[2].text, "equal texts get different samples"
    assert drawn[0].text == model.generate("a", temperature=1.0, top_p=0.0, seed=5, max_new_tokens=12).text
    assert model.generate([]) == []


def test_more_samples_than_run_at_once_are_all_there() -> None:
    found = _model().generate(["a"] * 70 + ["b"] * 70, max_new_tokens=2, seed=1)
    assert len(found) == 140 and {one.finish_reason for one in found} <= {"length", "stop"}


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "prompt"),
        ("a" * (CONTEXT + 1), {}, "prompt"),
        ("a", {"temperature": -1.0}, "temperature"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens"),
        ("a", {"max_new_tokens": -500}, "max_new_tokens"),
        ("a", {"stop": [""]}, "stop_texts"),
    ],
)
def test_wrong_options_are_named(prompt: str, options: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        _model().generate(prompt, **options)
    assert caught.value.field == field
    with pytest.raises(TypeError, match="heat"):
        _model().generate("a", heat=1)


def test_scores_are_those_of_the_evaluator() -> None:
    model, scorer = _model(), Scorer(model_of("gpt2"), num_tokens=VOCABULARY)
    tokens = Letters().encode("hello there")
    (wanted,) = scorer([Sample([Letters.eod, *tokens], len(tokens))])
    assert np.array_equal(model.score("hello there"), wanted.logprobs)
    (after,) = scorer([Sample(tokens, 6)])
    assert np.array_equal(model.score(" there", "hello"), after.logprobs)
    assert np.array_equal(model.score("there", "hello "), after.logprobs), "blanks count to the text"
    first, second = model.score(["there", "x"], "hello ")
    assert len(first) == 6 and len(second) == 2
    assert model.score("").shape == (0,)


def test_scores_are_those_of_what_the_model_wrote() -> None:
    model = _model()
    written = model.generate("hello", temperature=0, max_new_tokens=9, stop=())
    ids = [token for token in written.token_ids if token != Letters.eod]
    assert len(ids) > 3
    assert model.score(Letters().decode(ids), "hello") == pytest.approx(written.logprobs[: len(ids)], abs=1e-5)


def test_texts_longer_than_the_context_are_scored_whole() -> None:
    text, model = "the quick brown fox " * 6, _model()
    assert len(text) > 2 * CONTEXT
    scores = model.score(text)
    assert len(scores) == len(text)
    assert np.array_equal(scores[:CONTEXT], model.score(text[:CONTEXT]))
    assert np.array_equal(model.score(text[-5:], text[:-5].rstrip())[-4:], model.score(text[-5:], text[:-5])[-4:])


def test_a_text_that_joins_the_context_is_refused() -> None:
    class Joining(Letters):
        def encode(self, text: str) -> list[int]:
            return [0] * bool(text)

    with pytest.raises(DataError, match="'b'"):
        _model(Joining()).score("b", "a")


def test_threads_share_a_model() -> None:
    model, prompts = _model(), ["a", "hello", "abc", "zz"] * 4
    wanted = [model.generate(prompt, temperature=0, max_new_tokens=8).text for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda prompt: model.generate(prompt, temperature=0, max_new_tokens=8).text, prompts)
    assert list(found) == wanted
