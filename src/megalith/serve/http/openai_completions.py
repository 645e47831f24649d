"""OpenAI's `/v1/completions`: from its request to the engine's, and from events to its answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive

from megalith.serve.http.errors import ApiError
from megalith.serve.http.schemas import CompletionRequest
from megalith.serve.http.service import Answer, Collected, Sample, Service, request_violation
from megalith.serve.http.shared_fields import sampling_of, text_fields_of, token_texts
from megalith.serve.request import Finished, Request, Scores, Token, Top

_DEFAULT_TOKENS = 16


@dataclass(frozen=True)
class _Plan:
    """A request, understood.

    Attributes:
        texts: of the prompts, as they are echoed.
    """

    body: CompletionRequest
    requests: list[Request]
    texts: list[str]
    head: dict[str, Any]

    @property
    def n(self) -> int:
        return self.body.n or 1

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)


async def plan(service: Service, body: CompletionRequest) -> _Plan:
    """Understand a request.

    Raises:
        ApiError: 400, names the field.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, f"best_of: {body.best_of} is not n, and only then supported", "best_of", "invalid_value")
    if body.echo and service.answering:
        raise ApiError(400, "echo: the model answers the prompt, it does not continue it", "echo", "invalid_value")
    new_tokens = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if new_tokens == 0 and not body.echo:
        rule = "is no answer; give 1 or more" if service.answering else "needs echo: true, which scores the prompt"
        raise ApiError(400, f"max_tokens: 0 {rule}", "max_tokens", "invalid_value")
    prompts = [await _prompt(service, given) for given in _prompts(body)]
    for ids, _ in prompts:
        room = max(1, service.room(ids)) if body.max_tokens is None else new_tokens
        request_violation(service, ids, min(new_tokens, room), "prompt", "max_tokens")
    sampling, about_text = sampling_of(body, service.tokenizer.vocab_size), text_fields_of(body, service)
    requests = [
        Request(
            prompt=ids,
            max_new_tokens=min(new_tokens, service.room(ids)),
            sampling=sampling,
            seed=service.next_seed() if body.seed is None else body.seed,
            n=body.n or 1,
            logprobs=body.logprobs,
            prompt_logprobs=bool(body.echo and body.logprobs is not None) or new_tokens == 0,
            **about_text,
        )
        for ids, _ in prompts
    ]
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.settings.model_name,
    }
    return _Plan(body, requests, [text for _, text in prompts], head)


def _prompts(body: CompletionRequest) -> list[Any]:
    """The prompts, each a text or ids."""
    prompt: Any = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


async def _prompt(service: Service, given: Any) -> tuple[tuple[int, ...], str]:
    """Its ids and its text.

    Raises:
        ApiError: 400, it has no tokens or an id that there is not.
    """
    if isinstance(given, str):
        ids = await service.encode(given, "prompt")
        if not ids:
            raise ApiError(400, "prompt: has no tokens", "prompt", "invalid_value")
        return ids, given
    outside = next((number for number in given if number >= service.tokenizer.vocab_size), None)
    if outside is not None:
        rule = f"prompt: id {outside} is not below the vocabulary size {service.tokenizer.vocab_size}"
        raise ApiError(400, rule, "prompt", "invalid_value")
    return tuple(given), service.tokenizer.decode(given)


async def whole(service: Service, made: _Plan, receive: Receive) -> dict[str, Any]:
    """The answer in one piece."""
    answers = await submit_all(service, made.requests)
    found = await service.collect(answers, receive)
    choices = [
        _choice(service, made, number, position, sample, collected)
        for number, collected in enumerate(found)
        for position, sample in enumerate(_samples(collected, made.n))
    ]
    completion = sum(len(sample.ids) for collected in found for sample in collected.samples)
    return {**made.head, "choices": choices, "usage": usage(made.prompt_tokens, completion)}


async def submit_all(
    service: Service, requests: Sequence[Request], field_of: Callable[[str], str] = str
) -> list[Answer]:
    """Hand several requests to the engine: all of them, or none.

    Raises:
        ApiError: one of them was refused, or together they are more than may ever wait.
    """
    sequences, most = sum(request.n for request in requests), service.settings.limits.waiting
    if len(requests) > 1 and sequences > most:
        prompts, n = field_of("prompt"), requests[0].n
        each = f" with {field_of('n')} {n}" if n > 1 else ""
        rule = f"{len(requests)} prompts{each} are {sequences} sequences, and at most {most} may wait (--max-queue)"
        raise ApiError(400, f"{prompts}: {rule}; divide the request", prompts, "invalid_value")
    answers: list[Answer] = []
    try:
        for request in requests:
            answers.append(await service.submit(request, field_of))
    except BaseException:
        service.release(answers)
        raise
    return answers


def _samples(collected: Collected, n: int) -> list[Sample]:
    return collected.samples + [Sample(finished=Finished("length")) for _ in range(n - len(collected.samples))]


def _choice(
    service: Service, made: _Plan, number: int, position: int, sample: Sample, collected: Collected
) -> dict[str, Any]:
    text = "".join(sample.texts)
    logprobs = None
    if made.body.logprobs is not None:
        table = _Table(service, made.body.logprobs)
        if made.body.echo:
            table.add_prompt(made.requests[number].prompt, collected.scores)
        request = made.requests[number]
        table.add(sample.tokens, service.before(request.prompt), request.hidden_ids)
        logprobs = table.json
    return {
        "index": number * made.n + position,
        "text": made.texts[number] + text if made.body.echo else text,
        "logprobs": logprobs,
        "finish_reason": sample.finished.reason,
        "stop_reason": sample.finished.stop,
    }


class _Table:
    """OpenAI's four parallel lists of log-probabilities."""

    def __init__(self, service: Service, top: int, offset: int = 0) -> None:
        self._service, self._top, self._offset = service, top, offset
        self.json: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add_prompt(self, ids: Sequence[int], scores: Scores | None) -> None:
        """The tokens of a prompt; a request that was cancelled before it was read has no scores."""
        scores = scores or Scores((None,) * len(ids), ((),) * len(ids))
        texts = token_texts(self._service.tokenizer, ids)
        before: int | None = None
        for number, text, logprob, top in zip(ids, texts, scores.logprobs, scores.top, strict=True):
            self._row(text, before, logprob, top)
            self._offset += len(text)
            before = number

    def add(self, tokens: Sequence[Token], before: int | None, hidden: Collection[int] = ()) -> None:
        """The tokens of an answer; hidden ones have no place in its text."""
        ids = [token.id for token in tokens]
        for text, token in zip(token_texts(self._service.tokenizer, ids, before), tokens, strict=True):
            self._row(text, before, token.logprob, token.top)
            self._offset += 0 if token.id in hidden else len(text)
            before = token.id

    def _row(self, text: str, before: int | None, logprob: float | None, top: Top) -> None:
        json = self.json
        json["tokens"].append(text)
        json["token_logprobs"].append(logprob)
        json["top_logprobs"].append(None if logprob is None else {**self._likeliest(top, before), text: logprob})
        json["text_offset"].append(self._offset)

    def _likeliest(self, top: Top, before: int | None) -> dict[str, float]:
        """By text, as it would stand there; of two tokens with one text (parts of characters) the likelier counts."""
        found: dict[str, float] = {}
        for number, logprob in top[: max(1, self._top)]:
            (text,) = token_texts(self._service.tokenizer, [number], before)
            found.setdefault(text, logprob)
        return found

    @property
    def offset(self) -> int:
        return self._offset


def usage(prompt: int, completion: int) -> dict[str, int]:
    """OpenAI's counts."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


@dataclass
class _Stream:
    """What has been sent of one sample."""

    offset: int
    last: int | None
    echoed: bool = False


async def pieces(
    service: Service, made: _Plan, events: AsyncIterator[tuple[int, Any]]
) -> AsyncIterator[dict[str, Any]]:
    """The answer as it grows: the objects of the stream."""
    shows_usage = bool(made.body.stream_options and made.body.stream_options.include_usage)
    streams: dict[int, _Stream] = {}
    scores: dict[int, Scores] = {}
    completion = 0

    def chunk(index: int, text: str, logprobs: Any, end: Finished | None = None) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": end.reason if end else None,
        }
        if end is not None and end.stop is not None:
            choice["stop_reason"] = end.stop
        return {**made.head, "choices": [choice], **({"usage": None} if shows_usage else {})}

    async for number, event in events:
        if isinstance(event, Scores):
            scores[number] = event
            continue
        index = number * made.n + event.sample
        prompt = made.requests[number].prompt
        stream = streams.setdefault(index, _Stream(0, service.before(prompt)))
        if made.body.echo and not stream.echoed:
            stream.echoed = True
            table = _Table(service, made.body.logprobs or 0)
            if made.body.logprobs is not None:
                table.add_prompt(prompt, scores.get(number))
            stream.offset = len(made.texts[number])
            yield chunk(index, made.texts[number], table.json if made.body.logprobs is not None else None)
        if isinstance(event, Finished):
            yield chunk(index, "", None, service.ended(event))
            continue
        completion += 1
        logprobs = None
        if made.body.logprobs is not None:
            table = _Table(service, made.body.logprobs, stream.offset)
            table.add([event], stream.last, made.requests[number].hidden_ids)
            stream.offset, stream.last, logprobs = table.offset, event.id, table.json
        if event.text or logprobs is not None:
            yield chunk(index, event.text, logprobs)
    if shows_usage:
        yield {**made.head, "choices": [], "usage": usage(made.prompt_tokens, completion)}
